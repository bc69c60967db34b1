"""What moment matching averages over: weights w(s) of the noise levels, and the law of the times (t, s).

Differs from the paper in: everything that its abstract does not say. The weight, the law of the times and its grid
form are choices of this project and can be configured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from genkit.errors import ConfigError, nearest
from genkit.samplers.noise import Keys

__all__ = ["MAX_SNR", "MomentWeight", "TimeLaw", "checked_choice", "draw_times", "moment_weight"]

MomentWeight = Literal["mmd", "ikl", "none"]
TimeLaw = Literal["continuous", "grid"]

#: Where the weight "ikl" is cut: the ratio α²/σ² has no bound as s → 0.
MAX_SNR = 1e4


def checked_choice(name: str, value: Any, known: Sequence[Any]) -> Any:
    """``value`` where it is one of ``known`` (of the same type: 1 is not True).

    Raises:
        ConfigError: it is not; the message names the nearest.
    """
    if not any(type(value) is type(one) and value == one for one in known):
        shown = ", ".join(repr(one) for one in known)
        raise ConfigError(f"{name}={value!r}; expected one of {shown}.{nearest(str(value), map(str, known))}")
    return value


def moment_weight(weight: MomentWeight | Callable[[Tensor], Tensor], scheduler: Any) -> Callable[[Tensor], Tensor]:
    """w: times (B,) → weights (B,) of the moment-matching terms.

    With the scores s_S − s_T = (α/σ²)(m_S − m_T) the gradient of moment matching with the weight w is that of the
    integral KL divergence ∫ ω(s) KL(p_S,s ‖ p_T,s) ds with ω = w σ²/α² where x_s is x̂ noised by the forward process
    (for one step; in between it is a proxy).

    Args:
        weight: ``"mmd"``, w = 1; ``"ikl"``, ω = 1, so w = α²/σ², cut at :data:`MAX_SNR`; ``"none"``, w = 0: the reward
            alone; or w itself, a function of the times.
        scheduler: tells α and σ.

    Raises:
        ConfigError: an unknown name.
    """
    if callable(weight):
        return weight
    name = checked_choice("weight", weight, get_args(MomentWeight))
    if name != "ikl":
        return torch.ones_like if name == "mmd" else torch.zeros_like

    def snr(s: Tensor) -> Tensor:
        alpha, sigma = scheduler.alpha_sigma(s)
        return (alpha / sigma).square().clamp(max=MAX_SNR).to(s.dtype)

    return snr


def draw_times(keys: Keys, scheduler: Any, num_inference_steps: int, law: TimeLaw) -> tuple[Tensor, Tensor, Tensor]:
    """Times 0 < s < t ≤ 1 at most one inference step apart: t, s float32 (B,), and the step's number int64 (B,).

    With times τ(u) along the walk, u uniform in its steps (τ(u) = u on an equidistant grid) and K steps:

    * ``"continuous"``: s = τ(u), t = τ(min(u + δ, 1)) with u ~ U(0, 1), δ ~ U(0, 1/K);
    * ``"grid"``: t is one of the walk's K times with equal probability, s uniform between it and the next.

    Args:
        keys: the samples' streams; each gets its own pair.
        scheduler: its ``times`` are the walk's.
        num_inference_steps: K.
        law: see above; the number is that of the walk's step that t belongs to.
    """
    first, second = keys.at(purpose="time").uniform((2,)).unbind(-1)
    n, grid = num_inference_steps, scheduler.times(num_inference_steps, first.device)
    if law == "grid":
        step = (first * n).floor().long().clamp(max=n - 1)
        t, s = grid[step], torch.lerp(grid[step + 1], grid[step], second.to(grid.dtype))
        return t.to(torch.float32), s.to(torch.float32), step
    later = (first + second / n).clamp(max=1.0)
    t, s = _along(grid, later), _along(grid, first)
    return t, s, ((1.0 - later) * n).floor().long().clamp(max=n - 1)


def _along(grid: Tensor, u: Tensor) -> Tensor:
    """τ(u), float32: the walk's times, from 0 to 1, joined by straight lines."""
    n, rising = len(grid) - 1, grid.flip(0)
    place = u.to(rising.dtype) * n
    below = place.floor().long().clamp(max=n - 1)
    return torch.lerp(rising[below], rising[below + 1], place - below).to(torch.float32)
