"""A one-step student by the integral KL divergence (Diff-Instruct), and with a reward (Diff-Instruct++).

    x̂ = Φ_θ(x_1, 1) from pure noise,   x_s = α_s x̂ + σ_s ε ,
    L(θ) = ∫ ω(s) KL(p_θ,s ‖ p_T,s) ds − λ E[R(x̂)]   with the gradient
    E[(∂x̂/∂θ)ᵀ {w(s) (m_S − m_T)(x_s) − λ ∇R(x̂)}] ,   w = ω α²/σ² .

References: Luo et al., "Diff-Instruct", arXiv 2305.18455; Luo, "Diff-Instruct++", arXiv 2410.18881.

Differs from the paper in: only summaries of both were at hand. The gap of scores is written as one of clean
predictions, which is the same number; the weight ω = 1 is cut where α²/σ² passes its bound, and the auxiliary network's
loss has the student's weight w, which moves its training and not its optimum; what reward and divergence are summed
over, and a reward of several members, are those of moment matching here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from genkit._checks import checked_number
from genkit.errors import ConfigError
from genkit.pipelines.rmmd.objective import Cond, MomentMatchingObjective, Reduction
from genkit.pipelines.rmmd.weights import MomentWeight, checked_choice, draw_times
from genkit.rewards import Reward
from genkit.samplers.noise import Keys
from genkit.training.objective import Phase

__all__ = ["DiffInstructObjective", "ForwardNoisedObjective"]

LevelLaw = Literal["uniform", "lognormal"]
_HALVINGS = 32  # of [0, 1]: times are float32


class ForwardNoisedObjective(MomentMatchingObjective):
    """Moment matching on x̂ noised by the forward process, whatever time x̂ was predicted at.

    In every phase x_t is a state of the student's own K-step walk (t one of its K times, with equal probability; pure
    noise where K = 1), and x_s = α_s x̂ + σ_s ε with s of a law of its own (:meth:`levels`): no data are used. Arguments
    and errors are those of :class:`MomentMatchingObjective`; its ``on_policy`` and ``time_law`` have no effect.
    """

    def levels(self, keys: Keys) -> Tensor:
        """s, float32 (B,), one for all members of a condition; by default s ~ U(0, 1)."""
        return draw_times(keys, self.scheduler, 1, "grid")[1]

    def _states(
        self, phase: str, batch: Mapping[str, Tensor], cond: Cond, keys: Keys, rows: Keys
    ) -> tuple[Tensor, Tensor, Tensor]:
        t, _, number = draw_times(keys, self.scheduler, self.num_inference_steps, "grid")
        members = len(rows) // len(keys)
        t, s, number = (v.repeat_interleave(members) for v in (t, self.levels(keys), number))
        return self._visited(number, self._sample_shape(batch), cond, rows), t, s

    def _noised_again(self, output: Tensor, x_t: Tensor, t: Tensor, s: Tensor, rows: Keys) -> Tensor:
        clean = self.scheduler.to_x0(output, t, x_t)
        noise = rows.at(purpose="posterior").normal(clean.shape[1:], clean.dtype)
        state: Tensor = self.scheduler.add_noise(clean, noise, s)
        return state


class DiffInstructObjective(ForwardNoisedObjective):
    """Diff-Instruct, with a reward Diff-Instruct++: the losses of the module's docstring, in turns with the auxiliary.

    The auxiliary learns by plain denoising of x_s (no term of the teacher's), so the gap is the exact one and λ is not
    rescaled.

    Args:
        student: Φ_θ, (x_1, t = 1, cond) → model output.
        auxiliary: Φ_φ, of the student's architecture; both usually start from the teacher's weights.
        teacher: Ψ, frozen.
        scheduler: a Gaussian scheduler; all three networks answer in its prediction type. The noise x_1 is its prior.
        phases: ``Phase("distil", n)`` and/or ``Phase("reward", n)``, in this order.
        reward: R, differentiable; it acts in the phase ``reward``, and in ``distil`` where ``joint`` is set.
        lam: λ ≥ 0.
        lam_reg: weight ≥ 0 of the squared distance to the phase's first student, which the paper does not have.
        members: M, independent noises of one condition that the reward judges together.
        weight: ``"ikl"``, ω = 1; ``"mmd"``, w = 1; or w, a function of s.
        s_law: ``"uniform"``, s ~ U(0, 1); ``"lognormal"``, log σ_s/α_s ~ N(``p_mean``, ``p_std``²).
        p_mean, p_std: of the law ``"lognormal"`` alone; None: −1.2 and 1.2.
        aux_steps_per_student: steps of the auxiliary before each of the student.
        joint, reduction, guidance_scale, condition_names, shape: as in :class:`MomentMatchingObjective`.

    Raises:
        ConfigError: as :class:`MomentMatchingObjective`; ``p_mean`` or ``p_std`` with another law.

    A batch holds ``sample_id``, the condition's entries and what the reward reads; ``sample`` (B, \\*) only where
    ``shape`` is None, for its shape.
    """

    def __init__(
        self,
        student: nn.Module,
        auxiliary: nn.Module,
        teacher: nn.Module,
        scheduler: Any,
        *,
        phases: Sequence[Phase],
        reward: Reward | None = None,
        lam: float = 0.0,
        lam_reg: float = 0.0,
        members: int = 1,
        weight: MomentWeight | Callable[[Tensor], Tensor] = "ikl",
        s_law: LevelLaw = "uniform",
        p_mean: float | None = None,
        p_std: float | None = None,
        aux_steps_per_student: int = 1,
        joint: bool = False,
        reduction: Reduction = "sum",
        guidance_scale: float = 1.0,
        condition_names: Sequence[str] = (),
        shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            student, auxiliary, teacher, scheduler, num_inference_steps=1, phases=phases, reward=reward, lam=lam,
            lam_reg=lam_reg, members=members, weight=weight, teacher_weight=0.0, reference="teacher", joint=joint,
            aux_steps_per_student=aux_steps_per_student, reduction=reduction, guidance_scale=guidance_scale,
            condition_names=condition_names, shape=shape,
        )  # fmt: skip
        self.lognormal = _checked_law(s_law, p_mean, p_std)

    def levels(self, keys: Keys) -> Tensor:
        """s, float32 (B,), of the law chosen."""
        if self.lognormal is None:
            return super().levels(keys)
        mean, std = self.lognormal
        ratio = (mean + std * keys.at(purpose="level").normal()).exp()
        return _time_of_ratio(self.scheduler, ratio)


def _checked_law(s_law: LevelLaw, p_mean: float | None, p_std: float | None) -> tuple[float, float] | None:
    if checked_choice("s_law", s_law, get_args(LevelLaw)) == "lognormal":
        mean = checked_number("p_mean", -1.2 if p_mean is None else p_mean, "a finite number", math.isfinite)
        std = checked_number("p_std", 1.2 if p_std is None else p_std, "a number above 0", lambda v: 0.0 < v < math.inf)
        return mean, std
    if p_mean is not None or p_std is not None:
        raise ConfigError(
            f"p_mean={p_mean}, p_std={p_std} with s_law={s_law!r}, which has neither; set s_law='lognormal', or leave "
            "them out"
        )
    return None


def _time_of_ratio(scheduler: Any, ratio: Tensor) -> Tensor:
    """s with σ_s/α_s = ``ratio`` (B,) by bisection, float32; 1 where no time is that noisy."""
    low, width = torch.zeros_like(ratio), 1.0
    for _ in range(_HALVINGS):
        width /= 2.0
        alpha, sigma = scheduler.alpha_sigma(low + width)
        low = torch.where(sigma < ratio * alpha, low + width, low)
    return low.to(torch.float32)
