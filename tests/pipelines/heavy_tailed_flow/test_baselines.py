from __future__ import annotations

import math

import pytest
import torch
from scipy import integrate, stats

from genkit.metrics.risk import value_at_risk_and_shortfall
from genkit.pipelines.heavy_tailed_flow.baselines.classical import (
    FilteredHistoricalSimulation,
    Gaussian,
    GeneralisedPareto,
    MultivariateT,
    PeaksOverThreshold,
    rolling_historical_simulation,
)
from genkit.samplers.noise import draw_keys

SHAPE = torch.tensor([[1.0, 0.6, 0.1], [0.6, 2.0, -0.2], [0.1, -0.2, 0.5]], dtype=torch.float64)
MEAN = torch.tensor([0.1, -0.2, 0.0], dtype=torch.float64)
TRUTH = MultivariateT(4.0, MEAN, SHAPE)
WEIGHTS = torch.tensor([[1.0, 0.0, 0.0], [0.5, 1.5, 2.0]], dtype=torch.float64)


def keys(n: int, seed: int = 0):
    return draw_keys(torch.Generator().manual_seed(seed), n)


@pytest.fixture(scope="module")
def rows():
    return TRUTH.sample(keys(100_000))


def test_student_t_likelihood_recovers_the_law(rows):
    fit = MultivariateT.fit(rows)
    assert fit.nu == pytest.approx(4.0, rel=0.03)
    assert torch.allclose(fit.shape, SHAPE, atol=0.03) and torch.allclose(fit.mean, MEAN, atol=0.02)


def test_student_t_fit_is_a_maximum_of_the_likelihood(rows):
    part = rows[:3000]
    fit = MultivariateT.fit(part)

    def likelihood(nu, mean, shape):
        return stats.multivariate_t(mean.numpy(), shape.numpy(), df=nu).logpdf(part.numpy()).mean()

    best = likelihood(fit.nu, fit.mean, fit.shape)
    step = torch.zeros(3, dtype=torch.float64)
    step[1] = 0.02
    for nu, mean, shape in (
        (fit.nu * 1.03, fit.mean, fit.shape),
        (fit.nu * 0.97, fit.mean, fit.shape),
        (fit.nu, fit.mean + step, fit.shape),
        (fit.nu, fit.mean - step, fit.shape),
        (fit.nu, fit.mean, 1.02 * fit.shape),
        (fit.nu, fit.mean, 0.98 * fit.shape),
    ):
        assert likelihood(nu, mean, shape) < best


def test_student_t_fit_is_affine_equivariant(rows):
    part, mix = rows[:2000], torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.1, 0.0], [5.0, 0.0, 1.0]], dtype=torch.float64)
    fit, mixed = MultivariateT.fit(part), MultivariateT.fit(part @ mix.T)
    assert mixed.nu == pytest.approx(fit.nu, rel=1e-3)
    assert torch.allclose(mixed.shape, mix @ fit.shape @ mix.T, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("level", [0.975, 0.99])
@pytest.mark.parametrize("law", [TRUTH, Gaussian(MEAN, SHAPE)], ids=["student_t", "gaussian"])
def test_closed_form_risk_equals_the_samples(law, level):
    empirical = FilteredHistoricalSimulation.fit(law.sample(keys(400_000, seed=5)))
    for exact, measured in zip(law.var_es(WEIGHTS, level), empirical.var_es(WEIGHTS, level), strict=True):
        assert torch.allclose(exact, measured, rtol=0.03)


def test_student_t_shortfall_is_the_mean_beyond_the_quantile():
    (var,), (es,) = (risk[:1] for risk in TRUTH.var_es(WEIGHTS, 0.99))
    law = stats.t(4, loc=-0.1, scale=1.0)
    assert float(var) == pytest.approx(law.ppf(0.99))
    assert float(es) == pytest.approx(integrate.quad(lambda u: law.ppf(u), 0.99, 1)[0] / 0.01, rel=1e-6)


def test_infinite_shortfall_is_refused():
    with pytest.raises(ValueError, match="infinite at nu"):
        MultivariateT(0.9, MEAN, SHAPE).var_es(WEIGHTS, 0.99)
    with pytest.raises(ValueError, match="infinite at xi"):
        GeneralisedPareto(1.0, 0.1, 1.2, 1.0).var_es(0.99)


@pytest.mark.parametrize("xi", [-0.2, 0.0, 0.25, 0.6])
def test_generalised_pareto_risk_equals_the_numeric_integral(xi):
    tail = GeneralisedPareto(threshold=1.3, rate=0.08, xi=xi, beta=0.7)
    excess = stats.genpareto(xi, loc=1.3, scale=0.7)
    for level in (0.975, 0.99, 0.999):
        var, es = tail.var_es(level)
        assert 0.08 * excess.sf(var) == pytest.approx(1 - level)
        shortfall = var + integrate.quad(lambda x: 0.08 * excess.sf(x), var, math.inf)[0] / (1 - level)
        assert es == pytest.approx(shortfall, rel=1e-5)
    with pytest.raises(ValueError, match="lies below the threshold"):
        tail.var_es(0.9)


def test_generalised_pareto_fit_recovers_student_t_tails():
    n = 100_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tail = GeneralisedPareto.fit(torch.from_numpy(stats.t.ppf(u.numpy(), 4)), quantile=0.98)
    assert tail.xi == pytest.approx(0.25, abs=0.04)  # ξ = 1/ν
    assert tail.var_es(0.999)[0] == pytest.approx(stats.t.ppf(0.999, 4), rel=0.01)


def test_peaks_over_threshold_extrapolates_where_scenarios_end(rows):
    part = rows[:4000]
    exact = TRUTH.var_es(WEIGHTS[:1], 0.99)
    fit = PeaksOverThreshold.fit(part)
    assert all(
        float(a) == pytest.approx(float(b), rel=0.1) for a, b in zip(fit.var_es(WEIGHTS[:1], 0.99), exact, strict=True)
    )
    # its own samples agree with its closed form, asset by asset, and keep the dependence of the data
    drawn = fit.sample(keys(200_000, seed=8))
    for measured, closed in zip(
        value_at_risk_and_shortfall(drawn[:, 0], 0.99), fit.var_es(WEIGHTS[:1], 0.99), strict=True
    ):
        assert float(measured) == pytest.approx(float(closed[0]), rel=0.03)
    rank = [torch.corrcoef(x.argsort(0).argsort(0).double().T) for x in (part, drawn)]
    assert torch.allclose(rank[0], rank[1], atol=0.02)
    assert float(drawn.abs().max()) > float(part.abs().max())


def test_samples_belong_to_their_keys(rows):
    many = keys(50)
    for law in (TRUTH, Gaussian(MEAN, SHAPE), FilteredHistoricalSimulation(rows), PeaksOverThreshold.fit(rows[:500])):
        assert torch.equal(law.sample(many)[7:9], law.sample(many[7:9]))


def test_scenario_risk_of_one_asset_and_of_a_portfolio_agree_with_brute_force(rows):
    law = FilteredHistoricalSimulation.fit(rows[:999])
    weights = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.3, 0.0]], dtype=torch.float64)
    for w in (weights, WEIGHTS):
        var, es = law.var_es(w, 0.975)
        brute = [value_at_risk_and_shortfall(rows[:999] @ row, 0.975) for row in w]
        assert torch.allclose(var, torch.stack([v for v, _ in brute]))
        assert torch.allclose(es, torch.stack([e for _, e in brute]))


def test_rolling_simulation_uses_the_days_before_only():
    history = torch.randn(300, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights = torch.eye(3, dtype=torch.float64)
    var, es = rolling_historical_simulation(history, 200, weights, 0.975, window=150)
    assert var.shape == es.shape == (100, 3)
    brute = value_at_risk_and_shortfall(history[120:270, 1], 0.975)
    assert (float(var[70, 1]), float(es[70, 1])) == pytest.approx(tuple(float(b) for b in brute))
    shocked = history.clone()
    shocked[250] = -99.0
    later = rolling_historical_simulation(shocked, 200, weights, 0.975, window=150)[0]
    assert torch.equal(later[:51], var[:51]) and bool((later[51:] != var[51:]).any(dim=1).all())


def test_bad_rows_are_named(rows):
    with pytest.raises(ValueError, match="at least 200 finite rows"):
        PeaksOverThreshold.fit(rows[:50])
    with pytest.raises(ValueError, match=r"shape \(n, d\)"):
        Gaussian.fit(rows[:, 0])
    with pytest.raises(ValueError, match="window 500 and start 10"):
        rolling_historical_simulation(rows[:1000], 10, torch.eye(3), 0.99)
    spoiled = rows[:500].clone()
    spoiled[:3, 1] = math.nan
    with pytest.warns(UserWarning, match="3 of 500 rows"):
        assert FilteredHistoricalSimulation.fit(spoiled).scenarios.shape == (497, 3)
