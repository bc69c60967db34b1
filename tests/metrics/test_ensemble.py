"""Ensemble scores: identities and known expectations, missing cells without a trace, calibration and its controls."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.metrics import (
    block_bootstrap,
    compare_forecasts,
    crps,
    energy_score,
    latitude_weights,
    rank_histogram,
    reliability_index,
    spread_skill,
    weighted_mean,
)

KINDS = ("fair", "biased", "almost_fair")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def by_definition(x: list[float], y: float, kind: str) -> float:
    m = len(x)
    pairs = math.fsum(abs(a - b) for a in x for b in x)
    return math.fsum(abs(a - y) for a in x) / m - pairs / (2 * m * (m - 1 if kind == "fair" else m))


@pytest.mark.parametrize("backend", ["sorted", "pairwise", "auto"])
@pytest.mark.parametrize("m", [2, 3, 11])
def test_crps_is_its_definition(m: int, backend: str) -> None:
    x, y = normal(m, 5, 2), normal(5, 2, seed=1)
    x[1, 0, 0], y[1, 1] = x[0, 0, 0], x[0, 1, 1]  # equal members, and one that is the observation
    for kind in ("fair", "biased"):
        score = crps(x, y, kind=kind, backend=backend)
        expected = [[by_definition(x[:, i, j].tolist(), float(y[i, j]), kind) for j in range(2)] for i in range(5)]
        torch.testing.assert_close(score, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("m", [2, 5, 40])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.95, 1.0])
def test_almost_fair_mixes_fair_and_biased_in_both_backends(m: int, alpha: float) -> None:
    x, y = normal(m, 200), normal(200, seed=1)
    mixed = alpha * crps(x, y, kind="fair") + (1 - alpha) * crps(x, y, kind="biased")
    for backend in ("sorted", "pairwise"):
        score = crps(x, y, kind="almost_fair", alpha=alpha, backend=backend)
        torch.testing.assert_close(score, mixed, rtol=0, atol=1e-12)


def test_one_member_has_a_biased_score_the_absolute_error() -> None:
    x, y = normal(1, 7), normal(7, seed=1)
    for backend in ("sorted", "pairwise"):
        torch.testing.assert_close(crps(x, y, kind="biased", backend=backend), (x[0] - y).abs())
    torch.testing.assert_close(energy_score(x[..., None], y[:, None], "biased"), (x[0] - y).abs())


@pytest.mark.parametrize("m", [2, 10])
def test_the_fair_score_of_a_perfect_ensemble_does_not_depend_on_its_size(m: int) -> None:
    x, y = normal(m, 100_000, seed=m), normal(100_000, seed=m + 1)
    for kind, expected in (("fair", 1.0), ("biased", 1.0 + 1.0 / m), ("almost_fair", 1.0 + 0.05 / m)):
        score = crps(x, y, kind=kind)
        error = float(score.std()) / math.sqrt(score.numel())
        assert abs(float(score.mean()) - expected / math.sqrt(math.pi)) < 4 * error
    assert abs(float(crps(x, y, kind="biased").mean()) - 1 / math.sqrt(math.pi)) > 20 * error


def test_a_large_gaussian_ensemble_has_the_closed_form() -> None:
    mean, std = 1.5, 2.0
    p = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000  # quantiles in place of draws: no noise
    x = mean + std * math.sqrt(2.0) * torch.erfinv(2 * p - 1)
    y = torch.tensor([-3.0, 0.0, 1.5, 2.0, 7.0], dtype=torch.float64)
    z = (y - mean) / std
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    exact = std * (z * torch.erf(z / math.sqrt(2.0)) + 2 * density - 1 / math.sqrt(math.pi))
    torch.testing.assert_close(crps(x[:, None].expand(-1, 5), y, kind="biased"), exact, rtol=0, atol=2e-3)


def test_crps_is_that_of_scoringrules() -> None:
    scoringrules = pytest.importorskip("scoringrules")
    x, y = normal(9, 50), normal(50, seed=1)
    for kind, estimator in (("fair", "fair"), ("biased", "nrg")):
        theirs = scoringrules.crps_ensemble(y.numpy(), x.T.numpy(), estimator=estimator, backend="numpy")
        torch.testing.assert_close(crps(x, y, kind=kind), torch.as_tensor(theirs), rtol=0, atol=1e-12)
    x, y = normal(6, 20, 3), normal(20, 3, seed=1)
    theirs = scoringrules.es_ensemble(y.numpy(), x.movedim(0, 1).numpy(), backend="numpy")
    torch.testing.assert_close(energy_score(x, y, "biased"), torch.as_tensor(theirs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["sorted", "pairwise"])
def test_crps_gradients_are_finite_differences(kind: str, backend: str) -> None:
    x, y = normal(4, 6).requires_grad_(), normal(6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: crps(a, b, kind=kind, backend=backend), (x, y))


@pytest.mark.parametrize("kind", KINDS)
def test_energy_score_gradients_are_finite_differences_and_finite_where_points_coincide(kind: str) -> None:
    x, y = normal(4, 3, 2).requires_grad_(), normal(3, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: energy_score(a, b, kind), (x, y))
    same = torch.zeros(3, 2, 2, requires_grad=True)
    score = energy_score(same, torch.zeros(2, 2), kind)
    score.sum().backward()
    assert not score.any() and same.grad is not None and not same.grad.any()


def test_energy_score_of_one_dimension_is_crps_and_sees_dependence_in_two() -> None:
    x, y = normal(7, 30), normal(30, seed=1)
    for kind in KINDS:
        torch.testing.assert_close(energy_score(x[..., None], y[:, None], kind), crps(x, y, kind=kind))
    truth = normal(4000, 1, seed=2).expand(-1, 2)  # both components are equal
    right, wrong = normal(8, 4000, 1, seed=3).expand(-1, -1, 2), normal(8, 4000, 2, seed=4)
    gain = energy_score(wrong, truth) - energy_score(right, truth)
    assert float(gain.mean()) > 4 * float(gain.std()) / math.sqrt(4000)
    blind = crps(wrong, truth).mean() - crps(right, truth).mean()
    assert abs(float(blind)) < 0.02 < float(gain.mean())


@pytest.mark.parametrize("backend", ["sorted", "pairwise"])
def test_a_missing_observation_leaves_no_trace(backend: str) -> None:
    x, y = normal(5, 8), normal(8, seed=1)
    gaps = torch.tensor([False, True, False, False, False, True, False, False])
    weights = torch.rand(8, generator=seeded(2), dtype=torch.float64)

    def score_and_gradient(x: Tensor, y: Tensor, w: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        score = crps(leaf, y, backend=backend, mask=mask)
        weighted_mean(score, w).backward()
        assert leaf.grad is not None
        return score.detach(), leaf.grad

    without, gradient = score_and_gradient(x[:, ~gaps], y[~gaps], weights[~gaps])
    spoilt = torch.where(gaps, math.nan, x)
    for members, target, mask in (
        (x, torch.where(gaps, math.nan, y), None),
        (x, y, ~gaps),
        (spoilt, torch.where(gaps, math.nan, y), None),
        (spoilt, y, ~gaps),
    ):
        score, slope = score_and_gradient(members, target, weights, mask)
        assert torch.equal(score.isnan(), gaps) and torch.equal(score[~gaps], without)
        assert not slope[:, gaps].any(), "exactly zero, not NaN"
        torch.testing.assert_close(slope[:, ~gaps], gradient, rtol=1e-14, atol=0)
    score, _ = score_and_gradient(spoilt, y, weights)
    assert torch.equal(score.isnan(), gaps), "a NaN member is not hidden"


def test_weighted_mean_of_nothing_is_nan_with_gradient_zero() -> None:
    values = torch.full((2, 3), math.nan, requires_grad=True)
    mean = weighted_mean(values, dim=1)
    mean.sum().backward()
    assert mean.isnan().all() and values.grad is not None and not values.grad.any()
    known = torch.tensor([[1.0, math.nan, 4.0]])
    assert float(weighted_mean(known, torch.tensor([2.0, 9.0, 1.0]))) == 2.0
    assert weighted_mean(known.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("backend", ["sorted", "pairwise"])
def test_low_precision_is_computed_in_float32_and_never_negative(backend: str) -> None:
    x, y = (3.0 + normal(16, 20_000)).bfloat16(), (3.0 + normal(20_000, seed=1)).bfloat16()
    for members in (x, x[:2]):
        for kind in KINDS:
            score = crps(members, y, kind=kind, backend=backend)
            exact = crps(members.double(), y.double(), kind=kind)
            assert score.dtype == torch.float32 and float(score.min()) >= 0.0
            torch.testing.assert_close(score.double(), exact, rtol=1e-5, atol=1e-6)
    control = (x[:2] - y).abs().mean(dim=0) - 0.5 * (x[0] - x[1]).abs()  # the difference of large terms, in bfloat16
    assert control.dtype == torch.bfloat16 and float(control.min()) < 0.0


@pytest.mark.parametrize("m", [2, 8, 50])
def test_spread_skill_of_a_perfect_ensemble_is_one_at_any_size(m: int) -> None:
    x, y = normal(m, 40_000, seed=m), normal(40_000, seed=m + 1)
    assert float(spread_skill(x, y)) == pytest.approx(1.0, abs=0.02)
    naive = x.var(dim=0, correction=0).mean().sqrt() / (x.mean(dim=0) - y).square().mean().sqrt()
    control = math.sqrt((m + 1) / m) * float(naive)
    assert control == pytest.approx(math.sqrt((m - 1) / m), abs=0.02)
    assert float(spread_skill(0.5 * x, y)) < 0.7


def test_spread_skill_leaves_gaps_out_and_keeps_other_dimensions() -> None:
    x, y = normal(4, 30, 2), normal(30, 2, seed=1)
    y[5:, 1] = math.nan
    y[3, 0] = math.nan
    ratio = spread_skill(x, y)
    torch.testing.assert_close(ratio[1], spread_skill(x[:, :5, 1], y[:5, 1]))
    kept = torch.arange(30) != 3
    torch.testing.assert_close(ratio[0], spread_skill(x[:, kept, 0], y[kept, 0]))
    assert spread_skill(x, y, dim=(0, 1)).shape == ()
    assert float(spread_skill(x[:, :2], torch.full((2, 2), math.nan)).isnan().sum()) == 2


def chi_square(counts: Tensor) -> float:
    expected = float(counts.sum()) / len(counts)
    return float(((counts - expected) ** 2).sum()) / expected


def test_rank_histograms_are_flat_or_a_u() -> None:
    m, n = 9, 20_000
    x, y = normal(m, n), normal(n, seed=1)
    flat = rank_histogram(x, y, generator=seeded(2))
    assert int(flat.sum()) == n and chi_square(flat) < 27.9  # the 99.9 % quantile at 9 degrees of freedom
    narrow = rank_histogram(0.5 * x, y, generator=seeded(2))
    assert chi_square(narrow) > 1000 and int(narrow[[0, -1]].min()) > 2 * int(narrow[1:-1].max())
    noise = math.sqrt(2 * m / (math.pi * n))
    assert reliability_index(flat) < 2 * noise < 10 * noise < reliability_index(narrow)
    assert reliability_index(torch.tensor([4, 0])) == 1.0


def test_ties_are_broken_at_random_and_gaps_left_out() -> None:
    m, n = 4, 10_000
    x, y = normal(m, n).clamp_min(0.3), normal(n, seed=1).clamp_min(0.3)  # much rain of exactly the same amount
    assert chi_square(rank_histogram(x, y, generator=seeded(2))) < 18.5  # 99.9 % at 4
    assert chi_square(torch.bincount((x < y).sum(dim=0), minlength=m + 1)) > 1000, "the control breaks none"
    y[: n // 2] = math.nan
    x[:, : n // 4] = math.nan
    assert int(rank_histogram(x, y, generator=seeded(2)).sum()) == n // 2


def test_latitude_weights_are_areas_with_mean_one() -> None:
    edges = torch.linspace(-90.0, 90.0, 181, dtype=torch.float64)
    weights = latitude_weights((edges[1:] + edges[:-1]) / 2)
    areas = torch.deg2rad(edges).sin().diff()
    torch.testing.assert_close(weights, areas / areas.mean(), rtol=1e-4, atol=0)
    assert latitude_weights([90.0, 0.0, -90.0]).tolist() == pytest.approx([0.0, 3.0, 0.0], abs=1e-6)
    for wrong in ([0.0, 180.0], [0.0, math.nan], [90.0, -90.0], [[0.0]], []):
        with pytest.raises(ConfigError, match="-90 to 90"):
            latitude_weights(torch.tensor(wrong))


def autoregression(steps: int, series: int, memory: float, seed: int = 0) -> Tensor:
    noise, rows = normal(steps, series, seed=seed), []
    rows.append(noise[0] / math.sqrt(1 - memory**2))
    for t in range(1, steps):
        rows.append(memory * rows[-1] + noise[t])
    return torch.stack(rows)


def test_blocks_cover_the_mean_of_a_dependent_series_and_single_steps_do_not() -> None:
    values = autoregression(400, 300, 0.6)  # 300 series, of which the mean 0 is known

    def coverage(block_length: int) -> float:
        low, high = block_bootstrap(values, block_length, 300, generator=seeded(1))
        return float(((low <= 0) & (high >= 0)).double().mean())

    assert 0.88 < coverage(20) < 0.98
    assert coverage(1) < 0.75


def test_block_bootstrap_is_the_same_for_a_seed_and_takes_other_statistics() -> None:
    values = normal(101, 3)
    low, high = block_bootstrap(values, 7, generator=seeded(3))
    again = block_bootstrap(values, 7, generator=seeded(3), statistic=lambda series: series.mean(dim=1))
    assert torch.equal(low, again[0]) and torch.equal(high, again[1])
    assert bool(((low < values.mean(dim=0)) & (values.mean(dim=0) < high)).all())
    low, high = block_bootstrap(values, 7, generator=seeded(3), statistic=lambda series: series.std(dim=1))
    assert low.shape == (3,) and bool(((low > 0.6) & (high < 1.4)).all())
    ramp = torch.arange(100, dtype=torch.float64)
    low, high = block_bootstrap(
        ramp, 50, generator=seeded(), statistic=lambda series: series.diff(dim=1).abs().max(1)[0]
    )
    assert 1.0 <= float(low) <= float(high) <= 99.0, "blocks stay in order"


def test_forecasts_are_compared_by_variable() -> None:
    noise = autoregression(600, 3, 0.5)
    b = 5.0 + autoregression(600, 3, 0.5, seed=1)
    a = b + 0.3 * noise + torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64)
    found = compare_forecasts(a, b, 20, generator=seeded(2))
    assert found.verdict.tolist() == [1, 0, -1] and found.verdict.dtype == torch.int64
    torch.testing.assert_close(found.relative_change, a.mean(dim=0) / b.mean(dim=0) - 1)
    assert bool((found.low <= found.high).all())
    assert compare_forecasts(b, b, 20, generator=seeded()).verdict.tolist() == [0, 0, 0]


REFUSED = {
    "one member": (lambda: crps(torch.zeros(1, 3), torch.zeros(3)), "M >= 2.*kind='biased'"),
    "one member, spread": (lambda: spread_skill(torch.zeros(1, 3), torch.zeros(3)), "which the variance needs$"),
    "members last": (lambda: crps(torch.zeros(3, 5), torch.zeros(3)), "movedim"),
    "broadcasting": (lambda: crps(torch.zeros(5, 3), torch.zeros(1)), r"\(M, \*shape\)"),
    "an array": (lambda: crps(torch.zeros(5, 3), [0.0] * 3), "type list"),
    "kind": (lambda: crps(torch.zeros(5, 3), torch.zeros(3), kind="almostfair"), "Did you mean 'almost_fair'"),
    "kind of energy": (lambda: energy_score(torch.zeros(5, 3, 1), torch.zeros(3, 1), "unfair"), "Did you mean 'fair'"),
    "backend": (lambda: crps(torch.zeros(5, 3), torch.zeros(3), backend="sort"), "Did you mean 'sorted'"),
    "alpha": (lambda: crps(torch.zeros(5, 3), torch.zeros(3), kind="almost_fair", alpha=1.5), "from 0"),
    "mask": (lambda: crps(torch.zeros(5, 3), torch.zeros(3), mask=torch.ones(2).bool()), "mask has shape"),
    "fields": (lambda: energy_score(torch.zeros(5, 3), torch.zeros(3)), r"expected \(B, D\)"),
    "weights": (lambda: weighted_mean(torch.zeros(3), torch.tensor([1.0, -1.0, 1.0])), ">= 0"),
    "no generator": (lambda: rank_histogram(torch.zeros(5, 3), torch.zeros(3), generator=None), "manual_seed"),
    "NaN members": (
        lambda: rank_histogram(torch.tensor([[math.nan]]), torch.zeros(1), generator=seeded()),
        "1 members",
    ),
    "no counts": (lambda: reliability_index(torch.zeros(3)), "one is positive"),
    "NaN values": (lambda: block_bootstrap(torch.tensor([0.0, math.nan]), 1, generator=seeded()), "1 not finite"),
    "one block": (lambda: block_bootstrap(torch.zeros(10), 6, generator=seeded()), "at most 5"),
    "scores": (lambda: compare_forecasts(torch.zeros(9, 2), torch.zeros(9), 2, generator=seeded()), r"\(T, V\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        call()
