"""Mode coverage of samples from a mixture whose centres and weights are known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.metrics.tails import finite_values

__all__ = ["ModeCoverage", "mode_coverage"]


@dataclass(frozen=True)
class ModeCoverage:
    """How samples spread over the modes.

    Attributes:
        captured: modes whose share among the in-mode samples is at least ``capture_share`` of their weight.
        total_variation: half the sum of absolute differences between those shares and the weights.
        in_mode_mass: share of the finite samples within ``radius`` of their nearest centre.
        min_ratio: the smallest share over weight.
        proportions: float64 (K,), the shares.
    """

    captured: int
    total_variation: float
    in_mode_mass: float
    min_ratio: float
    proportions: Tensor
    modes: int
    n: int
    nonfinite: int


def mode_coverage(
    samples: Tensor, centres: Tensor, weights: Tensor, radius: float, capture_share: float = 1.0 / 3.0
) -> ModeCoverage:
    """Assigns each sample to its nearest centre when that is within ``radius``.

    Args:
        samples: (n, d).  centres: (K, d).  weights: (K,), positive, normalised here.
        radius: about three robust scales of a mode; what is outside every mode counts only in ``in_mode_mass``.
        capture_share: a mode is captured when its share is at least this part of its weight.

    Returns:
        Coverage of the finite samples; with none in any mode the proportions are 0 and the total variation is 1.
    """
    if samples.ndim != 2 or centres.ndim != 2 or samples.shape[1] != centres.shape[1] or len(weights) != len(centres):
        raise ConfigError(
            f"expected samples (n, d), centres (K, d) and weights (K,), got {tuple(samples.shape)}, "
            f"{tuple(centres.shape)} and {tuple(weights.shape)}"
        )
    if not radius > 0.0 or not bool((weights > 0).all()):
        raise ConfigError(f"radius and weights must be positive, got {radius!r} and {weights.tolist()}")
    rows, nonfinite = finite_values(samples)
    target = weights.to(torch.float64) / weights.to(torch.float64).sum()
    distance, nearest = torch.cdist(rows, centres.to(torch.float64)).min(dim=1)
    counts = torch.bincount(nearest[distance <= radius], minlength=len(centres)).to(torch.float64)
    inside = float(counts.sum())
    share = counts / max(inside, 1.0)
    variation = float((share - target).abs().sum()) / 2.0 if inside else 1.0
    captured = int((share >= capture_share * target).sum())
    return ModeCoverage(
        captured,
        variation,
        inside / len(rows),
        float((share / target).min()),
        share,
        len(centres),
        len(rows),
        nonfinite,
    )
