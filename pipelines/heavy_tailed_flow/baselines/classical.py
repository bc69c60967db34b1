"""Classical models of joint daily returns, fitted to the rows z (n, d) that the flow is trained on.

A fitted model answers two questions: :meth:`RiskModel.var_es`, the value at risk and expected shortfall of the loss
-Σ_j w_tj z_tj for given weights (one row a day), and :meth:`RiskModel.sample`. Losses are minus returns; both risks are
positive numbers. Historical simulation on raw returns needs no fit and is a function of the past window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from scipy import optimize, special, stats
from torch import Tensor

from genkit.errors import ConfigError
from genkit.metrics.risk import value_at_risk_and_shortfall
from genkit.metrics.tails import finite_values
from genkit.samplers.noise import Keys, draw_keys

__all__ = [
    "FilteredHistoricalSimulation",
    "Gaussian",
    "GeneralisedPareto",
    "MultivariateT",
    "PeaksOverThreshold",
    "RiskModel",
    "rolling_historical_simulation",
]

_CHUNK = 1 << 23  # scenario losses held at a time


class RiskModel(Protocol):
    """A fitted law of the vector z."""

    def var_es(self, weights: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """VaR and ES, float64 (T,), of the losses -Σ_j w_tj z_j for weights (T, d)."""
        ...

    def sample(self, keys: Keys) -> Tensor:
        """One draw of z per key, float64 (B, d)."""
        ...


def _rows(z: Tensor, least: int) -> Tensor:
    if z.ndim != 2:
        raise ConfigError(f"expected rows of shape (n, d), got {tuple(z.shape)}")
    rows, _ = finite_values(z, "rows")
    if len(rows) < least:
        raise ConfigError(f"expected at least {least} finite rows to fit, got {len(rows)}")
    return rows


def _single_asset(weights: Tensor) -> int | None:
    """The one column in which every row of weights is positive while all others are zero, or None."""
    used = (weights != 0).any(dim=0).nonzero().flatten()
    return int(used[0]) if len(used) == 1 and bool((weights[:, used[0]] > 0).all()) else None


@dataclass(frozen=True)
class FilteredHistoricalSimulation:
    """Scenarios: the law that puts mass 1/n on each given row; joint, so any portfolio can be read off.

    Fitted to residuals z = r/σ it is filtered historical simulation; the samples of a flow are used the same way.

    Reference: Barone-Adesi, Giannopoulos, Vosper, "VaR without correlations for portfolios of derivative
    securities", J. Futures Markets 1999.
    """

    scenarios: Tensor

    @classmethod
    def fit(cls, z: Tensor) -> FilteredHistoricalSimulation:
        """Keeps the finite rows (n, d); non-finite ones are counted in a warning."""
        return cls(_rows(z, 1))

    def var_es(self, weights: Tensor, level: float) -> tuple[Tensor, Tensor]:
        weights = weights.to(torch.float64)
        asset = _single_asset(weights)
        if asset is not None:  # both risks are homogeneous: VaR(w z) = w VaR(z)
            var, es = value_at_risk_and_shortfall(self.scenarios[:, asset], level)
            return weights[:, asset] * var, weights[:, asset] * es
        parts = weights.split(max(1, _CHUNK // len(self.scenarios)))
        risks = [value_at_risk_and_shortfall(part @ self.scenarios.T, level) for part in parts]
        return torch.cat([var for var, _ in risks]), torch.cat([es for _, es in risks])

    def sample(self, keys: Keys) -> Tensor:
        row = (keys.at(purpose="scenario").uniform() * len(self.scenarios)).long()
        return self.scenarios[row]


@dataclass(frozen=True)
class Gaussian:
    """Multivariate normal: the control that has no tail."""

    mean: Tensor
    covariance: Tensor

    @classmethod
    def fit(cls, z: Tensor) -> Gaussian:
        """Maximum likelihood: sample mean and covariance of rows (n, d)."""
        rows = _rows(z, z.shape[-1] + 1)
        return cls(rows.mean(dim=0), torch.cov(rows.T, correction=0))

    def var_es(self, weights: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """loc + s q and loc + s φ(q)/τ with q the normal quantile of ``level`` and τ = 1 - level."""
        loc, scale = _loss_loc_scale(weights, self.mean, self.covariance)
        q = float(stats.norm.ppf(level))
        return loc + scale * q, loc + scale * float(stats.norm.pdf(q)) / (1.0 - level)

    def sample(self, keys: Keys) -> Tensor:
        normal = keys.at(purpose="normal").normal((len(self.mean),), dtype=torch.float64)
        return self.mean + normal @ torch.linalg.cholesky(self.covariance).T


def _loss_loc_scale(weights: Tensor, mean: Tensor, shape: Tensor) -> tuple[Tensor, Tensor]:
    """Location and scale of -w·z for an elliptical z, float64 (T,)."""
    w = weights.to(torch.float64)
    return -(w @ mean), torch.einsum("ti,ij,tj->t", w, shape, w).sqrt()


@dataclass(frozen=True)
class MultivariateT:
    """Multivariate Student-t: z = μ + L N √(ν/χ²_ν) with L Lᵀ = Σ, the shape (not the covariance)."""

    nu: float
    mean: Tensor
    shape: Tensor

    @classmethod
    def fit(cls, z: Tensor, *, tolerance: float = 1e-10, max_iterations: int = 500) -> MultivariateT:
        r"""Maximum likelihood of rows (n, d) by ECME.

            w_i = (ν + d) / (ν + δ_i),    δ_i = (z_i - μ)ᵀ Σ⁻¹ (z_i - μ)
            μ = Σ w_i z_i / Σ w_i,    Σ = Σ w_i (z_i - μ)(z_i - μ)ᵀ / Σ w_i,    ν = argmax log-likelihood(μ, Σ, ν)

        Args:
            tolerance: stops when the mean log-likelihood rises by less.

        Raises:
            ConfigError: too few rows, or no convergence within ``max_iterations``.

        Reference: Liu, Rubin, "ML estimation of the t distribution using EM and its extensions", Stat. Sinica 1995;
        the division by Σ w_i: Kent, Tyler, Vardi, Commun. Stat. Simul. 1994.
        """
        rows = _rows(z, z.shape[-1] + 2)
        nu, mean, shape = 5.0, rows.median(dim=0).values, torch.cov(rows.T, correction=0)
        previous = -math.inf
        for _ in range(max_iterations):
            weight = (nu + rows.shape[1]) / (nu + _mahalanobis(rows, mean, shape))
            mean = (weight @ rows) / weight.sum()
            centred = rows - mean
            shape = (centred * weight.unsqueeze(1)).T @ centred / weight.sum()
            nu, value = _best_nu(_mahalanobis(rows, mean, shape).numpy(), shape)
            if value - previous < tolerance:
                return cls(nu, mean, shape)
            previous = value
        raise ConfigError(f"the Student-t likelihood did not settle in {max_iterations} iterations; raise tolerance")

    def var_es(self, weights: Tensor, level: float) -> tuple[Tensor, Tensor]:
        """loc + s q and loc + s f(q)(ν + q²)/((ν - 1) τ) with q, f the t quantile of ``level`` and density."""
        if self.nu <= 1.0:
            raise ConfigError(f"the expected shortfall is infinite at nu = {self.nu:.3g} <= 1")
        loc, scale = _loss_loc_scale(weights, self.mean, self.shape)
        q = float(stats.t.ppf(level, self.nu))
        shortfall = float(stats.t.pdf(q, self.nu)) * (self.nu + q * q) / ((self.nu - 1.0) * (1.0 - level))
        return loc + scale * q, loc + scale * shortfall

    def sample(self, keys: Keys) -> Tensor:
        normal = keys.at(purpose="normal").normal((len(self.mean),), dtype=torch.float64)
        half_chi2 = special.gammaincinv(self.nu / 2.0, keys.at(purpose="chi2").uniform().numpy())
        spread = torch.from_numpy(np.sqrt(self.nu / 2.0 / half_chi2)).unsqueeze(1)
        return self.mean + spread * (normal @ torch.linalg.cholesky(self.shape).T)


def _mahalanobis(rows: Tensor, mean: Tensor, shape: Tensor) -> Tensor:
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(shape), (rows - mean).T, upper=False)
    return white.square().sum(dim=0)


def _best_nu(delta: np.ndarray, shape: Tensor) -> tuple[float, float]:
    """ν in [.5, 500] of the largest mean log-likelihood, and that value."""
    d, log_det = shape.shape[0], float(torch.logdet(shape))

    def minus(log_nu: float) -> float:
        nu = math.exp(log_nu)
        constant = special.gammaln((nu + d) / 2.0) - special.gammaln(nu / 2.0) - d / 2.0 * math.log(nu * math.pi)
        return float(-constant + log_det / 2.0 + (nu + d) / 2.0 * np.log1p(delta / nu).mean())

    found = optimize.minimize_scalar(
        minus, bounds=(math.log(0.5), math.log(500.0)), method="bounded", options={"xatol": 1e-8}
    )
    return math.exp(float(found.x)), -float(found.fun)


@dataclass(frozen=True)
class GeneralisedPareto:
    """Upper tail above a threshold u: P(X > x) = ζ (1 + ξ (x - u)/β)^(-1/ξ), with ζ = P(X > u)."""

    threshold: float
    rate: float
    xi: float
    beta: float

    @classmethod
    def fit(cls, values: Tensor, quantile: float = 0.9) -> GeneralisedPareto:
        """Maximum likelihood of the excesses over the empirical ``quantile`` of values (n,), at least 20 of them.

        Reference: McNeil, Frey, Embrechts, "Quantitative risk management", 2nd ed. 2015, section 5.2.
        """
        if not 0.0 < quantile < 1.0:
            raise ConfigError(f"quantile must lie in (0, 1), got {quantile!r}; 0.90 to 0.95 is usual")
        threshold = float(torch.quantile(values, quantile))
        excess = (values[values > threshold] - threshold).numpy()
        if len(excess) < 20:
            raise ConfigError(f"only {len(excess)} values exceed the {quantile} quantile; at least 20 are needed")
        xi, _, beta = stats.genpareto.fit(excess, 0.1, floc=0.0, scale=excess.mean())
        return cls(threshold, len(excess) / len(values), float(xi), float(beta))

    def quantile(self, tail: Tensor) -> Tensor:
        """The value exceeded with probability ``tail`` in (0, ζ]: u + (β/ξ) ((tail/ζ)^(-ξ) - 1)."""
        log_ratio = torch.log(tail / self.rate)
        if abs(self.xi) < 1e-9:
            return self.threshold - self.beta * log_ratio
        return self.threshold + self.beta / self.xi * torch.expm1(-self.xi * log_ratio)

    def var_es(self, level: float) -> tuple[float, float]:
        """VaR = quantile(1 - level), ES = (VaR + β - ξ u)/(1 - ξ); for levels above the threshold's and ξ < 1."""
        if 1.0 - level > self.rate:
            raise ConfigError(f"level {level} lies below the threshold, which {self.rate:.3f} of the values exceed")
        if self.xi >= 1.0:
            raise ConfigError(f"the expected shortfall is infinite at xi = {self.xi:.3g} >= 1")
        var = float(self.quantile(torch.tensor(1.0 - level, dtype=torch.float64)))
        return var, (var + self.beta - self.xi * self.threshold) / (1.0 - self.xi)


@dataclass(frozen=True)
class PeaksOverThreshold:
    """Generalised Pareto tails on both sides of every asset, empirical middle and empirical copula.

    Assets use the closed form; other portfolios use ``scenarios``, rows whose ranks are those of a resampled data row.
    """

    lower: tuple[GeneralisedPareto, ...]  # of the losses -z
    upper: tuple[GeneralisedPareto, ...]
    ordered: Tensor  # (n, d), every column sorted
    ranks: Tensor  # (n, d), int64
    scenarios: FilteredHistoricalSimulation

    @classmethod
    def fit(cls, z: Tensor, quantile: float = 0.9, num_scenarios: int = 50_000) -> PeaksOverThreshold:
        """Fits rows (n, d); ``quantile`` sets the threshold on each side."""
        rows = _rows(z, 200)
        tails = [tuple(GeneralisedPareto.fit(s * rows[:, j], quantile) for j in range(rows.shape[1])) for s in (-1, 1)]
        ordered, ranks = rows.sort(dim=0).values, rows.argsort(dim=0).argsort(dim=0)
        keys = draw_keys(torch.Generator().manual_seed(0), num_scenarios)
        drawn = _semiparametric(keys, tails[0], tails[1], ordered, ranks)
        return cls(tails[0], tails[1], ordered, ranks, FilteredHistoricalSimulation(drawn))

    def var_es(self, weights: Tensor, level: float) -> tuple[Tensor, Tensor]:
        asset = _single_asset(weights)
        if asset is None:
            return self.scenarios.var_es(weights, level)
        var, es = self.lower[asset].var_es(level)
        w = weights[:, asset].to(torch.float64)
        return w * var, w * es

    def sample(self, keys: Keys) -> Tensor:
        return _semiparametric(keys, self.lower, self.upper, self.ordered, self.ranks)


def _semiparametric(
    keys: Keys,
    lower: tuple[GeneralisedPareto, ...],
    upper: tuple[GeneralisedPareto, ...],
    ordered: Tensor,
    ranks: Tensor,
) -> Tensor:
    """Rows with a data row's ranks, spread evenly inside each rank's cell, through semiparametric quantiles."""
    n, d = ordered.shape
    row = (keys.at(purpose="scenario").uniform() * n).long()
    u = (ranks[row] + keys.at(purpose="rank").uniform((d,))) / n
    place = (u * n - 0.5).clamp(0, n - 1)
    low = place.floor().long().clamp_max(n - 2)
    x = torch.lerp(ordered.gather(0, low), ordered.gather(0, low + 1), place - low)
    for j in range(d):
        in_lower, in_upper = u[:, j] < lower[j].rate, 1.0 - u[:, j] < upper[j].rate
        x[in_lower, j] = -lower[j].quantile(u[in_lower, j])
        x[in_upper, j] = upper[j].quantile(1.0 - u[in_upper, j])
    return x


def rolling_historical_simulation(
    history: Tensor, start: int, weights: Tensor, level: float, window: int = 500
) -> tuple[Tensor, Tensor]:
    """VaR and ES of each day from the raw returns of the ``window`` days before it.

    Args:
        history: (N, d) in percent, from the first day on.
        start: row of the first day that is forecast; at least ``window``.
        weights: (P, d), constant portfolio weights.

    Returns:
        VaR and ES, float64 (N - start, P); row t uses returns before day start + t only.
    """
    if not 1 <= window <= start < len(history):
        raise ConfigError(f"expected 1 <= window <= start < {len(history)} days, got window {window} and start {start}")
    portfolio = history.to(torch.float64) @ weights.to(torch.float64).T
    past = portfolio[start - window : -1].unfold(0, window, 1)  # (N - start, P, window)
    return value_at_risk_and_shortfall(past, level)
