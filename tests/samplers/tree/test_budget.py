"""The limit of network calls, resuming, and the scale that several objectives learn: exact equalities of trees."""

import itertools
import math

import numpy as np
import pytest
import torch

from genkit.errors import ConfigError
from genkit.rewards import FunctionReward, reward_output
from genkit.samplers.tree import PerObjective, SearchOptions, TreeSearch
from genkit.samplers.tree.population import self_normalised, smc
from tests.samplers.tree.toys import STEPS, MixtureChain, ToyChain, finite_chain

LEVELS = (2, 4, 6, 8)
ARRAYS = ("parent", "depth", "tree", "log_weight", "visits", "in_flight", "pending", "num_children", "values")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def search(rollouts, chain=None, reward=None, run=(), **options):
    chain = chain or MixtureChain(shift=0.1, levels=LEVELS, base_probability=0.3)
    options = SearchOptions(**({"lam": 2.0, "slots": 16} | options))
    return TreeSearch.on_chain(chain, reward or chain.mixture.reward, options).run(rollouts, seeded(), **dict(run))


def assert_same_search(a, b):
    assert a.store.size == b.store.size
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(a.store, name)[: a.store.size], getattr(b.store, name)[: b.store.size])
    assert torch.equal(a.leaves.states, b.leaves.states) and torch.equal(a.leaves.simulation, b.leaves.simulation)
    for name in ("issued", "done", "revisits", "network_calls", "reward_calls", "ticks"):
        assert a.counts[name] == b.counts[name]


# --- the limit of network calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "trees"), [("dts", 1), ("dts", 3), ("dts_star", 1), ("unbiased", 3)])
def test_a_limited_search_is_the_one_of_the_rollouts_that_fit(mode, trees):
    limit = 60 * STEPS + 3
    found = search(10**6, mode=mode, trees=trees, max_network_calls=limit)
    assert found.counts["out_of_calls"] and found.counts["done"] == found.counts["issued"] < 10**6
    assert limit - STEPS < found.network_calls <= limit
    n = found.store.size
    assert not found.store.in_flight[:n].any() and not found.store.pending[:n].any()
    assert_same_search(found, search(found.counts["issued"], mode=mode, trees=trees))


def test_revisits_cost_nothing_and_the_number_of_rollouts_stays_a_cap():
    chain, limit = finite_chain(), 60
    options = {"chain": chain, "reward": chain.reward, "widening": (1.0, 0.3), "slots": 4}
    found = search(10**5, max_network_calls=limit, **options)
    assert found.counts["revisits"] > 0 and limit - 3 < found.network_calls <= limit
    assert found.counts["done"] == found.counts["revisits"] + len(found.leaves)
    capped = search(40, max_network_calls=10**6, **options)
    assert capped.counts["done"] == 40 and not capped.counts["out_of_calls"]


def test_the_limit_does_not_depend_on_the_networks_batch():
    one, many = (search(500, MixtureChain(levels=LEVELS, batch_size=size), max_network_calls=300) for size in (3, None))
    assert_same_search(one, many)


def test_a_limit_below_one_rollout_is_refused():
    with pytest.raises(ConfigError, match=f"at least {STEPS}"):
        search(10, max_network_calls=STEPS - 1)
    assert len(search(10, max_network_calls=STEPS).leaves) == 1


# --- resuming ---------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """The end of a process."""


def interrupted_after(count):
    calls = itertools.count(1)

    def callback(report):
        if next(calls) == count:
            raise Stop

    return callback


TWO = FunctionReward(lambda x, context: torch.stack((-((x - 1.0) ** 2), -((x + 1.0) ** 2)), dim=1), name="two")


@pytest.mark.parametrize(
    "options",
    [
        {"max_network_calls": 60 * STEPS + 3},
        {"mode": "dts_star", "trees": 2},
        {"reward": TWO, "scalarisation": PerObjective(2, warm_up=25), "max_network_calls": 60 * STEPS + 3},
    ],
    ids=["limit", "best", "objectives"],
)
def test_an_interrupted_search_goes_on_as_if_it_had_not_stopped(tmp_path, options):
    options = {"slots": 8} | options
    whole = search(120, **options)
    for stop in (4, 2):
        run = {"save_dir": tmp_path, "save_every": 10, "resume": stop == 2, "callback": interrupted_after(stop)}
        with pytest.raises(Stop):
            search(120, run=run.items(), **options)
    again = search(120, run={"save_dir": tmp_path, "save_every": 10, "resume": True}.items(), **options)
    assert_same_search(whole, again)
    assert again.counts["out_of_calls"] == whole.counts["out_of_calls"]
    over = search(120, run={"save_dir": tmp_path, "resume": True}.items(), **options)
    assert_same_search(whole, over)


# --- the scale of several objectives ----------------------------------------------------------------------------------


def sometimes(x, context):
    values = TWO(x).values
    return torch.where(((x * 1e6).long() % 4 == 0).unsqueeze(1), math.nan, values)


def test_the_learned_scale_depends_on_no_batch():
    """The scale is that of the first 30 valid leaves by rollout, whatever was judged together, and however many."""
    objectives = PerObjective(2, warm_up=30)

    def run(size=None, **options):
        options = {"slots": 8, "scalarisation": objectives} | options
        return search(90, MixtureChain(levels=LEVELS, batch_size=size), FunctionReward(sometimes), **options)

    variants = [{"reward_batch": 1}, {"reward_batch": 13}, {"size": 3}, {"slots": 64}, {"sync": False, "trees": 3}]
    first, *others = (run(**options) for options in variants)
    leaves = first.leaves.take(first.leaves.simulation.argsort())
    valid = leaves.rewards[leaves.valid]
    assert torch.equal(first.objectives.bounds, objectives.fit(valid[:30]).bounds)
    for other in others:
        assert torch.equal(other.objectives.bounds, first.objectives.bounds)
    # the control: what a fit to all leaves judged by then would give after a batch of 13
    assert not torch.equal(objectives.fit(valid[:39]).bounds, first.objectives.bounds)
    assert len({*first.leaves.node[:30].tolist()}) == 30
    assert (first.store.num_children[0] >= 40) and first.objectives.ready  # independent rollouts until then


def test_a_search_that_ends_before_takes_the_scale_of_what_there_is():
    found = search(20, MixtureChain(levels=LEVELS), TWO, scalarisation=PerObjective(2, warm_up=30))
    assert torch.equal(found.objectives.bounds, PerObjective(2).fit(found.leaves.rewards).bounds)
    columns = found.objectives.columns(found.leaves.rewards).numpy()
    np.testing.assert_array_equal(found.store.values[found.leaves.node], columns)


# --- what the reward logs ---------------------------------------------------------------------------------------------


def test_counts_that_the_reward_logs_are_added_up_and_survive_a_break(tmp_path):
    def counting(x, context):
        return reward_output(-(x**2), logs={"left": int((x < 0.0).sum()), "mean": float(x.mean())})

    options = {"reward": FunctionReward(counting), "reward_batch": 7}
    found = search(200, **options)
    assert found.diagnostics()["reward_logs"] == {"left": int((found.leaves.states < 0.0).sum())}
    run = {"save_dir": tmp_path, "save_every": 10}
    with pytest.raises(Stop):
        search(200, run=run | {"callback": interrupted_after(3)}, **options)
    again = search(200, run=run | {"resume": True}, **options)
    assert again.counts["reward_logs"] == found.counts["reward_logs"]


# --- a prior that is drawn from another law ---------------------------------------------------------------------------


class Jumps(ToyChain):
    """A start of 0, 1 or 2 that is drawn evenly, and normal steps; ``weighs`` weighs it back to other probabilities."""

    prior, drawn = torch.tensor([0.6, 0.1, 0.3]).double(), torch.full((3,), 1.0 / 3.0).double()
    weighs = True

    def draw_stage(self, depth, state, keys, context=None):
        return (3.0 * keys.at(step=99, purpose="start").uniform()).floor()

    def stage_log_weight(self, depth, state, context=None):
        weight = (self.prior / self.drawn).log()[state.long()]
        return weight if self.weighs else torch.zeros_like(weight)

    def step(self, state, step, guided, keys, cond=None, context=None, outputs=None):
        self.calls += len(state)
        moved = state + 0.2 * keys.at(step=step, purpose="move").normal().double()
        return moved, torch.zeros(len(state), dtype=torch.float64)

    def outputs(self, state, step, cond=None):
        return (state,)

    def clean(self, state, step, cond=None, context=None, outputs=None):
        return state

    def log_z(self, lam):
        """log E exp(−λ x²/2) at the end of four steps, in closed form."""
        scale = 1.0 + lam * 4 * 0.04
        each = torch.exp(-0.5 * lam * torch.arange(3).double().square() / scale) / scale**0.5
        return float((self.prior * each).sum().log())


@pytest.mark.parametrize("weighs", [True, False])
def test_a_stage_that_draws_from_another_law_is_weighed_back(weighs):
    chain = Jumps(4, (2, 4), base_probability=0.5)
    chain.weighs = weighs
    reward = FunctionReward(lambda x, context: -0.5 * x**2)
    options = SearchOptions(lam=1.0, slots=16)
    runs = [TreeSearch.on_chain(chain, reward, options).run(48, seeded(i)) for i in range(60)]
    found = torch.tensor([math.exp(run.log_z_first[0, 0]) for run in runs])
    gap, noise = float(found.mean()) - math.exp(chain.log_z(1.0)), float(found.std()) / math.sqrt(len(found))
    assert (abs(gap) < 4.0 * noise) is weighs
    for run in runs[:3]:  # the weight is the first edge's, and part of the path's
        state = run.store.state_of(np.arange(1, run.store.size))
        first = run.store.depth[1 : run.store.size] == 1
        expected = chain.stage_log_weight(1, state[first])
        np.testing.assert_allclose(run.store.log_weight[1 : run.store.size][first], expected.numpy())
    for method in (self_normalised, smc):
        plain = method(chain, reward, 20_000, lam=1.0, generator=seeded(1))
        assert (abs(plain.log_z - chain.log_z(1.0)) < 0.03) is weighs
