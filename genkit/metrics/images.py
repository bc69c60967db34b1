r"""Measures of generated images: Fréchet distance and its floor, precision and recall, diversity, spectra, volumes.

Features (n, d) come from any network, or are the flattened images; values from different networks do not compare.
Nor do Fréchet distances at different n, whose bias falls about like 1/n: hold n equal and quote :func:`frechet_floor`.
NaN and infinity are refused, because leaving such rows out would flatter the model that made them.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from genkit._checks import check_same_shape, checked_count, got
from genkit.errors import ConfigError
from genkit.metrics.pareto import Points, hypervolume
from genkit.metrics.tails import Interval, bootstrap_interval

__all__ = [
    "ClassDiversity",
    "FrechetFloor",
    "PrecisionRecall",
    "RadialSpectrum",
    "SpectrumOfChange",
    "class_diversity",
    "frechet_distance",
    "frechet_floor",
    "hypervolume_difference",
    "hypervolume_interval",
    "precision_recall",
    "radial_spectrum",
    "spectrum_of_change",
]

BySeed = Sequence[Points]
Reference = Sequence[float] | Tensor

_EXACT = "donot_use_mm_for_euclid_dist"


def frechet_distance(features_a: Tensor, features_b: Tensor) -> float:
    r"""Squared Fréchet distance of the normal laws with the samples' moments, in float64 and squared feature units.

        \|μ_a - μ_b\|² + tr(C_a + C_b - 2 (C_a C_b)^½),    tr (C_a C_b)^½ = Σ √λ_i(C_a^½ C_b C_a^½)

    The √λ_i are the singular values of R_a R_bᵀ, where C = RᵀR by QR of the centred rows: nothing is complex, and
    singular covariances (n <= d) are exact to rounding as well. Covariances divide by n - 1; the result is >= 0.

    Args:
        features_a: (n, d), n >= 2.  features_b: (m, d), m >= 2.

    Raises:
        ConfigError: fewer than two rows, different d, or values that are not finite.

    Reference: Heusel et al., "GANs trained by a two time-scale update rule converge to a local Nash equilibrium",
    arXiv:1706.08500.
    """
    a, b = _two_features(("features_a", features_a), ("features_b", features_b), least=2)
    (mean_a, root_a), (mean_b, root_b) = _moments(a), _moments(b)
    traces = root_a.square().sum() + root_b.square().sum()
    cross = torch.linalg.svdvals(root_a @ root_b.T).sum()
    return max(0.0, float((mean_a - mean_b).square().sum() + traces - 2.0 * cross))


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (d,) and a root R (min(n, d), d) of the covariance RᵀR, in float64."""
    rows = rows.to(torch.float64)
    mean = rows.mean(dim=0)
    return mean, torch.linalg.qr(rows - mean, mode="r").R / math.sqrt(len(rows) - 1)


@dataclass(frozen=True)
class FrechetFloor:
    """Fréchet distance of halves of ``n`` rows: ``mean`` and ``std`` (NaN for one) over ``repeats`` divisions."""

    mean: float
    std: float
    n: int
    repeats: int


def frechet_floor(features: Tensor, n: int, *, generator: Generator, repeats: int = 8) -> FrechetFloor:
    """What a perfect model scores with n samples against n rows of the reference: lower values mean nothing.

    Args:
        features: (N, d) of the reference set, N >= 2n; each repeat takes :func:`frechet_distance` of two disjoint sets.
        n: rows in each set, at least 2: as many as the samples that the model is judged by.
        generator: source of the divisions, which share rows: std / √repeats is no standard error.

    Raises:
        ConfigError: N < 2n, n < 2, no repeats, no generator, or values that are not finite.
    """
    rows = _checked("features", features, "(n, d)", least=2)
    n, repeats = checked_count("n", n, "an integer, at least 2", 2), checked_count("repeats", repeats)
    if 2 * n > len(rows):
        raise ConfigError(f"n={n} with {len(rows)} rows; expected 2n or more: pass more, or n <= {len(rows) // 2}")
    source, values = _source(generator), []
    for _ in range(repeats):
        order = torch.randperm(len(rows), generator=source, device=source.device).to(rows.device)
        values.append(frechet_distance(rows[order[:n]], rows[order[n : 2 * n]]))
    distances = torch.tensor(values, dtype=torch.float64)
    return FrechetFloor(float(distances.mean()), float(distances.std()) if repeats > 1 else math.nan, n, repeats)


@dataclass(frozen=True)
class PrecisionRecall:
    """How two sets cover each other, by balls that reach to the ``k``-th neighbour within the own set.

    Attributes:
        precision: share of the fake rows inside some ball of the real set (quality).
        recall: share of the real rows inside some ball of the fake set (diversity).
        density: how many balls of the real set a fake row lies in, over k: above 1 where fakes crowd dense regions.
        coverage: share of the real balls that hold a fake row; unlike recall it does not grow with fake outliers.
    """

    precision: float
    recall: float
    density: float
    coverage: float
    k: int
    num_real: int
    num_fake: int


def precision_recall(real: Tensor, fake: Tensor, k: int = 3, chunk: int = 1024) -> PrecisionRecall:
    """Improved precision and recall, and density and coverage, of fake rows against real ones.

    Distances are norms of differences (|a|² + |b|² - 2ab would cancel), in float64 unless both sets are float32 or
    coarser. Balls are closed. A row is left out of its own neighbours by position, so copies of it count. O((n + m)² d)
    time, O(chunk (n + m)) memory. The values depend on n and m: hold them equal.

    Args:
        real: (n, d), n > k.  fake: (m, d), m > k.
        k: which neighbour gives the radius.
        chunk: rows whose distances are held at once.

    Raises:
        ConfigError: k not below n and m, different d, or values that are not finite.

    References: Kynkäänniemi et al., "Improved precision and recall metric for assessing generative models",
    arXiv:1904.06991; Naeem et al., "Reliable fidelity and diversity metrics for generative models", arXiv:2002.09797.
    """
    k, chunk = checked_count("k", k), checked_count("chunk", chunk)
    rows, others = _two_features(("real", real), ("fake", fake), least=1)
    n, m = len(rows), len(others)
    if k >= min(n, m):
        raise ConfigError(f"k={k} with {n} real and {m} fake rows; expected k below both: lower k or pass more rows")
    real_radius, fake_radius = _neighbour_radius(rows, k, chunk), _neighbour_radius(others, k, chunk)
    recalled, covered = (torch.zeros(n, dtype=torch.bool, device=rows.device) for _ in range(2))
    precise = memberships = 0
    for part, radius in zip(others.split(chunk), fake_radius.split(chunk), strict=True):
        distance = torch.cdist(part, rows, compute_mode=_EXACT)
        inside = distance <= real_radius
        precise += int(inside.any(dim=1).sum())
        memberships += int(inside.sum())
        covered |= inside.any(dim=0)
        recalled |= (distance <= radius.unsqueeze(1)).any(dim=0)
    return PrecisionRecall(precise / m, int(recalled.sum()) / n, memberships / (k * m), int(covered.sum()) / n, k, n, m)


def _neighbour_radius(rows: Tensor, k: int, chunk: int) -> Tensor:
    """Distance of each row (n, d) to its k-th nearest other row, (n,)."""
    radii = []
    for start in range(0, len(rows), chunk):
        distance = torch.cdist(rows[start : start + chunk], rows, compute_mode=_EXACT)
        distance.diagonal(offset=start).fill_(math.inf)
        radii.append(distance.topk(k, dim=1, largest=False).values[:, -1])
    return torch.cat(radii)


@dataclass(frozen=True)
class ClassDiversity:
    """``mean`` of ``per_class``, float64 (K,), over the labels ``classes``, int64 (K,); ``left_out`` have one image."""

    mean: float
    per_class: Tensor
    classes: Tensor
    left_out: int


def class_diversity(images: Tensor, labels: Tensor) -> ClassDiversity:
    r"""Mean over classes of the standard deviation of each pixel within the class (n - 1), averaged over the pixels.

    In float64, in units of the pixels. Classes have equal weight; those with one image are left out and counted.

    Args:
        images: (n, \*), with at least one pixel each.  labels: integers (n,).

    Raises:
        ConfigError: shapes that do not fit, labels that are no integers, NaN or inf, or no class with two images.
    """
    pixels = _checked("images", images, "(n, *)", least=1).to("cpu", torch.float64).flatten(1)
    if not isinstance(labels, Tensor) or labels.shape != (len(pixels),) or labels.is_floating_point():
        kind = getattr(labels, "dtype", "no dtype")
        raise ConfigError(f"labels has {got(labels)}, {kind}; expected integers ({len(pixels)},), one an image")
    classes, counts = labels.unique(return_counts=True)
    kept = classes[counts > 1].tolist()
    if not kept:
        raise ConfigError(f"each of the {len(classes)} labels has one image; expected one with two: pass more images")
    spreads = torch.stack([pixels[labels.cpu() == label].std(dim=0).mean() for label in kept])
    return ClassDiversity(float(spreads.mean()), spreads, torch.tensor(kept).long(), len(classes) - len(kept))


@dataclass(frozen=True)
class RadialSpectrum:
    """``power``, float64 (K,), in squared pixel units, at ``frequencies``, float64 (K,), in cycles per longer side.

    Bin k holds ``coefficients``, int64 (K,), Fourier coefficients from k - ½ to k + ½, and their sum; ``power`` over
    ``coefficients`` is flat for white noise, and the sum over all bins is the mean squared pixel.
    """

    frequencies: Tensor
    power: Tensor
    coefficients: Tensor


def radial_spectrum(images: Tensor) -> RadialSpectrum:
    """Mean power of images in isotropic bins of integer frequency, up to the corners of the Fourier plane.

    Coefficient (k_y, k_x) has the frequency L √((k_y/H)² + (k_x/W)²), L the longer side: equal stripes share a bin in
    both directions of an oblong image, bin 0 is the mean alone, and no bin is empty. The images count as periodic.

    Args:
        images: (n, C, H, W), n >= 1.

    Raises:
        ConfigError: another shape, or pixels that are not finite.
    """
    return _spectrum(_checked("images", images, "(n, C, H, W)", least=1))[0]


@dataclass(frozen=True)
class SpectrumOfChange:
    """Where in frequency a change lies: ``shares`` of its power at ``frequencies``, float64 (K,), with the sum 1.

    ``mean_squared_change`` is in squared pixel units. ``high_frequency_share`` is that of the coefficients above half
    of Nyquist (a quarter cycle a pixel), by their own frequency and not by their bin. Shares of no change are NaN.
    """

    frequencies: Tensor
    shares: Tensor
    mean_squared_change: float
    high_frequency_share: float


def spectrum_of_change(before: Tensor, after: Tensor) -> SpectrumOfChange:
    """The radial spectrum of ``after - before``, as shares: which frequencies a change of the model touched.

    Args:
        before: (n, C, H, W).  after: (n, C, H, W), image by image from the same noise and condition.

    Raises:
        ConfigError: other or different shapes, or pixels that are not finite.
    """
    check_same_shape("after", after, "before", before)
    pair = [_checked(name, x, "(n, C, H, W)", least=1) for name, x in (("before", before), ("after", after))]
    spectrum, high = _spectrum(pair[1].to(torch.float64) - pair[0].to(torch.float64))
    total = spectrum.power.sum()
    return SpectrumOfChange(spectrum.frequencies, spectrum.power / total, float(total), float(high / total))


def _spectrum(images: Tensor) -> tuple[RadialSpectrum, Tensor]:
    """The spectrum, and the power of the coefficients above half of Nyquist; float64 on the CPU."""
    height, width = images.shape[-2:]
    power = torch.zeros(height, width, dtype=torch.float64)
    for part in images.split(256):
        power += torch.fft.fft2(part.to(torch.float64), norm="forward").abs().square().sum(dim=(0, 1)).cpu()
    power /= images.shape[0] * images.shape[1]
    rows, columns = (torch.fft.fftfreq(size, dtype=torch.float64) for size in (height, width))
    cycles = torch.hypot(rows.unsqueeze(1), columns.unsqueeze(0))  # a pixel
    bins = (cycles * max(height, width) + 0.5).floor().long().flatten()
    counts, binned = torch.bincount(bins), torch.bincount(bins, weights=power.flatten())
    high = power[cycles > 0.25 + 1e-12].sum()
    return RadialSpectrum(torch.arange(len(counts)).double(), binned, counts), high


def hypervolume_interval(
    points_by_seed: BySeed, reference: Reference, num_resamples: int = 1000, *, generator: Generator
) -> Interval:
    """Mean over seeds of each seed's hypervolume, with its 95 % percentile bootstrap interval over the seeds.

    With few seeds the interval is too narrow; with one, low = value = high.

    Args:
        points_by_seed: for each seed its points (n_i, M), every objective maximised.
        reference: (M,), as in :func:`genkit.metrics.hypervolume`; the same for everything compared.
        generator: source of the resampling, on the CPU.

    Raises:
        ConfigError: no seeds, shapes that do not fit, fewer than two resamples, or no generator.

    Reference: Efron, Tibshirani, "An introduction to the bootstrap", 1993, chapter 13.
    """
    return _mean_interval(_volumes(points_by_seed, reference), num_resamples, generator)


def hypervolume_difference(
    a_by_seed: BySeed, b_by_seed: BySeed, reference: Reference, num_resamples: int = 1000, *, generator: Generator
) -> Interval:
    """Mean over seeds of the hypervolume of a minus that of b, with its 95 % bootstrap interval over the pairs.

    As in :func:`hypervolume_interval`; entry i of a and of b share a seed, and unequal lengths are a ConfigError.
    """
    if len(a_by_seed) != len(b_by_seed):
        raise ConfigError(
            f"a_by_seed has {len(a_by_seed)} seeds and b_by_seed {len(b_by_seed)}; expected the same seeds in both"
        )
    return _mean_interval(_volumes(a_by_seed, reference) - _volumes(b_by_seed, reference), num_resamples, generator)


def _volumes(points_by_seed: BySeed, reference: Reference) -> Tensor:
    return torch.tensor([hypervolume(points, reference) for points in points_by_seed], dtype=torch.float64)


def _mean_interval(values: Tensor, resamples: int, generator: Generator) -> Interval:
    if not len(values):
        raise ConfigError("got the points of 0 seeds; expected points (n, M) of at least one")
    count = checked_count("num_resamples", resamples, "an integer, at least 2", 2)
    return bootstrap_interval(lambda x: float(x.mean()), values, resamples=count, generator=_source(generator))


def _source(generator: Generator) -> Generator:
    if not isinstance(generator, torch.Generator):
        raise ConfigError(f"generator={reprlib.repr(generator)}; expected torch.Generator().manual_seed(seed)")
    return generator


def _checked(name: str, value: Tensor, shape: str, least: int) -> Tensor:
    """The tensor without gradient, when it has the ``shape`` (* for any rest), ``least`` rows and finite numbers."""
    fits = isinstance(value, Tensor) and (value.ndim >= 2 if "*" in shape else value.ndim == shape.count(",") + 1)
    if not fits or len(value) < least or not value.numel():
        raise ConfigError(f"{name} has {got(value)}; expected a tensor {shape}, n >= {least} and no size 0")
    bad = int((~torch.isfinite(value).flatten(1).all(dim=1)).sum())
    if bad:
        raise ConfigError(f"{bad} of {len(value)} rows of {name} are NaN or infinite; expected finite numbers")
    return value.detach()


def _two_features(first: tuple[str, Tensor], second: tuple[str, Tensor], least: int) -> tuple[Tensor, Tensor]:
    """Both sets in one precision, float32 or float64."""
    a, b = (_checked(name, value, "(n, d)", least) for name, value in (first, second))
    if a.shape[1] != b.shape[1]:
        raise ConfigError(f"{first[0]} has {got(a)} and {second[0]} {got(b)}; expected the same d, of one network")
    fine = any(value.dtype == torch.float64 or not value.is_floating_point() for value in (a, b))
    dtype = torch.float64 if fine else torch.float32
    return a.to(dtype), b.to(dtype)
