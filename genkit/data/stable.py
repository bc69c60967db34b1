"""The positive a-stable law, 0 < a < 1, from which symmetric stable noise is made: exact draws in log space, and its
distribution function.

S has the Laplace transform E exp(-l S) = exp(-l^a). With U uniform on (0, π) and E standard exponential (Kanter 1975)::

    log S = log sin(aU) - (1/a) log sin U + (b/a) [log sin(bU) - log E],      b = 1 - a
    S = (K(U) / E)^(b/a),   K(u) = (sin(au)^a sin(bu)^b / sin u)^(1/b),   increasing in u

so that, with y = x^(-a/b), P(S ≤ x) = (1/π) ∫_0^π exp(-y K(u)) du (Zolotarev 1986, section 2.5). Two forms are used:

* x^(-a) > 0.8: K(u) = K(0) exp(softplus(q)) turns the integral, by parts, into a convolution in log space,
  P(S ≤ x) = (1/π) ∫ u(q) w dq with w = exp(τ - e^τ) expit(q), τ = log(y K(0)) + softplus(q). The trapezoidal rule with
  step h has an error of about exp(-π²/h) whatever a is, and u(q) is a table that depends on a alone.
* x^(-a) ≤ 0.8: the series P(S > x) = Σ_k Γ(ka) sin(πkb) / (π k!) x^(-ka), which keeps full relative accuracy of the
  far tail, P(S > x) ~ x^(-a) / Γ(1 - a).

Everything takes α = 2a, because b = (2 - α)/2 is then exact also when α is near 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special
from scipy.optimize import elementwise
from torch import Tensor

from genkit.errors import ConfigError

__all__ = ["log_kanter", "positive_stable", "stable_log_quantile", "stable_tail_constant", "stable_tails"]

Array = NDArray[np.float64]

_STEP = 0.25  # trapezoidal step: an error of exp(-π²/h) = 7e-18
_SERIES_FROM = 0.8  # x^(-a) at and below which the tail series is used
_SERIES_TERMS = 220
_CHUNK = 1 << 22  # elements of the largest temporary array


def _log_sin_pi(fraction: Tensor, complement: Tensor) -> Tensor:
    """log sin(π f) from f and 1 - f, both given so that neither end of (0, 1) loses digits."""
    return torch.log(torch.sin(math.pi * torch.minimum(fraction, complement)))


def log_kanter(uniform: Tensor, exponential: Tensor, alpha: float) -> Tensor:
    """log S, elementwise, from ``uniform`` in (0, 1) and ``exponential`` > 0 (float64, equal shapes).

    Equation: Kanter's formula above with U = π · uniform. No clamp is needed: 52-bit uniforms stay 2^-53 away from 0
    and from 1, and each sine takes its argument's distance to the nearer of 0 and π.
    """
    a, b = alpha / 2, (2 - alpha) / 2
    rest = 1 - uniform  # exact: the uniforms are multiples of 2^-53
    sin_u = _log_sin_pi(uniform, rest)
    sin_au = _log_sin_pi(a * uniform, b + a * rest)
    sin_bu = _log_sin_pi(b * uniform, a + b * rest)
    return sin_au - sin_u / a + (b / a) * (sin_bu - torch.log(exponential))


def positive_stable(a: float, uniform: Tensor, exponential: Tensor) -> Tensor:
    r"""Kanter's draw of S_a, the positive a-stable law with E exp(-l S_a) = exp(-l^a).

    For a stability index α, A = 2 c² S_{α/2} makes √A Z symmetric α-stable with characteristic function
    exp(-\|c k\|^α).

    Args:
        a: index in (0, 1]; a = 1 is the constant S = 1.
        uniform: numbers in (0, 1), any shape.
        exponential: standard exponential numbers of the same shape, independent of ``uniform``.

    Returns:
        float64 tensor of that shape, > 0.

    Raises:
        ConfigError: ``a`` outside (0, 1].
    """
    if not 0.0 < a <= 1.0:
        raise ConfigError(
            f"a must lie in (0, 1], got {a!r}; for a symmetric α-stable law with 0 < α <= 2 pass a = α / 2"
        )
    if a == 1.0:  # log sin 0 times 0 would be NaN
        return torch.ones_like(uniform, dtype=torch.float64)
    return torch.exp(log_kanter(uniform.to(torch.float64), exponential.to(torch.float64), 2.0 * a))


@dataclass(frozen=True)
class _Table:
    """What the distribution function of one α needs: read-only arrays over the nodes q, and the series."""

    log_k0: float  # log K(0)
    growth: Array  # softplus(q) = log K(u(q)) - log K(0)
    weight: Array  # expit(q) h, the Jacobian times the step
    below: Array  # u(q) / π
    above: Array  # 1 - u(q) / π
    series: Array  # coefficients of x^(-ka), k = 1..


def _log_sinc(x: Array, to_pi: Array) -> Array:
    """log(sin x / x) on (0, π), given x and π - x."""
    squared = np.minimum(x, 0.1) ** 2
    small = -squared / 6 * (1 + squared / 30 * (1 + squared * 4 / 63 * (1 + squared * 3 / 40)))
    large = np.maximum(x, 0.1)
    return np.where(x < 0.1, small, np.log(np.sin(np.minimum(large, to_pi))) - np.log(large))


def _log_growth(logit: Array, a: float, b: float) -> Array:
    """log K(u) - log K(0) at u = π expit(logit), accurate at both ends."""
    u, p = math.pi * special.expit(logit), math.pi * special.expit(-logit)
    au, bu = _log_sinc(a * u, b * math.pi + a * p), _log_sinc(b * u, a * math.pi + b * p)
    return (a * au + b * bu - _log_sinc(u, p)) / b


def _solve_logit(growth: Array, a: float, b: float) -> Array:
    """The logit of u/π at which log K(u) - log K(0) = growth, by bisection (K increases)."""
    low, high = np.full_like(growth, -60.0), 20.0 + b * growth - 2 * math.log(min(a, b))
    for _ in range(70):
        middle = (low + high) / 2
        over = _log_growth(middle, a, b) > growth
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    return (low + high) / 2


@lru_cache(maxsize=32)
def _table(alpha: float) -> _Table:
    """The nodes and the series of one α (about 20 ms, kept for the last 32 values)."""
    a, b = alpha / 2, (2 - alpha) / 2
    log_k0 = math.log(b) + a / b * math.log(a)
    top = 5.0 - log_k0 - math.log(_SERIES_FROM) / b
    q = np.arange(-40.0, top, _STEP)
    growth = np.logaddexp(0.0, q)
    logit = _solve_logit(growth, a, b)
    k = np.arange(1, _SERIES_TERMS + 1)
    series = np.exp(special.gammaln(k * a) - special.gammaln(k + 1)) * np.sin(math.pi * np.fmod(k * b, 2)) / math.pi
    arrays = (growth, special.expit(q) * _STEP, special.expit(logit), special.expit(-logit), series)
    for array in arrays:
        array.setflags(write=False)
    return _Table(log_k0, *arrays)


def _integral(log_x: Array, alpha: float) -> tuple[Array, Array]:
    """P(S ≤ x) and P(S > x) by the trapezoidal rule, for a flat array."""
    table = _table(alpha)
    start = np.minimum(-alpha / (2 - alpha) * log_x + table.log_k0, 700.0)  # log(y K(0)); at 700 the cdf is 0
    cdf, sf = np.empty_like(start), -np.expm1(-np.exp(start))
    rows = max(1, _CHUNK // table.growth.size)
    for i in range(0, start.size, rows):
        tau = start[i : i + rows, None] + table.growth
        kernel = np.exp(tau - np.exp(tau)) * table.weight
        cdf[i : i + rows] = kernel @ table.below
        sf[i : i + rows] += kernel @ table.above
    return cdf, sf


def _series(log_x: Array, alpha: float) -> Array:
    """P(S > x) by the tail series (Horner in z = x^(-a)), for a flat array."""
    z = np.exp(-alpha / 2 * log_x)
    total = np.zeros_like(z)
    for coefficient in _table(alpha).series[::-1]:
        total = (total + coefficient) * z
    return total


def stable_tails(log_x: Array, alpha: float) -> tuple[Array, Array]:
    """P(S ≤ exp(log_x)) and P(S > exp(log_x)) for 0 < alpha < 2, elementwise.

    Both are accurate to about 1e-13, and each keeps that accuracy relatively where it is small.
    """
    flat = np.asarray(log_x, dtype=np.float64).ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        tail = -alpha / 2 * flat <= math.log(_SERIES_FROM)
        sf = np.where(tail, _series(np.where(tail, flat, np.inf), alpha), np.nan)
        cdf = 1 - sf
        cdf[~tail], sf[~tail] = _integral(flat[~tail], alpha)
    return cdf.reshape(np.shape(log_x)), sf.reshape(np.shape(log_x))


def stable_log_quantile(lower: Array, upper: Array, alpha: float) -> Array:
    """log x with P(S ≤ x) = lower and P(S > x) = upper; the smaller of the two decides (lower + upper = 1).

    The bracket is rigorous: P(S ≤ x) ≤ exp(-y K(0)), and P(S > x) ≤ x^(-a) / (1 - 1/e) by Markov's inequality.
    """
    a, b = alpha / 2, (2 - alpha) / 2
    with np.errstate(divide="ignore"):
        log_lower, log_upper = np.log(lower), np.log(upper)
    inside = np.isfinite(log_lower) & np.isfinite(log_upper)
    safe_lower, safe_upper = np.where(inside, log_lower, -0.7), np.where(inside, log_upper, -0.7)
    left = -b / a * (np.log(1 - safe_lower) - _table(alpha).log_k0)
    right = (0.5 - safe_upper) / a

    def mismatch(log_x: Array, log_lower: Array, log_upper: Array) -> Array:
        cdf, sf = stable_tails(log_x, alpha)
        tiny = np.finfo(np.float64).tiny
        from_below = np.log(np.maximum(cdf, tiny)) - log_lower
        return np.where(log_lower < log_upper, from_below, log_upper - np.log(np.maximum(sf, tiny)))

    root = elementwise.find_root(mismatch, (left, right), args=(safe_lower, safe_upper)).x
    edges = np.where(lower <= 0, -np.inf, np.where(upper <= 0, np.inf, np.nan))
    return np.where(inside, root, edges)


def stable_tail_constant(alpha: float) -> float:
    """C_α in the two-sided tail P(\\|X\\| > x) ~ C_α (c/x)^α of a symmetric α-stable law, 0 < α < 2.

    C_α = (2/π) Γ(α) sin(πα/2); it is 2/π for the Cauchy law and .39894 at α = 1.5.
    """
    if not 0.0 < alpha < 2.0:
        raise ConfigError(
            f"alpha must lie in (0, 2), got {alpha!r}; at alpha = 2 the law is Gaussian and has no power tail"
        )
    return 2.0 / math.pi * math.gamma(alpha) * math.sin(math.pi * alpha / 2.0)
