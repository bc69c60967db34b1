r"""The 2D nine-mode mixture with symmetric stable noise: data whose tails and mode weights are known.

    x = μ_k + √A Z,    k ~ weights,    A = 2 c² S_{α/2},    Z ~ N(0, I_2)

The noise is isotropic: one A for both coordinates, so that P(\|x - μ_k\| > r) falls like r^(-α). Each sample is a pure
function of (seed, index), whatever the number of samples drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from genkit.data.stable import positive_stable, stable_tails
from genkit.errors import ConfigError

__all__ = ["StableMixture"]

# imbalanced, in the range .01 to .30 that the 2D experiments of heavy-tailed diffusion models use; this assignment
# to the 3 x 3 grid (row by row from the lower left) is genkit's
WEIGHTS = (0.01, 0.10, 0.30, 0.02, 0.30, 0.05, 0.15, 0.02, 0.05)
_UNIFORMS = 5  # label, angle and exponential of Kanter's formula, radius and angle of the normal pair
_WORDS = 8  # 64-bit words reserved per sample
_CHUNK = 1 << 18
_QUADRATURE = 1 << 12


class StableMixture:
    r"""Nine isotropic symmetric α-stable modes on a 3 × 3 grid, as a map-style data set.

    ``data[LongTensor (b,)] -> {"sample": float32 (b, 2), "label": int64 (b,)}``

    Args:
        num_samples: n >= 1.
        alpha: stability index of the noise, 0 < α <= 2 (2 is Gaussian with variance 2 ``noise_scale``²).
        noise_scale: c: each coordinate of the noise has characteristic function exp(-\|c k\|^α).
        spacing: distance of neighbouring grid points; the centres are (i, j) · spacing with i, j in {-1, 0, 1}.
        weights: nine positive mode weights, normalised to sum to one.
        seed: an integer >= 0; equal seeds give equal samples.

    Raises:
        ConfigError: an argument outside its range, naming it.
    """

    def __init__(
        self,
        num_samples: int = 32768,
        *,
        alpha: float = 1.5,
        noise_scale: float = 0.1,
        spacing: float = 1.0,
        weights: Sequence[float] = WEIGHTS,
        seed: int = 0,
    ) -> None:
        _check(num_samples, alpha, noise_scale, spacing, weights, seed)
        self.alpha, self.noise_scale, self.seed = alpha, noise_scale, seed
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.weights /= self.weights.sum()
        axis = spacing * torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
        self.centres = torch.cartesian_prod(axis, axis).flip(1)  # row by row: x runs first
        sample, self.label = self.draw(num_samples)
        self.sample = sample.to(torch.float32)

    def __len__(self) -> int:
        return len(self.sample)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        return {"sample": self.sample[index], "label": self.label[index]}

    def draw(self, count: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Samples ``start`` to ``start + count - 1`` of the endless keyed sequence whose beginning the data set holds.

        Returns:
            float64 samples (count, 2) and int64 labels (count,). Indices beyond the data set's length are fresh
            draws, for a held-out set of any size.
        """
        parts = [
            self.transform(_keyed_uniforms(self.seed, low, min(_CHUNK, start + count - low)))
            for low in range(start, start + count, _CHUNK)
        ]
        return torch.cat([sample for sample, _ in parts]), torch.cat([label for _, label in parts])

    def transform(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Uniform numbers (B, 5) to samples float64 (B, 2) and labels (B,): the sampler without its randomness."""
        cumulative = self.weights.cumsum(0)
        label = torch.searchsorted(cumulative / cumulative[-1], uniform[:, 0].contiguous(), right=True)
        label = label.clamp_max(len(self.weights) - 1)
        stable = positive_stable(self.alpha / 2.0, uniform[:, 1], -torch.log(uniform[:, 2]))
        radius = torch.sqrt(2.0 * self.noise_scale**2 * stable) * torch.sqrt(-2.0 * torch.log(uniform[:, 3]))
        angle = 2.0 * math.pi * uniform[:, 4]
        noise = radius.unsqueeze(1) * torch.stack((torch.cos(angle), torch.sin(angle)), dim=1)
        return self.centres[label] + noise, label

    def radius_sf(self, radius: Tensor) -> Tensor:
        r"""P(\|x\| > r), float64, for radii (m,) >= 0, by quadrature over Z.

        Given Z and the mode, \|x\| > r is a condition on the clock A alone, whose law is integrated numerically, so
        the far tail keeps its relative accuracy (about 1e-3).
        """
        values = radius.to(torch.float64).reshape(-1)
        offsets, ring = self.centres.norm(dim=1).unique(return_inverse=True)  # isotropic: the centre's distance decides
        weights = torch.zeros_like(offsets).index_add(0, ring, self.weights)
        sf = torch.stack([_offset_radius_sf(values, float(d), self.alpha, self.noise_scale) for d in offsets], dim=1)
        return (sf @ weights).reshape(radius.shape)

    def radius_quantile(self, level: Tensor | float) -> Tensor:
        r"""The true quantiles of \|x\| at levels in (0, 1), float64: bisection of :meth:`radius_sf` in log r."""
        target = 1.0 - torch.as_tensor(level, dtype=torch.float64)
        low, high = torch.full_like(target, math.log(1e-6)), torch.full_like(target, math.log(1e12))
        for _ in range(50):
            middle = (low + high) / 2.0
            above = self.radius_sf(middle.exp()) > target
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return ((low + high) / 2.0).exp()

    def noise_radius_sf(self, radius: Tensor) -> Tensor:
        r"""P(\|x - μ_k\| > r), float64: one minus it is the true mass within r of a sample's own centre."""
        values = radius.to(torch.float64).reshape(-1)
        return _offset_radius_sf(values, 0.0, self.alpha, self.noise_scale).reshape(radius.shape)


def _check(
    num_samples: int, alpha: float, noise_scale: float, spacing: float, weights: Sequence[float], seed: int
) -> None:
    if num_samples < 1:
        raise ConfigError(f"num_samples must be at least 1, got {num_samples}")
    if not 0.0 < alpha <= 2.0:
        raise ConfigError(f"alpha must lie in (0, 2], got {alpha!r}; 2 is Gaussian noise")
    if not (noise_scale > 0.0 and spacing > 0.0 and math.isfinite(noise_scale) and math.isfinite(spacing)):
        raise ConfigError(f"noise_scale and spacing must be positive, got {noise_scale!r} and {spacing!r}")
    if len(weights) != 9 or not all(w > 0.0 and math.isfinite(w) for w in weights):
        raise ConfigError(f"weights must be nine positive numbers, got {list(weights)!r}")
    if seed < 0:
        raise ConfigError(f"seed must be a non-negative integer, got {seed}")


def _keyed_uniforms(seed: int, start: int, count: int) -> Tensor:
    """Rows ``start`` … of the (∞, 5) table of uniforms of a seed, in (0, 1): Philox-4x64 advanced to the row."""
    # numpy guarantees the raw stream of a bit generator, which it does not for the distributions built on it
    stream = np.random.Philox(key=seed)
    stream.advance(start * _WORDS // 4)
    words = stream.random_raw(count * _WORDS).reshape(count, _WORDS)[:, :_UNIFORMS]
    return torch.from_numpy(((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)


def _offset_radius_sf(radius: Tensor, offset: float, alpha: float, scale: float) -> Tensor:
    r"""P(\|μ + √A Z\| > r) with \|μ\| = offset, (m,): \|μ + s z\| = r is a quadratic in s = √A."""
    square_points = torch.quasirandom.SobolEngine(2).draw(_QUADRATURE, dtype=torch.float64) + 0.5 / _QUADRATURE
    along = torch.cos(math.pi * square_points[:, 0])  # of Z's direction with μ; by symmetry half a turn is enough
    square = -2.0 * torch.log(square_points[:, 1])  # |Z|²
    product = offset * along * square.sqrt()
    result = torch.empty_like(radius)
    for i, r in enumerate(radius):
        root = (product.square() - square * (offset**2 - r**2)).clamp_min(0.0).sqrt()
        # |x| > r below the smaller root and above the larger one; no real root makes them equal and the sum one
        lower, upper = ((-product - root) / square).clamp_min(0.0), ((-product + root) / square).clamp_min(0.0)
        above = [_positive_stable_sf(alpha / 2.0, s.square() / (2.0 * scale**2)) for s in (lower, upper)]
        # zero exactly at a zero root: a rounding error of 1 - 1 would drown the far tail
        below = torch.where(lower > 0.0, 1.0 - above[0], 0.0)
        result[i] = (below + above[1]).mean()
    return result


def _positive_stable_sf(a: float, s: Tensor) -> Tensor:
    """P(S_a > s), float64 of any shape, interpolated log-log in a table that is made once per a."""
    if a == 1.0:
        return (s < 1.0).to(torch.float64)
    log_s, log_sf = _positive_stable_table(a)
    full = s.clamp_min(1e-300).log()
    x = full.clamp(float(log_s[0]), float(log_s[-1]))
    cell = (torch.searchsorted(log_s, x) - 1).clamp(0, len(log_s) - 2)
    weight = (x - log_s[cell]) / (log_s[cell + 1] - log_s[cell])
    # beyond the table, where P(S > s) is about 1e-7, the law is its power tail
    return torch.exp(torch.lerp(log_sf[cell], log_sf[cell + 1], weight) - a * (full - log_s[-1]).clamp_min(0.0))


@functools.lru_cache(maxsize=8)
def _positive_stable_table(a: float) -> tuple[Tensor, Tensor]:
    """log s and log P(S_a > s) on a grid that reaches far into the power tail."""
    log_s = torch.linspace(-20.0, 16.0 / a, 4000, dtype=torch.float64)
    _, sf = stable_tails(log_s.numpy(), 2.0 * a)
    return log_s, torch.from_numpy(sf).clamp(1e-300, 1.0).log()
