"""Distribution matching distillation with several steps and a normalised gradient (DMD2).

    x_t a state of the student's own walk,   x̂ = Φ_θ(x_t, t),   x_s = α_s x̂ + σ_s ε,   s ~ U(s_min, s_max) ,
    gradient with respect to x̂:   (m_S − m_T)(x_s) / mean |x̂ − m_T(x_s)| .

Reference: Yin et al., "Improved distribution matching distillation", arXiv 2405.14867.

Differs from the paper in: there is no adversarial (GAN) term and so no use of data; the simulated walk takes the same
posterior steps with stochasticity η as sampling does here, where the paper's noises the clean prediction anew; bounds
of s and the number of auxiliary steps can be configured; a reward and a tie to the first student, which the paper does
not have, are off by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from genkit._checks import checked_number
from genkit.errors import ConfigError
from genkit.pipelines.rmmd.baselines.one_step import ForwardNoisedObjective
from genkit.pipelines.rmmd.objective import Reduction
from genkit.pipelines.rmmd.weights import MomentWeight
from genkit.rewards import Reward
from genkit.samplers.noise import Keys
from genkit.training.objective import Phase

__all__ = ["DMD2Objective"]


class DMD2Objective(ForwardNoisedObjective):
    """The distribution matching part of DMD2: the gradient of the module's docstring, in turns with the auxiliary.

    The auxiliary ("fake") network learns by plain denoising of x_s. A row's gap is divided by the mean of
    |x̂ − m_T(x_s)| over its elements: it does not change when all clean predictions are multiplied by one number, and it
    is that of ½ |x̂ − sg(x̂ − gradient)|².

    Args:
        student: Φ_θ, (x_t, t, cond) → model output.
        auxiliary: Φ_φ, of the student's architecture; both usually start from the teacher's weights.
        teacher: Ψ, frozen.
        scheduler: a Gaussian scheduler; all three networks answer in its prediction type.
        num_inference_steps: K, steps of the student's walk; x_t is its state at one of the K times.
        phases: ``Phase("distil", n)`` and/or ``Phase("reward", n)``, in this order.
        eta: stochasticity of the student's walk, in (0, 1].
        s_min, s_max: bounds of the time s, 0 < s_min < s_max ≤ 1, whatever t is.
        aux_steps_per_student: steps of the auxiliary before each of the student.
        weight: w(s) on top of the normalisation; ``"mmd"``, 1.
        reward: differentiable; it acts in the phase ``reward``, and in ``distil`` where ``joint`` is set.
        lam: λ ≥ 0 of the reward, beside a gradient that is normalised.
        lam_reg: weight ≥ 0 of the squared distance to the phase's first student.
        members, joint, reduction, guidance_scale, condition_names, shape, chain_dropout: as in
            :class:`MomentMatchingObjective`.

    Raises:
        ConfigError: as :class:`MomentMatchingObjective`; bounds of s out of range.

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
        num_inference_steps: int,
        phases: Sequence[Phase],
        eta: float = 1.0,
        s_min: float = 0.02,
        s_max: float = 0.98,
        aux_steps_per_student: int = 5,
        weight: MomentWeight | Callable[[Tensor], Tensor] = "mmd",
        reward: Reward | None = None,
        lam: float = 0.0,
        lam_reg: float = 0.0,
        members: int = 1,
        joint: bool = False,
        reduction: Reduction = "sum",
        guidance_scale: float = 1.0,
        condition_names: Sequence[str] = (),
        shape: Sequence[int] | None = None,
        chain_dropout: bool = False,
    ) -> None:
        super().__init__(
            student, auxiliary, teacher, scheduler, num_inference_steps=num_inference_steps, phases=phases, eta=eta,
            reward=reward, lam=lam, lam_reg=lam_reg, members=members, weight=weight, teacher_weight=0.0,
            reference="teacher", aux_steps_per_student=aux_steps_per_student, joint=joint, normalize="dmd",
            reduction=reduction, guidance_scale=guidance_scale, condition_names=condition_names, shape=shape,
            chain_dropout=chain_dropout,
        )  # fmt: skip
        for name, value in (("s_min", s_min), ("s_max", s_max)):
            checked_number(name, value, "a time above 0, to 1", lambda v: 0.0 < v <= 1.0)
        if s_min >= s_max:
            raise ConfigError(f"s_min={s_min} and s_max={s_max}; expected s_min below s_max")
        self.s_min, self.s_max = float(s_min), float(s_max)

    def levels(self, keys: Keys) -> Tensor:
        """s ~ U(s_min, s_max), float32 (B,)."""
        return self.s_min + (self.s_max - self.s_min) * super().levels(keys)
