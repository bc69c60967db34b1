"""The chain that a search walks, cut into levels: prior stages, then macro-edges of several steps each.

A *micro-step* is one transition of the scheduler, from ``times[k]`` to ``times[k + 1]``. Levels are counted from the
root: depth 0 is the empty root, depths 1 … P are the stages of the prior (by default one: pure noise), and each further
depth ends a *macro-edge* of several micro-steps; states at ``leaf_depth`` are clean samples.

With a :class:`~genkit.samplers.tree.proposals.GuidedProposal` the state of an edge is drawn from the mixture of the
base kernel p and a guided kernel q, and the edge carries the weight of the base against that mixture::

    ℓ = Σ_k [log p(x_{k+1} | x_k) − log q(x_{k+1} | x_k)],      w = 1 / (π₀ + (1 − π₀) exp(−ℓ)) ≤ 1 / π₀

so that weighted averages over edges are averages under p: E_mixture[w f] = E_p[f] in path space.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from genkit._checks import checked_count, got
from genkit.errors import ConfigError
from genkit.samplers.noise import Keys
from genkit.samplers.solvers import Cond, Denoiser
from genkit.samplers.tree.proposals import GuidedProposal
from genkit.samplers.tree.rows import State, put, row_count, stack_rows, take, where_rows
from genkit.samplers.walk import _check_callables, _check_prediction_type, _walk_times

__all__ = ["Chain", "Outputs", "Stage", "State", "put", "row_count", "stack_rows", "take", "where_rows"]

Context = Mapping[str, Tensor]
Outputs = tuple[Any, ...]
Stage = Callable[[Keys, State, Context | None], State]


class Chain:
    """A denoiser and a scheduler as a tree sees them: levels of states, and kernels between them.

    Args:
        denoiser: (x_t, t, cond) → model output.
        scheduler: gives ``transition``; its kernel must be stochastic (``eta`` above 0).
        num_inference_steps: number of micro-steps n (or give ``times``).
        times: the n + 1 times, from 1 to 0.
        levels: how many macro-edges (cut as evenly as n allows), or the micro-steps after which they end: increasing,
            the last one n.
        proposal: a guided kernel to draw from; None: the base's own.
        stages: functions (keys, state, context) → state that draw the prior one level after the other; the first gets
            the state None. By default one stage, ``scheduler.prior``. A stage that draws from another law than the
            prior's has a method ``log_weight(state, context)``, log p/q of what it drew, (B,).
        shape: the shape of one sample (one a field where states have parts), for the default stage.
        eta: stochasticity of the kernel; None: the scheduler's own.
        batch_size: rows of one network call; more rows go in several calls. None: all at once.

    Raises:
        ConfigError: levels, times or options that do not fit, or a deterministic kernel.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        scheduler: Any,
        *,
        num_inference_steps: int | None = None,
        times: Tensor | Sequence[float] | None = None,
        levels: int | Sequence[int] = 8,
        proposal: GuidedProposal | None = None,
        stages: Sequence[Stage] | None = None,
        shape: Any = None,
        eta: float | None = None,
        batch_size: int | None = None,
    ) -> None:
        _check_callables(denoiser, scheduler, None)
        _check_prediction_type(denoiser, scheduler)
        _refuse_deterministic(scheduler, eta)
        self.denoiser, self.scheduler, self.proposal, self.eta = denoiser, scheduler, proposal, eta
        self.times = _walk_times(scheduler, num_inference_steps, times, None)
        self.num_steps = len(self.times) - 1
        self.levels = _checked_levels(levels, self.num_steps)
        self.stages = tuple(stages) if stages is not None else (self._default_stage(shape),)
        self.num_stages = len(self.stages)
        self.leaf_depth = self.num_stages + len(self.levels)
        self.batch_size = None if batch_size is None else checked_count("batch_size", batch_size)
        self.calls_per_step = 1 if proposal is None else proposal.calls_per_step
        self._starts = (0, *self.levels)
        self._depth_after = torch.zeros(self.num_steps, dtype=torch.int64)
        for edge, end in enumerate(self.levels):
            self._depth_after[end - 1] = self.num_stages + 1 + edge
        self._edge_of = torch.bucketize(torch.arange(self.num_steps), torch.tensor(self.levels), right=True)

    def _default_stage(self, shape: Any) -> Stage:
        if shape is None:
            raise ConfigError("the search has no shape to draw noise of: give shape=, of one sample, or stages=")
        return lambda keys, state, context: self.scheduler.prior(keys.at(purpose="latents"), shape, context)

    # ---- levels ---------------------------------------------------------------------------------------------------

    def first_step(self, depth: int) -> int:
        """The micro-step at which states of a depth stand; ``num_steps`` at the leaves.

        Raises:
            ConfigError: the depth is a stage before the last, or outside the chain.
        """
        if not self.num_stages <= depth <= self.leaf_depth:
            raise ConfigError(f"depth {depth} has no micro-step; expected {self.num_stages} to {self.leaf_depth}")
        return self._starts[depth - self.num_stages]

    def depth_after(self, step: Tensor) -> Tensor:
        """The depth of states that have finished micro-step ``step`` (B,), int64; 0 inside a macro-edge."""
        return self._depth_after.to(step.device)[step]

    # ---- drawing --------------------------------------------------------------------------------------------------

    def draw_stage(self, depth: int, state: State, keys: Keys, context: Context | None = None) -> State:
        """States of the prior's stage ``depth`` (1 … ``num_stages``), given those of the stage before."""
        return self.stages[depth - 1](keys.at(step=depth, purpose=f"stage {depth}"), state, context)

    def stage_log_weight(self, depth: int, state: State, context: Context | None = None) -> Tensor:
        """log p/q of states that the prior's stage ``depth`` drew, float64 (B,): 0 where it draws from the prior."""
        weigh = getattr(self.stages[depth - 1], "log_weight", None)
        if weigh is None:
            return torch.zeros(row_count(state), dtype=torch.float64)
        weight: Tensor = weigh(state, context)
        return weight.detach().to("cpu", torch.float64)

    def draw_branch(self, keys: Keys, depth: int | Tensor) -> Tensor:
        """Whether the edge that leaves each row's ``depth`` is guided, bool (B,)."""
        if self.proposal is None:
            return torch.zeros(len(keys), dtype=torch.bool, device=keys.key.device)
        uniform = keys.at(step=depth, purpose="branch").uniform()
        return uniform >= self.proposal.base_probability

    @torch.no_grad()
    def outputs(self, state: State, step: Tensor, cond: Cond = None) -> Outputs:
        """The model outputs at rows of ``state`` that stand at micro-steps ``step`` (B,), each below ``num_steps``.

        The base's, and behind it the guided one where there is a proposal. Costs ``calls_per_step`` network evaluations
        a row; :meth:`step` and :meth:`clean` take them, so that looking ahead from a state and stepping on from it (or
        from copies of it) share one evaluation.
        """
        count, size = row_count(state), self.batch_size or row_count(state)
        if count <= size:
            return self._outputs(state, step, cond)
        chunks = [slice(start, start + size) for start in range(0, count, size)]
        parts = [self._outputs(take(state, rows), step[rows], take(cond, rows)) for rows in chunks]
        return tuple(stack_rows(same) for same in zip(*parts, strict=True))

    def _outputs(self, state: State, step: Tensor, cond: Cond) -> Outputs:
        t = self.times.to(step.device)[step].to(torch.float32)
        if self.proposal is None:
            return (self.denoiser(state, t, cond),)
        edge = self._edge_of.to(step.device)[step]
        return self.proposal.outputs(self.denoiser, state, t, cond, edge)

    @torch.no_grad()
    def step(
        self,
        state: State,
        step: Tensor,
        guided: Tensor | None,
        keys: Keys,
        cond: Cond = None,
        context: Context | None = None,
        outputs: Outputs | None = None,
    ) -> tuple[State, Tensor]:
        """One micro-step of every row.

        Args:
            state: rows (B, \\*).
            step: int64 (B,), each row's own micro-step.
            guided: bool (B,), whether the row draws from the guided kernel.
            keys: the rows' random streams; a draw depends on them and on ``step`` alone.
            cond: what the denoiser is told, (B, \\*) each.
            context: what the kernel needs, (B, \\*) each.
            outputs: those of :meth:`outputs` at these rows; None: computed here.

        Returns:
            The next states, and log p − log q of what was drawn, float64 (B,) (0 without a proposal, and for the last
            step, which is the base's for all).
        """
        if outputs is None:
            outputs = self.outputs(state, step, cond)
        times = self.times.to(step.device)
        t, s = times[step], times[step + 1]
        noise = keys.at(step=step, purpose="transition")
        base, *others = (self.scheduler.transition(o, t, s, state, context, self.eta) for o in outputs)
        if not others:
            return base.sample(noise), torch.zeros(len(keys), dtype=torch.float64, device=step.device)
        (other,) = others
        last = step == self.num_steps - 1
        take_guided = ~last if guided is None else guided & ~last
        drawn = where_rows(take_guided, other.sample(noise), base.sample(noise))
        ratio = _log_density(base, drawn) - _log_density(other, drawn)
        return drawn, torch.where(last, 0.0, ratio)

    @torch.no_grad()
    def clean(
        self,
        state: State,
        step: Tensor,
        cond: Cond = None,
        context: Context | None = None,
        outputs: Outputs | None = None,
    ) -> State:
        """The base's clean prediction from rows (B, \\*) at micro-steps ``step``: the mode of its step onto t = 0.

        ``outputs`` are those of :meth:`outputs` at these rows; without them ``calls_per_step`` network evaluations a
        row are made here.
        """
        if outputs is None:
            outputs = self.outputs(state, step, cond)
        t = self.times.to(step.device)[step]
        return self.scheduler.transition(outputs[0], t, torch.zeros_like(t), state, context, self.eta).mode

    def with_proposal(self, proposal: GuidedProposal | None) -> Chain:
        """The same chain with another proposal."""
        changed = copy.copy(self)
        changed.proposal = proposal
        changed.calls_per_step = 1 if proposal is None else proposal.calls_per_step
        return changed

    def edge_log_weight(self, log_ratio: Tensor) -> Tensor:
        """log w of edges with Σ (log p − log q) = ``log_ratio``, (B,); 0 without a proposal."""
        if self.proposal is None:
            return torch.zeros_like(log_ratio)
        return self.proposal.edge_log_weight(log_ratio)


def _log_density(transition: Any, drawn: State) -> Tensor:
    return getattr(transition, "unchecked_log_prob", transition.log_prob)(drawn).to(torch.float64)


def _refuse_deterministic(scheduler: Any, eta: float | None) -> None:
    parts = getattr(scheduler, "schedulers", {"": scheduler})
    for name, part in parts.items():
        if (getattr(part, "eta", 1.0) if eta is None else eta) == 0.0:
            where = f" of the field {name!r}" if name else ""
            raise ConfigError(
                f"eta=0 makes the kernel of {type(part).__name__}{where} deterministic, so that all children of a "
                "state are one; expected eta above 0 (an option of the scheduler, or eta= here)"
            )


def _checked_levels(levels: int | Sequence[int], steps: int) -> tuple[int, ...]:
    if isinstance(levels, int) and not isinstance(levels, bool):
        count = checked_count("levels", levels)
        if count > steps:
            raise ConfigError(f"levels={levels}; expected at most {steps}, the number of micro-steps")
        return tuple(math.ceil(steps * (i + 1) / count) for i in range(count))
    try:
        ends = tuple(int(end) for end in levels)  # type: ignore[union-attr]
    except TypeError as error:
        raise ConfigError(f"levels has {got(levels)}; expected how many, or the micro-steps where they end") from error
    if not ends or ends[-1] != steps or any(b <= a for a, b in zip((0, *ends), ends, strict=False)):
        raise ConfigError(f"levels={ends}; expected increasing micro-steps that end with {steps}, the number of them")
    return ends
