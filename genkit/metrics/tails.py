r"""Tails of samples: Hill index, quantile ratios, tail Kolmogorov–Smirnov, exceedance curves, bootstrap intervals.

Every function takes one column of values (n,); for vectors take a coordinate or :class:`RobustWhitening`'s radius.
Values that are NaN or infinite are left out, counted in the result and announced by one warning; a sample without
a finite value is an error.

Hill's estimator is biased at finite n (a symmetric stable law of index 1.8 reads 2.7 at k = 5 %), so samples are only
compared with a reference at equal n and equal k: :func:`compare_tails` does so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from genkit.errors import ConfigError

__all__ = [
    "EcfEstimate",
    "ExceedanceCurve",
    "HillEstimate",
    "HillPlot",
    "Interval",
    "RobustWhitening",
    "TailComparison",
    "TailKS",
    "bootstrap_interval",
    "compare_tails",
    "ecf_tail_index",
    "exceedance",
    "finite_values",
    "hill",
    "hill_plot",
    "quantile_ratio",
    "tail_ks",
]

_MAD_TO_STD = 1.482602218505602  # 1 / Φ⁻¹(3/4)
_SIDES = ("both", "upper", "lower")


def finite_values(x: Tensor, name: str = "samples") -> tuple[Tensor, int]:
    """The finite values of x in float64, and how many were not; warns with the count when some were not.

    Args:
        x: (n,) values, or (n, d) rows (a row counts as non-finite when any of its numbers is).
        name: what the warning and the errors call them.

    Raises:
        ConfigError: x has no finite value, or another number of dimensions.
    """
    if x.ndim not in (1, 2):
        raise ConfigError(f"{name} must have shape (n,) or (n, d), got {tuple(x.shape)}")
    values = x.detach().to(torch.float64)
    finite = torch.isfinite(values) if x.ndim == 1 else torch.isfinite(values).all(dim=1)
    bad = int((~finite).sum())
    if bad == len(x):
        raise ConfigError(f"{name} hold no finite value ({bad} of {len(x)} are NaN or infinite)")
    if bad:
        warnings.warn(
            f"{bad} of {len(x)} {name} are NaN or infinite; the estimate uses the other {len(x) - bad}", stacklevel=3
        )
    return values[finite], bad


def _column(x: Tensor, name: str = "samples") -> tuple[Tensor, int]:
    if x.ndim != 1:
        raise ConfigError(
            f"{name} must be one column of shape (n,), got {tuple(x.shape)}; pass a coordinate or a radius"
        )
    return finite_values(x, name)


def _excesses(x: Tensor, side: str) -> Tensor:
    """The values whose upper tail is asked for, largest first."""
    if side not in _SIDES:
        raise ConfigError(f"side must be one of {', '.join(_SIDES)}, got {side!r}")
    signed = {"both": x.abs(), "upper": x, "lower": -x}[side]
    return signed.sort(descending=True).values


@dataclass(frozen=True)
class HillEstimate:
    """Hill's tail index at one k: ``tail_index`` ± ``standard_error`` from the k largest of n finite values."""

    tail_index: float
    standard_error: float
    k: int
    n: int
    nonfinite: int


def hill(x: Tensor, *, k: int | None = None, fraction: float | None = None, side: str = "both") -> HillEstimate:
    r"""Hill's estimator of the tail index α of P(\|X\| > x) ~ x^(-α).

        1/α̂ = (1/k) Σ_{i<=k} log(x_(i) / x_(k+1)),    x_(1) >= x_(2) >= …,    standard error α̂/√k

    Args:
        x: (n,) values.
        k: number of largest values used; or give ``fraction``.
        fraction: k/n in (0, 1); k is rounded down, at least 1.
        side: ``"both"`` uses \|x\|, ``"upper"`` x, ``"lower"`` -x.

    Returns:
        The estimate; ``inf`` when the k+1 largest values are all equal.

    Raises:
        ConfigError: not exactly one of ``k`` and ``fraction``, k outside [1, n), or a (k+1)-th value that is not > 0.

    Reference: Hill, "A simple general approach to inference about the tail of a distribution", Ann. Stat. 1975.
    """
    values, nonfinite = _column(x)
    if (k is None) == (fraction is None):
        raise ConfigError(f"give exactly one of k and fraction, got k={k!r} and fraction={fraction!r}")
    if fraction is not None and not 0.0 < fraction < 1.0:
        raise ConfigError(f"fraction must lie in (0, 1), got {fraction!r}")
    count = max(1, int(fraction * len(values))) if fraction is not None else int(k or 0)
    plot = _hill_curve(_excesses(values, side), count)
    index = float(plot[-1])
    return HillEstimate(index, index / math.sqrt(count), count, len(values), nonfinite)


def _hill_curve(ordered: Tensor, top: int) -> Tensor:
    """α̂ at k = 1 … top, (top,), from values in descending order."""
    if not 1 <= top < len(ordered):
        raise ConfigError(f"k must be at least 1 and below the {len(ordered)} finite values, got {top}")
    if float(ordered[top]) <= 0.0:
        raise ConfigError(
            f"Hill's estimator needs positive values: number {top + 1} is {float(ordered[top]):g}; lower k"
        )
    logs = ordered[: top + 1].log()
    ks = torch.arange(1, top + 1, dtype=torch.float64)
    return ks / (logs[:-1].cumsum(0) - ks * logs[1:]).clamp_min(0.0)


@dataclass(frozen=True)
class HillPlot:
    """Hill's index against k: ``k`` int64 (K,), ``tail_index`` and ``standard_error`` float64 (K,)."""

    k: Tensor
    tail_index: Tensor
    standard_error: Tensor
    n: int
    nonfinite: int


def hill_plot(x: Tensor, *, max_fraction: float = 0.1, side: str = "both") -> HillPlot:
    """Hill's estimates for every k up to ``max_fraction`` of n: a flat stretch is where the index can be read."""
    values, nonfinite = _column(x)
    if not 0.0 < max_fraction < 1.0:
        raise ConfigError(f"max_fraction must lie in (0, 1), got {max_fraction!r}")
    curve = _hill_curve(_excesses(values, side), max(1, int(max_fraction * len(values))))
    k = torch.arange(1, len(curve) + 1)
    return HillPlot(k, curve, curve / k.to(torch.float64).sqrt(), len(values), nonfinite)


def quantile_ratio(
    samples: Tensor, reference: Tensor, levels: Sequence[float] = (0.99, 0.999, 0.9999), side: str = "both"
) -> dict[float, float]:
    r"""Quantiles of the samples over those of the reference, by level (of \|x\| by default); 1 is perfect.

    Args:
        samples: (n,) values.  reference: (m,) values; equal n and m make the two biases equal.
        levels: in (0, 1). A level with fewer than one value above it gives NaN.
    """
    a, _ = _column(samples)
    b, _ = _column(reference, "reference values")
    return {level: _upper_quantile(a, level, side) / _upper_quantile(b, level, side) for level in levels}


def _upper_quantile(x: Tensor, level: float, side: str) -> float:
    """The value with floor(n (1 - level)) values above it."""
    if not 0.0 < level < 1.0:
        raise ConfigError(f"levels must lie in (0, 1), got {level!r}")
    above = math.floor(len(x) * (1.0 - level) + 1e-9)
    return float(_excesses(x, side)[above]) if above >= 1 else math.nan


@dataclass(frozen=True)
class TailKS:
    """Distance of two tails: ``distance`` of the laws above ``threshold``, and how often each goes above it.

    ``exceedance_error`` is ``exceedance`` - ``reference_exceedance``; ``count`` and ``reference_count`` values exceed.
    """

    distance: float
    exceedance: float
    reference_exceedance: float
    exceedance_error: float
    threshold: float
    count: int
    reference_count: int
    nonfinite: int


def tail_ks(samples: Tensor, reference: Tensor, level: float = 0.95, side: str = "both") -> TailKS:
    r"""Kolmogorov–Smirnov distance of the conditional laws above the reference's ``level`` quantile.

        sup_x \| P(X <= x \| X > u) - P(Y <= x \| Y > u) \|,    u = the reference's quantile

    The distance is 1 when no sample exceeds u. The rate at which u is exceeded is a separate number beside it.
    """
    a, bad = _column(samples)
    b, _ = _column(reference, "reference values")
    threshold = _upper_quantile(b, level, side)
    if math.isnan(threshold):
        raise ConfigError(f"{len(b)} reference values have none above the {level} quantile; lower level or pass more")
    tail_a, tail_b = (values[values > threshold] for values in (_excesses(a, side), _excesses(b, side)))
    rates = len(tail_a) / len(a), len(tail_b) / len(b)
    return TailKS(_ks_distance(tail_a, tail_b), *rates, rates[0] - rates[1], threshold, len(tail_a), len(tail_b), bad)


def _ks_distance(a: Tensor, b: Tensor) -> float:
    if len(a) == 0 or len(b) == 0:
        return 1.0
    grid = torch.cat((a, b))
    cdf_a, cdf_b = (torch.searchsorted(v.sort().values, grid, right=True).to(torch.float64) / len(v) for v in (a, b))
    return float((cdf_a - cdf_b).abs().max())


@dataclass(frozen=True)
class ExceedanceCurve:
    """P(X > ``threshold``) = ``probability``, float64 (m,): a line of slope -α on log-log axes for a power tail."""

    threshold: Tensor
    probability: Tensor
    n: int
    nonfinite: int


def exceedance(x: Tensor, thresholds: Tensor | None = None, side: str = "both") -> ExceedanceCurve:
    """Empirical exceedance probabilities at the thresholds, or at every positive value of the sample."""
    values, nonfinite = _column(x)
    ordered = _excesses(values, side).flip(0)
    points = ordered[ordered > 0].unique() if thresholds is None else thresholds.to(torch.float64)
    above = len(ordered) - torch.searchsorted(ordered, points.contiguous(), right=True)
    return ExceedanceCurve(points, above.to(torch.float64) / len(ordered), len(ordered), nonfinite)


@dataclass(frozen=True)
class EcfEstimate:
    """Stable law fitted to the characteristic function: index ``alpha`` and scale c of exp(-|c k|^alpha)."""

    alpha: float
    scale: float
    n: int
    nonfinite: int


def ecf_tail_index(x: Tensor, frequencies: Sequence[float] = (0.2, 0.3, 0.45, 0.65, 0.9)) -> EcfEstimate:
    r"""Index of a symmetric stable law from its empirical characteristic function φ̂, for α near 2 where Hill fails.

        log(-log \|φ̂(k)\|) = α log k + α log c

    is fitted by least squares. \|φ̂\| does not depend on the location. It is no estimate of the tail of other laws.

    Args:
        x: (n,) values.
        frequencies: k in units of 1 / half the interquartile range, at least two.

    Reference: Koutrouvelis, "Regression-type estimation of the parameters of stable laws", JASA 1980 (first step).
    """
    values, nonfinite = _column(x)
    if len(frequencies) < 2:
        raise ConfigError(f"at least two frequencies are needed to fit a slope, got {len(frequencies)}")
    ordered = values.sort().values
    spread = float(ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4]) / 2.0
    if spread <= 0.0:
        raise ConfigError("the interquartile range of the samples is zero; the law has no scale to fit")
    k = torch.tensor(frequencies, dtype=torch.float64)
    phase = k.unsqueeze(1) * ((values - ordered[len(ordered) // 2]) / spread)
    modulus = torch.hypot(phase.cos().mean(dim=1), phase.sin().mean(dim=1))
    y, log_k = torch.log(-torch.log(modulus)), torch.log(k)
    centred = log_k - log_k.mean()
    alpha = float((centred * y).sum() / centred.square().sum())
    scale = spread * math.exp(float(y.mean()) / alpha - float(log_k.mean()))
    return EcfEstimate(alpha, scale, len(values), nonfinite)


@dataclass(frozen=True)
class RobustWhitening:
    """Affine map fitted to a reference by medians: ``centre`` (d,) and ``transform`` (d, d), float64.

    Fit it to the reference once and take both radii with it, so that they can be compared.
    """

    centre: Tensor
    transform: Tensor

    @classmethod
    def fit(cls, reference: Tensor) -> RobustWhitening:
        """Medians, median absolute deviations (MAD) and their pairwise correlations of rows (n, d).

        The correlation of standardised columns u, v is (MAD²(u+v) - MAD²(u-v)) / (MAD²(u+v) + MAD²(u-v)), which exists
        for laws without variance.

        Reference: Gnanadesikan, Kettenring, "Robust estimates, residuals, and outlier detection", Biometrics 1972.
        """
        rows, _ = finite_values(reference, "reference rows")
        rows = rows.unsqueeze(1) if rows.ndim == 1 else rows
        centre = rows.median(dim=0).values
        spread = _mad(rows)
        if not bool((spread > 0).all()):
            raise ConfigError(
                f"columns {(spread <= 0).nonzero().flatten().tolist()} have zero median absolute deviation"
            )
        unit = (rows - centre) / spread
        plus = _mad(unit.unsqueeze(2) + unit.unsqueeze(1)).square()
        minus = _mad(unit.unsqueeze(2) - unit.unsqueeze(1)).square()
        values, vectors = torch.linalg.eigh((plus - minus) / (plus + minus))
        root = vectors @ torch.diag(values.clamp_min(1e-6).rsqrt()) @ vectors.T
        return cls(centre, root / spread)

    def radius(self, x: Tensor) -> Tensor:
        """Whitened distance from the centre, float64 (n,), of rows (n, d): about 1 per standard deviation."""
        rows = x.unsqueeze(1) if x.ndim == 1 else x
        return torch.linalg.vector_norm((rows.to(torch.float64) - self.centre) @ self.transform.T, dim=1)


def _mad(x: Tensor) -> Tensor:
    """Median absolute deviation along the rows, scaled to the standard deviation of a normal law."""
    return _MAD_TO_STD * (x - x.median(dim=0).values).abs().median(dim=0).values


@dataclass(frozen=True)
class Interval:
    """A statistic with its percentile bootstrap interval [low, high]."""

    value: float
    low: float
    high: float


def bootstrap_interval(
    statistic: Callable[[Tensor], float],
    x: Tensor,
    *,
    coverage: float = 0.95,
    resamples: int = 200,
    generator: torch.Generator | None = None,
) -> Interval:
    """Percentile bootstrap of ``statistic`` over independent rows of x.

    Args:
        statistic: rows (n, \\*) → number.
        x: (n, \\*) independent samples (for a time series resample its blocks beforehand).
        generator: source of the resampling; None takes a fixed one, so that equal calls give equal intervals.

    Reference: Efron, Tibshirani, "An introduction to the bootstrap", 1993, chapter 13.
    """
    if len(x) == 0 or resamples < 2 or not 0.0 < coverage < 1.0:
        raise ConfigError(
            f"bootstrap needs samples, at least 2 resamples and a coverage in (0, 1); got {len(x)}, {resamples} "
            f"and {coverage}"
        )
    source = torch.Generator().manual_seed(0) if generator is None else generator
    draws = [statistic(x[torch.randint(len(x), (len(x),), generator=source)]) for _ in range(resamples)]
    ends = torch.tensor([(1.0 - coverage) / 2.0, (1.0 + coverage) / 2.0], dtype=torch.float64)
    low, high = torch.quantile(torch.tensor(draws, dtype=torch.float64), ends).tolist()
    return Interval(statistic(x), low, high)


@dataclass(frozen=True)
class TailComparison:
    """Samples beside a reference at equal ``n`` and equal ``k``; ``nonfinite`` samples were left out."""

    hill: HillEstimate
    reference_hill: HillEstimate
    hill_ratio: float
    quantile_ratios: dict[float, float]
    tail_ks: TailKS
    n: int
    k: int
    nonfinite: int


def compare_tails(
    samples: Tensor,
    reference: Tensor,
    *,
    fraction: float = 0.05,
    levels: Sequence[float] = (0.9, 0.95, 0.99),
    ks_level: float = 0.95,
    side: str = "both",
) -> TailComparison:
    """Hill indices, quantile ratios and tail KS of two columns, both cut to the length of the shorter one.

    The first n rows of the longer column are used, so pass samples in the order they were drawn.
    """
    a, bad = _column(samples)
    b, _ = _column(reference, "reference values")
    n = min(len(a), len(b))
    a, b = a[:n], b[:n]
    ours, theirs = hill(a, fraction=fraction, side=side), hill(b, fraction=fraction, side=side)
    ratios = quantile_ratio(a, b, levels, side)
    ratio = ours.tail_index / theirs.tail_index
    return TailComparison(ours, theirs, ratio, ratios, tail_ks(a, b, ks_level, side), n, ours.k, bad)
