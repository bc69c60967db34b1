"""Soft values from the leaves to the root: the importance-weighted log-mean-exp over the children that were judged.

Update rule, with p the base kernel, q the proposal, w = p/q and n the number of judged children::

    v(x) = (1 / lam) log( (1 / n) sum_i w_i exp(lam v(x_i)) )

which is unbiased for exp(lam V) when n does not depend on the values (Diffusion Tree Sampling, arXiv:2506.20701, states
the rule without weights). ``lam = 0`` gives the mean under self-normalised weights, ``lam = inf`` the maximum.
"""

from __future__ import annotations

import math

import numpy as np

from genkit.samplers.tree.store import Floats, Ints, NodeStore

__all__ = ["back_up", "renew_all", "segment_starts", "soft_value"]


def segment_starts(counts: Ints) -> Ints:
    """Where each of the segments of the given lengths (P,) starts."""
    return np.cumsum(counts) - counts


def soft_value(values: Floats, log_weight: Floats, counts: Ints, lam: float, floor: float = -math.inf) -> Floats:
    """Soft values of parents from their children's.

    Args:
        values: (n, K) values of all children, one parent's after the other's; -inf is zero probability.
        log_weight: (n,) log p/q of the children.
        counts: (P,) number of children of each parent, at least 1.
        lam: inverse temperature, from 0 to inf.
        floor: the value of a parent all of whose children have zero probability.

    Returns:
        (P, K).
    """
    starts = segment_starts(counts)
    columns = [_column(values[:, k], log_weight, starts, counts, lam) for k in range(values.shape[1])]
    result = np.stack(columns, axis=1)
    return np.where(np.isneginf(result), floor, result)


def _column(value: Floats, log_weight: Floats, starts: Ints, counts: Ints, lam: float) -> Floats:
    if math.isinf(lam):
        return np.asarray(np.maximum.reduceat(np.where(np.isneginf(log_weight), -np.inf, value), starts))
    if lam == 0.0:
        return _mean(value, log_weight, starts, counts)
    log_sum = _log_sum(log_weight + lam * value, starts, counts)
    return np.asarray((log_sum - np.log(counts)) / lam)


def _log_sum(terms: Floats, starts: Ints, counts: Ints) -> Floats:
    """log sum exp over the segments; -inf where all terms are."""
    top = np.maximum.reduceat(terms, starts)
    top = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        return np.asarray(top + np.log(np.add.reduceat(np.exp(terms - np.repeat(top, counts)), starts)))


def _mean(value: Floats, log_weight: Floats, starts: Ints, counts: Ints) -> Floats:
    """The limit of small lam; a child without probability (weight 0 or value -inf) does not count."""
    log_weight = np.where(np.isneginf(value), -np.inf, log_weight)
    total = _log_sum(log_weight, starts, counts)
    shift = np.repeat(np.where(np.isneginf(total), 0.0, total), counts)
    share = np.exp(log_weight - shift)
    mean = np.add.reduceat(share * np.where(share > 0.0, value, 0.0), starts)
    return np.asarray(np.where(np.isneginf(total), -np.inf, mean))


def back_up(store: NodeStore, leaves: Ints, lam: float, floor: float = -math.inf) -> None:
    """Adds finished rollouts to the tree: links their new nodes, counts the visits and renews the values above.

    Args:
        store: the tree; the values of ``leaves`` are set.
        leaves: (B,) the node at which each rollout ended; a leaf that was selected again may occur more than once.
        lam: inverse temperature of the values.
        floor: as in `soft_value`.
    """
    node, hits = _merged(leaves, np.ones(len(leaves), np.int64))
    while len(node):
        _count(store, node, hits)
        below = store.parent[node] >= 0
        node, hits = _merged(store.parent[node[below]], hits[below])
        if len(node):
            _renew(store, node, lam, floor)


def renew_all(store: NodeStore, lam: float, floor: float = -math.inf) -> None:
    """Computes the values of all nodes anew from those of the judged leaves (after their columns have changed)."""
    inner = np.flatnonzero(store.num_children[: store.size])
    depth = store.depth[inner]
    for level in range(int(depth.max(initial=-1)), -1, -1):
        nodes = inner[depth == level]
        if len(nodes):
            _renew(store, nodes, lam, floor)


def _renew(store: NodeStore, node: Ints, lam: float, floor: float) -> None:
    children, counts = store.children(node)
    store.values[node] = soft_value(store.values[children], store.log_weight[children], counts, lam, floor)
    store.dirty[node] = True


def _count(store: NodeStore, node: Ints, hits: Ints) -> None:
    """Visits of nodes at one depth; nodes that are visited for the first time are linked."""
    new = (store.visits[node] == 0) & (store.parent[node] >= 0)
    store.link(node[new])
    # the parent of a new node waits for it only if the rollout's selection ended there
    parents, linked = np.unique(store.parent[node[new]], return_counts=True)
    store.pending[parents] -= np.where(store.in_flight[parents] > 0, linked, 0).astype(np.int32)
    store.visits[node] += hits
    # only nodes that the selection passed are in flight; new ones never were
    store.in_flight[node] -= np.where(store.in_flight[node] > 0, hits, 0).astype(np.int32)
    store.dirty[node] = store.dirty[parents] = True


def _merged(node: Ints, hits: Ints) -> tuple[Ints, Ints]:
    """Equal nodes together with the sum of their hits, in the order of their first occurrence."""
    unique, first, inverse = np.unique(node, return_index=True, return_inverse=True)
    total = np.bincount(inverse, weights=hits, minlength=len(unique)).astype(np.int64)
    order = np.argsort(first, kind="stable")  # children are linked in the order of the leaves
    return unique[order].astype(np.int64), total[order]
