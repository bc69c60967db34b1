"""Moment matching distillation, and its rewarded continuation on the student's own states.

Time runs from data (0) to noise (1), x_t = α_t x_0 + σ_t ε. From a state x_t the student predicts x̂ = Φ_θ(x_t, t), and
a posterior step with stochasticity η > 0 leads to x_s; the auxiliary network Φ_φ learns m_S(x_s) = E[x̂ | x_s], the
teacher says m_T(x_s) = E[x_0 | x_s]. Where both agree for all s the student's law is the teacher's. With sg
the stop-gradient::

    auxiliary:  w(s) { |Φ_φ(x_s) − sg x̂|² + τ |Φ_φ(x_s) − sg m_ref(x_s)|² }
    student:    w(s) ⟨x̂, sg[Φ_φ(x_s) − m_ref(x_s)]⟩  − λ R(x̂)  + ρ |x̂ − sg Φ_θ0(x_t)|²

in turns. In the phase ``distil`` x_t is noised data, m_ref the teacher and λ = ρ = 0; in the phase ``reward`` x_t comes
from the student's own walk, θ0 is the student at its start, and m_ref the teacher or the auxiliary at its start. No
gradient flows through x_t, x_s or the walk: a step costs one differentiated network call whatever the walk's length.

The auxiliary's optimum is (m_S + τ m_ref)/(1 + τ), so the gap is m_S − m_ref divided by 1 + τ, and the reward weighs as
much as λ(1 + τ) against the exact gap: that number is logged.

Differs from the paper in: only its abstract and summaries of Jacq, Couairon, De Bortoli, Berthet, Doucet, Elie, RMMD,
arXiv 2606.30414, and of its parent, Salimans et al., "Multistep distillation of diffusion models via moment matching",
arXiv 2406.04103, were at hand. The weight w, the law of the times, one time for all members of an ensemble, the
teacher's term in the second phase, averaging over members, dropout switched off in walks and in fixed networks, and
the copies θ0 and φ0 being of the trained weights (not of their moving average) are choices made here; the normalisation
``"dmd"`` is that of Yin et al., DMD2, arXiv 2405.14867.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from genkit._checks import checked_count, checked_number, checked_shape
from genkit.errors import ConfigError, nearest
from genkit.pipelines.rmmd.weights import MomentWeight, TimeLaw, checked_choice, draw_times, moment_weight
from genkit.rewards import Reward
from genkit.samplers import rollout
from genkit.samplers.noise import Keys
from genkit.training.objective import LossOutput, Objective, Phase, check_phases

__all__ = ["MomentMatchingObjective"]

Cond = Mapping[str, Tensor] | None
Reference = Literal["auxiliary", "teacher"]
OnPolicy = Literal["continuous", "discrete", False]
Reduction = Literal["sum", "mean"]
_PHASES = ("distil", "reward")


class MomentMatchingObjective(Objective):
    """The losses of the module's docstring; the networks are ``student`` and ``auxiliary``, in turns.

    A reward, an inner product and a squared distance are summed over a sample's elements (``reduction="sum"``) or
    averaged; the regularisers are averaged over rows (conditions and members), the reward over conditions. Choose the
    reduction of the reward's own definition: with a reward that is a mean over cells and regularisers that are sums, λ
    would mean less the larger the sample is.

    Args:
        student: Φ_θ, (x_t, t, cond) → model output.
        auxiliary: Φ_φ, of the student's architecture; both usually start from the teacher's weights.
        teacher: Ψ, frozen.
        scheduler: a Gaussian scheduler; all three networks answer in its prediction type.
        num_inference_steps: K, steps of the student's walk.
        phases: ``Phase("distil", n)`` and/or ``Phase("reward", n)``, in this order.
        eta: stochasticity η of the posterior step and of the walk, in (0, 1].
        reward: R, differentiable, of clean samples: (B, \\*), or (B, M, \\*) with ``members`` M > 1. Its context is the
            batch without ``sample_id``; ``observation`` is the batch's ``sample`` where there is no such entry.
        lam: λ ≥ 0.
        lam_reg: ρ ≥ 0 of the tie to the phase's first student; None: λ/2, which makes both a proximal step.
        members: M, independent walks and predictions of one condition that the reward judges together.
        weight: w: ``"mmd"``, ``"ikl"`` or a function of s, see :func:`genkit.pipelines.rmmd.weights.moment_weight`.
        teacher_weight: τ ≥ 0.
        reference: m_ref in the phase ``reward``: the ``"auxiliary"`` as it was at its start, or the ``"teacher"``.
        on_policy: x_t in the phase ``reward``: ``"continuous"``, a sample of the student's walk noised anew;
            ``"discrete"``, a state of that walk; False, noised data.
        time_law: of (t, s), see :func:`genkit.pipelines.rmmd.weights.draw_times`; ``"discrete"`` states always lie on
            the grid.
        aux_steps_per_student: steps of the auxiliary before each of the student.
        joint: whether the reward acts in the phase ``distil`` as well (without the tie).
        normalize: ``"dmd"`` divides a row's moment gap by the mean of |x̂ − m_ref(x_s)| over its elements.
        reduction: see above.
        guidance_scale: v of a conditional teacher, Ψ(∅) + v (Ψ(c) − Ψ(∅)), where Ψ(∅) is told ``cond=None``.
        condition_names: entries of a batch that the networks are told.
        shape: of one sample; None: that of the data's ``sample``.
        chain_dropout: whether the student's dropout acts in its walks (its training calls always have it).

    Raises:
        ConfigError: ``eta`` of 0, networks that do not fit together, a reward without gradient or that never acts,
            unknown names, numbers out of range.

    A batch holds ``sample_id``, the condition's entries, what the reward reads, and ``sample`` (B, \\*) where data are
    noised or ``shape`` is None.
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
        reward: Reward | None = None,
        lam: float = 0.0,
        lam_reg: float | None = None,
        members: int = 1,
        weight: MomentWeight | Callable[[Tensor], Tensor] = "mmd",
        teacher_weight: float = 1.0,
        reference: Reference = "auxiliary",
        on_policy: OnPolicy = "continuous",
        time_law: TimeLaw = "continuous",
        aux_steps_per_student: int = 1,
        joint: bool = False,
        normalize: Literal["dmd"] | None = None,
        reduction: Reduction = "sum",
        guidance_scale: float = 1.0,
        condition_names: Sequence[str] = (),
        shape: Sequence[int] | None = None,
        chain_dropout: bool = False,
    ) -> None:
        _check_networks({"student": student, "auxiliary": auxiliary, "teacher": teacher}, scheduler)
        _check_same_parameters(student, auxiliary)
        self.student, self.auxiliary, self.scheduler, self.reward = student, auxiliary, scheduler, reward
        self._frozen: dict[str, nn.Module] = {"teacher": teacher}
        self.eta = _checked_eta(eta)
        self.lam = checked_number("lam", lam, "a finite number, at least 0", _not_negative)
        self.lam_reg = self.lam / 2.0 if lam_reg is None else checked_number("lam_reg", lam_reg, ">= 0", _not_negative)
        self.teacher_weight = checked_number("teacher_weight", teacher_weight, ">= 0 and finite", _not_negative)
        self.guidance_scale = checked_number("guidance_scale", guidance_scale, "a finite number", math.isfinite)
        self.num_inference_steps = checked_count("num_inference_steps", num_inference_steps)
        self.members = checked_count("members", members)
        self.aux_steps_per_student = checked_count("aux_steps_per_student", aux_steps_per_student)
        self.moment_weight = moment_weight(weight, scheduler)
        self.reference: Reference = checked_choice("reference", reference, get_args(Reference))
        self.on_policy: OnPolicy = checked_choice("on_policy", on_policy, get_args(OnPolicy))
        self.time_law: TimeLaw = checked_choice("time_law", time_law, get_args(TimeLaw))
        self.normalize = checked_choice("normalize", normalize, ("dmd", None))
        self.reduction: Reduction = checked_choice("reduction", reduction, get_args(Reduction))
        self.condition_names, self.joint, self.chain_dropout = tuple(condition_names), joint, chain_dropout
        self.shape = None if shape is None else checked_shape("shape", shape, "the shape of one sample")
        self._phases = _checked_phases(phases)
        self._check_reward()
        if self.guidance_scale != 1.0 and not self.condition_names:
            raise ConfigError(
                f"guidance_scale={guidance_scale} without condition_names: there is no condition to guide by; name the "
                "batch's entries that the teacher is told, or leave the scale at 1"
            )

    def _check_reward(self) -> None:
        acts = self.joint or any(phase.name == "reward" for phase in self._phases)
        if self.reward is None and (acts or self.lam > 0.0 or self.members > 1):
            raise ConfigError(
                f"lam={self.lam}, members={self.members}, joint={self.joint} and the phases "
                f"{[phase.name for phase in self._phases]} need a reward; pass reward=, or distil only, with "
                "lam=0, members=1 and joint=False"
            )
        if self.reward is not None and not acts:
            raise ConfigError("the reward never acts: add Phase('reward', steps), or set joint=True, or leave it out")
        if self.reward is not None and not self.reward.differentiable:
            raise ConfigError(f"{self.reward!r} is not differentiable; use PolicyGradientObjective, or another reward")

    # ---- what the Trainer asks ------------------------------------------------------------------------------------

    def phases(self) -> Sequence[Phase]:
        return self._phases

    def networks(self) -> Mapping[str, nn.Module]:
        return {"student": self.student, "auxiliary": self.auxiliary}

    def frozen(self) -> Mapping[str, nn.Module]:
        return self._frozen

    def start_phase(self, name: str) -> None:
        """Freezes θ0 (where ρ > 0) and φ0 (where it is the reference) before the phase ``reward``."""
        if name != "reward":
            return
        self._frozen = {"teacher": self._frozen["teacher"]}
        if self.lam_reg > 0.0:
            self._frozen["first_student"] = _frozen_copy(self.student)
        if self.reference == "auxiliary":
            self._frozen["first_auxiliary"] = _frozen_copy(self.auxiliary)

    def turn(self, step: int) -> str:
        """In each phase ``aux_steps_per_student`` steps of the auxiliary, then one of the student, and so on."""
        inside = self._phase_of(step)[1]
        return "auxiliary" if inside % (self.aux_steps_per_student + 1) < self.aux_steps_per_student else "student"

    def _phase_of(self, step: int) -> tuple[str, int]:
        """The phase's name, and the step's number inside it."""
        start = 0
        for phase in self._phases[:-1]:
            if step < start + phase.steps:
                return phase.name, step - start
            start += phase.steps
        return self._phases[-1].name, step - start

    # ---- losses ---------------------------------------------------------------------------------------------------

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        checked_choice("turn", turn, tuple(self.networks()))
        phase = self._phase_of(step)[0]
        members = self.members if phase == "reward" or self.joint else 1
        rows = _rows_of(keys, members)
        cond = {name: v.repeat_interleave(members, dim=0) for name, v in self._told(batch).items()} or None
        with torch.no_grad():
            x_t, t, s = self._states(phase, batch, cond, keys, rows)
        with torch.set_grad_enabled(turn == "student" and torch.is_grad_enabled()):
            output = self.net("student")(x_t, t, cond)
            clean = self.scheduler.to_x0(output, t, x_t)
        with torch.no_grad():
            x_s = self._noised_again(output.detach(), x_t, t, s, rows)
        if turn == "auxiliary":
            return self._auxiliary_loss(phase, clean, x_s, s, cond)
        total, logs = self._moment_loss(phase, clean, x_s, s, cond)
        if self.reward is not None and (phase == "reward" or self.joint):
            value, more = self._reward_loss(clean, batch, t[::members], logs.pop("gradient_rms"))
            total, logs = total - self.lam * value, logs | more
        if phase == "reward" and self.lam_reg > 0.0:
            with torch.no_grad():
                first = self.scheduler.to_x0(self._first("first_student")(x_t, t, cond), t, x_t)
            distance = self._reduce((clean - first).square()).mean()
            total, logs["first_student_distance"] = total + self.lam_reg * distance, distance.detach()
        logs.pop("gradient_rms", None)
        return LossOutput(total, logs)

    def _auxiliary_loss(self, phase: str, clean: Tensor, x_s: Tensor, s: Tensor, cond: Cond) -> LossOutput:
        guess = self.scheduler.to_x0(self.net("auxiliary")(x_s, s, cond), s, x_s)
        error = (guess - clean).square()
        logs: dict[str, Tensor | float] = {"auxiliary_error": error.detach().mean().sqrt()}
        if self.teacher_weight > 0.0:
            error = error + self.teacher_weight * (guess - self.reference_moment(phase, x_s, s, cond)).square()
        return LossOutput((self.moment_weight(s) * self._reduce(error)).mean(), logs)

    def _moment_loss(
        self, phase: str, clean: Tensor, x_s: Tensor, s: Tensor, cond: Cond
    ) -> tuple[Tensor, dict[str, Any]]:
        with torch.no_grad():
            reference = self.reference_moment(phase, x_s, s, cond)
            gap = self.student_moment(x_s, s, cond) - reference
            logs: dict[str, Any] = {"moment_gap": gap.square().mean().sqrt()}
            halves = _by_half("moment_gap", gap.flatten(1).square().mean(dim=1), s)
            logs |= {name: value.sqrt() for name, value in halves.items()}
            if self.normalize == "dmd":
                scale = (clean.detach() - reference).flatten(1).abs().mean(dim=1)
                gap = gap / _like(scale.clamp(min=torch.finfo(scale.dtype).tiny), gap)
            direction = _like(self.moment_weight(s), gap) * gap
            logs["gradient_rms"] = direction.square().mean().sqrt()
        return self._reduce(clean * direction).mean(), logs

    def _reward_loss(
        self, clean: Tensor, batch: Mapping[str, Tensor], t: Tensor, moment_rms: Tensor
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        """The mean reward over conditions, an invalid one counting as a constant, with its gradient to x̂."""
        sample = clean.detach()
        sample = sample.unflatten(0, (-1, self.members)) if self.members > 1 else sample
        context = {name: value for name, value in batch.items() if name != "sample_id"}
        if "sample" in context:
            context.setdefault("observation", context["sample"])
        reward = self.reward
        if reward is None:
            raise ConfigError("there is no reward; pass reward= at construction")
        try:
            output, slope = reward.value_and_grad(sample, context)
        except ConfigError as error:
            raise ConfigError(
                f"{error} (With members={self.members} the reward is given a sample of shape {tuple(sample.shape)}; a "
                "score of ensembles needs members=M of at least 2, one of single samples members=1.)"
            ) from error
        slope = slope.reshape(clean.shape).to(clean.dtype)
        count = len(sample)
        # the value is the reward's, the gradient the one it gave: its own graph is already freed
        value = (output.filled().sum() + ((clean - clean.detach()) * slope).sum()) / count
        cells = self.members * (slope[0].numel() if self.reduction == "mean" else 1)
        ratio = self.lam * cells * slope.square().mean().sqrt() / moment_rms.clamp(min=1e-12)
        return value, {
            "reward": output.mean().detach(),
            "reward_invalid": 1.0 - output.valid.to(torch.float32).mean(),
            **_by_half("reward", output.filled().detach(), t),
            "reward_gradient_ratio": ratio,
            "effective_lambda": self.lam * (1.0 + self.teacher_weight),
        }

    def _reduce(self, values: Tensor) -> Tensor:
        """Sum or mean over a row's elements, (B, \\*) → (B,)."""
        flat = values.flatten(1)
        return flat.sum(dim=1) if self.reduction == "sum" else flat.mean(dim=1)

    # ---- moments ----------------------------------------------------------------------------------------------------

    def student_moment(self, x_s: Tensor, s: Tensor, cond: Cond) -> Tensor:
        """m_S(x_s), (B, \\*), as the student's turn sees it: the auxiliary without dropout. Override it where it is
        known exactly.
        """
        with _evaluating(self.auxiliary):
            return self.scheduler.to_x0(self.auxiliary(x_s, s, cond), s, x_s)

    @torch.no_grad()
    def reference_moment(self, phase: str, x_s: Tensor, s: Tensor, cond: Cond) -> Tensor:
        """m_ref(x_s), (B, \\*): the (guided) teacher's clean prediction, or the first auxiliary's."""
        if phase == "reward" and self.reference == "auxiliary":
            return self.scheduler.to_x0(self._first("first_auxiliary")(x_s, s, cond), s, x_s)
        teacher = self._frozen["teacher"]
        output = teacher(x_s, s, cond)
        if self.guidance_scale != 1.0:
            output = torch.lerp(teacher(x_s, s, None), output, self.guidance_scale)
        return self.scheduler.to_x0(output, s, x_s)

    def _first(self, name: str) -> nn.Module:
        if name not in self._frozen:
            raise ConfigError(f"{name} is not there: call start_phase('reward') before the losses of that phase")
        return self._frozen[name]

    # ---- states -----------------------------------------------------------------------------------------------------

    def _states(
        self, phase: str, batch: Mapping[str, Tensor], cond: Cond, keys: Keys, rows: Keys
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x_t (B·M, \\*) and t, s (B·M,); the members of a condition share their times."""
        discrete = phase == "reward" and self.on_policy == "discrete"
        law: TimeLaw = "grid" if discrete else self.time_law
        members = len(rows) // len(keys)
        t, s, number = (
            v.repeat_interleave(members) for v in draw_times(keys, self.scheduler, self.num_inference_steps, law)
        )
        if discrete:
            return self._visited(number, self._sample_shape(batch), cond, rows), t, s
        if phase == "reward" and self.on_policy:
            x0 = self._walk(self.num_inference_steps, self._sample_shape(batch), cond, rows)[-1]
        else:
            x0 = _entry(batch, "sample").repeat_interleave(members, dim=0)
        x0 = x0.to(torch.promote_types(x0.dtype, torch.float32))
        noise = rows.at(purpose="noise").normal(x0.shape[1:], x0.dtype)
        return self.scheduler.add_noise(x0, noise, t), t, s

    def _noised_again(self, output: Tensor, x_t: Tensor, t: Tensor, s: Tensor, rows: Keys) -> Tensor:
        """x_s of the posterior step from x_t, (B·M, \\*)."""
        posterior = self.scheduler.transition(output, t, s, x_t, None, self.eta)
        state: Tensor = posterior.sample(rows.at(purpose="posterior"))
        return state

    def _visited(self, number: Tensor, shape: Sequence[int], cond: Cond, rows: Keys) -> Tensor:
        """The walk's state before step ``number`` of each row; the last step is never taken."""
        states = self._walk(self.num_inference_steps - 1, shape, cond, rows)
        return states[number, torch.arange(len(rows), device=number.device)]

    def _walk(self, steps: int, shape: Sequence[int], cond: Cond, rows: Keys) -> Tensor:
        """The states of the first ``steps`` steps of the student's walk, (steps + 1, B·M, \\*)."""
        own = rows.at(purpose="chain")
        if steps == 0:
            return self.scheduler.prior(own, shape).unsqueeze(0)
        with torch.no_grad(), _evaluating(self.student, not self.chain_dropout):
            walk = rollout(
                self.student, self.scheduler, None, shape=(len(rows), *shape), generator=own, cond=cond,
                times=self.scheduler.times(self.num_inference_steps)[: steps + 1], solver="ancestral", eta=self.eta,
                return_trajectory=True,
            )  # fmt: skip
        states: Tensor = walk.trajectory
        return states

    def _sample_shape(self, batch: Mapping[str, Tensor]) -> tuple[int, ...]:
        if self.shape is not None:
            return self.shape
        if "sample" not in batch:
            raise ConfigError(f"the batch has {sorted(batch)}, no 'sample' to tell a sample's shape; pass shape=")
        return tuple(batch["sample"].shape[1:])

    def _told(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _entry(batch, name) for name in self.condition_names}


# ---- checks and small things -----------------------------------------------------------------------------------------


def _checked_eta(eta: Any) -> float:
    return checked_number(
        "eta", eta, "above 0, to 1: with 0 the noised-again state x_s is a deterministic function of the "
        "prediction, so E[x̂ | x_s] is that prediction and there is no moment to match", lambda v: 0.0 < v <= 1.0,
    )  # fmt: skip


def _not_negative(value: float) -> bool:
    return 0.0 <= value < math.inf


def _checked_phases(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    if isinstance(phases, Mapping) or not phases or not all(isinstance(phase, Phase) for phase in phases):
        raise ConfigError(
            f"phases={phases!r}; expected a sequence of Phase('distil', steps) and Phase('reward', steps)"
        )
    names = [phase.name for phase in check_phases(phases)]
    for name in names:
        checked_choice("phase", name, _PHASES)
    if names != sorted(names, key=_PHASES.index):
        raise ConfigError(f"phases {names}; expected 'distil' before 'reward'")
    return tuple(phases)


def _check_networks(networks: Mapping[str, nn.Module], scheduler: Any) -> None:
    expected = getattr(scheduler, "prediction_type", None)
    for name, network in networks.items():
        declared = getattr(network, "prediction_type", expected)
        if declared != expected:
            raise ConfigError(
                f"the {name} predicts {declared!r}, but the scheduler expects {expected!r}; all networks and the "
                "scheduler need one prediction type, since their clean predictions are compared"
            )
    for (one, first), (other, second) in itertools.combinations(networks.items(), 2):
        shared = {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
        if first is second or shared:
            raise ConfigError(f"{one} and {other} share their weights; make a copy for each: copy.deepcopy({other})")


def _check_same_parameters(student: nn.Module, auxiliary: nn.Module) -> None:
    ours, theirs = ({n: tuple(p.shape) for n, p in net.named_parameters()} for net in (student, auxiliary))
    if ours == theirs:
        return
    name = next(n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n))
    shapes = f"{ours.get(name, 'absent')} and {theirs.get(name, 'absent')}"
    raise ConfigError(
        f"the student and the auxiliary differ in {name!r}: {shapes}; "
        "expected one architecture, since an auxiliary of another capacity cannot follow the student's moments"
    )


def _frozen_copy(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).eval().requires_grad_(False)


@contextmanager
def _evaluating(module: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Inside, the module is in evaluation mode; afterwards each of its parts is as it was."""
    training = [part for part in module.modules() if part.training] if wanted else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _rows_of(keys: Keys, members: int) -> Keys:
    """One stream for each member of each condition, members side by side."""
    if members == 1:
        return keys
    own = torch.arange(members, device=keys.sample.device)
    sample = (keys.sample.unsqueeze(1) * members + own).flatten()
    return Keys(keys.key.repeat_interleave(members), sample, keys.step, keys.purpose)


def _by_half(name: str, values: Tensor, times: Tensor) -> dict[str, Tensor]:
    """Means of values (B,) at times below and from ½, 0 where a half has none: what noise does to them."""
    late = times >= 0.5
    found = {}
    for half, rows in (("t<0.5", ~late), ("t>=0.5", late)):
        found[f"{name}/{half}"] = torch.where(rows, values, 0.0).sum() / rows.sum().clamp(min=1)
    return found


def _entry(batch: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in batch:
        raise ConfigError(f"the batch has {sorted(batch)}, but {name!r} is needed.{nearest(name, batch)}")
    return batch[name]


def _like(coefficient: Tensor, x: Tensor) -> Tensor:
    """(B,) as (B, 1, …, 1) in the dtype of ``x``."""
    return coefficient.to(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
