from __future__ import annotations

import math

import pytest
import torch

from genkit.data.returns import MarketReturns, market_closes
from genkit.metrics.risk import diebold_mariano, kupiec, value_at_risk_and_shortfall
from genkit.pipelines.heavy_tailed_flow.backtest import (
    RiskForecast,
    backtest,
    classical_forecasts,
    forecast_risk,
    format_rows,
    portfolio_weights,
    score_forecast,
)
from genkit.pipelines.heavy_tailed_flow.baselines.classical import Gaussian, MultivariateT
from genkit.samplers.noise import draw_keys

NAMES = ("a", "b", "c")
TRUTH = MultivariateT(4.0, torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64) + 0.5)


@pytest.fixture(scope="module")
def market():
    return MarketReturns(), MarketReturns(split="test")


@pytest.fixture(scope="module")
def classical(market):
    return classical_forecasts(*market)


def test_forecast_of_samples_equals_the_day_by_day_definition():
    z = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sigma = torch.rand(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    forecast = forecast_risk(z, sigma, NAMES, 0.975)
    for day in range(5):
        returns = sigma[day] * z
        columns = [*returns.T, returns.mean(dim=1)]
        risks = [value_at_risk_and_shortfall(column, 0.975) for column in columns]
        assert torch.allclose(forecast.var[day], torch.stack([v for v, _ in risks]))
        assert torch.allclose(forecast.es[day], torch.stack([e for _, e in risks]))


def test_joint_samples_matter_for_the_portfolio():
    z = TRUTH.sample(draw_keys(torch.Generator().manual_seed(0), 20_000))
    generator = torch.Generator().manual_seed(1)
    shuffled = torch.stack([column[torch.randperm(len(z), generator=generator)] for column in z.T], dim=1)
    sigma = torch.ones(1, 3, dtype=torch.float64)
    joint, alone = (forecast_risk(x, sigma, NAMES, 0.99).var[0] for x in (z, shuffled))
    assert torch.equal(joint[:3], alone[:3]) and float(alone[3]) < 0.9 * float(joint[3])


def test_true_law_passes_and_a_thin_one_fails():
    keys = draw_keys(torch.Generator().manual_seed(3), 4000)
    sigma = 1 + 0.5 * torch.sin(torch.arange(4000, dtype=torch.float64) / 50).unsqueeze(1).expand(4000, 3)
    returns = sigma * TRUTH.sample(keys)
    right = score_forecast(forecast_risk(TRUTH, sigma, NAMES, 0.99), returns, NAMES)
    thin = Gaussian.fit(TRUTH.sample(draw_keys(torch.Generator().manual_seed(4), 4000)) * 0.8)
    wrong = score_forecast(forecast_risk(thin, sigma, NAMES, 0.99), returns, NAMES)
    fixed = score_forecast(forecast_risk(TRUTH, torch.ones_like(sigma), NAMES, 0.99), returns, NAMES)
    for a, b, c in zip(right, wrong, fixed, strict=True):
        assert min(a.kupiec_p, a.independence_p, a.conditional_coverage_p, a.es_residual_p) > 0.01
        assert b.kupiec_p < 0.01 and b.es_residual_p < 0.05
        assert a.fz0_score < min(b.fz0_score, c.fz0_score) and a.quantile_score < min(
            b.quantile_score, c.quantile_score
        )
    assert diebold_mariano(right[0].daily_fz0_score, wrong[0].daily_fz0_score).statistic < -1.0


def first_changed_forecast(market, tmp_path, shift: int) -> int:
    """The first held-out day whose forecast moves when the closes from held-out day 300 on are 20 % lower."""
    _, test = market
    lines = [f"{d},{a},{b},{c}" for d, (a, b, c) in zip(*closes_after_a_crash(test.dates[300]), strict=True)]
    own = tmp_path / "crash.csv"
    own.write_text("\n".join(["date,sp500,nasdaq,wti", *lines]))
    crashed = MarketReturns(path=own, split="test")
    law = Gaussian.fit(test.sample)
    before, after = (forecast_risk(law, data.scale.roll(-shift, 0), NAMES, 0.99).var for data in (test, crashed))
    return int((~torch.isclose(before, after, rtol=1e-9)).any(dim=1)[: len(test) - shift].nonzero()[0])


def closes_after_a_crash(day):
    table = market_closes()
    factor = torch.tensor([0.8 if d >= day else 1.0 for d in table.dates], dtype=torch.float64)
    return table.dates, (table.values * factor.unsqueeze(1)).tolist()


def test_forecasts_know_nothing_of_their_own_day(market, tmp_path):
    assert first_changed_forecast(market, tmp_path, shift=0) == 301
    assert first_changed_forecast(market, tmp_path, shift=1) == 300  # the control: σ_t in place of σ_{t-1}


def test_counts_and_tests_of_rows_agree_with_the_forecast(market, classical):
    _, test = market
    row = classical["multivariate_t"][3]
    assert (row.portfolio, row.level, row.n) == ("equal_weights", 0.975, len(test))
    assert row.expected_violations == pytest.approx(0.025 * len(test))
    hits = torch.zeros(row.n, dtype=torch.bool)
    hits[: row.violations] = True
    assert row.kupiec_p == pytest.approx(kupiec(hits, 0.975).p_value)
    assert row.quantile_score == pytest.approx(float(row.daily_quantile_score.mean()))
    assert row.mean_es > row.mean_var > 0


def test_classical_baselines_on_the_held_out_days(classical):
    assert set(classical) == {
        "historical_simulation",
        "filtered_historical_simulation",
        "gaussian",
        "multivariate_t",
        "pot_gpd",
    }
    assert all(len(rows) == 8 for rows in classical.values())
    by = {name: {(r.portfolio, r.level): r for r in rows} for name, rows in classical.items()}
    # filtering beats the rolling window everywhere, and every fat tail beats the Gaussian at 99 % on equities
    for key, row in by["historical_simulation"].items():
        assert by["pot_gpd"][key].quantile_score < row.quantile_score
    for name in ("filtered_historical_simulation", "multivariate_t", "pot_gpd"):
        for asset in ("sp500", "nasdaq", "equal_weights"):
            assert by[name][asset, 0.99].fz0_score < by["gaussian"][asset, 0.99].fz0_score
    assert by["gaussian"]["sp500", 0.99].kupiec_p < 0.05 < by["pot_gpd"]["sp500", 0.99].kupiec_p


def test_raw_returns_are_backtested_without_scaling():
    train, test = MarketReturns("raw"), MarketReturns("raw", split="test")
    law = Gaussian.fit(train.sample)
    rows = backtest(law, test, levels=(0.99,))
    var = forecast_risk(law, torch.ones_like(test.returns), test.names, 0.99).var
    assert torch.equal(var, var[:1].expand_as(var)) and rows[0].mean_var == pytest.approx(float(var[0, 0]))
    assert "empirical" in classical_forecasts(train, test, levels=(0.99,))


def test_own_samples_with_nonfinite_rows_are_announced(market):
    _, test = market
    samples = test.sample.clone()
    samples[:4] = math.inf
    with pytest.warns(UserWarning, match="4 of 982 rows"):
        backtest(samples, test, levels=(0.99,))


def test_weights_and_table():
    names, weights = portfolio_weights(NAMES)
    assert names == ("a", "b", "c", "equal_weights")
    assert torch.equal(weights.sum(1), torch.ones(4, dtype=torch.float64))
    forecast = RiskForecast(0.99, torch.full((50, 4), 2.0), torch.full((50, 4), 3.0))
    returns = torch.zeros(50, 3)
    returns[7] = -2.5
    rows = score_forecast(forecast, returns, NAMES)
    assert all(row.violations == 1 for row in rows)
    assert "| flow | a | 0.99 | 1 (0.5) |" in format_rows({"flow": rows})
    assert set(rows[0].numbers()) >= {"violations", "kupiec_p", "fz0_score"}


def test_mismatched_shapes_are_named():
    with pytest.raises(ValueError, match="one column per asset"):
        forecast_risk(torch.ones(10, 2), torch.ones(5, 3), NAMES, 0.99)
    forecast = RiskForecast(0.99, torch.ones(5, 4), torch.ones(5, 4))
    with pytest.raises(ValueError, match="5 days and the returns 6"):
        score_forecast(forecast, torch.zeros(6, 3), NAMES)
