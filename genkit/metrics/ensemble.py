"""Ensemble forecasts: CRPS, energy score, spread-skill ratio, rank histogram, area weights and block bootstrap.

An ensemble is (M, \\*shape): members first, then the shape of what was observed. Scores are losses, lower is better, in
the unit of the forecast. All runs on the device of its inputs, in float32 at least. A NaN observation was not made: its
cell is NaN in the result and takes no part in gradients, means or counts. A NaN member makes its cell NaN too: check
an ensemble before `weighted_mean` leaves such cells out. The kinds of CRPS and energy score, with a distance d:

    biased       (1/M) Σ_i d(x_i, y) - 1/(2 M²) Σ_ij d(x_i, x_j)           the score of the empirical distribution
    fair         (1/M) Σ_i d(x_i, y) - 1/(2 M (M-1)) Σ_ij d(x_i, x_j)      unbiased: its mean does not depend on M
    almost_fair  α fair + (1 - α) biased

References: Gneiting, Raftery, "Strictly proper scoring rules, prediction, and estimation", JASA 2007 (CRPS and energy
score); Ferro, "Fair scores for ensemble forecasts", QJRMS 2014; Lang et al., "AIFS-CRPS", arXiv:2412.15832 (almost
fair); Fortin et al., "Why should ensemble spread match the RMSE of the ensemble mean?", J. Hydromet. 2014; Hamill,
"Interpretation of rank histograms for verifying ensemble forecasts", Mon. Weather Rev. 2001; Delle Monache et al.,
J. Geophys. Res. 111 D24307, 2006 (reliability index); Künsch, "The jackknife and the bootstrap for general stationary
observations", Ann. Stat. 1989 (moving blocks).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from genkit._checks import checked_count, checked_number, got
from genkit.errors import ConfigError, nearest

__all__ = [
    "ForecastComparison",
    "block_bootstrap",
    "compare_forecasts",
    "crps",
    "energy_score",
    "latitude_weights",
    "rank_histogram",
    "reliability_index",
    "spread_skill",
    "weighted_mean",
]

_KINDS = ("fair", "biased", "almost_fair")
_BACKENDS = ("auto", "sorted", "pairwise")
_FEW_MEMBERS = 3  # up to here all pairs cost no more than a sort
_BLOCK = 1 << 22  # numbers of resampled series held at once: 32 MB


def crps(
    ensemble: Tensor,
    observation: Tensor,
    *,
    kind: str = "fair",
    alpha: float = 0.95,
    backend: str = "auto",
    mask: Tensor | None = None,
) -> Tensor:
    r"""Continuous ranked probability score of every cell.

    With a_i = x_i - y, ε = (1-α)/M and a_(0) <= … <= a_(M-1) the almost fair score is

        pairwise  1/(M(M-1)) Σ_{i<j} [2 min(\|a_i\|, \|a_j\|) 1(a_i a_j > 0) + ε \|a_i - a_j\|]
        sorted    Σ_k [w(M-1-k) max(a_(k), 0) + w(k) max(-a_(k), 0)],   w(k) = 2αk/(M(M-1)) + (1-α)(2k+1)/M²

    where the bracket is \|a_i\| + \|a_j\| - (1-ε) \|a_i - a_j\|. All summands are >= 0, so nothing cancels and no score
    is negative. Fair is α = 1, biased is α = 0.

    Args:
        ensemble: (M, \*shape).
        observation: (\*shape), in the same unit; NaN where there is none.
        kind: ``"fair"`` (M >= 2), ``"biased"`` or ``"almost_fair"`` (M >= 2): see the module.
        alpha: α in [0, 1] of the almost fair score, which the other kinds do not read.
        backend: ``"sorted"`` costs O(M log M), ``"pairwise"`` O(M²), in gradients also of memory; ``"auto"`` chooses.
        mask: bool, broadcast against the observation; False leaves a cell out.

    Returns:
        (\*shape), in the unit of the forecast; NaN at cells left out, where the gradient is exactly 0.

    Raises:
        ConfigError: an unknown kind or backend, too few members, shapes that do not fit, or α outside [0, 1].
    """
    x, y, share = _checked(ensemble, observation, kind, alpha)
    _check_choice("backend", backend, _BACKENDS)
    known = ~torch.isnan(y) if mask is None else ~torch.isnan(y) & _cells("mask", mask, y).bool()
    error = torch.sub(*_masked(known, x, y))
    pairs = backend == "pairwise" or (backend == "auto" and len(x) <= _FEW_MEMBERS)
    score = _pairwise(error, share) if pairs and len(x) > 1 else _sorted(error, share)
    return torch.where(known, score, math.nan)


def _pairwise(error: Tensor, share: float) -> Tensor:
    count, total = len(error), torch.zeros_like(error[0])
    for i in range(count - 1):
        one, others = error[i], error[i + 1 :]
        same_side = torch.minimum(one, others).relu() + (-torch.maximum(one, others)).relu()
        total = total + (2.0 * same_side + (1.0 - share) / count * (one - others).abs()).sum(dim=0)
    return total / (count * (count - 1))


def _sorted(error: Tensor, share: float) -> Tensor:
    count, ordered = len(error), error.sort(dim=0).values
    rank = torch.arange(count, dtype=error.dtype, device=error.device).reshape(-1, *(1,) * (error.ndim - 1))
    fair, biased = 2.0 * share / (count * max(count - 1, 1)), (1.0 - share) / count**2
    below = fair * rank + biased * (2.0 * rank + 1.0)
    return (below.flip(0) * ordered.relu() + below * (-ordered).relu()).sum(dim=0)


def energy_score(ensemble: Tensor, observation: Tensor, kind: str = "fair", *, alpha: float = 0.95) -> Tensor:
    """Energy score of vectors: the CRPS with Euclidean distances, which also sees wrong dependence.

    Args:
        ensemble: (M, B, D).
        observation: (B, D), scaled so that its components count alike; a row with a NaN is left out.
        kind: ``"fair"`` (M >= 2), ``"biased"`` or ``"almost_fair"`` (M >= 2): see the module.
        alpha: α in [0, 1] of the almost fair score.

    Returns:
        (B,), >= 0; NaN in rows left out, where the gradient is 0. Coinciding points add 0 to the gradient.

    Raises:
        ConfigError: an unknown kind, too few members, shapes that do not fit, or α outside [0, 1].
    """
    x, y, share = _checked(ensemble, observation, kind, alpha)
    if y.ndim != 2:
        raise ConfigError(f"observation has {got(y)}; expected (B, D), one vector a row: flatten the other dimensions")
    known = ~torch.isnan(y).any(dim=1, keepdim=True)
    x, y = _masked(known, x, y)
    count, error = len(x), torch.linalg.vector_norm(x - y, dim=-1)
    total = error[0] if count == 1 else torch.zeros_like(error[0])
    for i in range(count - 1):
        distance = torch.linalg.vector_norm(x[i] - x[i + 1 :], dim=-1)
        pairs = error[i] + error[i + 1 :] - (1.0 - (1.0 - share) / count) * distance
        total = total + pairs.clamp_min(0.0).sum(dim=0)  # below 0 by rounding only
    return torch.where(known.squeeze(1), total / max(count * (count - 1), 1), math.nan)


def weighted_mean(values: Tensor, weights: Tensor | None = None, *, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Σ w v / Σ w over the cells that are not NaN, with gradient exactly 0 at the others; NaN where no weight is left.

    Args:
        values: (\\*shape), for example of `crps`.
        weights: broadcast against the values, >= 0, for example of `latitude_weights`; equal by default.
        dim: the dimensions to average over, which the result lacks; by default all.

    Raises:
        ConfigError: weights that do not fit, are negative or not finite.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    known = ~torch.isnan(values)
    weights = torch.ones_like(values) if weights is None else weights
    if not bool(((weights >= 0) & torch.isfinite(weights)).all()):
        raise ConfigError("weights hold negative or non-finite numbers; expected weights >= 0, with 0 for no weight")
    kept = torch.where(known, _cells("weights", weights, values).to(values), 0.0)
    return (torch.where(known, values, 0.0) * kept).sum(dim=dim) / kept.sum(dim=dim)


def spread_skill(ensemble: Tensor, observation: Tensor, dim: int | tuple[int, ...] = 0) -> Tensor:
    """Spread over error; 1 is expected of a perfect ensemble of any size, less says under-dispersed.

        √((M+1)/M) · √(mean of the unbiased variance of the members) / RMSE of the ensemble mean

    Args:
        ensemble: (M, N, \\*), M >= 2.
        observation: (N, \\*), in the same unit; NaN cells are left out of spread and error alike.
        dim: dimensions of the observation to average over, which the result lacks; NaN where nothing was observed.

    Raises:
        ConfigError: one member, or shapes that do not fit.
    """
    x, y, _ = _checked(ensemble, observation, "fair", 1.0, "the variance needs")
    known = ~torch.isnan(y)
    x, y = _masked(known, x, y)
    variance, square = (part.sum(dim=dim) for part in (x.var(dim=0), (x.mean(dim=0) - y).square()))
    ratio = ((len(x) + 1) / len(x) * variance / square).sqrt()
    return torch.where(known.any(dim=dim), ratio, math.nan)


def rank_histogram(ensemble: Tensor, observation: Tensor, *, generator: torch.Generator) -> Tensor:
    """How often an observation is above 0, 1, …, M members, int64 (M+1,): flat if calibrated, a U if under-dispersed.

    Args:
        ensemble: (M, N).
        observation: (N,); NaN observations are left out.
        generator: breaks ties between observation and members (rain of 0) at random.

    Raises:
        ConfigError: shapes that do not fit, a NaN among the members of a counted observation, or no generator.
    """
    x, y, _ = _checked(ensemble, observation, "biased", 1.0)
    if y.ndim != 1:
        raise ConfigError(f"observation has {got(y)}; expected (N,) and an ensemble (M, N): flatten the cells")
    _check_generator(generator)
    known = ~torch.isnan(y)
    x, y = x[:, known], y[known]
    if bool(torch.isnan(x).any()):
        raise ConfigError(f"{int(torch.isnan(x).sum())} members of counted cells are NaN; leave those cells out")
    uniform = torch.rand(y.shape, generator=generator, device=generator.device, dtype=torch.float64).to(y.device)
    ties = (x == y).sum(dim=0)
    rank = (x < y).sum(dim=0) + (uniform * (ties + 1)).long()
    return torch.bincount(rank, minlength=len(x) + 1)


def reliability_index(counts: Tensor) -> float:
    """Distance Σ_k |f_k - 1/(M+1)| of a rank histogram from the flat one: 0 flat, below 2.

    Args:
        counts: (M+1,), of `rank_histogram`; f are its frequencies. Chance alone gives √(2 M / (π n)) in n of them.

    Raises:
        ConfigError: another shape, a negative count, or no count at all.
    """
    if counts.ndim != 1 or not bool((counts >= 0).all()) or not bool(counts.sum() > 0):
        raise ConfigError(f"counts={counts.tolist()}; expected (M+1,) numbers >= 0 of which one is positive")
    frequency = counts.to(torch.float64) / counts.sum()
    return float((frequency - 1.0 / len(counts)).abs().sum())


def latitude_weights(latitudes: Tensor | Sequence[float]) -> Tensor:
    """Area weights cos(latitude) of the rows of a regular grid, (L,) with mean 1; ``.unsqueeze(1)`` for fields (L, K).

    Args:
        latitudes: (L,), in degrees, from -90 to 90.

    Raises:
        ConfigError: latitudes outside the range, NaN, only poles, or another shape.
    """
    degrees = torch.as_tensor(latitudes)
    if degrees.ndim != 1 or not bool((degrees.abs() <= 90.0).all()) or not bool((degrees.abs() < 90.0).any()):
        raise ConfigError(
            f"latitudes={reprlib.repr(degrees.tolist())}; expected (L,) degrees, -90 to 90, not only poles"
        )
    area = torch.deg2rad(degrees.to(torch.float64)).cos().clamp_min(0.0)
    return (area / area.mean()).to(torch.promote_types(degrees.dtype, torch.float32))


def block_bootstrap(
    values: Tensor,
    block_length: int,
    num_resamples: int = 1000,
    *,
    generator: torch.Generator,
    statistic: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """95 % percentile interval ``(low, high)``, float64 (\\*), of a statistic of a dependent series, by moving blocks.

    Args:
        values: (T, \\*), in time order; all columns are resampled together.
        block_length: at most T/2 steps, longer than the series' memory; with 20 blocks the interval covers some 92 %.
        num_resamples: at least 2.  generator: their source.
        statistic: resampled series (r, T, \\*) → (r, \\*), for r at a time; by default the mean over T.

    Raises:
        ConfigError: values that are not finite (counted), lengths that do not fit, or no generator.
    """
    bad = int((~torch.isfinite(values)).sum())
    if values.ndim == 0 or bad:
        raise ConfigError(f"values have {got(values)}, {bad} not finite; expected finite (T, *): drop steps with gaps")
    steps, size = len(values), checked_count("block_length", block_length)
    if 2 * size > steps:
        raise ConfigError(f"block_length={size}; expected at most {steps // 2}, half of the {steps} steps")
    resamples = checked_count("num_resamples", num_resamples, "an integer, at least 2", 2)
    _check_generator(generator)
    series, shape = values.detach().to(torch.float64), (resamples, math.ceil(steps / size))
    starts = torch.randint(steps - size + 1, shape, generator=generator, device=generator.device)
    rows = (starts.to(values.device).unsqueeze(2) + torch.arange(size, device=values.device)).flatten(1)[:, :steps]
    measure = statistic or (lambda resampled: resampled.mean(dim=1))
    draws = torch.cat([measure(series[part]) for part in rows.split(1 + _BLOCK // (1 + series.numel()))]).sort(0).values
    return draws[resamples // 40], draws[-1 - resamples // 40]


@dataclass(frozen=True)
class ForecastComparison:
    """Which of two forecasts scores lower, by variable; `compare_forecasts` makes it.

    Args:
        verdict: int64 (V,): 1 where a is better, 0 for a tie, -1 where a is worse.
        relative_change: float64 (V,), mean(a) / mean(b) - 1: negative where a is lower.
        low, high: float64 (V,), the 95 % interval of mean(a - b), in the unit of the scores.
    """

    verdict: Tensor
    relative_change: Tensor
    low: Tensor
    high: Tensor


def compare_forecasts(
    scores_a: Tensor, scores_b: Tensor, block_length: int, *, generator: torch.Generator, num_resamples: int = 1000
) -> ForecastComparison:
    """Compares two forecasts of the same days, where lower scores are better.

    A variable is no tie where the interval of the mean difference (`block_bootstrap`) excludes 0. Intervals are not
    widened for the number of variables: of many equal ones about 5 % are called different.

    Args:
        scores_a, scores_b: (T, V), one row a forecast in time order, one column a variable.
        block_length: as in `block_bootstrap`.

    Raises:
        ConfigError: shapes that differ, or what `block_bootstrap` refuses.
    """
    shapes = tuple(scores_a.shape), tuple(scores_b.shape)
    if shapes[0] != shapes[1] or scores_a.ndim != 2:
        raise ConfigError(f"scores_a and scores_b have shapes {shapes}; expected one shape (T, V) for both")
    a, b = scores_a.detach().to(torch.float64), scores_b.detach().to(torch.float64)
    low, high = block_bootstrap(a - b, block_length, num_resamples, generator=generator)
    return ForecastComparison((high < 0).long() - (low > 0).long(), a.mean(dim=0) / b.mean(dim=0) - 1.0, low, high)


def _checked(ensemble: Any, observation: Any, kind: str, alpha: float, of: str = "") -> tuple[Tensor, Tensor, float]:
    """Both in one type of at least float32, and the share of the fair score."""
    _check_choice("kind", kind, _KINDS)
    fits = isinstance(ensemble, Tensor) and isinstance(observation, Tensor) and ensemble.ndim > 0
    if not fits or ensemble.shape[1:] != observation.shape or len(ensemble) == 0:
        raise ConfigError(
            f"ensemble has {got(ensemble)}, observation {got(observation)}; expected (M, *shape) and (*shape): "
            "move the members to the first dimension, as in ensemble.movedim(1, 0)"
        )
    alpha = checked_number("alpha", alpha, "a number from 0 (biased) to 1 (fair)", lambda a: 0.0 <= a <= 1.0)
    if len(ensemble) == 1 and kind != "biased":
        needs = of or f"kind={kind!r} needs; kind='biased' takes one member (it is the absolute error then)"
        raise ConfigError(f"ensemble has 1 member; expected M >= 2, which {needs}")
    dtype = torch.promote_types(torch.promote_types(ensemble.dtype, observation.dtype), torch.float32)
    return ensemble.to(dtype), observation.to(dtype), {"fair": 1.0, "biased": 0.0}.get(kind, alpha)


def _masked(known: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both, 0 where not known: masked before any difference, since a NaN in one leaves a NaN gradient behind."""
    return torch.where(known, x, 0.0), torch.where(known, y, 0.0)


def _check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r}; expected one of {', '.join(known)}.{nearest(value, known)}")


def _check_generator(generator: Any) -> None:
    if not isinstance(generator, torch.Generator):
        raise ConfigError(f"generator has {got(generator)}; expected torch.Generator().manual_seed(seed)")


def _cells(name: str, value: Tensor, like: Tensor) -> Tensor:
    try:
        return value.broadcast_to(like.shape)
    except RuntimeError as error:
        raise ConfigError(f"{name} has {got(value)}; expected one that broadcasts to {tuple(like.shape)}") from error
