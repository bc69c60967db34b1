from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from genkit.errors import ConfigError
from genkit.metrics.risk import (
    christoffersen,
    diebold_mariano,
    es_residual_test,
    expected_shortfall,
    fz0_score,
    kupiec,
    quantile_score,
    value_at_risk,
)

LEVELS = (0.975, 0.99)


def midpoints(law, n: int = 400_000) -> torch.Tensor:
    """Exact quantiles of a law at n midpoints, as returns."""
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return torch.from_numpy(law.ppf(u.numpy()))


def t_shortfall(nu: float, level: float) -> float:
    q = stats.t.ppf(level, nu)
    return stats.t.pdf(q, nu) * (nu + q * q) / ((nu - 1) * (1 - level))


@pytest.mark.parametrize("level", LEVELS)
def test_normal_and_student_t_closed_forms(level):
    normal = midpoints(stats.norm())
    assert float(value_at_risk(normal, level)) == pytest.approx(stats.norm.ppf(level), rel=1e-3)
    shortfall = stats.norm.pdf(stats.norm.ppf(level)) / (1 - level)
    assert float(expected_shortfall(normal, level)) == pytest.approx(shortfall, rel=1e-3)
    student = midpoints(stats.t(4))
    assert float(value_at_risk(student, level)) == pytest.approx(stats.t.ppf(level, 4), rel=1e-3)
    assert float(expected_shortfall(student, level)) == pytest.approx(t_shortfall(4, level), rel=5e-3)


def test_var_and_es_of_a_small_sample_equal_the_definition():
    returns = -torch.arange(1.0, 11.0)  # losses 1 … 10
    assert float(value_at_risk(returns, 0.8)) == 8.0 and float(expected_shortfall(returns, 0.8)) == pytest.approx(9.5)
    # (1/.25) ∫_.75^1: half a cell of 8, then 9 and 10
    assert float(value_at_risk(returns, 0.75)) == 8.0
    assert float(expected_shortfall(returns, 0.75)) == pytest.approx((0.05 * 8 + 0.1 * 9 + 0.1 * 10) / 0.25)


def test_risk_is_homogeneous_and_moves_with_the_mean():
    x = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for risk in (value_at_risk, expected_shortfall):
        assert torch.allclose(risk(3 * x - 1, 0.99), 3 * risk(x, 0.99) + 1)
        assert torch.equal(risk(x, 0.99), torch.stack([risk(row, 0.99) for row in x]))


def test_shortfall_is_subadditive():
    x = torch.randn(2, 999, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 3
    assert float(expected_shortfall(x.sum(0), 0.97)) <= float(expected_shortfall(x, 0.97).sum())


def hits(n: int, days: list[int]) -> torch.Tensor:
    result = torch.zeros(n, dtype=torch.bool)
    result[days] = True
    return result


def test_kupiec_equals_hand_computed_ratios():
    # n = 250, x = 7, τ = .01: 2 [7 log .028 + 243 log .972 - 7 log .01 - 243 log .99]
    by_hand = 2 * (7 * math.log(0.028 / 0.01) + 243 * math.log(0.972 / 0.99))
    result = kupiec(hits(250, list(range(7))), 0.99)
    assert result.statistic == pytest.approx(by_hand) == pytest.approx(5.497, abs=1e-3)
    assert result.p_value == pytest.approx(stats.chi2.sf(by_hand, 1))
    none = kupiec(hits(250, []), 0.99)
    assert none.statistic == pytest.approx(-500 * math.log(0.99)) == pytest.approx(5.025, abs=1e-3)
    assert kupiec(hits(200, [3, 90]), 0.99).statistic == pytest.approx(0.0, abs=1e-9)  # the rate is exactly 1 %
    assert kupiec(hits(10, list(range(10))), 0.99).statistic == pytest.approx(-20 * math.log(0.01))


@pytest.mark.parametrize(
    "days", [[], [0], [249], [3, 4, 5, 90], [10, 60, 110], list(range(0, 250, 2)), list(range(250))]
)
def test_christoffersen_equals_brute_force(days):
    v = hits(250, days)
    count = [[0, 0], [0, 0]]
    for a, b in zip(v[:-1].tolist(), v[1:].tolist(), strict=True):
        count[a][b] += 1

    def log_likelihood(probability) -> float:
        total = 0.0
        for state in (0, 1):
            for after in (0, 1):
                p = probability(state) if after else 1 - probability(state)
                total += count[state][after] * math.log(p) if count[state][after] else 0.0
        return total

    free = log_likelihood(lambda s: count[s][1] / max(sum(count[s]), 1))
    pooled = log_likelihood(lambda s: (count[0][1] + count[1][1]) / 249)
    result = christoffersen(v, 0.99)
    assert result.transitions == (tuple(count[0]), tuple(count[1]))
    assert result.independence.statistic == pytest.approx(2 * (free - pooled), abs=1e-9)
    coverage = 2 * (free - log_likelihood(lambda s: 0.01))
    assert result.conditional_coverage.statistic == pytest.approx(coverage, abs=1e-9)
    assert result.conditional_coverage.p_value == pytest.approx(stats.chi2.sf(coverage, 2))
    assert result.independence.p_value == pytest.approx(stats.chi2.sf(max(2 * (free - pooled), 0), 1), abs=1e-9)


def test_clusters_are_seen_and_spread_violations_are_not():
    clustered, spread = hits(1000, list(range(500, 510))), hits(1000, list(range(50, 1000, 100)))
    assert kupiec(clustered, 0.99).p_value == kupiec(spread, 0.99).p_value > 0.9
    assert christoffersen(clustered, 0.99).independence.p_value < 1e-6
    assert christoffersen(spread, 0.99).independence.p_value > 0.5


def test_p_values_of_true_forecasts_are_about_uniform():
    generator = torch.Generator().manual_seed(4)
    p = [kupiec(torch.rand(1000, generator=generator) < 0.025, 0.975).p_value for _ in range(400)]
    assert 0.02 < sum(v < 0.05 for v in p) / 400 < 0.09
    wrong = [kupiec(torch.rand(1000, generator=generator) < 0.05, 0.975).p_value for _ in range(100)]
    assert sum(v < 0.05 for v in wrong) > 90


@pytest.mark.parametrize("level", LEVELS)
def test_scores_are_lowest_at_the_truth(level):
    losses = -midpoints(stats.t(4), 100_000)
    var = torch.tensor(stats.t.ppf(level, 4), dtype=torch.float64)
    es = torch.tensor(t_shortfall(4, level), dtype=torch.float64)
    best = float(quantile_score(losses, var, level).mean())
    assert all(float(quantile_score(losses, f * var, level).mean()) > best for f in (0.8, 0.95, 1.05, 1.2))
    best = float(fz0_score(losses, var, es, level).mean())
    for f, g in ((0.9, 1.0), (1.05, 1.0), (1.0, 0.9), (1.0, 1.1), (0.9, 0.9), (1.1, 1.1)):
        assert float(fz0_score(losses, f * var, g * es, level).mean()) > best
    # the control: shortfall alone has no score; a squared error to the loss is lowest far from it
    assert float((losses - es).square().mean()) > float(losses.square().mean())


def test_scores_of_single_days_equal_hand_values():
    loss, var = torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])
    assert quantile_score(loss, var, 0.99).tolist() == pytest.approx([0.01, 0.99])
    fz = fz0_score(loss, var, torch.tensor([4.0, 4.0]), 0.99)
    assert fz.tolist() == pytest.approx([0.5 + math.log(4) - 1, 25 + 0.5 + math.log(4) - 1])


def test_fz0_differences_do_not_depend_on_the_unit():
    losses = -midpoints(stats.norm(), 1000)
    low, high = torch.tensor([[1.9, 2.4], [2.1, 2.6]], dtype=torch.float64)
    difference = fz0_score(losses, *low, 0.975) - fz0_score(losses, *high, 0.975)
    scaled = fz0_score(9 * losses, *(9 * low), 0.975) - fz0_score(9 * losses, *(9 * high), 0.975)
    assert torch.allclose(difference, scaled, atol=1e-9)


def test_fz0_refuses_impossible_forecasts():
    with pytest.raises(ValueError, match="1 of 2 forecasts"):
        fz0_score(torch.ones(2), torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0]), 0.99)


def test_residual_test_keeps_the_truth_and_finds_a_short_shortfall():
    generator = torch.Generator().manual_seed(6)
    losses = torch.randn(20_000, generator=generator, dtype=torch.float64)
    var = torch.full_like(losses, stats.norm.ppf(0.975))
    es = torch.full_like(losses, stats.norm.pdf(stats.norm.ppf(0.975)) / 0.025)
    assert es_residual_test(losses, var, es).p_value > 0.05
    assert es_residual_test(losses, var, 0.93 * es).p_value < 0.01
    assert math.isnan(es_residual_test(losses[:100].clamp_max(0), var[:100], es[:100]).p_value)


def test_diebold_mariano_equals_the_t_statistic_without_lags_and_is_antisymmetric():
    generator = torch.Generator().manual_seed(7)
    a, b = torch.rand(2, 500, generator=generator, dtype=torch.float64)
    plain = diebold_mariano(a, b, lags=0)
    d = a - b
    assert plain.statistic == pytest.approx(float(d.mean() / (d.std(correction=0) / math.sqrt(500))))
    assert plain.p_value == pytest.approx(2 * stats.norm.sf(abs(plain.statistic)))
    assert diebold_mariano(b, a).statistic == pytest.approx(-diebold_mariano(a, b).statistic)
    assert diebold_mariano(a, a).p_value == 1.0
    assert diebold_mariano(a, a + 0.2 + 0.1 * b).p_value < 1e-6


def test_diebold_mariano_needs_its_lags_for_dependent_scores():
    generator = torch.Generator().manual_seed(8)
    rejected = {0: 0, 10: 0}
    for _ in range(200):
        noise = torch.randn(510, generator=generator, dtype=torch.float64).unfold(0, 11, 1).mean(1)
        for lags in rejected:
            rejected[lags] += diebold_mariano(noise, torch.zeros_like(noise), lags=lags).p_value < 0.05
    assert rejected[10] < 40 < 80 < rejected[0]


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="level must lie"):
        value_at_risk(torch.ones(10), 0.01)
    with pytest.raises(ValueError, match="2 non-finite"):
        value_at_risk(torch.tensor([1.0, math.nan, math.inf]), 0.99)
    with pytest.raises(ValueError, match="bool tensor"):
        kupiec(torch.ones(10), 0.99)
    with pytest.raises(ValueError, match="n >= 10 days"):
        diebold_mariano(torch.ones(10), torch.ones(11))
    with pytest.raises(ConfigError, match="same days"):
        fz0_score(torch.ones(5), torch.ones(4), torch.ones(4), 0.99)
    with pytest.raises(ConfigError, match="lags must lie"):
        diebold_mariano(torch.ones(12), torch.zeros(12), lags=50)
