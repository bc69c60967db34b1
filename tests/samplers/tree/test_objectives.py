from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from scipy import stats

from genkit.samplers.noise import Keys
from genkit.samplers.tree.objectives import Directions, MultiObjective, PerObjective, das_dennis, scalarise

UNIT = [(0.0, 1.0)] * 3
BOTH = [PerObjective, Directions]
LAMBDA = 4.0


def simulations(count: int, key: int = 5, first: int = 0) -> Keys:
    sample = torch.arange(first, first + count)
    return Keys(torch.full((count,), key), sample, torch.zeros((), dtype=torch.int64))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ------------------------------------------------------------------------------------- random trees and their backup


class Node:
    """A node of a random tree: a leaf with a reward (M,), or children with log weights."""

    def __init__(self, rng: np.random.Generator, depth: int, size: int, weighted: bool) -> None:
        self.reward = torch.from_numpy(rng.random(size))
        self.children = (
            [Node(rng, depth - 1, size, weighted) for _ in range(rng.integers(1, 4))]
            if depth and rng.random() < 0.9
            else []
        )
        spread = 0.7 if weighted else 0.0
        self.log_weights = torch.from_numpy(spread * rng.standard_normal(len(self.children)))

    def walk(self):
        yield self
        for child in self.children:
            yield from child.walk()

    def soft(self, columns) -> torch.Tensor:
        """Columns (K,) of the node: (1/λ) log mean_i w_i exp(λ v_i), from the leaves upwards."""
        if not self.children:
            return columns(self.reward.unsqueeze(0))[0]
        below = torch.stack([child.soft(columns) for child in self.children])
        total = torch.logsumexp(self.log_weights.unsqueeze(1) + LAMBDA * below, dim=0)
        return (total - math.log(len(self.children))) / LAMBDA

    def leaves(self, log_mass: float = 0.0):
        """(log of the product of w / n along the path, reward) of all leaves below."""
        if not self.children:
            yield log_mass, self.reward
        for weight, child in zip(self.log_weights.tolist(), self.children, strict=True):
            yield from child.leaves(log_mass + weight - math.log(len(self.children)))

    def exact(self, value) -> float:
        """The soft value of a scalar function of the reward, straight from the leaves."""
        terms = [mass + LAMBDA * value(reward) for mass, reward in self.leaves()]
        return float(torch.logsumexp(torch.tensor(terms, dtype=torch.float64), dim=0)) / LAMBDA


def trees(size: int = 3, weighted: bool = True, count: int = 6):
    return [Node(np.random.default_rng(seed), 4, size, weighted) for seed in range(count)]


def by_hand(reward, c, form: str, ideal, rho: float) -> float:
    total = sum(w * float(r) for w, r in zip(c, reward, strict=True))
    if form == "linear":
        return total
    return -max(w * (float(u) - float(r)) for w, u, r in zip(c, ideal, reward, strict=True)) + rho * total


def test_the_sum_of_soft_values_is_an_optimistic_bound_with_equality_at_leaves():
    """Hölder, for any positive weights of the edges; the gap is real, so the reverse is false."""
    objective = PerObjective(3, bounds=UNIT)
    gaps = []
    for tree, c in itertools.product(trees(), objective.draw(simulations(5))):
        for node in tree.walk():
            cheap = float(objective.score(node.soft(objective.columns).unsqueeze(0), c))
            exact = node.exact(lambda r, c=c: float(r @ c))
            assert cheap >= exact - 1e-12
            if node.children:
                gaps.append(cheap - exact)
            else:
                assert cheap == pytest.approx(exact, abs=1e-12)
    assert max(gaps) > 0.02 and np.mean(np.array(gaps) > 1e-4) > 0.4


def test_equality_where_the_objectives_are_determined():
    """All descendants share one reward: nothing is over-valued."""
    objective = PerObjective(3, bounds=UNIT)
    tree = Node(np.random.default_rng(0), 4, 3, weighted=False)
    for node in tree.walk():
        node.reward = torch.tensor([0.2, 0.9, 0.4], dtype=torch.float64)
    for c in objective.draw(simulations(5)):
        assert float(objective.score(tree.soft(objective.columns).unsqueeze(0), c)) == pytest.approx(
            float(tree.reward @ c), abs=1e-12
        )


def test_objectives_good_in_different_descendants_are_over_valued_by_the_known_amount():
    tree = Node(np.random.default_rng(0), 0, 2, weighted=False)
    tree.children = [Node(np.random.default_rng(i), 0, 2, weighted=False) for i in range(2)]
    tree.log_weights = torch.zeros(2, dtype=torch.float64)
    for child, reward in zip(tree.children, ([1.0, 0.0], [0.0, 1.0]), strict=True):
        child.reward = torch.tensor(reward, dtype=torch.float64)
    each = math.log((math.exp(LAMBDA) + 1) / 2) / LAMBDA
    c = torch.tensor([0.5, 0.5], dtype=torch.float64)
    cheap, exact = PerObjective(2, bounds=UNIT[:2]), Directions(2, c.unsqueeze(0), bounds=UNIT[:2])
    assert float(cheap.score(tree.soft(cheap.columns).unsqueeze(0), c)) == pytest.approx(each)
    assert float(exact.score(tree.soft(exact.columns).unsqueeze(0), torch.tensor(0))) == pytest.approx(0.5)


def test_tchebycheff_of_soft_values_is_optimistic_away_from_the_corners():
    """exp(λ f_c) is below a product of powers exp(λ r_m) whose exponents sum to at most max c + ρ <= 1."""
    objective = PerObjective(3, form="tchebycheff", bounds=UNIT, rho=0.05)
    preferences = [c for c in objective.draw(simulations(12)) if float(c.max()) <= 0.95]
    assert len(preferences) > 5
    for tree, c in itertools.product(trees(weighted=False, count=4), preferences):
        for node in tree.walk():
            cheap = float(objective.score(node.soft(objective.columns).unsqueeze(0), c))
            exact = node.exact(lambda r, c=c: by_hand(r, c.tolist(), "tchebycheff", [1, 1, 1], 0.05))
            assert cheap >= exact - 1e-12
            assert node.children or cheap == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("form", ["linear", "tchebycheff"])
def test_directions_equal_the_recursion_from_the_leaves(form):
    objective = Directions(3, 10, form=form, rho=0.1, bounds=[(0.0, 1.0), (-1.0, 1.0), (0.0, 2.0)])
    assert objective.num_columns(3) == 10 == len(objective.directions)
    draws = torch.arange(10)
    for tree in trees():
        for node in tree.walk():
            columns = node.soft(objective.columns)
            scores = objective.score(columns.expand(10, -1), draws)
            for k, c in enumerate(objective.preferences(draws).tolist()):

                def value(r, c=c):
                    scaled = [float(r[0]), (float(r[1]) + 1) / 2, float(r[2]) / 2]
                    return by_hand(scaled, c, form, [1, 1, 1], 0.1)

                exact = node.exact(value)
                assert float(scores[k]) == float(columns[k]) == pytest.approx(exact, abs=1e-12)


# ------------------------------------------------------------------------------------------------------- the forms


@pytest.mark.parametrize("form", ["linear", "tchebycheff"])
def test_scalarise_equals_its_formula_and_broadcasts(form):
    values, weights, ideal = normal(6, 3), das_dennis(3, 3), torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64)
    table = scalarise(values.unsqueeze(1), weights, form=form, ideal=ideal, rho=0.2)
    for i, k in itertools.product(range(6), range(len(weights))):
        assert float(table[i, k]) == pytest.approx(by_hand(values[i], weights[k].tolist(), form, ideal, 0.2))
    one = PerObjective(3, form=form, bounds=UNIT, ideal=ideal, rho=0.2)
    assert torch.equal(one.score(values, weights[4]), table[:, 4])
    assert torch.equal(one.score(values, weights[:6]), table[:, :6].diagonal())


def test_tchebycheff_finds_a_concave_part_that_linear_weights_never_find():
    front = torch.tensor([[0.0, 1.0], [0.4, 0.4], [1.0, 0.0]], dtype=torch.float64)
    winners = {}
    for form in ("linear", "tchebycheff"):
        objective = PerObjective(2, form=form, bounds=UNIT[:2], weights="das_dennis", num_directions=21)
        columns = objective.columns(front)
        winners[form] = {int(objective.score(columns, c).argmax()) for c in objective.draw(simulations(21))}
    assert winners == {"linear": {0, 2}, "tchebycheff": {0, 1, 2}}


def test_the_augmentation_parts_weakly_dominated_points():
    values = torch.tensor([[0.3, 0.3], [0.3, 0.9]], dtype=torch.float64)
    c, ideal = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    plain = scalarise(values, c, form="tchebycheff", ideal=ideal, rho=0.0)
    augmented = scalarise(values, c, form="tchebycheff", ideal=ideal, rho=0.05)
    assert plain[0] == plain[1] and augmented[0] < augmented[1]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("form", ["linear", "tchebycheff"])
@pytest.mark.parametrize("bounds", [None, UNIT])
def test_leaves_without_a_judgement_have_probability_zero_under_every_preference(kind, form, bounds):
    objective = kind(3, form=form, bounds=bounds)
    rewards = torch.tensor([[0.1, 0.2, 0.3], [math.nan, 0.5, 0.5], [math.inf, 0, 0], [0, -math.inf, 0]])
    columns = objective.columns(rewards)
    assert columns.dtype == torch.float64 and columns.shape == (4, objective.num_columns(3))
    assert not bool(columns.isnan().any()) and bool((columns[1:] == -math.inf).all())
    corners = torch.eye(3, dtype=torch.float64) if kind is PerObjective else torch.arange(objective.num_columns(3))
    for parameter in corners:  # a weight of 0 meets -inf
        score = objective.score(columns, parameter)
        assert bool(torch.isfinite(score[0])) and bool((score[1:] == -math.inf).all())


# ---------------------------------------------------------------------------------------------- lattices and draws


@pytest.mark.parametrize(("size", "divisions"), [(1, 4), (2, 5), (3, 4), (4, 3), (5, 2)])
def test_das_dennis_is_the_whole_lattice(size, divisions):
    expected = [p for p in itertools.product(range(divisions + 1), repeat=size) if sum(p) == divisions]
    lattice = das_dennis(size, divisions)
    assert (lattice * divisions).round().int().tolist() == [list(p) for p in expected]
    assert len(lattice) == math.comb(divisions + size - 1, size - 1)
    assert torch.allclose(lattice.sum(dim=1), torch.ones(len(lattice), dtype=torch.float64))


def test_the_largest_lattice_within_the_limit():
    sizes = {limit: Directions(3, limit, bounds=UNIT).num_columns(3) for limit in (3, 5, 6, 16, 28)}
    assert sizes == {3: 3, 5: 3, 6: 6, 16: 15, 28: 28}
    assert Directions(2, 16).num_columns(2) == 16


@pytest.mark.parametrize(
    "objective",
    [
        PerObjective(3),
        PerObjective(3, weights="das_dennis"),
        PerObjective(3, weights=[[1, 0, 0], [1, 1, 2]]),
        Directions(3, 15),
    ],
)
def test_a_draw_depends_on_its_own_simulation_alone(objective):
    together = objective.draw(simulations(40))
    assert torch.equal(together, objective.draw(simulations(40)))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(objective.draw(simulations(40)[order]), together[order])
    assert torch.equal(objective.draw(simulations(7, first=21)), together[21:28])
    assert not torch.equal(objective.draw(simulations(40, key=6)), together)
    weights = objective.preferences(together)
    assert weights.shape == (40, 3) and bool((weights >= 0).all())
    assert torch.allclose(weights.sum(dim=1), torch.ones(40, dtype=torch.float64))


def test_dirichlet_draws_are_uniform_on_the_simplex():
    draws = PerObjective(4).draw(simulations(4000))
    for m in range(4):
        assert stats.kstest(draws[:, m].numpy(), stats.beta(1, 3).cdf).pvalue > 1e-3
    covariance = torch.cov(draws.T)
    expected = (torch.eye(4) * 4 - 1) / (16 * 5)
    assert float((covariance - expected).abs().max()) < 4e-3


def test_every_round_has_every_direction_once_and_every_tree_sees_all():
    objective = Directions(3, 15)
    draws = objective.draw(simulations(15 * 60)).reshape(60, 15)
    assert torch.equal(draws.sort(dim=1).values, torch.arange(15).expand(60, 15))
    assert len({tuple(row) for row in draws.tolist()}) == 60
    # tree g of 5 takes the simulations g, g + 5, …: in one fixed order it would see 3 of the 15
    for tree in range(5):
        assert len(draws.flatten()[tree::5].unique()) == 15


# ----------------------------------------------------------------------------------------- scale, ideal point, state


def test_bounds_scale_without_clipping():
    objective = PerObjective(2, bounds=[(-2.0, 2.0), (0.0, 10.0)])
    assert objective.ready
    assert objective.columns(torch.tensor([[-2.0, 10.0], [0.0, 20.0]])).tolist() == [[0.0, 1.0], [0.5, 2.0]]


@pytest.mark.parametrize("kind", BOTH)
def test_the_scale_is_frozen_by_the_quantiles_of_the_warm_up(kind):
    rewards = normal(200, 3) * torch.tensor([1e-3, 1.0, 1e4])
    start = kind(3)
    assert not start.ready and bool((start.columns(rewards) == 0).all())
    unjudged = torch.full((5, 3), math.nan, dtype=torch.float64)
    fitted = start.fit(torch.cat((unjudged, rewards)))
    assert fitted.ready and not start.ready
    expected = np.quantile(rewards.numpy(), [0.05, 0.95], axis=0).T
    assert fitted.bounds is not None and np.allclose(fitted.bounds, expected, rtol=1e-14)
    scaled = fitted.scaled(rewards)
    assert torch.allclose(torch.quantile(scaled, 0.05, dim=0), torch.zeros(3, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(torch.quantile(scaled, 0.95, dim=0), torch.ones(3, dtype=torch.float64))
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    shuffled = start.fit(rewards[order])
    assert torch.equal(shuffled.columns(rewards), fitted.columns(rewards))
    with pytest.raises(ValueError, match="frozen already"):
        fitted.fit(rewards)
    with pytest.raises(ValueError, match="1 judged leaves"):
        start.fit(torch.cat((unjudged, rewards[:1])))


def test_units_of_the_rewards_do_not_matter_after_the_warm_up():
    rewards, factor = normal(100, 3), torch.tensor([1e-3, 7.0, 1e4], dtype=torch.float64)
    for kind, form in itertools.product(BOTH, ["linear", "tchebycheff"]):
        a = kind(3, form=form).fit(rewards)
        b = kind(3, form=form).fit(rewards * factor - 3.0 * factor)
        parameter = a.draw(simulations(100))
        one = a.score(a.columns(rewards), parameter)
        other = b.score(b.columns(rewards * factor - 3.0 * factor), parameter)
        assert torch.allclose(one, other, atol=1e-9)


def test_rare_hits_and_constants_get_a_scale():
    rare = torch.zeros(100, dtype=torch.float64)
    rare[17] = 2.0
    rewards = torch.stack((rare, torch.full((100,), 5.0, dtype=torch.float64)), dim=1)
    fitted = PerObjective(2).fit(rewards)
    assert fitted.bounds is not None and fitted.bounds.tolist() == [[0.0, 2.0], [5.0, 6.0]]


def test_the_running_ideal_is_a_function_of_the_set_of_leaves():
    rewards = normal(60, 3)
    unjudged = torch.tensor([[math.nan, 99.0, 99.0]], dtype=torch.float64)
    start = PerObjective(3, form="tchebycheff", bounds=[(0.0, 2.0)] * 3)
    assert start.ideal.tolist() == [1.0, 1.0, 1.0]
    in_waves = start
    for wave in rewards.split(7):
        in_waves = in_waves.observe(torch.cat((wave, unjudged)))
    at_once = start.observe(rewards.flip(0)).observe(rewards[:5])  # again: nothing changes
    expected = rewards.amax(dim=0) / 2.0
    assert torch.equal(in_waves.ideal, expected) and torch.equal(at_once.ideal, expected)
    assert start.observe(unjudged) is start
    # stored columns do not depend on it, scores do
    assert torch.equal(in_waves.columns(rewards), start.columns(rewards))
    c = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    hand = [by_hand(r / 2.0, c.tolist(), "tchebycheff", expected, 0.05) for r in rewards]
    assert in_waves.score(in_waves.columns(rewards), c).tolist() == pytest.approx(hand)
    # frozen before or after the waves: the same
    a, b = PerObjective(3, form="tchebycheff"), PerObjective(3, form="tchebycheff")
    assert torch.equal(a.observe(rewards).fit(rewards[:30]).ideal, b.fit(rewards[:30]).observe(rewards).ideal)


def test_given_ideals_and_those_of_directions_stay():
    rewards = normal(50, 2)
    given = PerObjective(2, form="tchebycheff", bounds=UNIT[:2], ideal=[3.0, 4.0])
    assert given.observe(rewards + 100).ideal.tolist() == [3.0, 4.0]
    assert Directions(2, bounds=UNIT[:2]).ideal.tolist() == [1.0, 1.0]
    fitted = Directions(2, form="tchebycheff").fit(rewards)
    assert torch.equal(fitted.ideal, fitted.scaled(rewards).amax(dim=0)) and bool((fitted.ideal > 1).all())
    constant = torch.stack((rewards[:, 0], torch.full((50,), 5.0, dtype=torch.float64)), dim=1)
    assert float(Directions(2).fit(constant).ideal[1]) == 1.0  # not the 0 that was reached
    later = fitted.observe(rewards + 100)
    assert torch.equal(later.ideal, fitted.ideal) and torch.equal(later.columns(rewards), fitted.columns(rewards))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("stage", ["new", "fitted", "observed"])
def test_a_restored_object_continues_alike(kind, stage):
    rewards, new = normal(50, 3), kind(3, form="tchebycheff")
    objective: MultiObjective = new if stage == "new" else new.fit(rewards[:20])
    objective = objective.observe(rewards) if stage == "observed" else objective
    restored = new.restored(load(save(objective.state_dict())))
    assert restored.ready == objective.ready and torch.equal(restored.ideal, objective.ideal)
    for one in ("columns", "scaled"):
        assert torch.equal(getattr(restored, one)(rewards), getattr(objective, one)(rewards))
    rebuilt = new if stage == "new" else new.fit(rewards[:20])  # or from the leaves alone
    rebuilt = rebuilt.observe(rewards) if stage == "observed" else rebuilt
    assert torch.equal(rebuilt.ideal, objective.ideal)
    with pytest.raises(ValueError, match="'ideal' is missing"):
        new.restored({"bounds": torch.zeros(3, 2)})


def test_numbers_given_as_lists_keep_their_digits():
    objective = PerObjective(2, bounds=[(0.1, 0.3), (0.0, 1.0)], ideal=[0.7, 0.9], weights=[[0.1, 0.9]])
    assert objective.bounds is not None and objective.bounds[0].tolist() == [0.1, 0.3]
    assert objective.draw(simulations(1)).tolist() == [[0.1, 0.9]]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: PerObjective(1), "SingleObjective"),
        (lambda: PerObjective(3, form="linaer"), "Did you mean 'linear'"),
        (lambda: PerObjective(3, weights="dirichelt"), "Did you mean 'dirichlet'"),
        (lambda: PerObjective(3, weights=[[1, -1, 1]]), "none negative"),
        (lambda: PerObjective(3, weights=[[0, 0, 0]]), "none negative"),
        (lambda: PerObjective(3, weights=[[1, 1]]), "weights"),
        (lambda: PerObjective(3, rho=-1), "rho=-1"),
        (lambda: PerObjective(3, warm_up=1), "warm_up=1"),
        (lambda: PerObjective(2, bounds=[(0, 1), (1, 1)]), "low < high"),
        (lambda: PerObjective(2, bounds=[(0, 1)]), "bounds"),
        (lambda: PerObjective(2, ideal=[1.0, math.nan]), "ideal"),
        (lambda: PerObjective(3, weights="das_dennis", num_directions=2), "one direction an objective"),
        (lambda: Directions(3, 2), "one direction an objective"),
        (lambda: Directions(3, [[1, 1]]), "directions"),
        (lambda: PerObjective(3).num_columns(2), "was made for 3"),
        (lambda: PerObjective(3).columns(torch.zeros(4, 2)), r"\(B, 3\)"),
        (lambda: scalarise(torch.zeros(1, 2), torch.ones(2), form="tchebycheff"), "ideal=None"),
        (lambda: das_dennis(3, 0), "divisions=0"),
    ],
)
def test_refusals(make, match):
    with pytest.raises(ValueError, match=match):
        make()
