"""Moment matching in the teacher's parameter space: no auxiliary network, two independent halves of a batch instead.

Differs from the paper in: only summaries of Salimans et al., "Multistep distillation of diffusion models via moment
matching", arXiv 2406.04103, were at hand; the sign and the factor of the loss are worked out here (with the opposite
sign the student runs away from the teacher), and the preconditioner is fixed and diagonal, or a function that is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from genkit._checks import checked_count
from genkit.errors import ConfigError
from genkit.pipelines.rmmd.objective import Cond, _check_networks, _checked_eta, _entry
from genkit.pipelines.rmmd.weights import MomentWeight, TimeLaw, checked_choice, draw_times, moment_weight
from genkit.samplers.noise import Keys
from genkit.training.objective import LossOutput, Objective

__all__ = ["InstantMomentObjective"]


class InstantMomentObjective(Objective):
    """Moment matching in parameter space, without an auxiliary network: ½ |E ∇_ϑ ℓ|²_Λ, ℓ = w(s) |x̂ − Ψ_ϑ(x_s)|².

    At the optimum the teacher's own loss gradient vanishes on the student's samples. With ν = Λ E∇_ϑ ℓ of one half of
    the batch, the loss on the other half is −2 w(s) x̂ᵀ sg[J_ϑ Ψ(x_s) ν], whose mean gradient is unbiased; its value is
    that of the objective, estimated without bias. One backward and one forward-mode pass through the teacher, which
    must allow both.

    A batch is cut into halves, so the gradient depends on how a window is split into micro-batches (its mean does not).

    Args:
        student: Φ_θ, (x_t, t, cond) → model output.
        teacher: Ψ, frozen, in evaluation mode, of the scheduler's prediction type as the student.
        scheduler: a Gaussian scheduler.
        num_inference_steps: K.
        eta: in (0, 1].
        weight: w, as in :class:`MomentMatchingObjective`.
        time_law: of (t, s), as there.
        preconditioner: Λ: None, the identity; a diagonal by parameter name, such as :meth:`inverse_rms` gives; or a
            function of the gradient by parameter name that returns the like, linear, symmetric and positive.
        condition_names: entries of a batch that both networks are told.

    Raises:
        ConfigError: as in :class:`MomentMatchingObjective`; a preconditioner without some parameter; at a call fewer
            than two samples.

    A batch holds ``sample_id``, ``sample`` (B, \\*) and the condition's entries.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        scheduler: Any,
        *,
        num_inference_steps: int,
        eta: float = 1.0,
        weight: MomentWeight | Callable[[Tensor], Tensor] = "mmd",
        time_law: TimeLaw = "continuous",
        preconditioner: Mapping[str, Tensor] | Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None,
        condition_names: Sequence[str] = (),
    ) -> None:
        _check_networks({"student": student, "teacher": teacher}, scheduler)
        self.student, self.teacher, self.scheduler = student, teacher, scheduler
        self.eta, self.moment_weight = _checked_eta(eta), moment_weight(weight, scheduler)
        self.num_inference_steps = checked_count("num_inference_steps", num_inference_steps)
        self.time_law: TimeLaw = checked_choice("time_law", time_law, get_args(TimeLaw))
        self.condition_names, self.preconditioner = tuple(condition_names), preconditioner
        names = [name for name, _ in teacher.named_parameters()]
        missing = [n for n in names if isinstance(preconditioner, Mapping) and n not in preconditioner]
        if missing:
            raise ConfigError(f"the preconditioner lacks the teacher's {missing[:4]}; expected one tensor a parameter")

    def networks(self) -> Mapping[str, nn.Module]:
        return {"student": self.student}

    def frozen(self) -> Mapping[str, nn.Module]:
        return {"teacher": self.teacher}

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        if len(keys) < 2:
            raise ConfigError("a batch of one sample has no independent halves; expected at least 2 samples")
        first, second = slice(None, len(keys) // 2), slice(len(keys) // 2, None)
        with torch.no_grad():
            clean, x_s, s, cond = self._predictions(_part(batch, first), keys[first])
        nu = self.preconditioned(self.teacher_gradient(clean, x_s, s, cond))
        clean, x_s, s, cond = self._predictions(_part(batch, second), keys[second])
        value = self.surrogate(clean, x_s, s, cond, nu)
        size = torch.stack([v.square().sum() for v in nu.values()]).sum().sqrt()
        return LossOutput(value, {"teacher_gradient_norm": size})

    def teacher_gradient(self, clean: Tensor, x_s: Tensor, s: Tensor, cond: Cond) -> dict[str, Tensor]:
        """∇_ϑ of the mean of w(s) |x̂ − Ψ_ϑ(x_s)|² over rows, by parameter name; x̂ (B, \\*) is a constant."""
        own = {name: p.detach().requires_grad_() for name, p in self.teacher.named_parameters()}
        with torch.enable_grad():
            error = (clean.detach() - self._moment(own, x_s, s, cond)).square().flatten(1).sum(dim=1)
            found = torch.autograd.grad((self.moment_weight(s) * error).mean(), list(own.values()), allow_unused=True)
        return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(own.items(), found, strict=True)}

    def preconditioned(self, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        """Λ applied to a gradient by parameter name."""
        if self.preconditioner is None:
            return gradient
        if isinstance(self.preconditioner, Mapping):
            return {name: self.preconditioner[name] * value for name, value in gradient.items()}
        return dict(self.preconditioner(gradient))

    def surrogate(self, clean: Tensor, x_s: Tensor, s: Tensor, cond: Cond, nu: Mapping[str, Tensor]) -> Tensor:
        """A scalar of the value ½ νᵀ E∇_ϑ ℓ and the gradient of −2 E[w x̂ᵀ J_ϑΨ(x_s) ν] with respect to x̂."""
        own = {name: p.detach() for name, p in self.teacher.named_parameters()}
        tangent = {name: nu[name].detach() for name in own}
        with torch.no_grad():
            pair: Any = torch.func.jvp(lambda p: self._moment(p, x_s, s, cond), (own,), (tangent,))
            mean, moved = pair
        inner = ((clean - mean) * moved).flatten(1).sum(dim=1)
        value = -(self.moment_weight(s) * inner).mean()
        return value.detach() + 2.0 * (value - value.detach())

    @torch.no_grad()
    def inverse_rms(self, batch: Mapping[str, Tensor], keys: Keys, *, draws: int = 8) -> dict[str, Tensor]:
        """A diagonal Λ: 1/rms of the teacher's gradient over ``draws`` draws of times and noise, by parameter name."""
        total = {name: torch.zeros_like(p) for name, p in self.teacher.named_parameters()}
        for draw in range(checked_count("draws", draws)):
            gradient = self.teacher_gradient(*self._predictions(batch, keys.at(step=draw)))
            total = {name: value + gradient[name].square() / draws for name, value in total.items()}
        return {name: 1.0 / (value.sqrt() + 1e-8) for name, value in total.items()}

    def _predictions(self, batch: Mapping[str, Tensor], keys: Keys) -> tuple[Tensor, Tensor, Tensor, Cond]:
        cond = {name: _entry(batch, name) for name in self.condition_names} or None
        x0 = _entry(batch, "sample")
        x0 = x0.to(torch.promote_types(x0.dtype, torch.float32))
        t, s, _ = draw_times(keys, self.scheduler, self.num_inference_steps, self.time_law)
        x_t = self.scheduler.add_noise(x0, keys.at(purpose="noise").normal(x0.shape[1:], x0.dtype), t)
        output = self.net("student")(x_t, t, cond)
        with torch.no_grad():
            posterior = self.scheduler.transition(output.detach(), t, s, x_t, None, self.eta)
            x_s = posterior.sample(keys.at(purpose="posterior"))
        return self.scheduler.to_x0(output, t, x_t), x_s, s, cond

    def _moment(self, parameters: dict[str, Tensor], x_s: Tensor, s: Tensor, cond: Cond) -> Tensor:
        output = torch.func.functional_call(self.teacher, parameters, (x_s, s, cond))
        clean: Tensor = self.scheduler.to_x0(output, s, x_s)
        return clean


def _part(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in batch.items()}
