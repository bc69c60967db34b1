"""One-day risk: value at risk, expected shortfall, their backtests and scores.

Sign convention: a loss is minus a return; value at risk (VaR) and expected shortfall (ES) at a level such as .99 are
positive numbers in the unit of the returns, and a day is a violation when its loss is **greater than** the VaR. With
tail probability τ = 1 - level::

    VaR = inf{x : P(loss <= x) >= level},    ES = (1/τ) ∫_level^1 VaR_u du

Scores are losses of the forecaster: lower is better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from genkit.errors import ConfigError

__all__ = [
    "ChristoffersenTest",
    "TestResult",
    "christoffersen",
    "diebold_mariano",
    "es_residual_test",
    "expected_shortfall",
    "fz0_score",
    "kupiec",
    "quantile_score",
    "value_at_risk",
    "value_at_risk_and_shortfall",
]


def _check_level(level: float) -> None:
    if not 0.5 <= level < 1.0:
        raise ConfigError(f"level must lie in [0.5, 1), got {level!r}; one-day risk uses 0.975 and 0.99")


def _check_days(**series: Tensor) -> None:
    if len({tuple(values.shape) for values in series.values() if values.ndim}) > 1:  # a constant may be a scalar
        shapes = ", ".join(f"{name} {tuple(values.shape)}" for name, values in series.items())
        raise ConfigError(f"losses and forecasts must be of the same days, got {shapes}")


def value_at_risk_and_shortfall(returns: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Empirical VaR and ES along the last dimension.

        VaR = loss_(m) with m = ⌈n level⌉ in ascending order,
        ES = [Σ_{i>m} loss_(i) + (m - n level) VaR] / (n (1 - level))

    Args:
        returns: (\\*, n), in any unit.
        level: in [.5, 1).

    Returns:
        VaR and ES, float64 (\\*).

    Raises:
        ConfigError: no returns, a non-finite one (counted), or a level outside its range.

    Reference: Acerbi, Tasche, "On the coherence of expected shortfall", J. Banking Finance 2002, equation 4.
    """
    _check_level(level)
    n = returns.shape[-1] if returns.ndim else 0
    bad = int((~torch.isfinite(returns)).sum())
    if n == 0 or bad:
        raise ConfigError(f"VaR and ES need finite returns along the last dimension; got n = {n} with {bad} non-finite")
    rank = math.ceil(n * level - 1e-9)
    top = torch.topk(-returns, n - rank + 1, dim=-1).values.to(torch.float64)  # the last one is loss_(rank)
    var = top[..., -1]
    return var, (top[..., :-1].sum(dim=-1) + (rank - n * level) * var) / (n * (1.0 - level))


def value_at_risk(returns: Tensor, level: float) -> Tensor:
    """Empirical VaR along the last dimension, float64: see :func:`value_at_risk_and_shortfall`."""
    return value_at_risk_and_shortfall(returns, level)[0]


def expected_shortfall(returns: Tensor, level: float) -> Tensor:
    """Empirical ES (also called CVaR) along the last dimension: see :func:`value_at_risk_and_shortfall`."""
    return value_at_risk_and_shortfall(returns, level)[1]


@dataclass(frozen=True)
class TestResult:
    """A test statistic with its p-value; a small p-value speaks against the forecast."""

    __test__ = False  # not a pytest class

    statistic: float
    p_value: float


def _x_log_y(x: float, y: float) -> float:
    return 0.0 if x == 0 else x * math.log(y)


def _bernoulli(failures: float, successes: float, p: float) -> float:
    """Log-likelihood of counts under violation probability p, with 0 log 0 = 0."""
    return _x_log_y(failures, p) + _x_log_y(successes, 1.0 - p)


def _violations(violations: Tensor) -> Tensor:
    if violations.ndim != 1 or violations.dtype != torch.bool or len(violations) < 2:
        raise ConfigError(
            f"violations must be a bool tensor (n,) with n >= 2 (losses > value at risk), got "
            f"{violations.dtype} {tuple(violations.shape)}"
        )
    return violations


def kupiec(violations: Tensor, level: float) -> TestResult:
    """Kupiec's test that violations happen with probability τ = 1 - level.

        LR = 2 [log L(x/n) - log L(τ)],    log L(p) = x log p + (n - x) log(1 - p),    LR ~ χ²(1)

    Args:
        violations: bool (n,), in time order.

    Reference: Kupiec, "Techniques for verifying the accuracy of risk measurement models", J. Derivatives 1995.
    """
    _check_level(level)
    n, x = len(_violations(violations)), int(violations.sum())
    ratio = 2.0 * (_bernoulli(x, n - x, x / n) - _bernoulli(x, n - x, 1.0 - level))
    return TestResult(max(ratio, 0.0), _chi2_1_sf(ratio))


def _chi2_1_sf(x: float) -> float:
    return math.erfc(math.sqrt(max(x, 0.0) / 2.0))


@dataclass(frozen=True)
class ChristoffersenTest:
    """Independence and conditional coverage of violations; ``transitions[i][j]`` counts days in state i then j."""

    independence: TestResult
    conditional_coverage: TestResult
    transitions: tuple[tuple[int, int], tuple[int, int]]


def christoffersen(violations: Tensor, level: float) -> ChristoffersenTest:
    """Christoffersen's tests that violations do not follow one another, alone and jointly with their rate.

        LR_ind = 2 [log L(π01, π11) - log L(π)],    πij = nij / (ni0 + ni1),    π = (n01 + n11) / (n - 1),    ~ χ²(1)
        LR_cc = 2 [log L(π01, π11) - log L(τ)] on the same n - 1 transitions,                                ~ χ²(2)

    With no violation at all LR_ind is 0. The χ² law is asymptotic: with a handful of violations the p-values are
    rough.

    Reference: Christoffersen, "Evaluating interval forecasts", Int. Econ. Rev. 1998, section 4.
    """
    _check_level(level)
    today, tomorrow = _violations(violations)[:-1], violations[1:]
    n00, n01 = int((~today & ~tomorrow).sum()), int((~today & tomorrow).sum())
    n10, n11 = int((today & ~tomorrow).sum()), int((today & tomorrow).sum())
    hits, rest = n01 + n11, n00 + n10
    chain = sum(_bernoulli(h, m, h / (h + m)) for h, m in ((n01, n00), (n11, n10)) if h + m)
    independence = 2.0 * (chain - _bernoulli(hits, rest, hits / (hits + rest)))
    coverage = 2.0 * (chain - _bernoulli(hits, rest, 1.0 - level))
    return ChristoffersenTest(
        TestResult(max(independence, 0.0), _chi2_1_sf(independence)),
        TestResult(max(coverage, 0.0), math.exp(-max(coverage, 0.0) / 2.0)),
        ((n00, n01), (n10, n11)),
    )


def quantile_score(losses: Tensor, var: Tensor, level: float) -> Tensor:
    """Quantile (pinball) score of each day, float64: (1{loss <= VaR} - level) (VaR - loss) >= 0.

    Its expectation is lowest at the true quantile.

    Reference: Koenker, Bassett, "Regression quantiles", Econometrica 1978.
    """
    _check_level(level)
    _check_days(losses=losses, var=var)
    losses, var = losses.to(torch.float64), var.to(torch.float64)
    return ((losses <= var).to(torch.float64) - level) * (var - losses)


def fz0_score(losses: Tensor, var: Tensor, es: Tensor, level: float) -> Tensor:
    """Joint score of VaR and ES of each day, float64: the zero-homogeneous Fissler–Ziegel loss.

        FZ0 = 1{loss > VaR} (loss - VaR) / (τ ES) + VaR / ES + log ES - 1

    Its expectation is lowest at the true pair; differences do not depend on the unit of the returns.

    Raises:
        ConfigError: an ES that is not positive or lies below its VaR (counted).

    Reference: Patton, Ziegel, Chen, "Dynamic semiparametric models for expected shortfall (and value-at-risk)",
    J. Econometrics 2019, equation 6, with losses for returns; Fissler, Ziegel, Ann. Stat. 2016.
    """
    _check_level(level)
    _check_days(losses=losses, var=var, es=es)
    losses, var, es = losses.to(torch.float64), var.to(torch.float64), es.to(torch.float64)
    wrong = int((~((es > 0) & (es >= var * (1.0 - 1e-9)))).sum())
    if wrong:
        raise ConfigError(f"{wrong} of {es.numel()} forecasts have ES <= 0 or ES < VaR; FZ0 needs 0 < ES and VaR <= ES")
    excess = torch.where(losses > var, losses - var, 0.0)
    return excess / ((1.0 - level) * es) + var / es + es.log() - 1.0


def es_residual_test(
    losses: Tensor, var: Tensor, es: Tensor, *, resamples: int = 2000, generator: torch.Generator | None = None
) -> TestResult:
    """McNeil and Frey's test that losses on violation days are on average as large as the ES said.

    Residuals (loss - ES) / ES of the violation days have mean zero when ES is right; the alternative is that they are
    larger. The p-value comes from a bootstrap of the studentised mean of the centred residuals.

    Args:
        losses, var, es: (n,).
        generator: source of the resampling; None takes a fixed one.

    Returns:
        Statistic mean·√m/std and its one-sided p-value; NaN with fewer than three violations.

    Reference: McNeil, Frey, "Estimation of tail-related risk measures for heteroscedastic financial time series",
    J. Empirical Finance 2000, section 4.2.
    """
    _check_days(losses=losses, var=var, es=es)
    hit = losses > var
    residual = ((losses - es) / es).to(torch.float64)[hit]
    m = len(residual)
    if m < 3 or float(residual.std()) == 0.0:
        return TestResult(math.nan, math.nan)
    source = torch.Generator().manual_seed(0) if generator is None else generator
    statistic = float(residual.mean() / residual.std()) * math.sqrt(m)
    draws = (residual - residual.mean())[torch.randint(m, (resamples, m), generator=source)]
    spread = draws.std(dim=1).clamp_min(1e-12)
    null = draws.mean(dim=1) / spread * math.sqrt(m)
    return TestResult(statistic, float((null >= statistic).sum() + 1) / (resamples + 1))


def diebold_mariano(scores_a: Tensor, scores_b: Tensor, lags: int | None = None) -> TestResult:
    """Diebold and Mariano's test that two forecasters have equal expected score, two-sided.

        d_t = a_t - b_t,    statistic = mean(d) / √(ω/n),    ω = γ_0 + 2 Σ_{j<=lags} (1 - j/(lags+1)) γ_j

    Args:
        scores_a, scores_b: (n,) scores of the same days; a negative statistic favours a.
        lags: Bartlett lags of the long-run variance; None takes ⌊4 (n/100)^(2/9)⌋ (Newey, West 1994).

    Returns:
        The statistic and its normal p-value; 0 and 1 when the scores are equal every day.

    Reference: Diebold, Mariano, "Comparing predictive accuracy", J. Bus. Econ. Stat. 1995.
    """
    if scores_a.shape != scores_b.shape or scores_a.ndim != 1 or len(scores_a) < 10:
        raise ConfigError(
            f"expected two score series (n,) of the same n >= 10 days, got {tuple(scores_a.shape)} and "
            f"{tuple(scores_b.shape)}"
        )
    d = (scores_a - scores_b).to(torch.float64)
    n = len(d)
    width = int(4.0 * (n / 100.0) ** (2.0 / 9.0)) if lags is None else lags
    if not 0 <= width < n:
        raise ConfigError(f"lags must lie in [0, {n}), the number of days, got {lags!r}")
    centred = d - d.mean()
    gamma = [float((centred[j:] * centred[: n - j]).sum()) / n for j in range(width + 1)]
    omega = gamma[0] + 2.0 * sum((1.0 - j / (width + 1.0)) * gamma[j] for j in range(1, width + 1))
    if omega <= 0.0:
        return TestResult(0.0, 1.0) if float(d.abs().max()) == 0.0 else TestResult(math.nan, math.nan)
    statistic = float(d.mean()) / math.sqrt(omega / n)
    return TestResult(statistic, math.erfc(abs(statistic) / math.sqrt(2.0)))
