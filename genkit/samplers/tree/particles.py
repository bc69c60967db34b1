"""Rows that are walked down a search's chain together: groups of particles, their weights and what they cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number, got
from genkit.errors import ConfigError
from genkit.samplers.noise import Keys, draw_keys
from genkit.samplers.solvers import Cond
from genkit.samplers.tree.chain import Chain, Context, Outputs
from genkit.samplers.tree.proposals import effective_shares
from genkit.samplers.tree.rows import State, stack_rows, take
from genkit.samplers.walk import _progress

__all__ = [
    "ParticleWalk",
    "Population",
    "PopulationResult",
    "RewardFunction",
    "Scale",
    "Twist",
    "best_rows",
    "draw_by_weight",
    "log_mean_exp",
    "take_outputs",
    "tilt",
]

RewardFunction = Callable[[Any, Any], Any]  # a genkit.rewards.Reward


@dataclass(frozen=True, kw_only=True)
class Population:
    """Clean samples with their rewards and weights.

    Args:
        samples: rows (B, \\*), or a dict of them.
        rewards: (B, M), one column an objective; NaN where the reward could not tell.
        valid: bool (B,).
        log_weights: float64 (B,): averages with these weights are averages under the law aimed at, and where Z is
            estimated the mean of the weights is its estimate.
        groups: int64 (B,), which independent population each row belongs to.
    """

    samples: State
    rewards: Tensor
    valid: Tensor
    log_weights: Tensor
    groups: Tensor

    def __len__(self) -> int:
        return len(self.groups)

    def rows(self, index: Tensor) -> dict[str, Any]:
        """The fields at some rows (an index or a mask)."""
        names = ("samples", "rewards", "valid", "log_weights", "groups")
        return {name: take(getattr(self, name), index) for name in names}

    def expectation(self, of: Tensor | Callable[[State], Tensor]) -> Tensor:
        """Σ w f / Σ w over the rows, float64 (\\*) for values f (B, \\*) or a function of the samples that gives them.

        Raises:
            ConfigError: values of another batch, or no row with a weight above 0.
        """
        values = of(self.samples) if callable(of) else of
        if len(values) != len(self):
            raise ConfigError(f"the values have {got(values)}; expected {len(self)} of them, one a sample")
        weighted = self.log_weights > -math.inf
        if not bool(weighted.any()):
            raise ConfigError("no sample has a weight above 0, so that there is no average; look at valid and rewards")
        shares = self.log_weights[weighted].softmax(dim=0)
        kept = values[weighted].to(torch.float64)
        return torch.tensordot(shares, kept, dims=1)


@dataclass(frozen=True, kw_only=True)
class PopulationResult(Population):
    """What a baseline delivers: its own fields are the delivered rows.

    Args:
        population: all rows that were walked to the end, with their weights; those delivered are chosen from them.
        network_calls: network evaluations, one a row and pass.
        reward_calls: samples and clean predictions that the reward judged.
        seconds: ``"network"`` (with the kernels), ``"reward"`` and ``"total"``.
        ess: the effective share (Σ w)²/(n Σ w²) of the weights at the end of each macro-edge, before resampling,
            a mean over the groups; the last one with the final rewards (where λ is in play).
        log_z: log of the estimate of Z, of which the expectation is Z itself; None where no λ is in play.
        log_z_error: its standard error by the delta method, over rows (:func:`self_normalised`) or groups
            (:func:`smc`); None where there is one group.
        log_z_groups: the same estimate of each group, float64 (groups,), or None.
    """

    population: Population
    network_calls: int
    reward_calls: int
    seconds: Mapping[str, float]
    ess: tuple[float, ...]
    log_z: float | None = None
    log_z_error: float | None = None
    log_z_groups: Tensor | None = None

    def expectation(self, of: Tensor | Callable[[State], Tensor]) -> Tensor:
        """Σ w f / Σ w, (\\*): over the whole population for a function of the samples, over the delivered rows for
        values (B, \\*) of these."""
        return self.population.expectation(of) if callable(of) else super().expectation(of)


@dataclass
class ParticleWalk:
    """Groups of rows that are walked together, with what it has cost so far.

    Args:
        chain, reward: what is walked, and what judges.
        keys: the rows' random streams: one key, ``sample`` the row's number.
        groups: int64 (B,), the group of each row; rows of a group lie together.
        num_groups, size: groups, and rows of each.
        cond, context: entries with one row for every row, or None.
        slots: rows that are walked at once.
        progress: show a progress bar.
    """

    chain: Chain
    reward: RewardFunction
    keys: Keys
    groups: Tensor
    num_groups: int
    size: int
    cond: Cond
    context: Context | None
    slots: int
    progress: bool
    network_calls: int = 0
    reward_calls: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"network": 0.0, "reward": 0.0})
    began: float = field(default_factory=time.perf_counter)

    @classmethod
    def begin(
        cls,
        chain: Chain,
        reward: RewardFunction,
        num_groups: int,
        size: int,
        generator: torch.Generator | None,
        cond: Cond,
        context: Context | None,
        slots: int,
        device: torch.device | str,
        progress: bool,
    ) -> ParticleWalk:
        """A walk at its start, with one key drawn from the generator."""
        if isinstance(chain, type) or not all(hasattr(chain, name) for name in ("draw_stage", "step", "levels")):
            raise ConfigError(f"chain has {got(chain)}; expected a Chain(denoiser, scheduler, …)")
        if not callable(reward):
            raise ConfigError(f"reward has {got(reward)}; expected a genkit.rewards.Reward")
        index = torch.arange(num_groups * size, device=device)
        groups, keys = index // size, _numbered(draw_keys(generator, 1, device), index)
        cond = _rows_of("cond", cond, groups, num_groups)
        context = _rows_of("context", context, groups, num_groups)
        slots = checked_count("slots", slots)
        return cls(chain, reward, keys, groups, num_groups, size, cond, context, slots, progress)

    def _chunks(self) -> list[slice]:
        return [slice(start, start + self.slots) for start in range(0, len(self.groups), self.slots)]

    def edges(self) -> Any:
        """The macro-edges, counted from 0, with a progress bar where one is wanted."""
        return _progress(len(self.chain.levels), self.progress)

    def start(self) -> tuple[State, Tensor]:
        """Rows of the prior, through all its stages, and log p/q of what these drew, (B,)."""
        parts, weights = [], []
        for rows in self._chunks():
            state: State = None
            context, total = take(self.context, rows), torch.zeros(len(self.keys[rows]), dtype=torch.float64)
            for depth in range(1, self.chain.num_stages + 1):
                state = self.chain.draw_stage(depth, state, self.keys[rows], context)
                total = total + self.chain.stage_log_weight(depth, state, context)
            parts.append(state)
            weights.append(total)
        return stack_rows(parts), torch.cat(weights).to(self.groups.device)

    def advance(self, edge: int, state: State, guided: Tensor, outputs: Outputs | None = None) -> tuple[State, Tensor]:
        """All rows at the end of a macro-edge, and Σ (log p − log q) of what was drawn; ``outputs`` at its start."""
        before = time.perf_counter()
        parts = [
            self._advance(edge, rows, take(state, rows), guided[rows], take_outputs(outputs, rows))
            for rows in self._chunks()
        ]
        states, ratios = zip(*parts, strict=True)
        self.seconds["network"] += time.perf_counter() - before
        return stack_rows(states), torch.cat(ratios)

    def _advance(
        self, edge: int, rows: slice, state: State, guided: Tensor, outputs: Outputs | None
    ) -> tuple[State, Tensor]:
        keys, cond, context = self.keys[rows], take(self.cond, rows), take(self.context, rows)
        total = torch.zeros(len(keys), dtype=torch.float64, device=keys.key.device)
        for k in range((0, *self.chain.levels)[edge], self.chain.levels[edge]):
            step = torch.full_like(keys.key, k)
            self.network_calls += 0 if outputs is not None else len(keys) * self.chain.calls_per_step
            known = {} if outputs is None else {"outputs": outputs}
            state, ratio = self.chain.step(state, step, guided, keys, cond, context, **known)
            total, outputs = total + ratio, None
        return state, torch.where(total.isnan(), -math.inf, total)  # a state that is not finite has no weight

    def look_ahead(self, edge: int, state: State) -> tuple[Outputs, State]:
        """Model outputs and clean predictions of all rows at the end of a macro-edge (not the last)."""
        before = time.perf_counter()
        parts, cleans = [], []
        for rows in self._chunks():
            part, cond = take(state, rows), take(self.cond, rows)
            step = torch.full_like(self.keys.key[rows], self.chain.levels[edge])
            parts.append(self.chain.outputs(part, step, cond))
            cleans.append(self.chain.clean(part, step, cond, take(self.context, rows), parts[-1]))
        self.network_calls += len(self.groups) * self.chain.calls_per_step
        self.seconds["network"] += time.perf_counter() - before
        return tuple(stack_rows(same) for same in zip(*parts, strict=True)), stack_rows(cleans)

    def judge(self, state: State) -> tuple[Tensor, Tensor]:
        """Rewards (B, M) of clean rows, NaN where not valid, and valid (B,)."""
        before = time.perf_counter()
        outputs = [self.reward(take(state, rows), take(self.context, rows)) for rows in self._chunks()]
        self.seconds["reward"] += time.perf_counter() - before
        self.reward_calls += len(self.groups)
        values = torch.cat([out.values for out in outputs]).to(self.groups.device)
        values = values.unsqueeze(1) if values.ndim == 1 else values
        valid = torch.cat([out.valid for out in outputs]).to(self.groups.device) & torch.isfinite(values).all(dim=1)
        return torch.where(valid.unsqueeze(1), values, math.nan), valid

    def rollouts(self, guided: bool = False) -> tuple[State, Tensor, tuple[float, ...]]:
        """Clean rows, their log-weights (B,) and the effective share after each edge; ``guided``: all, unweighted."""
        (state, log_weights), ess, chain = self.start(), [], self.chain
        log_weights = torch.zeros_like(log_weights) if guided else log_weights
        for edge in self.edges():
            branch = chain.draw_branch(self.keys, chain.num_stages + edge)
            state, ratio = self.advance(edge, state, torch.ones_like(branch) if guided else branch)
            log_weights = log_weights if guided else log_weights + chain.edge_log_weight(ratio)
            ess.append(float(effective_shares(log_weights.unsqueeze(0))))
        return state, log_weights, tuple(ess)

    def population(self, state: State, rewards: Tensor, valid: Tensor, log_weights: Tensor) -> Population:
        """All rows as a population."""
        return Population(samples=state, rewards=rewards, valid=valid, log_weights=log_weights, groups=self.groups)

    def judged(self, state: State, log_weights: Tensor | None = None) -> Population:
        """All rows with their rewards."""
        if log_weights is None:
            log_weights = torch.zeros(len(self.groups), dtype=torch.float64, device=self.groups.device)
        return self.population(state, *self.judge(state), log_weights)

    def ancestors(self, log_weights: Tensor, count: int, how: str, step: int, where: Tensor | None = None) -> Tensor:
        """``count`` rows of each group (G, N) drawn by their weights, (G · count,); itself where not ``where`` (G,)."""
        group = torch.arange(self.num_groups, device=self.groups.device)
        keys = _numbered(self.keys[:1], group).at(step=step, purpose="resampling")
        drawn = draw_by_weight(log_weights, count, keys, how)
        if where is not None:
            drawn = torch.where(where.unsqueeze(1), drawn, torch.arange(count, device=drawn.device))
        return (drawn + group.unsqueeze(1) * self.size).reshape(-1)

    def drawn(self, log_weights: Tensor, count: int, how: str) -> tuple[Tensor, Tensor]:
        """Delivered rows, and their log-weights: log of their group's mean weight."""
        index = self.ancestors(log_weights, count, how, self.chain.num_steps)
        return index, log_mean_exp(log_weights)[self.groups[index]]

    def result(
        self,
        everyone: Population,
        delivered: Tensor | tuple[Tensor, Tensor] | None,
        ess: tuple[float, ...] = (),
        log_z_groups: Tensor | None = None,
        log_z_terms: Tensor | None = None,
    ) -> PopulationResult:
        """The result; ``log_z_terms``: logarithms of independent estimates of Z, for its error."""
        index, log_weights = delivered if isinstance(delivered, tuple) else (delivered, None)
        rows = everyone.rows(torch.arange(len(everyone), device=self.groups.device) if index is None else index)
        if log_weights is not None:
            rows["log_weights"] = log_weights
        return PopulationResult(
            **rows,
            population=everyone,
            network_calls=self.network_calls,
            reward_calls=self.reward_calls,
            seconds={**self.seconds, "total": time.perf_counter() - self.began},
            ess=ess,
            log_z=None if log_z_groups is None else float(log_mean_exp(log_z_groups)),
            log_z_error=None if log_z_terms is None else _relative_error(log_z_terms),
            log_z_groups=log_z_groups,
        )


@dataclass(frozen=True)
class Scale:
    """One number of a reward's values.

    Args:
        preference: weights of the objectives (M,); None where there is one.
        floor: the number of samples without a valid reward, −inf or finite.

    Raises:
        ConfigError: no such floor; from :meth:`score`: a preference that does not fit the values.
    """

    preference: Sequence[float] | Tensor | None
    floor: float

    def __post_init__(self) -> None:
        if math.isnan(checked_number("floor", self.floor, "a number, or −inf", lambda v: v < math.inf)):
            raise ConfigError("floor is NaN; expected a number, or −inf")

    def score(self, values: Tensor, valid: Tensor) -> Tensor:
        """float64 (B,): the preferred combination of values (B, M), the floor where not valid."""
        count = values.shape[1]
        if self.preference is None and count > 1:
            raise ConfigError(f"the reward has {count} objectives; give preference=, their {count} weights")
        weights = torch.ones(1) if self.preference is None else torch.as_tensor(self.preference)
        if weights.shape != (count,) or not bool(torch.isfinite(weights).all()):
            raise ConfigError(f"preference={weights.tolist()}; expected {count} finite weights, one an objective")
        combined = values.to(torch.float64) @ weights.to(values.device, torch.float64)
        return torch.where(valid, combined, self.floor)


class Twist:
    """The potentials along each particle's past.

    Args:
        kind: ``"difference"``, ``"max"`` or ``"final"`` (none).
        lams: λ_l of each macro-edge.
        scale: one number of a reward's values.
        groups, size: of the particles.
        device: where they live.
    """

    def __init__(self, kind: str, lams: Sequence[float], scale: Scale, groups: int, size: int, device: Any) -> None:
        self.kind, self.lams, self.scale, self.shape = kind, lams, scale, (groups, size)
        self.total = torch.zeros(groups * size, dtype=torch.float64, device=device)  # Σ log G
        self.highest = torch.full_like(self.total, -math.inf)

    def asks(self, edge: int) -> bool:
        """Whether the reward of clean predictions is wanted at the end of this edge."""
        return self.kind != "final" and self.lams[edge] > 0.0

    def potential(self, edge: int, values: Tensor, valid: Tensor) -> Tensor:
        """log G (B,) of particles whose clean predictions have these rewards."""
        score = self._finite(self.scale.score(values, valid))
        if self.kind == "difference":
            log_potential = self.lams[edge] * score - self.total
        else:
            self.highest = torch.maximum(self.highest, score)
            log_potential = self.lams[edge] * self.highest
        self.total = self.total + log_potential
        return log_potential

    def _finite(self, score: Tensor) -> Tensor:
        """Scores where −inf is the lowest finite one of the group, or 0 where there is none."""
        score = score.reshape(self.shape)
        lowest = torch.where(score == -math.inf, math.inf, score).amin(dim=1, keepdim=True)
        lowest = torch.where(lowest == math.inf, 0.0, lowest)
        return torch.where(score == -math.inf, lowest, score).reshape(-1)

    def follow(self, ancestors: Tensor) -> None:
        """Each particle takes over its ancestor's past."""
        self.total, self.highest = self.total[ancestors], self.highest[ancestors]

    def last(self, values: Tensor, valid: Tensor, lam: float) -> Tensor:
        """log of exp(λ r) / Π G, (B,)."""
        return tilt(self.scale.score(values, valid), lam) - self.total


def tilt(score: Tensor, lam: float) -> Tensor:
    """λ r, where −inf stays −inf for λ = 0 too."""
    return torch.where(score == -math.inf, score, lam * score)


def log_mean_exp(log_values: Tensor) -> Tensor:
    """log of the mean of the exponentials over the last dimension."""
    return log_values.logsumexp(dim=-1) - math.log(log_values.shape[-1])


def _relative_error(log_values: Tensor) -> float | None:
    """The standard error of the mean of positive numbers, relative to the mean; None for a single one."""
    if len(log_values) < 2 or not bool((log_values > -math.inf).any()):
        return None
    values = (log_values - log_values.max()).exp()
    return float(values.std() / (values.mean() * math.sqrt(len(values))))


def draw_by_weight(log_weights: Tensor, count: int, keys: Keys, how: str) -> Tensor:
    """``count`` indices for each row of log-weights (G, N), in order for systematic draws, int64 (G, count)."""
    dead = (log_weights == -math.inf).all(dim=1, keepdim=True)
    cumulative = torch.where(dead, 0.0, log_weights).softmax(dim=1).cumsum(dim=1)
    cumulative = (cumulative / cumulative[:, -1:]).contiguous()
    if how == "systematic":
        points = (torch.arange(count, device=log_weights.device) + keys.uniform().unsqueeze(1)) / count
    else:
        points = keys.uniform((count,))
    # strictly below 1, so that trailing rows without weight are never taken
    return torch.searchsorted(cumulative, points.clamp(max=1.0 - 2.0**-53).contiguous(), right=True)


def best_rows(score: Tensor, groups: int, count: int) -> Tensor:
    """Rows of the ``count`` highest scores of each of ``groups`` equal groups, best first; ties in order."""
    size = len(score) // groups
    order = score.reshape(groups, size).argsort(dim=1, descending=True, stable=True)[:, :count]
    return (order + size * torch.arange(groups, device=score.device).unsqueeze(1)).reshape(-1)


def take_outputs(outputs: Outputs | None, rows: Any) -> Outputs | None:
    """The rows of model outputs at an index; None stays None."""
    return None if outputs is None else tuple(take(output, rows) for output in outputs)


def _numbered(search: Keys, index: Tensor) -> Keys:
    """The streams of rows 0, 1, … of a search with one key."""
    return Keys(search.key.expand(len(index)).contiguous(), index, search.step)


def _rows_of(name: str, entries: Any, groups: Tensor, num_groups: int) -> dict[str, Tensor] | None:
    """Entries with one row, or one a group, with one for every row."""
    if entries is None:
        return None
    if not isinstance(entries, Mapping):
        raise ConfigError(f"{name} has {got(entries)}; expected a mapping from names to tensors, or None")
    rows = {}
    for key, value in entries.items():
        if not isinstance(value, Tensor) or value.shape[:1] not in ((1,), (num_groups,)):
            expected = "one row" if num_groups == 1 else f"one row, or {num_groups} (one a group)"
            raise ConfigError(f"{name}[{key!r}] has {got(value)}; expected a tensor with {expected}")
        value = value.to(groups.device)
        rows[key] = value.expand(len(groups), *value.shape[1:]) if len(value) == 1 else value[groups]
    return rows
