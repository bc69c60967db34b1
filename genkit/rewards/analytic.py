"""Rewards with known values and gradients: for tests, toy tilts and simple risk penalties (not from a paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.rewards.base import Context, Reward, Sample, context_entry, field_of

__all__ = ["GaussianMixtureLogDensity", "LinearFunctional", "QuadraticTarget", "SquaredExceedance"]


class QuadraticTarget(Reward):
    """r(x) = −(w/2) ‖x − y‖²,  ∇r = −w (x − y).

    Args:
        target: y, broadcast against one sample (*); None reads ``context["target"]``, (B, *).
        weight: w > 0.
        field: the part of the sample that is judged, when it has parts.
    """

    differentiable = True

    def __init__(self, target: Tensor | float | None = None, *, weight: float = 1.0, field: str | None = None) -> None:
        if not weight > 0:
            raise ConfigError(f"QuadraticTarget(weight={weight}): expected a positive number.")
        self.target, self.weight, self.field = target, weight, field

    def values(self, sample: Sample, context: Context | None) -> Tensor:
        x = field_of(sample, self.field, of=self)
        y = context_entry(context, "target", x.shape[0], of=self) if self.target is None else self.target
        y = torch.as_tensor(y, dtype=x.dtype, device=x.device)
        fits = y.shape == x.shape if self.target is None else _broadcasts(y, x.shape[1:])
        if not fits:
            expected = (
                f"{tuple(x.shape)} from the context" if self.target is None else f"one sample {tuple(x.shape[1:])}"
            )
            raise ConfigError(f"{self}: the target has shape {tuple(y.shape)}, expected {expected}.")
        return -0.5 * self.weight * (x - y).flatten(1).square().sum(dim=1)


class LinearFunctional(Reward):
    """r(x) = ⟨a, x⟩,  ∇r = a.

    Args:
        direction: a, with the shape of one sample (*) or broadcast to it.
        field: the part of the sample that is judged, when it has parts.
    """

    differentiable = True

    def __init__(self, direction: Tensor | Sequence[float], *, field: str | None = None) -> None:
        self.direction, self.field = torch.as_tensor(direction), field

    def values(self, sample: Sample, context: Context | None) -> Tensor:
        return _inner(self.direction, field_of(sample, self.field, of=self))


class SquaredExceedance(Reward):
    """r(x) = s · max(⟨a, x⟩ − c, 0)²,  ∇r = 2 s max(⟨a, x⟩ − c, 0) a.

    With s = −1 it penalises exceedances of a threshold (a loss of a portfolio, a limit of rain), with s = +1 it asks
    for them.

    Args:
        threshold: c.
        direction: a, with the shape of one sample (*) or broadcast to it; None takes the mean of the elements.
        sign: s, −1 or +1.
        field: the part of the sample that is judged, when it has parts.
    """

    differentiable = True

    def __init__(
        self,
        threshold: float,
        *,
        direction: Tensor | Sequence[float] | None = None,
        sign: int = -1,
        field: str | None = None,
    ) -> None:
        if sign not in (-1, 1):
            raise ConfigError(f"SquaredExceedance(sign={sign}): expected -1 (penalise) or +1 (ask for).")
        self.threshold, self.sign, self.field = threshold, sign, field
        self.direction = None if direction is None else torch.as_tensor(direction)

    def values(self, sample: Sample, context: Context | None) -> Tensor:
        x = field_of(sample, self.field, of=self)
        level = x.flatten(1).mean(dim=1) if self.direction is None else _inner(self.direction, x)
        return self.sign * (level - self.threshold).clamp(min=0).square()


class GaussianMixtureLogDensity(Reward):
    """r(x) = log Σ_k w_k N(x; μ_k, σ_k² I),  ∇r = Σ_k p(k | x) (μ_k − x)/σ_k².

    Args:
        means: μ, (K, d).
        stds: σ, (K,) or one number, positive.
        weights: w, (K,), non-negative with a positive sum; normalised here. Equal by default.
        field: the part of the sample that is judged, when it has parts. Samples are (B, *) with d elements each.
    """

    differentiable = True

    def __init__(
        self,
        means: Tensor,
        stds: Tensor | float = 1.0,
        weights: Tensor | None = None,
        *,
        field: str | None = None,
    ) -> None:
        if means.ndim != 2:
            raise ConfigError(f"means have shape {tuple(means.shape)}, expected (K, d).")
        count = means.shape[0]
        self.means, self.field = means, field
        self.stds = torch.as_tensor(stds, dtype=means.dtype).expand(count)
        self.weights = torch.full((count,), 1.0, dtype=means.dtype) if weights is None else weights.to(means.dtype)
        positive = bool((self.stds > 0).all()) and bool((self.weights >= 0).all()) and bool(self.weights.sum() > 0)
        if self.weights.shape != (count,) or not positive:
            raise ConfigError(f"expected {count} positive stds and non-negative weights, got {stds} and {weights}.")

    def values(self, sample: Sample, context: Context | None) -> Tensor:
        x = field_of(sample, self.field, of=self).flatten(1)
        d = self.means.shape[1]
        if x.shape[1] != d:
            raise ConfigError(f"samples have {x.shape[1]} elements, the mixture's means have {d}.")
        mu, sigma, w = (v.to(x) for v in (self.means, self.stds, self.weights / self.weights.sum()))
        square = (x.unsqueeze(1) - mu).square().sum(dim=2) / sigma.square()
        log_normal = -0.5 * square - d * (sigma.log() + 0.5 * math.log(2 * math.pi))
        return torch.logsumexp(w.log() + log_normal, dim=1)


def _broadcasts(a: Tensor, shape: torch.Size) -> bool:
    """Whether ``a`` can be repeated to ``shape``; a batch of targets cannot, it belongs in the context."""
    return a.ndim <= len(shape) and all(n in (1, m) for n, m in zip(a.shape[::-1], shape[::-1], strict=False))


def _inner(a: Tensor, x: Tensor) -> Tensor:
    try:
        product = a.to(x) * x
    except RuntimeError as error:
        raise ConfigError(f"direction {tuple(a.shape)} does not fit a sample {tuple(x.shape[1:])}.") from error
    if product.shape != x.shape:
        raise ConfigError(f"direction {tuple(a.shape)} does not fit a sample {tuple(x.shape[1:])}.")
    return product.flatten(1).sum(dim=1)
