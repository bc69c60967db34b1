"""One-day-ahead risk of held-out days: forecasts from a fitted law of z, scores and tests against what happened.

With z_t = r_t / σ_{t-1} the loss of a portfolio w on day t is -Σ_j w_j σ_{j,t-1} z_j, so a joint law of z fitted once
gives every day's VaR and ES from volatilities that were known the evening before. No forecast sees its own day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from genkit.data.returns import MarketReturns
from genkit.errors import ConfigError
from genkit.metrics.risk import christoffersen, es_residual_test, fz0_score, kupiec, quantile_score
from genkit.pipelines.heavy_tailed_flow.baselines.classical import (
    FilteredHistoricalSimulation,
    Gaussian,
    MultivariateT,
    PeaksOverThreshold,
    RiskModel,
    rolling_historical_simulation,
)

__all__ = [
    "BacktestRow",
    "RiskForecast",
    "backtest",
    "classical_forecasts",
    "forecast_risk",
    "format_rows",
    "portfolio_weights",
    "score_forecast",
]

LEVELS = (0.975, 0.99)
_TITLES = (
    "model",
    "portfolio",
    "level",
    "violations (expected)",
    "Kupiec p",
    "independence p",
    "conditional coverage p",
    "ES residual p",
    "quantile score",
    "FZ0 score",
)


def portfolio_weights(names: Sequence[str]) -> tuple[tuple[str, ...], Tensor]:
    """Names and weights (d + 1, d) of what is judged: each asset alone, and all of them equally weighted."""
    d = len(names)
    weights = torch.cat((torch.eye(d, dtype=torch.float64), torch.full((1, d), 1.0 / d, dtype=torch.float64)))
    return (*names, "equal_weights"), weights


@dataclass(frozen=True)
class RiskForecast:
    """VaR and ES of T days and P portfolios at one level, float64 (T, P), positive, in percent."""

    level: float
    var: Tensor
    es: Tensor


def forecast_risk(law: RiskModel | Tensor, scale: Tensor, names: Sequence[str], level: float) -> RiskForecast:
    """One-day forecasts of all portfolios.

    Args:
        law: a fitted model, or joint samples of z (n, d), used as scenarios (non-finite rows are counted in a warning).
        scale: (T, d), σ_{t-1} of each day in percent, or ones when the law is one of raw returns.
        names: the d assets.
    """
    if isinstance(law, Tensor):
        if law.ndim != 2 or law.shape[1] != scale.shape[1]:
            raise ConfigError(f"expected samples (n, {scale.shape[1]}), one column per asset, got {tuple(law.shape)}")
        law = FilteredHistoricalSimulation.fit(law)
    _, weights = portfolio_weights(names)
    risks = [law.var_es(w * scale.to(torch.float64), level) for w in weights]
    return RiskForecast(level, torch.stack([v for v, _ in risks], dim=1), torch.stack([e for _, e in risks], dim=1))


@dataclass(frozen=True)
class BacktestRow:
    """One portfolio at one level over n days; p-values of the tests, mean scores (lower is better).

    ``daily_quantile_score`` and ``daily_fz0_score``, float64 (T,), serve tests between forecasters.
    """

    portfolio: str
    level: float
    n: int
    violations: int
    expected_violations: float
    kupiec_p: float
    independence_p: float
    conditional_coverage_p: float
    es_residual_p: float
    quantile_score: float
    fz0_score: float
    mean_var: float
    mean_es: float
    daily_quantile_score: Tensor = field(repr=False, compare=False)
    daily_fz0_score: Tensor = field(repr=False, compare=False)

    def numbers(self) -> dict[str, float]:
        """The measured numbers by name, without the daily series."""
        skip = ("portfolio", "level", "daily_quantile_score", "daily_fz0_score")
        return {name: float(value) for name, value in vars(self).items() if name not in skip}


def score_forecast(forecast: RiskForecast, returns: Tensor, names: Sequence[str]) -> list[BacktestRow]:
    """Scores and tests of a forecast against the realised returns (T, d) in percent, one row per portfolio."""
    if forecast.var.shape[0] != len(returns):
        raise ConfigError(
            f"the forecast has {forecast.var.shape[0]} days and the returns {len(returns)}; they must agree"
        )
    titles, weights = portfolio_weights(names)
    losses = -(returns.to(torch.float64) @ weights.T)
    columns = zip(titles, losses.T, forecast.var.T, forecast.es.T, strict=True)
    return [_score(title, loss, var, es, forecast.level) for title, loss, var, es in columns]


def _score(title: str, loss: Tensor, var: Tensor, es: Tensor, level: float) -> BacktestRow:
    hit = loss > var
    markov = christoffersen(hit, level)
    quantile, fz0 = quantile_score(loss, var, level), fz0_score(loss, var, es, level)
    return BacktestRow(
        portfolio=title,
        level=level,
        n=len(loss),
        violations=int(hit.sum()),
        expected_violations=len(loss) * (1.0 - level),
        kupiec_p=kupiec(hit, level).p_value,
        independence_p=markov.independence.p_value,
        conditional_coverage_p=markov.conditional_coverage.p_value,
        es_residual_p=es_residual_test(loss, var, es).p_value,
        quantile_score=float(quantile.mean()),
        fz0_score=float(fz0.mean()),
        mean_var=float(var.mean()),
        mean_es=float(es.mean()),
        daily_quantile_score=quantile,
        daily_fz0_score=fz0,
    )


def backtest(law: RiskModel | Tensor, test: MarketReturns, levels: Sequence[float] = LEVELS) -> list[BacktestRow]:
    """All portfolios at all levels over the days of ``test`` (a held-out split of the kind the law was fitted to).

    The law's own units are the data's samples: ``kind="ewma"`` scales it by each day's volatility, ``kind="raw"`` does
    not.
    """
    forecasts = [forecast_risk(law, test.scale, test.names, level) for level in levels]
    return [row for forecast in forecasts for row in score_forecast(forecast, test.returns, test.names)]


def classical_forecasts(
    train: MarketReturns, test: MarketReturns, levels: Sequence[float] = LEVELS, window: int = 500
) -> dict[str, list[BacktestRow]]:
    """Rows of every classical baseline, by name, fitted to ``train`` and judged on ``test``.

    ``historical_simulation`` uses the raw returns of the last ``window`` days, whatever the data's kind. On raw data
    there is no filter, and the law of all training rows is called ``empirical``.
    """
    z = train.sample.to(torch.float64)
    empirical = "filtered_historical_simulation" if train.kind == "ewma" else "empirical"
    laws: dict[str, RiskModel] = {
        empirical: FilteredHistoricalSimulation.fit(z),
        "gaussian": Gaussian.fit(z),
        "multivariate_t": MultivariateT.fit(z),
        "pot_gpd": PeaksOverThreshold.fit(z),
    }
    rows = {"historical_simulation": _historical(test, levels, window)}
    return rows | {name: backtest(law, test, levels) for name, law in laws.items()}


def _historical(test: MarketReturns, levels: Sequence[float], window: int) -> list[BacktestRow]:
    _, weights = portfolio_weights(test.names)
    rows = []
    for level in levels:
        var, es = rolling_historical_simulation(test.history, test.start, weights, level, window)
        days = len(test)
        rows += score_forecast(RiskForecast(level, var[:days], es[:days]), test.returns, test.names)
    return rows


def format_rows(rows: Mapping[str, Sequence[BacktestRow]]) -> str:
    """A Markdown table of backtests by model."""
    lines = ["| " + " | ".join(_TITLES) + " |", "|" + "---|" * len(_TITLES)]
    for model, results in rows.items():
        lines += [
            f"| {model} | {r.portfolio} | {r.level} | {r.violations} ({r.expected_violations:.1f}) | "
            f"{r.kupiec_p:.3f} | {r.independence_p:.3f} | {r.conditional_coverage_p:.3f} | {r.es_residual_p:.3f} | "
            f"{r.quantile_score:.4f} | {r.fz0_score:.4f} |"
            for r in results
        ]
    return "\n".join(lines)
