from __future__ import annotations

import math

import pytest
import torch

from genkit.data.mixtures import StableMixture
from genkit.metrics.tails import (
    RobustWhitening,
    bootstrap_interval,
    compare_tails,
    ecf_tail_index,
    exceedance,
    hill,
    hill_plot,
    quantile_ratio,
    tail_ks,
)


def pareto(alpha: float, n: int) -> torch.Tensor:
    """The exact quantiles of P(X > x) = x^(-alpha) at n midpoints, shuffled."""
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return u[torch.randperm(n, generator=torch.Generator().manual_seed(0))] ** (-1.0 / alpha)


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.7, 1.5, 3.0])
@pytest.mark.parametrize("fraction", [0.005, 0.01, 0.05])
def test_hill_of_exact_pareto_quantiles(alpha, fraction):
    estimate = hill(pareto(alpha, 100_000), fraction=fraction)
    assert estimate.tail_index == pytest.approx(alpha, rel=0.01)
    assert estimate.k == int(fraction * 100_000)
    assert estimate.standard_error == pytest.approx(estimate.tail_index / math.sqrt(estimate.k))


def test_hill_equals_its_formula_on_a_small_sample():
    x = torch.tensor([3.0, -8.0, 1.0, 2.0, 0.5])
    assert hill(x, k=2).tail_index == pytest.approx(2 / (math.log(8 / 2) + math.log(3 / 2)))
    assert hill(x, k=2, side="upper").tail_index == pytest.approx(2 / (math.log(3 / 1) + math.log(2 / 1)))
    with pytest.raises(ValueError, match="needs positive values"):
        hill(x, k=1, side="lower")


def test_standard_error_matches_repeated_samples():
    u = torch.rand(400, 2000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    estimates = [hill(row ** (-1 / 2.0), k=100) for row in u]
    spread = torch.tensor([e.tail_index for e in estimates]).std()
    assert float(spread) == pytest.approx(2.0 / math.sqrt(100), rel=0.12)


def test_hill_and_ratios_do_not_depend_on_the_unit():
    x, y = pareto(1.7, 20_000), normal(20_000)
    assert hill(x * 1e-6, fraction=0.02).tail_index == pytest.approx(hill(x, fraction=0.02).tail_index, rel=1e-9)
    assert compare_tails(x * 7, y * 7).quantile_ratios == pytest.approx(compare_tails(x, y).quantile_ratios)
    assert tail_ks(x * 7, y * 7).distance == pytest.approx(tail_ks(x, y).distance)
    assert ecf_tail_index(x * 7).alpha == pytest.approx(ecf_tail_index(x).alpha)


def test_hill_plot_holds_every_single_estimate():
    x = pareto(2.0, 5000)
    plot = hill_plot(x, max_fraction=0.05)
    for k in (1, 7, 250):
        assert float(plot.tail_index[k - 1]) == pytest.approx(hill(x, k=k).tail_index)
    assert torch.equal(plot.k, torch.arange(1, 251))


def test_hill_is_biased_near_alpha_two_and_the_characteristic_function_is_not():
    data = StableMixture(9, alpha=1.9)
    sample, label = data.draw(200_000)
    x = (sample - data.centres[label])[:, 0]
    assert hill(x, fraction=0.05).tail_index > 3.0
    assert ecf_tail_index(x).alpha == pytest.approx(1.9, abs=0.02)
    assert ecf_tail_index(normal(200_000) + 5.0).alpha == pytest.approx(2.0, abs=0.02)
    assert ecf_tail_index(normal(200_000)).scale == pytest.approx(1 / math.sqrt(2), rel=0.02)


def test_quantile_ratio_of_scaled_samples_is_the_scale():
    x = pareto(1.5, 20_000)
    assert quantile_ratio(1.3 * x, x) == pytest.approx({0.99: 1.3, 0.999: 1.3, 0.9999: 1.3})
    assert math.isnan(quantile_ratio(x[:500], x[:500])[0.999])  # no value lies above it


def test_tail_ks_equals_brute_force():
    a, b = normal(700, 1), 1.3 * normal(900, 2)
    result = tail_ks(a, b, 0.9)
    tail_a, tail_b = (v.abs()[v.abs() > result.threshold] for v in (a, b))
    brute = max(abs(float((tail_a <= x).double().mean() - (tail_b <= x).double().mean())) for x in b.abs().tolist())
    brute = max(brute, *(abs(float((tail_a <= x).double().mean() - (tail_b <= x).double().mean())) for x in tail_a))
    assert result.distance == pytest.approx(brute, abs=1e-12)
    assert (result.count, result.reference_count) == (len(tail_a), 90)
    assert result.exceedance_error == pytest.approx(len(tail_a) / 700 - 0.1)


def test_tail_ks_judges_the_shape_and_the_rate_apart():
    x = pareto(2.0, 10_000)  # a Pareto tail keeps its conditional law when scaled above its own threshold only in rate
    same = tail_ks(x, x)
    assert same.distance == 0.0 and same.exceedance_error == 0.0
    assert tail_ks(torch.zeros(100), x).distance == 1.0
    thinner = tail_ks(pareto(2.0, 10_000).clamp_max(same.threshold * 1.5), x)
    assert thinner.exceedance_error == 0.0 and thinner.distance > 0.3


def test_exceedance_of_pareto_is_the_power_law():
    x = pareto(1.5, 10_000)
    points = torch.tensor([1.5, 4.0, 20.0], dtype=torch.float64)
    curve = exceedance(x, points)
    assert torch.allclose(curve.probability, points**-1.5, atol=1e-4)
    full = exceedance(x)
    assert float(full.probability[0]) == pytest.approx(1 - 1e-4) and float(full.probability[-1]) == 0.0


def test_whitened_radius_is_affine_invariant_for_an_elliptical_law():
    z = normal(60_000).reshape(-1, 3)
    mix = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [-3.0, 0.2, 1.0]], dtype=torch.float64)
    x = z @ mix.T + 5.0
    radius = RobustWhitening.fit(x).radius(x)
    outer = z.norm(dim=1) > 1.5
    assert float((radius / z.norm(dim=1) - 1)[outer].abs().max()) < 0.06
    assert float((x.norm(dim=1) / z.norm(dim=1) - 1)[outer].abs().max()) > 1.0  # the control: no whitening
    heavy = x.clone()
    heavy[:500] *= 1e9  # 2.5 % of outliers move a median-based scale little, and a covariance altogether
    assert float((RobustWhitening.fit(heavy).radius(x) / radius - 1).abs().median()) < 0.1


def test_bootstrap_interval_has_its_coverage_and_repeats():
    covered = 0
    for seed in range(60):
        x = normal(100, seed) + 3.0
        interval = bootstrap_interval(lambda v: float(v.mean()), x, coverage=0.9)
        covered += interval.low <= 3.0 <= interval.high
    assert 46 <= covered <= 60
    assert interval == bootstrap_interval(lambda v: float(v.mean()), x, coverage=0.9)


def test_comparison_takes_equal_n_and_k():
    x, y = pareto(1.5, 8000), pareto(1.5, 2000)
    result = compare_tails(x, y)
    assert (result.n, result.k, result.hill.k, result.reference_hill.k) == (2000, 100, 100, 100)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_samples_are_counted_and_announced(bad):
    x = pareto(1.5, 1000)
    spoiled = torch.cat((x, torch.full((7,), bad, dtype=torch.float64)))
    with pytest.warns(UserWarning, match="7 of 1007 samples are NaN or infinite"):
        estimate = hill(spoiled, k=50)
    assert (estimate.nonfinite, estimate.n) == (7, 1000)
    assert estimate.tail_index == hill(x, k=50).tail_index
    with pytest.warns(UserWarning):
        assert compare_tails(spoiled, x).nonfinite == 7
    with pytest.raises(ValueError, match="no finite value"):
        hill(spoiled[-7:], k=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of k and fraction"),
        ({"k": 3, "fraction": 0.1}, "exactly one"),
        ({"fraction": 1.5}, "fraction must lie"),
        ({"k": 100}, "below the 100 finite values"),
        ({"k": 0}, "at least 1"),
        ({"k": 3, "side": "top"}, "side must be one of"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        hill(pareto(1.5, 100), **options)
    with pytest.raises(ValueError, match="one column"):
        hill(torch.ones(10, 2), k=3)
