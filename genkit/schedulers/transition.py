"""Transitions: the conditional laws p(x_s | x_t) of one step of a chain, as values with a sample, a density and a mode.

A transition is made by ``scheduler.transition(...)``; it never changes. ``sample`` takes the noise as an argument (an
object with ``normal`` and ``uniform``, such as :class:`genkit.samplers.Keys`), so that one transition can be sampled,
branched and scored at will.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from genkit._checks import check_same_shape, got
from genkit.errors import ConfigError

__all__ = [
    "CategoricalTransition",
    "GaussianTransition",
    "Noise",
    "Transition",
    "WrappedNormalTransition",
    "distinct",
    "expand_as",
    "linear_combination",
]


class Noise(Protocol):
    """What a transition needs of a random stream: numbers for a per-sample shape, ``(B, *shape)``."""

    def normal(self, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor: ...

    def uniform(self, shape: Sequence[int] = (), dtype: torch.dtype = torch.float64) -> Tensor: ...


@runtime_checkable
class Transition(Protocol):
    """p(x_s | x_t) for a batch: sample it, score a state under it, or take its mode."""

    def sample(self, keys: Noise) -> Any:
        """A state x_s, (B, *), a pure function of the transition and the noise."""
        ...

    def log_prob(self, x_s: Any) -> Tensor:
        """log p(x_s | x_t) in nats, (B,), summed over all but the batch dimension."""
        ...

    @property
    def mode(self) -> Any:
        """The most probable state, (B, *)."""
        ...


def expand_as(coefficient: Tensor, x: Tensor) -> Tensor:
    """A per-sample coefficient () or (B,) as (B, 1, …, 1) in the dtype of ``x``; one with the rank of ``x`` is kept."""
    coefficient = coefficient.to(x.dtype)
    if coefficient.ndim in (0, x.ndim):
        return coefficient
    return coefficient.reshape(coefficient.shape + (1,) * (x.ndim - coefficient.ndim))


def distinct(t: Tensor) -> Tensor:
    """Times (B,) that were expanded from one, as a walk's are, as that one (): coefficients are then computed once."""
    return t[0] if t.ndim == 1 and t.shape[0] > 1 and t.stride(0) == 0 else t


def linear_combination(*terms: tuple[Tensor, Tensor]) -> Tensor:
    """Σ c_i x_i for per-sample coefficients c_i and states x_i, in at least float32: one pass over the state a term."""
    dtype = torch.float32
    for _, x in terms:
        dtype = torch.promote_types(dtype, x.dtype)
    (c, x), *rest = terms
    total = expand_as(c, x.to(dtype)) * x.to(dtype)
    for c, x in rest:
        c, x = expand_as(c, x.to(dtype)), x.to(dtype)
        # in place only where nothing records or transforms the operations, and nothing has to grow
        fits = x.shape == total.shape and all(k in (1, n) for k, n in zip(c.shape, total.shape, strict=False))
        fresh = torch.is_grad_enabled() or not fits
        total = torch.addcmul(total, c, x) if fresh else total.addcmul_(c, x)
    return total


def _sum_over_elements(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sums (B, *) over all but the batch; where ``mask`` (B, N) is False the elements add 0."""
    if mask is not None:
        if mask.shape != values.shape[: mask.ndim]:
            raise ConfigError(f"the mask has {got(mask)}; expected (B, N) of a state with {got(values)}")
        values = torch.where(expand_as(mask.to(values.dtype), values) > 0, values, torch.zeros_like(values))
    return values.reshape(values.shape[0], values[0].numel() if len(values) else 0).sum(dim=1)


def _nan_unless(valid: Tensor, values: Tensor) -> Tensor:
    """NaN where not ``valid``, as a constant: gradients of the other values stay finite."""
    return torch.where(valid, values, torch.full_like(values, math.nan))


def _noise_like(mean: Tensor, keys: Noise) -> Tensor:
    noise = keys.normal(mean.shape[1:], mean.dtype)
    check_same_shape("the keys' noise", noise, "the transition's mean", mean)
    return noise


def _refuse_zero_width(std: Tensor, kind: str) -> None:
    if bool((std <= 0).any()):
        raise ConfigError(
            f"log_prob of a {kind} with width 0 was asked for: a deterministic step (eta=0, or s=0) has no density. "
            "Use eta > 0 and score only the steps with s > 0; rollout(return_log_probs=True) writes NaN there."
        )


@dataclass(frozen=True)
class GaussianTransition:
    """x_s = mean + std · ε with ε ~ N(0, I).

    Args:
        mean: (B, \\*).
        std: (B,), or any shape that broadcasts with ``mean`` from the left; 0 makes the step deterministic.
        mask: optional bool (B, N): elements where it is False are padding and add nothing to ``log_prob``.
    """

    mean: Tensor
    std: Tensor
    mask: Tensor | None = None

    @property
    def mode(self) -> Tensor:
        """The mean."""
        return self.mean

    def sample(self, keys: Noise) -> Tensor:
        """mean + std · ε, with ε from ``keys``, (B, \\*)."""
        noise = _noise_like(self.mean, keys)
        return self.mean + expand_as(self.std, self.mean) * noise

    def log_prob(self, x_s: Tensor) -> Tensor:
        """−½ |x_s − mean|²/std² − n log std − (n/2) log 2π, float32 or float64 (B,).

        Raises:
            ConfigError: the transition has width 0.
        """
        _refuse_zero_width(self.std, "GaussianTransition")
        return self.unchecked_log_prob(x_s)

    def unchecked_log_prob(self, x_s: Tensor) -> Tensor:
        """:meth:`log_prob`, with NaN instead of an error where the width is 0."""
        check_same_shape("x_s", x_s, "the transition's mean", self.mean)
        std = expand_as(self.std, self.mean).expand_as(self.mean)
        wide, std = std > 0, torch.where(std > 0, std, torch.ones_like(std))
        residual = (x_s.to(self.mean.dtype) - self.mean) / std
        scores = -0.5 * residual.square() - std.log() - 0.5 * math.log(2 * math.pi)
        return _sum_over_elements(_nan_unless(wide, scores), self.mask)


@dataclass(frozen=True)
class CategoricalTransition:
    """Independent categorical variables, one per position.

    Args:
        logits: unnormalised log-probabilities (B, \\*, C).
        mask: optional bool (B, N): positions where it is False are padding and add nothing to ``log_prob``.
    """

    logits: Tensor
    mask: Tensor | None = None

    @property
    def mode(self) -> Tensor:
        """The most probable class of each position, int64 (B, \\*)."""
        return self.logits.argmax(dim=-1)

    def sample(self, keys: Noise) -> Tensor:
        """One class per position by inversion of the cumulative distribution, int64 (B, \\*)."""
        cumulative = self.logits.to(torch.float64).softmax(dim=-1).cumsum(dim=-1)
        uniform = keys.uniform(self.logits.shape[1:-1]).unsqueeze(-1) * cumulative[..., -1:]
        return (cumulative <= uniform).sum(dim=-1)

    def log_prob(self, x_s: Tensor) -> Tensor:
        """Σ log p(class), (B,); −inf where a class has probability 0."""
        check_same_shape("x_s", x_s, "the transition's classes", self.logits[..., 0])
        log_probs = self.logits.log_softmax(dim=-1)
        return _sum_over_elements(log_probs.gather(-1, x_s.unsqueeze(-1)).squeeze(-1), self.mask)


# below this width the sum over periodic images converges faster, above it the Fourier series
_CROSSOVER = 0.5
_IMAGES = 6
_HARMONICS = 6


@dataclass(frozen=True)
class WrappedNormalTransition:
    """A normal variable wrapped onto the unit torus [0, 1): x_s = (mean + std · ε) mod 1, element by element.

    The density Σ_k N(x − mean + k; std²) is summed over periodic images for std ≤ ½ and as the Fourier series
    1 + 2 Σ_n exp(−2π² n² std²) cos 2πn(x − mean) above; either way the truncation error is below 1e-15.

    Args:
        mean: location (B, \\*), taken modulo 1.
        std: width before wrapping, (B,) or broadcastable with ``mean`` from the left.
        mask: optional bool (B, N): elements where it is False are padding and add nothing to ``log_prob``.
    """

    mean: Tensor
    std: Tensor
    mask: Tensor | None = None

    @property
    def mode(self) -> Tensor:
        """The location modulo 1."""
        return torch.remainder(self.mean, 1.0)

    def sample(self, keys: Noise) -> Tensor:
        """(mean + std · ε) mod 1, (B, \\*) in [0, 1)."""
        noise = _noise_like(self.mean, keys)
        wrapped = torch.remainder(self.mean + expand_as(self.std, self.mean) * noise, 1.0)
        return torch.where(wrapped < 1.0, wrapped, torch.zeros_like(wrapped))  # remainder may round up to 1

    def log_prob(self, x_s: Tensor) -> Tensor:
        """Log-density with respect to the uniform measure on the torus, (B,).

        Raises:
            ConfigError: the transition has width 0.
        """
        _refuse_zero_width(self.std, "WrappedNormalTransition")
        return self.unchecked_log_prob(x_s)

    def unchecked_log_prob(self, x_s: Tensor) -> Tensor:
        """:meth:`log_prob`, with NaN instead of an error where the width is 0."""
        check_same_shape("x_s", x_s, "the transition's mean", self.mean)
        std = expand_as(self.std, self.mean).expand_as(self.mean)
        wide, std = std > 0, torch.where(std > 0, std, torch.ones_like(std))
        offset = torch.remainder(x_s.to(self.mean.dtype) - self.mean + 0.5, 1.0) - 0.5
        narrow = _log_sum_of_images(offset, std.clamp(max=_CROSSOVER))
        series = _log_fourier_series(offset, std.clamp(min=_CROSSOVER))
        scores = torch.where(std <= _CROSSOVER, narrow, series)
        return _sum_over_elements(_nan_unless(wide, scores), self.mask)


def _log_sum_of_images(offset: Tensor, std: Tensor) -> Tensor:
    images = torch.arange(-_IMAGES, _IMAGES + 1, device=offset.device, dtype=offset.dtype)
    exponents = -0.5 * ((offset.unsqueeze(-1) + images) / std.unsqueeze(-1)).square()
    return exponents.logsumexp(dim=-1) - std.log() - 0.5 * math.log(2 * math.pi)


def _log_fourier_series(offset: Tensor, std: Tensor) -> Tensor:
    n = torch.arange(1, _HARMONICS + 1, device=offset.device, dtype=offset.dtype)
    weights = torch.exp(-2.0 * (math.pi * n * std.unsqueeze(-1)).square())
    return torch.log1p(2.0 * (weights * torch.cos(2.0 * math.pi * n * offset.unsqueeze(-1))).sum(dim=-1))
