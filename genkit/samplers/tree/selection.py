"""Selection: where each new rollout leaves the tree.

All free slots descend together, one level after the other; at a node the rollouts act in their order, so that what an
earlier one occupies (its virtual visit) counts for a later one. A rollout grows a new child where the node has fewer
linked and pending children than its allowance of progressive widening,

    max(1, floor(C (N + O + 1)^alpha))        (N: judged visits, O: rollouts in flight)

or where no child can be selected yet, and else goes on to a child:

* ``dts``: a child with fewer than ``min_visits`` visits (in flight included) first, the least visited one; after that a
  child is drawn with probability ∝ w exp(lam v) (``explore`` of the time uniformly).
* ``dts_star``: the child with the largest v + kappa log w / lam + c_uct s sqrt(log(N + O + 1) / (N_i + O_i)), with s
  the standard deviation of the values of the root's children.
* ``unbiased``: every node below the root gets the number of children that ``branching`` gives its depth, whatever the
  values; the root widens without limit. Values are then unbiased for exp(lam V).

Leaves are exempt from the quota, since their values are exact. Random numbers are keyed by (search, rollout, depth), so
they do not depend on the order of calls.

Diffusion Tree Sampling and DTS*: arXiv:2506.20701 (its constants are not published in the part that is known here).
Visits in flight: Liu et al., "Watch the unobserved", arXiv:1810.11755. The visit quota, the weights and the unbiased
mode are not in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.samplers.noise import Keys
from genkit.samplers.tree.backup import segment_starts
from genkit.samplers.tree.store import Floats, Ints, NodeStore, expand_ranges

__all__ = [
    "Descent",
    "Policy",
    "Scalarisation",
    "SingleObjective",
    "boltzmann",
    "descend",
    "grow_at",
    "select_uniforms",
    "shares",
    "withdraw",
]


class Scalarisation(Protocol):
    """What a search needs to know of its objectives; the state is passed and returned, never changed."""

    warm_up: int

    @property
    def ready(self) -> bool: ...
    def num_columns(self, num_objectives: int) -> int: ...
    def columns(self, rewards: Tensor) -> Tensor: ...
    def draw(self, keys: Keys) -> Tensor: ...
    def score(self, columns: Tensor, parameter: Tensor) -> Tensor: ...
    def fit(self, rewards: Tensor) -> Self: ...
    def observe(self, rewards: Tensor) -> Self: ...
    def state_dict(self) -> Mapping[str, Tensor]: ...
    def restored(self, state: Mapping[str, Any]) -> Self: ...


class SingleObjective:
    """One objective: the column is the reward, and the score is the column."""

    warm_up = 0
    ready = True

    def num_columns(self, num_objectives: int) -> int:
        """1.

        Raises:
            ConfigError: the reward has several objectives.
        """
        if num_objectives != 1:
            raise ConfigError(
                f"the reward has {num_objectives} objectives, the search values one; give scalarisation= (PerObjective "
                f"or Directions), or a reward (B,)"
            )
        return 1

    def columns(self, rewards: Tensor) -> Tensor:
        """The rewards (B, 1)."""
        return rewards

    def draw(self, keys: Keys) -> Tensor:
        """No parameter, (B, 0)."""
        return torch.zeros(len(keys), 0, dtype=torch.float64)

    def score(self, columns: Tensor, parameter: Tensor) -> Tensor:
        """The values (n,) of columns (n, 1)."""
        return columns[:, 0]

    def fit(self, rewards: Tensor) -> Self:
        """Nothing to learn."""
        return self

    def observe(self, rewards: Tensor) -> Self:
        """Nothing to learn."""
        return self

    def state_dict(self) -> Mapping[str, Tensor]:
        """Nothing to save."""
        return {}

    def restored(self, state: Mapping[str, Any]) -> Self:
        """Nothing to restore."""
        return self


@dataclass(frozen=True)
class Policy:
    """The rule of selection.

    Args:
        mode: ``"dts"``, ``"dts_star"`` or ``"unbiased"``.
        lam: inverse temperature, from 0 to inf.
        leaf_depth: depth of clean samples.
        widening: (C, alpha).
        min_visits: quota of a child before it enters the Boltzmann draw (``dts``).
        explore: share of uniform choices (``dts``).
        c_uct: weight of the visit bonus (``dts_star``).
        kappa: 1 keeps the base model as the reference of ``dts_star``, 0 searches for the reward alone.
        branching: children of a node at depth 1 … ``leaf_depth - 1`` (``unbiased``).
    """

    mode: str
    lam: float
    leaf_depth: int
    widening: tuple[float, float] = (2.0, 0.8)
    min_visits: int = 3
    explore: float = 0.0
    c_uct: float = 1.0
    kappa: float = 1.0
    branching: tuple[int, ...] = ()

    def allowance(self, seen: Ints) -> Ints:
        """Children a node may have whose visits and rollouts in flight are ``seen``."""
        scale, power = self.widening
        return np.maximum(1, np.floor(scale * (seen + 1.0) ** power)).astype(np.int64)

    def leaves_below(self, depth: int) -> int:
        """Rollouts that a node at ``depth`` takes under the fixed branching."""
        return math.prod(self.branching[depth - 1 :])


@dataclass(frozen=True)
class Descent:
    """Where rollouts stop: ``node`` (F,), and whether they grow a child there, ``expand`` (F,); leaves do not."""

    node: Ints
    expand: np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class _Groups:
    """Rollouts at one depth by node: positions in order (n,), and node, first position and number of each group."""

    order: Ints
    node: Ints
    start: Ints
    count: Ints

    @property
    def rank(self) -> Ints:
        return np.arange(len(self.order)) - np.repeat(self.start, self.count)


def _groups(node: Ints) -> _Groups:
    order = np.argsort(node, kind="stable")
    unique, start, count = np.unique(node[order], return_index=True, return_counts=True)
    return _Groups(order, unique, start, count)


def select_uniforms(key: int, simulation: Ints, depths: int, purpose: str = "select") -> Floats:
    """Two uniform numbers for each rollout and depth, (F, depths, 2)."""
    sample = torch.from_numpy(np.repeat(simulation, depths))
    step = torch.arange(depths).repeat(len(simulation))
    drawn = Keys(torch.full_like(sample, key), sample, step, purpose).uniform((2,))
    return np.asarray(drawn.numpy().reshape(len(simulation), depths, 2))


def descend(
    store: NodeStore,
    policy: Policy,
    roots: Ints,
    uniforms: Floats,
    objectives: Scalarisation,
    parameters: Tensor,
) -> Descent:
    """Takes rollouts (in their order) from the roots to where they leave the tree, and books them as in flight.

    Args:
        store: the tree; ``in_flight`` of the nodes passed and ``pending`` of the nodes that grow are increased.
        policy: the rule.
        roots: (F,) node at which each rollout starts.
        uniforms: (F, leaf_depth, 2) random numbers (used by ``dts``).
        objectives: gives the score of nodes.
        parameters: (F, \\*) the rollouts' parameters for it.
    """
    walk = _Walk(store, policy, objectives, parameters, uniforms, np.ones(len(roots)))
    node, expand = roots.astype(np.int64), np.zeros(len(roots), bool)
    active = np.arange(len(roots))
    for depth in range(policy.leaf_depth):
        if not len(active):
            break
        here = _groups(node[active])
        grows, chosen = walk.level(depth, active, here)
        store.in_flight[here.node] += here.count.astype(np.int32)
        store.dirty[here.node] = True
        expand[active[grows]] = True
        node[active[~grows]] = chosen
        active = active[~grows]
    np.add.at(store.in_flight, node[active], 1)
    store.dirty[node[active]] = True
    np.add.at(store.pending, node[expand], 1)
    return Descent(node, expand)


def grow_at(store: NodeStore, nodes: Ints) -> Descent:
    """Rollouts that leave the tree at given nodes (F,) whatever its rule, booked as `descend` would."""
    np.add.at(store.in_flight, nodes, 1)
    np.add.at(store.pending, nodes, 1)
    store.dirty[nodes] = True
    return Descent(nodes.astype(np.int64), np.ones(len(nodes), bool))


def withdraw(store: NodeStore, down: Descent, start: int) -> Descent:
    """The first ``start`` rollouts of a descent; the booking of the others, which came after them, is undone."""
    np.subtract.at(store.pending, down.node[start:][down.expand[start:]], 1)
    node = down.node[start:]
    while len(node):
        np.subtract.at(store.in_flight, node, 1)
        node = store.parent[node].astype(np.int64)
        node = node[node >= 0]
    return Descent(down.node[:start], down.expand[:start])


@dataclass
class _Walk:
    """One descent: what every level needs."""

    store: NodeStore
    policy: Policy
    objectives: Scalarisation
    parameters: Tensor
    uniforms: Floats
    spread: Floats

    def level(self, depth: int, active: Ints, here: _Groups) -> tuple[Any, Ints]:
        """Which of the active rollouts grow a child here (n,), and the children that the others go to, in order."""
        seen = (self.store.visits[here.node] + self.store.in_flight[here.node]).astype(np.int64)
        if self.policy.mode == "unbiased":
            return self._fixed(depth, here)
        if depth == 0 and self.policy.mode == "dts_star":
            self._measure_spread(active, here)
        sorted_grows = self._grows(here, seen)
        grows = np.zeros(len(active), bool)
        grows[here.order] = sorted_grows
        stay = ~sorted_grows
        count = np.add.reduceat(stay.astype(np.int64), here.start)
        kept = count > 0
        inner = _Groups(here.order[stay], here.node[kept], segment_starts(count[kept]), count[kept])
        if not len(inner.order):
            return grows, np.zeros(0, np.int64)
        choose = self._boltzmann if self.policy.mode == "dts" else self._upper_bound
        chosen = np.zeros(len(active), np.int64)
        chosen[inner.order] = choose(depth, active, inner, np.repeat(seen, here.count)[stay] + here.rank[stay])
        return grows, chosen[~grows]

    def _grows(self, here: _Groups, seen: Ints) -> Any:
        """Progressive widening; earlier rollouts at a node raise its visits in flight and its pending children."""
        store = self.store
        have = (store.num_children[here.node] + store.pending[here.node]).astype(np.int64)
        barren = store.num_children[here.node] == 0
        ranks = np.arange(int(here.count.max()))
        allowed = np.where(barren[:, None], np.iinfo(np.int64).max, self.policy.allowance(seen[:, None] + ranks))
        grown = np.zeros(allowed.shape, bool)
        for rank in ranks:
            grown[:, rank] = have < allowed[:, rank]
            have += grown[:, rank]
        return grown[np.repeat(np.arange(len(here.node)), here.count), here.rank]

    # --- fixed branching ------------------------------------------------------------------------------------------

    def _fixed(self, depth: int, here: _Groups) -> tuple[Any, Ints]:
        """The first child whose own subtree is not complete, else a new one."""
        child, counts = self.store.children(here.node)
        taken = self.store.visits[child] + self.store.in_flight[child]
        room = np.maximum(0, self.policy.leaves_below(depth + 1) - taken.astype(np.int64))
        group = np.repeat(np.arange(len(here.node)), counts)
        goes = np.minimum(here.count, np.bincount(group, weights=room, minlength=len(here.node)).astype(np.int64))
        entries = np.repeat(np.arange(len(child)), room)
        picked = _first_of_each(group[entries], goes)
        stay = here.rank < np.repeat(goes, here.count)
        grows = np.zeros(len(here.order), bool)
        grows[here.order] = ~stay
        chosen = np.zeros(len(here.order), np.int64)
        chosen[here.order[stay]] = child[entries[picked]]
        return grows, chosen[~grows]

    # --- Boltzmann ------------------------------------------------------------------------------------------------

    def _boltzmann(self, depth: int, active: Ints, here: _Groups, seen: Ints) -> Ints:
        child, counts = self.store.children(here.node)
        chosen = np.full(len(here.order), -1, np.int64)
        if depth + 1 < self.policy.leaf_depth:
            self._fill_quota(here, child, counts, chosen)
        left = np.flatnonzero(chosen < 0)
        if len(left):
            who = active[here.order[left]]
            group = np.repeat(np.arange(len(here.node)), here.count)[left]
            chosen[left] = self._draw(self.uniforms[who, depth], who, child, counts, group)
        return chosen

    def _fill_quota(self, here: _Groups, child: Ints, counts: Ints, chosen: Ints) -> None:
        """Sends the first rollouts of each group to children below the quota, the least visited first."""
        taken = (self.store.visits[child] + self.store.in_flight[child]).astype(np.int64)
        below = np.flatnonzero(taken < self.policy.min_visits)
        if not len(below):
            return
        group = np.repeat(np.arange(len(here.node)), counts)[below]
        lacking = self.policy.min_visits - taken[below]
        entries = np.repeat(np.arange(len(below)), lacking)
        visit = expand_ranges(taken[below], lacking)
        entries = entries[np.lexsort((entries, visit, group[entries]))]
        goes = np.minimum(here.count, np.bincount(group[entries], minlength=len(here.node)))
        filled = here.rank < np.repeat(goes, here.count)
        chosen[filled] = child[below[entries[_first_of_each(group[entries], goes)]]]

    def _draw(self, uniforms: Floats, who: Ints, child: Ints, counts: Ints, group: Ints) -> Ints:
        if isinstance(self.objectives, SingleObjective):  # all rollouts of a group see the same weights
            score = self.store.values[child, 0]
        else:  # every rollout has its own
            starts = segment_starts(counts)
            child, counts, group = (
                child[expand_ranges(starts[group], counts[group])], counts[group], np.arange(len(who)),
            )  # fmt: skip
            score = self._score(child, np.repeat(who, counts))
        weight = self.store.log_weight[child]
        return child[boltzmann(score, weight, counts, self.policy.lam, uniforms, group, self.policy.explore)]

    def _score(self, child: Ints, who: Ints) -> Floats:
        columns = torch.from_numpy(self.store.values[child])
        score = self.objectives.score(columns, self.parameters[torch.from_numpy(who)])
        return np.asarray(score.numpy(), np.float64)

    # --- upper confidence bounds ----------------------------------------------------------------------------------

    def _upper_bound(self, depth: int, active: Ints, here: _Groups, seen: Ints) -> Ints:
        child, counts = self.store.children(here.node)
        ends = np.cumsum(counts)
        chosen = np.zeros(len(here.order), np.int64)
        for group, end in enumerate(ends):
            members = slice(here.start[group], here.start[group] + here.count[group])
            own = child[end - counts[group] : end]
            chosen[members] = own[self._best(own, active[here.order[members]], seen[members])]
        return chosen

    def _best(self, child: Ints, who: Ints, seen: Ints) -> Ints:
        """Positions of the children that rollouts at one node take, one after the other."""
        taken = (self.store.visits[child] + self.store.in_flight[child]).astype(np.float64)
        lean = _weight_term(self.store.log_weight[child], self.policy)
        picks = np.zeros(len(who), np.int64)
        for i, rollout in enumerate(who):
            if i == 0 or not isinstance(self.objectives, SingleObjective):
                score = lean + self._score(child, np.full(len(child), rollout))
            bonus = self.policy.c_uct * self.spread[rollout] * math.sqrt(math.log(seen[i] + 1.0))
            picks[i] = np.argmax(score + bonus / np.sqrt(taken))
            taken[picks[i]] += 1.0
        return picks

    def _measure_spread(self, active: Ints, here: _Groups) -> None:
        """The scale of the bonus: the standard deviation of the scores of the root's children, else 1."""
        for group, root in enumerate(here.node):
            child, _ = self.store.children(np.array([root]))
            members = active[here.order[here.start[group] : here.start[group] + here.count[group]]]
            shared = isinstance(self.objectives, SingleObjective)
            for rollout in members[:1] if shared else members:
                score = self._score(child, np.full(len(child), rollout))
                score = score[np.isfinite(score)]
                spread = float(score.std()) if len(score) > 1 else 0.0
                self.spread[members if shared else rollout] = spread if spread > 0.0 else 1.0


def _weight_term(log_weight: Floats, policy: Policy) -> Floats:
    if policy.kappa == 0.0 or math.isinf(policy.lam):
        return np.where(np.isneginf(log_weight), -np.inf, 0.0)
    return policy.kappa * log_weight / policy.lam


def _first_of_each(group: Ints, take: Ints) -> Ints:
    """Positions of the first ``take[g]`` entries of each group g of the sorted ``group``."""
    starts = np.searchsorted(group, np.arange(len(take)))
    return expand_ranges(starts, take)


def boltzmann(
    score: Floats, log_weight: Floats, counts: Ints, lam: float, uniforms: Floats, group: Ints, explore: float = 0.0
) -> Ints:
    """Draws children with probability ∝ w exp(lam · score) from segments.

    Args:
        score: (n,) scores of all children, one segment's after the other's.
        log_weight: (n,) log w.
        counts: (P,) lengths of the segments, at least 1.
        lam: inverse temperature, from 0 to inf.
        uniforms: (F, 2) uniform numbers: whether to choose uniformly, and the choice.
        group: (F,) the segment that each draw is from.
        explore: share of uniform choices.

    Returns:
        (F,) positions in the n children; uniform where all children of a segment have zero probability.
    """
    starts = segment_starts(counts)
    weight = shares(score, log_weight, counts, lam)
    if explore > 0.0:
        return np.where(
            uniforms[:, 0] < explore,
            starts[group] + (uniforms[:, 1] * counts[group]).astype(np.int64),
            _invert(weight, starts, counts, uniforms[:, 1], group),
        )
    return _invert(weight, starts, counts, uniforms[:, 1], group)


def shares(score: Floats, log_weight: Floats, counts: Ints, lam: float) -> Floats:
    """Probabilities (n,) ∝ w exp(lam · score) whose largest is 1 in every segment; see `boltzmann`."""
    starts = segment_starts(counts)
    if math.isinf(lam):
        alive = np.where(np.isneginf(log_weight), -np.inf, score)
        best = np.repeat(np.maximum.reduceat(alive, starts), counts)
        logits = np.where((alive == best) & ~np.isneginf(alive), log_weight, -np.inf)
    elif lam == 0.0:
        logits = np.where(np.isneginf(score), -np.inf, log_weight)
    else:
        logits = log_weight + lam * score
    top = np.maximum.reduceat(logits, starts)
    empty = np.isneginf(top)
    share = np.exp(logits - np.repeat(np.where(empty, 0.0, top), counts))
    return np.where(np.repeat(empty, counts), 1.0, share) if empty.any() else share


def _invert(weight: Floats, starts: Ints, counts: Ints, uniform: Floats, group: Ints) -> Ints:
    """Inversion of each segment's cumulated weights; a child without weight is never drawn."""
    total = np.cumsum(weight)
    base = np.where(starts > 0, total[starts - 1], 0.0)[group]
    end = total[starts + counts - 1][group]
    target = np.minimum(base + uniform * (end - base), np.nextafter(end, 0.0))
    return np.searchsorted(total, np.maximum(target, base), side="right")
