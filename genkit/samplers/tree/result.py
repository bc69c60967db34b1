"""What a search returns: judged leaves, the tree they hang on, two estimates of Z, and what the search was like.

``log_z_tree`` is the root's backed-up value. It is biased at a finite budget, because the search stops visiting
children that were unlucky. ``log_z_first`` is the mean of w exp(lam r) over the first rollout below each child of the
root; these are independent of one another and of all values, so exp(log_z_first) is unbiased. Where the first falls
below the second by more than the noise and a factor of two, a warning says so.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_count
from genkit.errors import ConfigError
from genkit.samplers.noise import Keys, draw_keys
from genkit.samplers.tree.backup import segment_starts
from genkit.samplers.tree.judging import LeafLog
from genkit.samplers.tree.proposals import effective_share
from genkit.samplers.tree.rows import draw_distinct, take
from genkit.samplers.tree.selection import Policy, Scalarisation, SingleObjective, boltzmann, select_uniforms, shares
from genkit.samplers.tree.store import Floats, Ints, NodeStore

__all__ = ["Leaves", "TreeResult"]

log = logging.getLogger("genkit.samplers")


@dataclass(frozen=True)
class Leaves:
    """Judged leaves.

    Args:
        states: clean samples, (n, \\*) (a dict of tensors where states have parts).
        rewards: (n, M) float64, NaN where invalid.
        valid: (n,) bool.
        node: (n,) their nodes.
        simulation: (n,) the rollouts that made them.
        tree: (n,) the tree each belongs to.
        ancestor: (n,) the child of the root above each.
        log_weight: (n,) log p/q of the path from the root.
        visits: (n,) how often a rollout ended there.
    """

    states: Any
    rewards: Tensor
    valid: Tensor
    node: Tensor
    simulation: Tensor
    tree: Tensor
    ancestor: Tensor
    log_weight: Tensor
    visits: Tensor

    def __len__(self) -> int:
        return len(self.node)

    def take(self, index: Tensor) -> Leaves:
        """The leaves at some positions (repeats are allowed)."""
        return Leaves(*(take(getattr(self, f.name), index) for f in fields(self)))


class TreeResult:
    """The outcome of a search.

    Attributes:
        leaves: all judged leaves (`Leaves`), in the order in which they were judged.
        store: the tree (`NodeStore`).
        log_z_tree: float64 (trees, K), lam times the value of the roots (NaN where lam is 0 or inf).
        log_z_first: float64 (trees, K), its unbiased counterpart (see the module).
        log_z_first_se: float64 (trees, K), its standard error.
        network_calls: network evaluations, counted row by row.
        counts: everything counted (``done``, ``revisits``, ``reward_calls``, ``raised``, ``not_finite``, …).
        failures: kind and message of the first 100 errors of the reward.
    """

    def __init__(
        self,
        store: NodeStore,
        judged: LeafLog,
        policy: Policy,
        objectives: Scalarisation,
        counts: Mapping[str, Any],
        key: int,
    ) -> None:
        self.store, self.policy, self.objectives = store, policy, objectives
        self.counts = {name: value for name, value in counts.items() if name != "failures"}
        self.failures: list[dict[str, Any]] = list(counts["failures"])
        self.network_calls: int = counts["network_calls"]
        self.key = key
        self._judged = judged.all()
        self._path = _path_weights(store)
        self.log_z_tree = _times_lam(store.values[: store.trees], policy.lam)
        self.log_z_first, self.log_z_first_se = self._first_rollouts()

    @functools.cached_property
    def leaves(self) -> Leaves:
        """All judged leaves."""
        node, store = self._judged.node, self.store
        found = [self._judged.rewards, self._judged.valid, node, self._judged.simulation]
        found += [store.tree[node].astype(np.int64), self._ancestors(node), self._path[node], store.visits[node]]
        states = store.state_of(node) if len(node) else torch.zeros(0)
        return Leaves(states, *(torch.from_numpy(np.ascontiguousarray(array)) for array in found))

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time: the network's, the reward's (in a second thread where ``sync=False``), and the rest."""
        counts = self.counts
        own = counts["wall_seconds"] - counts["network_seconds"] - counts["reward_seconds"]
        return {"network": counts["network_seconds"], "reward": counts["reward_seconds"], "own": max(0.0, own)}

    def _ancestors(self, node: Ints) -> Ints:
        node = node.astype(np.int64)
        while (deep := self.store.depth[node] > 1).any():
            node = np.where(deep, self.store.parent[node], node)
        return node

    # --- Z ------------------------------------------------------------------------------------------------------------

    def _first_rollouts(self) -> tuple[Floats, Floats]:
        store = self.store
        first: Ints = np.flatnonzero((store.depth[: store.size] == 1) & (store.visits[: store.size] > 0))
        tree, leaf = store.tree[first], first
        while len(leaf) and store.depth[leaf[0]] < self.policy.leaf_depth:
            leaf = store.first_child(leaf)
        terms = self._path[leaf, None] + _times_lam(store.values[leaf], self.policy.lam)
        found = [_log_mean(terms[tree == g]) for g in range(store.trees)]
        return np.stack([f[0] for f in found]), np.stack([f[1] for f in found])

    def warn_if_biased(self) -> bool:
        """Warns (and returns True) where Z_tree lies below Z_first by more than two standard errors and a factor 2."""
        with np.errstate(invalid="ignore"):
            gap = self.log_z_tree - self.log_z_first
            low = gap < -2.0 * self.log_z_first_se - math.log(2.0)
        if low.any():
            log.warning(
                "Z of the tree is %.2g of the unbiased estimate from first rollouts (%d of %d values are below half of "
                "it): the search has settled too early. Use more rollouts, a wider tree (widening=), a larger "
                "min_visits= or a smaller lam=",
                math.exp(gap[low].min()),
                int(low.sum()),
                low.size,
            )
        return bool(low.any())

    # --- draws --------------------------------------------------------------------------------------------------------

    def sample(
        self,
        num: int,
        generator: torch.Generator | None = None,
        *,
        tree: int | None = None,
        parameter: Tensor | None = None,
    ) -> Leaves:
        """Draws leaves by walks from the root with probability ∝ w exp(lam v), without network calls.

        Args:
            num: number of draws (leaves may repeat).
            generator: one key is drawn from it.
            tree: which tree; None: draw i is from tree i mod ``trees``.
            parameter: what several objectives are weighed with; None: drawn anew for each walk.
        """
        checked_count("num", num)
        walks = np.arange(num)
        key = int(draw_keys(generator, 1).key[0])
        uniforms = select_uniforms(key, walks, self.policy.leaf_depth, "sample")
        if parameter is None:
            drawn = Keys(torch.full((num,), key), torch.from_numpy(walks), torch.zeros((), dtype=torch.int64))
            parameters = self.objectives.draw(drawn)
        else:
            parameters = torch.as_tensor(parameter).expand(num, *torch.as_tensor(parameter).shape)
        node: Ints = walks % self.store.trees if tree is None else np.full(num, self._checked_tree(tree))
        for depth in range(self.policy.leaf_depth):
            node = self._draw_children(node, parameters, uniforms[:, depth])
        return self.leaves.take(torch.from_numpy(self._position(node)))

    def sample_distinct(
        self, num: int, generator: torch.Generator | None = None, parameter: Tensor | None = None
    ) -> Leaves:
        """Draws valid leaves without replacement: each next one with probability ∝ `probabilities`, of those left.

        Leaves with the same state, bit by bit, count as one (the first judged), with the sum of their probabilities;
        every tree has the same weight (:func:`~genkit.samplers.tree.rows.draw_distinct`).

        Args:
            num: how many at most; fewer where fewer distinct leaves have a probability.
            generator: one key is drawn from it.
            parameter: what several objectives are weighed with; None: probabilities are averaged over 64 draws of it.

        Returns:
            The leaves in the order of the draws.
        """
        checked_count("num", num)
        key = draw_keys(generator, 1).key
        chance = np.where(self._judged.valid, self._mean_probabilities(int(key), parameter), 0.0)
        _, first, content = np.unique(self._content[chance > 0.0], return_index=True, return_inverse=True)
        rows: Ints = np.flatnonzero(chance > 0.0)
        total = np.bincount(content, weights=chance[rows], minlength=len(first))
        rows, order = rows[first], np.argsort(first)  # streams by the order of judgement
        rows, total = rows[order], total[order]
        drawn = draw_distinct(torch.from_numpy(total), num, int(key))
        return self.leaves.take(torch.from_numpy(rows)[drawn])

    def _mean_probabilities(self, key: int, parameter: Tensor | None) -> Floats:
        if parameter is not None or isinstance(self.objectives, SingleObjective):
            return self.probabilities(parameter).numpy()
        keys = Keys(torch.full((64,), key), torch.arange(64), torch.zeros((), dtype=torch.int64))
        return np.mean([self.probabilities(one).numpy() for one in self.objectives.draw(keys)], axis=0)

    def _draw_children(self, node: Ints, parameters: Tensor, uniforms: Floats) -> Ints:
        parents, group = np.unique(node, return_inverse=True)
        if not isinstance(self.objectives, SingleObjective):
            parents, group = node, np.arange(len(node))
        child, counts = self.store.children(parents)
        if isinstance(self.objectives, SingleObjective):
            score = self.store.values[child, 0]
        else:
            each = torch.from_numpy(np.repeat(group, counts))
            score = self.objectives.score(torch.from_numpy(self.store.values[child]), parameters[each]).numpy()
        weight = self.store.log_weight[child]
        return child[boltzmann(score, weight, counts, self.policy.lam, uniforms, group)]

    def _position(self, node: Ints) -> Ints:
        order = np.argsort(self._judged.node)
        return order[np.searchsorted(self._judged.node[order], node)]

    def _checked_tree(self, tree: int) -> int:
        if not 0 <= tree < self.store.trees:
            raise ConfigError(f"tree={tree}; expected 0 to {self.store.trees - 1}")
        return tree

    def best(self, num: int, *, tree: int | None = None, parameter: Tensor | None = None) -> Leaves:
        """The best distinct leaves, best first; fewer than ``num`` where there are not so many valid ones.

        Args:
            num: how many at most.
            tree: which tree; None: of all.
            parameter: what several objectives are weighed with (needed for them).
        """
        checked_count("num", num)
        score = self._scores(parameter)
        usable = self._judged.valid & (True if tree is None else self.leaves.tree.numpy() == self._checked_tree(tree))
        rows = np.flatnonzero(usable)
        rows = rows[np.argsort(-score[rows], kind="stable")]
        _, first = np.unique(self._content[rows], return_index=True)
        return self.leaves.take(torch.from_numpy(rows[np.sort(first)[:num]]))

    def _scores(self, parameter: Tensor | None) -> Floats:
        if isinstance(self.objectives, SingleObjective):
            return self.store.values[self._judged.node, 0]
        if parameter is None:
            raise ConfigError("the search has several objectives; give parameter=, what they are weighed with")
        given = torch.as_tensor(parameter)
        columns = torch.from_numpy(self.store.values[self._judged.node])
        return self.objectives.score(columns, given.expand(len(columns), *given.shape)).numpy()

    @functools.cached_property
    def _content(self) -> Any:
        """A number for each leaf that is equal where the states are equal bit by bit."""
        states = self.leaves.states
        parts = [states[name] for name in sorted(states)] if isinstance(states, Mapping) else [states]
        flat = [p.detach().cpu().contiguous().reshape(len(p), -1).view(torch.uint8).numpy() for p in parts]
        rows = np.ascontiguousarray(np.concatenate(flat, axis=1))
        return np.unique(rows.view(f"V{rows.shape[1]}").ravel(), return_inverse=True)[1].ravel()

    # --- expectations -------------------------------------------------------------------------------------------------

    def probabilities(self, parameter: Tensor | None = None) -> Tensor:
        """The probability with which a walk of `sample` ends at each leaf, float64 (n,); sums to 1 in every tree."""
        store = self.store
        chance = np.zeros(store.size)
        chance[: store.trees] = 1.0
        inner = np.flatnonzero(store.num_children[: store.size])
        for depth in range(self.policy.leaf_depth):
            parents = inner[store.depth[inner] == depth]
            if len(parents):
                child, counts = store.children(parents)
                chance[child] = np.repeat(chance[parents], counts) * self._shares(child, counts, parameter)
        return torch.from_numpy(chance[self._judged.node])

    def _shares(self, child: Ints, counts: Ints, parameter: Tensor | None) -> Floats:
        columns = torch.from_numpy(self.store.values[child])
        if isinstance(self.objectives, SingleObjective):
            score = columns[:, 0].numpy()
        elif parameter is None:
            raise ConfigError("the search has several objectives; give parameter=, what they are weighed with")
        else:
            given = torch.as_tensor(parameter)
            score = self.objectives.score(columns, given.expand(len(columns), *given.shape)).numpy()
        share = shares(score, self.store.log_weight[child], counts, self.policy.lam)
        return share / np.repeat(np.add.reduceat(share, segment_starts(counts)), counts)

    def expectation(self, f: Callable[[Any], Tensor] | Tensor, parameter: Tensor | None = None) -> Tensor:
        """The mean of f over each tree's leaves under the tilted weights of the tree.

        Args:
            f: a function of states (n, \\*) that gives (n, \\*), or its values at ``leaves``.
            parameter: as in `probabilities`.

        Returns:
            float64 (trees, \\*).
        """
        values = (f(self.leaves.states) if callable(f) else f).detach().cpu().to(torch.float64)
        chance = self.probabilities(parameter)
        used = chance > 0.0  # f may be NaN where a leaf has probability 0
        weight = chance[used].reshape(-1, *[1] * (values.ndim - 1))
        result = torch.zeros(self.store.trees, *values.shape[1:], dtype=torch.float64)
        return result.index_add_(0, self.leaves.tree[used], weight * values[used])

    # --- diagnostics --------------------------------------------------------------------------------------------------

    def diagnostics(self) -> dict[str, Any]:
        """What the search was like, as JSON values. Entries by level are lists over depths 1 … ``leaf_depth``."""
        store, levels = self.store, range(1, self.policy.leaf_depth + 1)
        seen = np.flatnonzero(store.visits[: store.size] > 0)
        at = [seen[store.depth[seen] == depth] for depth in levels]
        return {
            **self.counts,
            "seconds": self.seconds,
            "nodes": int(store.size),
            "leaves": len(self._judged.node),
            "invalid": int((~self._judged.valid).sum()),
            "unique_share": len(np.unique(self._content)) / len(self._content) if len(self._content) else math.nan,
            "log_z_tree": self.log_z_tree.tolist(),
            "log_z_first": self.log_z_first.tolist(),
            "log_z_first_se": self.log_z_first_se.tolist(),
            "effective_share_by_level": [_effective_share(store.log_weight[nodes]) for nodes in at],
            "mean_weight_by_level": [_mean_weight(store.log_weight[nodes]) for nodes in at],
            "visit_entropy_by_level": [_entropy(store.visits[nodes]) for nodes in at],
            "nodes_by_level": [len(nodes) for nodes in at],
            "children_by_level": [_histogram(store.num_children[n]) for n in (np.arange(store.trees), *at[:-1])],
            "effective_leaves": self._effective_leaves(),
        }

    def _effective_leaves(self) -> list[float] | None:
        """1 / Σ p² of the leaves' probabilities, by tree."""
        if not isinstance(self.objectives, SingleObjective):
            return None
        chance = self.probabilities()
        squares = torch.zeros(self.store.trees, dtype=torch.float64).index_add_(0, self.leaves.tree, chance**2)
        return (1.0 / squares).tolist()


def _path_weights(store: NodeStore) -> Floats:
    """log p/q from the root to every node."""
    total = store.log_weight[: store.size].copy()
    for depth in range(2, int(store.depth[: store.size].max()) + 1):
        nodes = np.flatnonzero(store.depth[: store.size] == depth)
        total[nodes] += total[store.parent[nodes]]
    return total


def _times_lam(values: Floats, lam: float) -> Floats:
    return np.full(values.shape, np.nan) if lam == 0.0 or math.isinf(lam) else lam * values


def _log_mean(terms: Floats) -> tuple[Floats, Floats]:
    """log of the mean of exp(terms) (n, K), and its standard error."""
    count = len(terms)
    if count == 0 or np.isnan(terms).any():
        return np.full(terms.shape[1], np.nan), np.full(terms.shape[1], np.nan)
    top = terms.max(axis=0)
    scaled = np.exp(terms - np.where(np.isneginf(top), 0.0, top))
    mean = scaled.mean(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = scaled.std(axis=0, ddof=1) / math.sqrt(count) / mean if count > 1 else np.full(len(top), np.nan)
        return top + np.log(mean), error


def _effective_share(log_weight: Floats) -> float:
    """NaN where there are no weights above 0."""
    if not len(log_weight) or np.isneginf(log_weight.max()):
        return math.nan
    return effective_share(torch.from_numpy(log_weight))


def _mean_weight(log_weight: Floats) -> float:
    return float(np.exp(log_weight).mean()) if len(log_weight) else math.nan


def _entropy(visits: Ints) -> float:
    """Entropy of the visits over nodes as a share of its maximum; 1 for a single node."""
    if len(visits) < 2:
        return 1.0 if len(visits) else math.nan
    share = visits / visits.sum()
    return float(-(share * np.log(share)).sum() / math.log(len(visits)))


def _histogram(children: Ints) -> dict[str, int]:
    """Nodes by their number of children: 0, 1, 2, 3-4, 5-8, …"""
    edges = [0, 1, 2]
    while len(children) and edges[-1] < children.max():
        edges.append(2 * edges[-1])
    bins = np.searchsorted(edges, children)
    names = ["0", "1", "2", *(f"{low + 1}-{high}" for low, high in zip(edges[2:], edges[3:], strict=False))]
    counts = np.bincount(bins, minlength=len(edges))
    return {name: int(n) for name, n in zip(names, counts, strict=True) if n}
