from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from genkit.metrics import ParetoArchive, epsilon_dominance_thinning, hypervolume, non_dominated, pareto

PLANE = [(1, 5), (2, 3), (4, 2), (3, 3), (0, 6)]
SPACE = [(1, 2, 3), (2, 1, 3), (3, 2, 1), (2, 2, 2)]


def random_points(n: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sphere(n: int, size: int, seed: int = 0) -> torch.Tensor:
    """Points of which none dominates another."""
    points = random_points(n, size, seed)
    return points / points.norm(dim=1, keepdim=True)


def front_by_definition(points: np.ndarray) -> list[bool]:
    finite = [bool(np.isfinite(row).all()) for row in points]
    return [
        finite[i] and not any(finite[j] and (q >= p).all() and (q > p).any() for j, q in enumerate(points))
        for i, p in enumerate(points)
    ]


def cells(points: np.ndarray, side: int) -> int:
    """The hypervolume above 0 of integer points up to ``side``: how many unit cells have their upper corner below."""
    size = points.shape[1]
    corners = np.stack(np.meshgrid(*[np.arange(1, side + 1)] * size, indexing="ij"), axis=-1).reshape(-1, size)
    return int((corners[:, None] <= points[None]).all(axis=2).any(axis=1).sum())


def inclusion_exclusion(points: np.ndarray) -> float:
    subsets = (s for k in range(1, len(points) + 1) for s in itertools.combinations(points, k))
    return sum((-1) ** (len(s) + 1) * float(np.prod(np.maximum(np.min(s, axis=0), 0.0))) for s in subsets)


@st.composite
def integer_sets(draw, sizes=(1, 2, 3, 4, 5), side=4, most=12):
    size = draw(st.sampled_from(sizes))
    rows = draw(st.lists(st.lists(st.integers(-1, side), min_size=size, max_size=size), min_size=1, max_size=most))
    return np.array(rows, dtype=np.float64)


# ---------------------------------------------------------------------------------------------------- hypervolume


def test_known_values():
    assert hypervolume(PLANE, [0, 0]) == 13.0
    assert hypervolume(SPACE, [0, 0, 0]) == 13.0
    assert hypervolume([(3.0,), (5.0,)], [1.0]) == 4.0
    assert hypervolume([(2, 3, 5, 7, 11)], [1] * 5) == 1 * 2 * 4 * 6 * 10
    assert hypervolume(torch.zeros(0, 3), [0, 0, 0]) == 0.0
    # control: boxes counted separately, or the dominated point (3, 3) left out of the staircase, give another number
    assert sum(a * b for a, b in PLANE) != 13 and hypervolume([p for p in PLANE if p != (3, 3)], [0, 0]) == 12.0


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_lattice_on_a_plane_has_its_closed_form(size):
    """Positive integer points of sum h dominate all cells whose upper corner has a sum of at most h."""
    h = 9
    lattice = np.array([p for p in itertools.product(range(1, h), repeat=size) if sum(p) == h])
    assert hypervolume(lattice, [0] * size) == sum(sum(p) <= h for p in itertools.product(range(1, h + 1), repeat=size))


@settings(max_examples=150, deadline=None)
@given(integer_sets())
def test_equals_the_count_of_cells(points):
    assert hypervolume(points, [0] * points.shape[1]) == cells(points, 4)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_equals_inclusion_and_exclusion(size):
    for seed in range(5):
        points = random_points(9, size, seed) - 0.1
        expected = inclusion_exclusion(points.numpy())
        assert hypervolume(points, [0.0] * size) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_agrees_with_monte_carlo(size):
    points = sphere(60, size)
    draws = random_points(20_000, size, seed=1)
    share = float((draws[:, None] <= points[None]).all(dim=2).any(dim=1).double().mean())
    exact = hypervolume(points, [0.0] * size)
    assert abs(share - exact) < 4 * (exact * (1 - exact) / 20_000) ** 0.5


@settings(max_examples=80, deadline=None)
@given(integer_sets(side=6), st.integers(0, 2**31))
def test_what_must_not_change_it(points, seed):
    rng = np.random.default_rng(seed)
    size = points.shape[1]
    reference = np.zeros(size)
    value = hypervolume(points, reference)
    dominated = points[rng.integers(len(points))] - rng.integers(0, 3, size)
    duplicate = points[rng.integers(len(points))]
    below = np.where(np.arange(size) == rng.integers(size), -rng.integers(0, 3), 50)
    unjudged = np.where(np.arange(size) == rng.integers(size), rng.choice([np.nan, np.inf, -np.inf]), 50)
    for extra in (dominated, duplicate, below, unjudged):
        assert hypervolume(np.vstack((points, extra)), reference) == value
    assert hypervolume(points[rng.permutation(len(points))], reference) == value
    assert hypervolume(points[:, rng.permutation(size)], reference) == value
    assert hypervolume(points * 2.0 + 8.0, reference + 8.0) == value * 2.0**size


@settings(max_examples=80, deadline=None)
@given(integer_sets(), st.lists(st.integers(0, 6), min_size=5, max_size=5))
def test_it_grows_exactly_with_points_that_reach_new_cells(points, raw):
    size = points.shape[1]
    extra = np.array(raw[:size], dtype=np.float64)
    reference = [0] * size
    before, after = hypervolume(points, reference), hypervolume(np.vstack((points, extra)), reference)
    covered = bool((points >= extra).all(axis=1).any()) or bool((extra <= 0).any())
    assert after == before if covered else after > before


def test_the_sweep_gives_the_same_in_blocks(monkeypatch):
    points = sphere(150, 3)
    whole = hypervolume(points, [0, 0, 0])
    monkeypatch.setattr(pareto, "_BLOCK", 1000)
    assert hypervolume(points, [0, 0, 0]) == pytest.approx(whole, rel=1e-13)


def test_order_of_objectives_does_not_matter_for_many_points():
    points = sphere(80, 5)
    value = hypervolume(points, [0.0] * 5)
    assert hypervolume(points.flip(1), [0.0] * 5) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("points", "reference", "match"),
    [
        ([1.0, 2.0], [0.0], r"shape \(2,\)"),
        (PLANE, [0.0], "expected 2 finite numbers"),
        (PLANE, [0.0, np.nan], "expected 2 finite numbers"),
    ],
)
def test_wrong_shapes_are_named(points, reference, match):
    with pytest.raises(ValueError, match=match):
        hypervolume(points, reference)


# --------------------------------------------------------------------------------------------------- non-dominated


def test_front_of_a_known_set_keeps_copies_and_drops_unjudged_rows():
    rows = [*PLANE, (4, 2), (np.nan, 9), (np.inf, 9), (4, 1)]
    assert non_dominated(rows).tolist() == [True, False, True, True, True, True, False, False, False]


@settings(max_examples=150, deadline=None)
@given(integer_sets(side=3, most=20))
def test_front_equals_its_definition(points):
    assert non_dominated(points).tolist() == front_by_definition(points)


def test_front_does_not_depend_on_order_or_units():
    points = random_points(400, 3)
    mask = non_dominated(points)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    assert torch.equal(non_dominated(points[order]), mask[order])
    assert torch.equal(non_dominated(points * torch.tensor([1e-9, 1.0, 1e9])), mask)
    assert bool(non_dominated(sphere(300, 4)).all())


# -------------------------------------------------------------------------------------------------------- thinning


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 4), st.sampled_from([0.02, 0.1, 0.5, 3.0]))
def test_thinning_covers_all_points_with_few_of_the_front(seed, size, epsilon):
    points = random_points(60, size, seed)
    mask = epsilon_dominance_thinning(points, epsilon)
    kept = points[mask]
    covered = (kept[None] + epsilon * (1 + 1e-12) >= points[:, None]).all(dim=2).any(dim=1)
    assert bool(covered.all()) and bool((mask <= non_dominated(points)).all())
    boxes = torch.floor(kept / epsilon)
    assert len(torch.unique(boxes, dim=0)) == len(boxes) and bool(non_dominated(boxes).all())
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed % 1000))
    assert torch.equal(epsilon_dominance_thinning(points[order], epsilon), mask[order])


def test_thinning_with_small_boxes_keeps_each_place_once_and_with_large_boxes_the_best_corner():
    points = torch.tensor([[1.0, 5.0], [4.0, 2.0], [1.0, 5.0], [3.0, 3.0], [0.0, 0.0]])
    assert epsilon_dominance_thinning(points, 1e-3).tolist() == [True, True, False, True, False]
    assert epsilon_dominance_thinning(points, 10.0).tolist() == [False, False, False, True, False]
    # (5, 3) is nearer to the corner (10, 10), though (1, 5) is nearer to the lower one
    assert epsilon_dominance_thinning([(1, 5), (5, 3)], 10.0).tolist() == [False, True]
    # objectives may have sides of their own
    assert epsilon_dominance_thinning(points, [10.0, 1e-3]).tolist() == [True, False, False, False, False]
    for wrong in (0.0, [1.0, -1.0], [1.0], float("inf")):
        with pytest.raises(ValueError, match="epsilon"):
            epsilon_dominance_thinning(points, wrong)


# --------------------------------------------------------------------------------------------------------- archive


@settings(max_examples=60, deadline=None)
@given(integer_sets(sizes=(2, 3), side=5, most=30), st.lists(st.integers(0, 30), max_size=6))
def test_the_archive_is_the_same_for_every_division(points, cuts):
    archive = ParetoArchive(points.shape[1], reference=[0] * points.shape[1])
    for part in np.split(points, sorted(min(c, len(points)) for c in cuts)):
        now = archive.add(part)
        fresh = archive.front[archive.front >= len(archive) - len(part)] - (len(archive) - len(part))
        assert torch.nonzero(now).flatten().tolist() == fresh.tolist()
    assert archive.front.tolist() == torch.nonzero(non_dominated(points)).flatten().tolist()
    assert archive.hypervolume() == cells(points, 5)
    assert torch.equal(archive.values, torch.from_numpy(points)) and len(archive) == len(points)
    assert archive.ids.tolist() == list(range(len(points)))


def test_the_archive_merges_in_blocks(monkeypatch):
    monkeypatch.setattr(pareto, "_BLOCK", 64)
    points = torch.cat((sphere(80, 3) * 0.9, sphere(80, 3, seed=1)))
    archive = ParetoArchive(3)
    for part in points.split(20):
        archive.add(part)
    assert archive.front.tolist() == torch.nonzero(non_dominated(points)).flatten().tolist()


def test_the_archive_keeps_what_belongs_to_a_sample_and_survives_a_file():
    archive = ParetoArchive(2, num_parameters=2, reference=[0.0, 0.0])
    preferences = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [0.5, 0.5]])
    archive.add(PLANE[:3], ids=[7, 8, 9], parameters=preferences[:3], log_weights=[0.1, 0.2, 0.3])
    archive.add(PLANE[3:], ids=[11, 10], parameters=preferences[3:])
    archive.add([[np.nan, 9.0]], ids=[12], parameters=[[1.0, 0.0]])
    assert archive.invalid_count == 1 and archive.ids[archive.front].tolist() == [7, 9, 11, 10]
    assert archive.log_weights.tolist() == [0.1, 0.2, 0.3, 0.0, 0.0, 0.0]
    groups = archive.by_preference()
    assert groups[0].tolist() == [[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]
    assert [g.tolist() for g in groups[1]] == [[0, 3], [2, 4], [1, 5]]
    nearest = archive.by_preference([[0.9, 0.1], [0.2, 0.8], [-9.0, 9.0]])[1]
    assert [g.tolist() for g in nearest] == [[1, 5], [0, 2, 3, 4], []]
    assert archive.ids[archive.thinned(10.0)].tolist() == [11]

    back = ParetoArchive.from_state_dict(load(save(archive.state_dict())))
    for name, tensor in archive.state_dict().items():
        assert torch.equal(back.state_dict()[name].nan_to_num(-1.0), tensor.nan_to_num(-1.0))
    assert back.hypervolume() == archive.hypervolume() == 13.0
    for one in (archive, back):  # and both go on alike
        one.add([[9.0, 9.0]], parameters=[[0.5, 0.5]])
    assert back.front.tolist() == archive.front.tolist() == [6]
    empty = ParetoArchive.from_state_dict({k: v.numpy() for k, v in ParetoArchive(3).state_dict().items()})
    assert (len(empty), empty.num_objectives, empty.reference) == (0, 3, None)


def test_the_archive_does_not_share_memory_with_its_caller():
    values, archive = torch.ones(2, 2, dtype=torch.float64), ParetoArchive(2)
    archive.add(values)
    values.zero_()
    assert archive.values.tolist() == [[1.0, 1.0]] * 2 and archive.hypervolume([0.0, 0.0]) == 1.0


def test_refusals_of_the_archive():
    archive = ParetoArchive(2, num_parameters=3)
    with pytest.raises(ValueError, match="values has shape"):
        archive.add(torch.zeros(1, 3), parameters=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="parameters=None"):
        archive.add(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="ids has shape"):
        archive.add(torch.zeros(1, 2), parameters=torch.zeros(1, 3), ids=[1, 2])
    assert len(archive) == 0 and len(archive.values) == 0  # a refused row leaves nothing behind
    with pytest.raises(ValueError, match="reference=None"):
        archive.hypervolume()
    with pytest.raises(ValueError, match="num_parameters=0"):
        ParetoArchive(2).by_preference()
    with pytest.raises(ValueError, match=r"preferences has shape"):
        archive.by_preference(torch.zeros(2, 2))
    state = archive.state_dict()
    with pytest.raises(ValueError, match="'ids' is missing"):
        ParetoArchive.from_state_dict({k: v for k, v in state.items() if k != "ids"})
