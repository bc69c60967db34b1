"""Which steps of a walk a reward's gradient goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from genkit._checks import checked_count
from genkit.errors import ConfigError, nearest

__all__ = ["GradientWindow", "WindowDraw", "WindowKind"]

WindowKind = Literal["last_k", "random_k", "uniform_k", "drtune", "refl_x0", "draft_lv", "full"]


@dataclass(frozen=True)
class WindowDraw:
    """One walk's window, as the arguments of :func:`genkit.samplers.rollout`.

    Args:
        grad_steps: steps whose network calls are differentiated, increasing.
        input_grad: whether the gradient also flows through the network's input.
        stop_at: the walk ends here with a step onto t = 0; None: it goes to its end.
        noises: how often the last step is taken: once in the walk, then from its freshly noised end; gradients are
            averaged.
    """

    grad_steps: tuple[int, ...]
    input_grad: bool = True
    stop_at: int | None = None
    noises: int = 1


class GradientWindow:
    """A choice of steps, drawn anew for every walk where it is random.

    ==============  ==================================================================================================
    ``kind``        differentiated steps of a walk of n
    ==============  ==================================================================================================
    ``"last_k"``    the last k (DRaFT-K, Clark et al., arXiv 2309.17400)
    ``"random_k"``  the last K, K uniform on 1 … 2k − 1, so k on average (truncated at random like AlignProp,
                    Prabhudesai et al., arXiv 2310.03739)
    ``"uniform_k"`` k evenly spaced ones, the last among them
    ``"drtune"``    the same k, with the network's input cut off from the gradient (Wu et al., arXiv 2405.00760)
    ``"refl_x0"``   one of the last k; the walk ends there with the clean prediction (ReFL, Xu et al., arXiv 2304.05977)
    ``"draft_lv"``  the last one, and again from ``noises`` − 1 freshly noised ends (DRaFT-LV, arXiv 2309.17400)
    ``"full"``      all
    ==============  ==================================================================================================

    Args:
        kind: one of the table.
        k: see the table; cut to n where it is larger.
        noises: of ``"draft_lv"``.

    Raises:
        ConfigError: an unknown kind, a count below 1, or ``noises`` of another kind.
    """

    def __init__(self, kind: WindowKind = "last_k", k: int = 1, *, noises: int | None = None) -> None:
        if kind not in get_args(WindowKind):
            known = get_args(WindowKind)
            raise ConfigError(f"window={kind!r}; expected one of {', '.join(known)}.{nearest(str(kind), known)}")
        if noises is not None and kind != "draft_lv":
            raise ConfigError(f"noises={noises} belongs to the window 'draft_lv'; got {kind!r}")
        self.kind, self.k = kind, checked_count("k", k)
        self.noises = 1 if kind != "draft_lv" else checked_count("noises", 2 if noises is None else noises)

    def __repr__(self) -> str:
        return f"GradientWindow({self.kind!r}, k={self.k})"

    def draw(self, num_steps: int, uniform: float) -> WindowDraw:
        """The window of one walk.

        Args:
            num_steps: n.
            uniform: a uniform number in [0, 1), the only randomness.
        """
        n = checked_count("num_steps", num_steps)
        k = min(self.k, n)
        if self.kind == "full":
            return WindowDraw(tuple(range(n)))
        if self.kind == "draft_lv":
            return WindowDraw((n - 1,), noises=self.noises)
        if self.kind == "refl_x0":
            step = n - k + int(uniform * k)
            return WindowDraw((step,), stop_at=step)
        if self.kind in ("uniform_k", "drtune"):
            spaced = tuple(sorted({((i + 1) * n) // k - 1 for i in range(k)}))
            return WindowDraw(spaced, input_grad=self.kind == "uniform_k")
        if self.kind == "random_k":
            k = min(n, 1 + int(uniform * (2 * self.k - 1)))
        return WindowDraw(tuple(range(n - k, n)))
