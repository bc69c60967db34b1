"""Draws without replacement, on trees of a root and a few leaves whose probabilities are given."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from genkit.samplers.tree import NodeStore, PerObjective, Policy, SingleObjective, TreeResult
from genkit.samplers.tree.backup import renew_all
from genkit.samplers.tree.judging import Judged, LeafLog

DRAWS = 1500


def result_of(states, chance, valid=True, values=None, objectives=None):
    """A root with leaves (n,) of probability ∝ chance · exp(value under the preference)."""
    states, n = torch.as_tensor(states), len(states)
    values = np.zeros((n, 1)) if values is None else np.asarray(values, float)
    store, log = NodeStore(columns=values.shape[1]), LeafLog()
    node = store.append(np.zeros(n, np.int64), np.ones(n), np.log(np.asarray(chance, float)), states)
    store.link(node)
    store.visits[: store.size] = 1
    store.values[node] = values
    renew_all(store, 1.0)
    log.add(Judged(node, np.arange(n), values.copy(), np.broadcast_to(valid, n).copy()))
    counts = {"failures": [], "network_calls": 0}
    return TreeResult(store, log, Policy("dts", 1.0, 1), objectives or SingleObjective(), counts, 0)


def draws(result, num, count=DRAWS, parameter=None):
    generator = torch.Generator().manual_seed(3)
    return np.stack([result.sample_distinct(num, generator, parameter).states.numpy() for _ in range(count)])


def test_two_of_three_leaves():
    """Successive draws: P(i first) = p_i and P(i among two) = p_i + sum over j of p_j p_i / (1 - p_j)."""
    p = np.array([0.1, 0.3, 0.6])
    seen = draws(result_of([0, 1, 2], p), 2)
    assert chisquare(np.bincount(seen[:, 0], minlength=3), p * DRAWS).pvalue > 1e-3
    assert chisquare(np.bincount(seen[:, 0], minlength=3), np.full(3, DRAWS / 3)).pvalue < 1e-6
    assert (seen[:, 0] != seen[:, 1]).all()
    inside = np.array([p[i] + sum(p[j] * p[i] / (1.0 - p[j]) for j in range(3) if j != i) for i in range(3)])
    missing = np.bincount(3 - seen.sum(axis=1), minlength=3)  # one leaf is left out of every pair
    assert chisquare(missing, (1.0 - inside) * DRAWS).pvalue > 1e-3
    assert chisquare(missing, (1.0 - p) / 2.0 * DRAWS).pvalue < 1e-6


def test_equal_states_count_once_and_invalid_or_impossible_ones_never():
    result = result_of([5, 7, 7, 9, 11, 13], [0.1, 0.2, 0.1, 0.4, 0.2, 0.0001], [True] * 4 + [False, True])
    result.store.values[result.leaves.node[5], 0] = -math.inf
    seen = draws(result, 1)[:, 0]
    expected = np.array([0.1, 0.3, 0.4]) / 0.8 * DRAWS
    assert chisquare([(seen == state).sum() for state in (5, 7, 9)], expected).pvalue > 1e-3
    found = result.sample_distinct(10, torch.Generator().manual_seed(0))
    assert sorted(found.states.tolist()) == [5, 7, 9] and found.valid.all()


def test_draws_depend_on_the_generator_alone_and_are_nested():
    result = result_of(torch.arange(50), np.linspace(1.0, 2.0, 50))
    few, many = (result.sample_distinct(n, torch.Generator().manual_seed(4)).states for n in (5, 30))
    assert torch.equal(few, many[:5]) and len(set(many.tolist())) == 30
    assert not torch.equal(many, result.sample_distinct(30, torch.Generator().manual_seed(5)).states)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_several_objectives():
    """With the two preferences (1, 0) and (0, 1) in rounds, 64 draws hold each 32 times: the mean of two softmaxes."""
    values = np.array([[0.0, 2.0], [1.0, 1.0], [2.0, -1.0]])
    objectives = PerObjective(2, weights=torch.eye(2), bounds=[(0.0, 1.0)] * 2)
    result = result_of([0, 1, 2], np.ones(3), values=values, objectives=objectives)
    softmax = np.exp(values) / np.exp(values).sum(axis=0)
    seen = draws(result, 1, 150)[:, 0]
    assert chisquare(np.bincount(seen, minlength=3), softmax.mean(axis=1) * 150).pvalue > 1e-3
    assert chisquare(np.bincount(seen, minlength=3), softmax[:, 0] * 150).pvalue < 1e-6
    seen = draws(result, 1, 150, torch.tensor([0.0, 1.0]).double())[:, 0]
    assert chisquare(np.bincount(seen, minlength=3), softmax[:, 1] * 150).pvalue > 1e-3
