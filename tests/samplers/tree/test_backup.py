"""Soft values: log-mean-exp with weights, its limits, and the booking of visits."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from genkit.samplers.tree.backup import back_up, renew_all, soft_value
from genkit.samplers.tree.store import NodeStore


def value_of(values, log_weight=None, lam=2.0, floor=-math.inf):
    values = np.asarray(values, float)[:, None]
    log_weight = np.zeros(len(values)) if log_weight is None else np.asarray(log_weight, float)
    return float(soft_value(values, log_weight, np.array([len(values)]), lam, floor)[0, 0])


@pytest.mark.parametrize("lam", [0.0, 1e-3, 2.0, math.inf])
def test_duplicate_child_leaves_the_value_unchanged(lam):
    children, weights = [0.3, -1.2, 0.8], [0.1, -0.4, 0.2]
    once = value_of(children, weights, lam)
    assert value_of(children * 2, weights * 2, lam) == pytest.approx(once, rel=1e-12)
    without_mean = once + math.log(3) / lam if 0.0 < lam < math.inf else math.nan
    assert not value_of(children * 2, weights * 2, lam) == pytest.approx(without_mean, abs=0.1)


def test_one_child_shifts_by_its_weight():
    assert value_of([0.7], [-0.5], lam=4.0) == pytest.approx(0.7 - 0.5 / 4.0, abs=1e-14)


def test_limits_of_the_temperature():
    children, weights = np.array([0.3, -1.2, 0.8]), np.array([0.1, -0.4, 0.2])
    share = np.exp(weights) / np.exp(weights).sum()
    assert value_of(children, weights, 0.0) == pytest.approx(float(share @ children), abs=1e-14)
    assert value_of(children, lam=1e-6) == pytest.approx(children.mean(), abs=1e-5)
    assert value_of(children, weights, math.inf) == 0.8
    assert value_of(children, weights, 1e5) == pytest.approx(0.8, abs=1e-3)


def test_large_values_do_not_overflow():
    assert value_of([1e4, -1e4], lam=1.0) == pytest.approx(1e4 - math.log(2), abs=1e-9)
    assert value_of([-1e4, -1e4], lam=30.0) == pytest.approx(-1e4, abs=1e-9)


def test_impossible_children_count_as_zero_probability():
    children = [0.5, -math.inf]
    assert value_of(children, lam=2.0) == pytest.approx(0.5 - math.log(2) / 2.0)  # they stay in the mean
    assert value_of([0.5, 0.5], [0.0, -math.inf], lam=2.0) == pytest.approx(0.5 - math.log(2) / 2.0)
    assert value_of(children, lam=0.0) == 0.5
    assert value_of([0.5, 0.9], [0.0, -math.inf], lam=math.inf) == 0.5


@pytest.mark.parametrize("lam", [0.0, 2.0, math.inf])
def test_all_impossible_gives_the_floor(lam):
    assert value_of([-math.inf] * 3, lam=lam) == -math.inf
    assert value_of([-math.inf] * 3, lam=lam, floor=-7.0) == -7.0


def test_segments_are_independent_and_columns_too():
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, size=40)
    values, weights = rng.normal(size=(counts.sum(), 3)), rng.normal(size=counts.sum())
    found = soft_value(values, weights, counts, 1.7)
    ends = np.cumsum(counts)
    for parent, (end, n) in enumerate(zip(ends, counts, strict=True)):
        rows = slice(end - n, end)
        expected = (logsumexp(weights[rows, None] + 1.7 * values[rows], axis=0) - math.log(n)) / 1.7
        np.testing.assert_allclose(found[parent], expected, rtol=1e-13)


def grow(store, leaf_depth, parent, rng):
    """A new path from ``parent`` to a leaf, booked as the engine does it; returns the leaf."""
    node = parent
    while node >= 0:
        store.in_flight[node] += 1
        node = int(store.parent[node])
    store.pending[parent] += 1
    node = parent
    for depth in range(int(store.depth[parent]) + 1, leaf_depth + 1):
        weight = np.array([rng.normal()])
        node = int(store.append(np.array([node]), np.array([depth]), weight, torch.zeros(1, 2))[0])
    store.values[node] = rng.normal()
    return node


def brute_value(store, node, lam, leaf_depth):
    """The same recursion node by node, with Python lists of children."""
    if store.depth[node] == leaf_depth:
        return float(store.values[node, 0])
    children = [c for c in range(store.size) if store.parent[c] == node and store.visits[c] > 0]
    terms = [store.log_weight[c] + lam * brute_value(store, c, lam, leaf_depth) for c in children]
    return (float(logsumexp(terms)) - math.log(len(terms))) / lam


@pytest.fixture
def random_tree():
    rng, store, leaves = np.random.default_rng(1), NodeStore(2), []
    for _ in range(25):
        inner = np.flatnonzero(
            (store.depth[: store.size] < 4) & ((store.visits[: store.size] > 0) | (store.parent[: store.size] < 0))
        )
        batch = [grow(store, 4, int(parent), rng) for parent in rng.choice(inner, size=3)]
        leaves += batch
        back_up(store, np.array(batch), 1.3)
    return store, leaves


def test_incremental_backup_equals_the_recursion(random_tree):
    store, _ = random_tree
    for root in range(2):
        assert store.values[root, 0] == pytest.approx(brute_value(store, root, 1.3, 4), rel=1e-12)
    before = store.values[: store.size].copy()
    renew_all(store, 1.3)
    np.testing.assert_array_equal(store.values[: store.size], before)


def test_counts_after_backup(random_tree):
    store, leaves = random_tree
    n = store.size
    assert not store.in_flight[:n].any() and not store.pending[:n].any()
    assert store.visits[:2].sum() == len(leaves)
    total = np.bincount(store.parent[2:n], weights=store.visits[2:n], minlength=n)
    inner = store.depth[:n] < 4
    np.testing.assert_array_equal(total[inner], store.visits[:n][inner])  # every visit goes on to one child
    np.testing.assert_array_equal(np.bincount(store.parent[2:n], minlength=n), store.num_children[:n])


def test_a_leaf_that_is_visited_again_changes_visits_only(random_tree):
    store, leaves = random_tree
    before, node = store.values[: store.size].copy(), leaves[0]
    while node >= 0:
        store.in_flight[node] += 2
        node = int(store.parent[node])
    back_up(store, np.array([leaves[0]] * 2), 1.3)
    assert store.visits[leaves[0]] == 3 and not store.in_flight[: store.size].any()
    np.testing.assert_array_equal(store.values[: store.size], before)
