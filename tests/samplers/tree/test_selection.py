"""Selection: frequencies against exact probabilities, and the wave-wise descent against a rollout-by-rollout one."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from genkit.samplers.noise import Keys
from genkit.samplers.tree.backup import back_up
from genkit.samplers.tree.selection import Policy, SingleObjective, boltzmann, descend, select_uniforms
from genkit.samplers.tree.store import NodeStore

DEPTH = 4


def uniforms(count, seed=0):
    return select_uniforms(seed, np.arange(count), 1)[:, 0]


@pytest.mark.parametrize("lam", [0.0, 0.8, 3.0])
def test_boltzmann_frequencies(lam):
    score, weight = np.array([9.0, 0.3, -0.5, 1.0, -4.0]), np.array([0.0, 0.2, -0.3, -1.0, 0.5])
    counts, group = np.array([1, 4]), np.ones(20_000, int)
    drawn = boltzmann(score, weight, counts, lam, uniforms(len(group)), group)
    chance = np.exp(weight[1:] + lam * score[1:])
    seen = np.bincount(drawn, minlength=5)
    assert seen[0] == 0
    assert chisquare(seen[1:], chance / chance.sum() * len(group)).pvalue > 1e-3
    unweighted = np.exp(lam * score[1:])  # the power of the test: weights left out are noticed
    assert chisquare(seen[1:], unweighted / unweighted.sum() * len(group)).pvalue < 1e-9


def test_boltzmann_at_infinite_lam_takes_the_best_by_weight():
    score, weight = np.array([1.0, 2.0, 2.0, 5.0]), np.array([3.0, 0.0, math.log(3.0), -np.inf])
    drawn = boltzmann(score, weight, np.array([4]), math.inf, uniforms(8000), np.zeros(8000, int))
    seen = np.bincount(drawn, minlength=4)
    assert seen[0] == seen[3] == 0
    assert chisquare(seen[1:3], [2000, 6000]).pvalue > 1e-3


def test_children_without_probability_are_never_drawn():
    score = np.array([-np.inf, 0.0, -np.inf, -np.inf, -np.inf])
    group = np.repeat([0, 1], 3000)
    drawn = boltzmann(score, np.zeros(5), np.array([3, 2]), 2.0, uniforms(6000), group)
    assert (drawn[:3000] == 1).all()
    assert chisquare(np.bincount(drawn[3000:] - 3)).pvalue > 1e-3  # nothing is possible: uniform


def test_exploration_is_uniform():
    score = np.array([0.0, 50.0])
    drawn = boltzmann(score, np.zeros(2), np.array([2]), 1.0, uniforms(8000), np.zeros(8000, int), explore=0.5)
    assert chisquare(np.bincount(drawn), [2000, 6000]).pvalue > 1e-3


def test_random_numbers_are_keyed_by_rollout_and_depth():
    whole = select_uniforms(5, np.arange(6), 3)
    np.testing.assert_array_equal(select_uniforms(5, np.array([4, 1]), 3), whole[[4, 1]])
    one = Keys(torch.tensor([5]), torch.tensor([4]), torch.tensor(2), "select").uniform((2,))
    np.testing.assert_array_equal(whole[4, 2], one[0].numpy())
    assert len(np.unique(whole)) == whole.size


# --- the descent of a wave --------------------------------------------------------------------------------------------


def finish(store, down, rng, lam, leaf_depth=DEPTH):
    """Grows a path below every rollout that stopped, and backs all of them up."""
    leaves = []
    for node, expand in zip(down.node, down.expand, strict=True):
        for depth in range(int(store.depth[node]) + 1, leaf_depth + 1 if expand else 0):
            state = torch.zeros(1, 1)
            node = store.append(np.array([node]), np.array([depth]), rng.normal(size=1) / 2, state)[0]
            store.values[node] = rng.normal()
        leaves.append(node)
    back_up(store, np.array(leaves), lam)


def grown_store(policy, rollouts, seed=0, wave=7, trees=2):
    rng, store = np.random.default_rng(seed), NodeStore(trees)
    for start in range(0, rollouts, wave):
        finish(store, descend_wave(store, policy, np.arange(start, start + wave), trees), rng, policy.lam)
    return store


def descend_wave(store, policy, sims, trees=2):
    return descend(
        store, policy, sims % trees, select_uniforms(9, sims, policy.leaf_depth), SingleObjective(),
        torch.zeros(len(sims), 0),
    )  # fmt: skip


class Sequential:
    """The rules of selection for one rollout at a time, by loops over Python lists."""

    def __init__(self, store, policy):
        self.s, self.p = store, policy

    def children(self, node):
        return self.s.children(np.array([node]))[0].tolist()

    def descend(self, root, u):
        node, path, spread = root, [root], self.spread(root)
        for depth in range(self.p.leaf_depth):
            child = self.choose(node, depth, u[depth], spread)
            if child is None:
                break
            node = child
            path.append(node)
        expand = self.s.depth[node] < self.p.leaf_depth
        self.s.in_flight[path] += 1
        self.s.pending[node] += expand
        return node, expand

    def spread(self, root):
        values = self.s.values[self.children(root), 0]
        return (values.std() if len(values) > 1 else 0.0) or 1.0

    def taken(self, node):
        return int(self.s.visits[node] + self.s.in_flight[node])

    def choose(self, node, depth, u, spread):
        child = self.children(node)
        if self.p.mode == "unbiased":
            room = [c for c in child if self.taken(c) < self.p.leaves_below(depth + 1)]
            return room[0] if room else None
        allowed = max(1, math.floor(self.p.widening[0] * (self.taken(node) + 1.0) ** self.p.widening[1]))
        if not child or len(child) + self.s.pending[node] < allowed:
            return None
        if self.p.mode == "dts":
            fresh = [c for c in child if self.taken(c) < self.p.min_visits and depth + 1 < self.p.leaf_depth]
            if fresh:
                return min(fresh, key=lambda c: (self.taken(c), child.index(c)))
            chance = np.exp(self.p.lam * self.s.values[child, 0] + self.s.log_weight[child])
            return child[int(np.searchsorted(np.cumsum(chance), u[1] * chance.sum()))]
        bonus = self.p.c_uct * spread * math.sqrt(math.log(self.taken(node) + 1))
        value = self.s.values[child, 0] + self.p.kappa * self.s.log_weight[child] / self.p.lam
        return child[int(np.argmax([v + bonus / math.sqrt(self.taken(c)) for v, c in zip(value, child, strict=True)]))]


POLICIES = {
    "dts": Policy("dts", 1.5, DEPTH),
    "narrow dts": Policy("dts", 1.5, DEPTH, (1.0, 0.5), 2),
    "dts without quota": Policy("dts", 1.5, DEPTH, (1.0, 0.6), 1),
    "dts_star": Policy("dts_star", 1.5, DEPTH, (1.0, 0.5)),
    "unbiased": Policy("unbiased", 1.5, DEPTH, branching=(2, 3, 2)),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_wave_acts_as_its_rollouts_one_after_the_other(name):
    policy, rng = POLICIES[name], np.random.default_rng(4)
    store, twin = grown_store(policy, 140), grown_store(policy, 140)
    for wave in range(6):
        sims = np.arange(1000 + 40 * wave, 1040 + 40 * wave)
        one = Sequential(twin, policy)
        draws = select_uniforms(9, sims, DEPTH)
        expected = [one.descend(sim % 2, u) for sim, u in zip(sims, draws, strict=True)]
        down = descend_wave(store, policy, sims)
        assert down.node.tolist() == [node for node, _ in expected]
        assert down.expand.tolist() == [bool(expand) for _, expand in expected]
        for array in ("in_flight", "pending", "visits"):
            np.testing.assert_array_equal(getattr(store, array)[: store.size], getattr(twin, array)[: twin.size])
        values = rng.integers(2**31)
        finish(store, down, np.random.default_rng(values), policy.lam)
        finish(twin, down, np.random.default_rng(values), policy.lam)


@pytest.mark.parametrize("name", ["dts", "narrow dts", "dts_star"])
def test_widening_allowance(name):
    policy = POLICIES[name]
    store = grown_store(policy, 400, wave=5)
    inner = np.flatnonzero(store.depth[: store.size] < DEPTH)
    allowed = np.maximum(1, np.floor(policy.widening[0] * (store.visits[inner] + 1.0) ** policy.widening[1]))
    assert (store.num_children[inner] <= allowed + 5).all()
    sequential = grown_store(policy, 400, wave=1)
    inner = np.flatnonzero(sequential.depth[: sequential.size] < DEPTH)
    seen = sequential.visits[inner]
    assert (
        sequential.num_children[inner]
        <= np.maximum(1, np.floor(policy.widening[0] * (seen + 1.0) ** policy.widening[1]))
    ).all()


def test_the_quota_comes_before_values():
    store = grown_store(POLICIES["dts"], 600, wave=1)
    inner = np.flatnonzero((store.depth[: store.size] < DEPTH - 1) & (store.num_children[: store.size] > 0))
    child, counts = store.children(inner)
    parent = np.repeat(np.arange(len(inner)), counts)
    unripe = np.bincount(parent, store.visits[child] < 3) > 0
    most = np.maximum.reduceat(store.visits[child], np.cumsum(counts) - counts)
    assert unripe.any() and most[unripe].max() <= 3 + 1  # nobody runs ahead while a sibling waits for its quota


def test_fixed_branching_makes_the_scheduled_tree():
    policy = POLICIES["unbiased"]
    store = grown_store(policy, 12 * 8, wave=1, trees=1)
    for depth, branching in ((1, 2), (2, 3), (3, 2)):
        nodes = np.flatnonzero(store.depth[: store.size] == depth)
        assert (store.num_children[nodes] == branching).all()
    assert store.num_children[0] == 8


def test_infinite_lam_and_zero_weights_do_not_stop_the_descent():
    for lam in (0.0, math.inf):
        for mode in ("dts", "dts_star"):
            store = grown_store(Policy(mode, lam, DEPTH, (1.0, 0.5)) if lam else Policy("dts", lam, DEPTH), 60)
            store.log_weight[: store.size] = -np.inf
            down = descend_wave(store, Policy(mode if lam else "dts", lam, DEPTH, (1.0, 0.2)), np.arange(200, 230))
            assert len(down.node) == 30
