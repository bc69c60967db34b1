"""Noise on the unit torus: a variance-exploding chain of wrapped normals, for fractional coordinates and angles.

With σ_t = σ_min^{1−t} σ_max^t (and σ_0 = 0) a clean point is noised to x_t = (x_0 + σ_t ε) mod 1. The model's output is
the scaled score, f = −σ_t ∇ log p_t(x_t) (``epsilon``: for small σ it is the noise). One step back, with the kernel
that all of genkit's chains share::

    x_s = x_t − (σ_t − sqrt(σ_s² − γ²)) f + γ z   mod 1,      γ = η σ_s sqrt(σ_t² − σ_s²) / σ_t

η = 1 gives the ancestral mean x_t + (σ_t² − σ_s²) ∇ log p_t, η = 0 the Euler step of the probability-flow ODE.

References: De Bortoli et al., "Riemannian score-based generative modelling", arXiv 2202.02763 (the torus); Jiao et al.,
"Crystal structure prediction by joint equivariant diffusion", arXiv 2309.04475 (wrapped normals and their score).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin  # noqa: F401  (diffusers looks it up here by name)
from torch import Tensor

from genkit._checks import checked_count, checked_eta, checked_number, checked_shape, got
from genkit.errors import ConfigError
from genkit.schedulers.base import ConfiguredScheduler
from genkit.schedulers.gaussian import (
    Context,
    _as_time,
    _at_least_float32,
    _check_fit,
    _lacks_float64,
    _match,
    _safe_reciprocal,
)
from genkit.schedulers.transition import (
    _CROSSOVER,
    _HARMONICS,
    _IMAGES,
    Noise,
    WrappedNormalTransition,
    distinct,
    expand_as,
    linear_combination,
)

__all__ = ["WrappedScheduler", "score_size", "wrapped_normal_score"]

_QUADRATURE = 512


def wrapped_normal_score(offset: Tensor, std: Tensor) -> Tensor:
    """d/dx log WN(x; m, std²) at x − m = ``offset``, of the shape of ``offset``: periodic with period 1, and odd.

    Summed over periodic images for std ≤ ½ and as the derivative of the Fourier series above: truncating the images
    instead, as at ±3 with std = 2, gives 4e-2 where the score is below 1e-7.

    Args:
        offset: (B, \\*), taken modulo 1.
        std: widths before wrapping, positive, () or broadcastable with ``offset`` from the left.
    """
    offset = torch.remainder(offset + 0.5, 1.0) - 0.5
    std = expand_as(std, offset).expand_as(offset)
    narrow = _score_of_images(offset, std.clamp(max=_CROSSOVER))
    return torch.where(std <= _CROSSOVER, narrow, _score_of_series(offset, std.clamp(min=_CROSSOVER)))


def _score_of_images(offset: Tensor, std: Tensor) -> Tensor:
    images = torch.arange(-_IMAGES, _IMAGES + 1, device=offset.device, dtype=offset.dtype)
    scaled = (offset.unsqueeze(-1) + images) / std.unsqueeze(-1)
    return -((-0.5 * scaled.square()).softmax(dim=-1) * scaled).sum(dim=-1) / std


def _score_of_series(offset: Tensor, std: Tensor) -> Tensor:
    n = torch.arange(1, _HARMONICS + 1, device=offset.device, dtype=offset.dtype)
    weights = torch.exp(-2.0 * (math.pi * n * std.unsqueeze(-1)).square())
    angle = 2.0 * math.pi * n * offset.unsqueeze(-1)
    slope = -4.0 * math.pi * (n * weights * torch.sin(angle)).sum(dim=-1)
    return slope / (1.0 + 2.0 * (weights * torch.cos(angle)).sum(dim=-1))


def score_size(std: Tensor) -> Tensor:
    """sqrt(E[(std · score)²]) of a wrapped normal, float64 of the shape of ``std``: near 1 for small widths, → 0.

    The expectation is a quadrature over one period (the midpoint rule, exact to rounding for smooth periodic
    functions), so the number is the same in every process; narrow widths are integrated over ±9 standard deviations.
    """
    std = std.to(torch.float64)
    points = (torch.arange(_QUADRATURE, dtype=torch.float64, device=std.device) + 0.5) / _QUADRATURE - 0.5
    reach = (18.0 * std).clamp(max=1.0).unsqueeze(-1)
    offset = points * reach
    width = std.unsqueeze(-1).expand_as(offset).reshape(-1)
    score = wrapped_normal_score(offset.reshape(-1), width).reshape(offset.shape)
    law = WrappedNormalTransition(torch.zeros_like(width).unsqueeze(-1), width)
    density = law.log_prob(offset.reshape(-1, 1)).exp().reshape(offset.shape)
    return std * (density * score.square() * reach).mean(dim=-1).sqrt()


class WrappedScheduler(ConfiguredScheduler):
    """x_t = (x_0 + σ_t ε) mod 1 on the unit torus, element by element: the chain of the module's docstring.

    ``t`` and ``s`` are times in [0, 1], () or (B,), **one per sample**; all methods are pure functions.

    Args:
        sigma_min: σ just above t = 0, in periods; at t = 0 itself σ is 0, so that a walk's last step lands on the mean.
        sigma_max: σ at t = 1; from 0.5 on the noise is uniform to within 1.5 %.
        eta: stochasticity of :meth:`transition` in [0, 1]: 0 deterministic, 1 ancestral.
        scale_by_num_atoms: multiply σ by n^{−1/3}, with n the context's ``"num_atoms"`` (B,): one width in units of
            length for cells of all sizes.

    Raises:
        ConfigError: an option of another type or range; from the methods, tensors that do not fit, or a missing
            ``num_atoms``.
    """

    context_names = ("num_atoms",)
    prediction_type = "epsilon"

    @register_to_config
    def __init__(
        self,
        sigma_min: float = 0.005,
        sigma_max: float = 0.5,
        eta: float = 1.0,
        scale_by_num_atoms: bool = False,
    ) -> None:
        self.sigma_min = checked_number("sigma_min", sigma_min, "a number")
        self.sigma_max = checked_number("sigma_max", sigma_max, "a number")
        if not 0.0 < self.sigma_min < self.sigma_max < math.inf:
            given = f"sigma_min={sigma_min!r}, sigma_max={sigma_max!r}"
            raise ConfigError(f"{given}; expected 0 < sigma_min < sigma_max, both finite")
        self.eta = checked_eta(eta)
        if not isinstance(scale_by_num_atoms, bool):
            raise ConfigError(f"scale_by_num_atoms={scale_by_num_atoms!r}; expected true or false")
        self.scale_by_num_atoms = scale_by_num_atoms

    # ---- noise levels -------------------------------------------------------------------------------------------

    def times(self, n: int, device: torch.device | str | None = None) -> Tensor:
        """Equally spaced times from 1 to 0, (n + 1,): σ falls by equal factors, and then to 0.

        Raises:
            ConfigError: ``n`` is not a positive integer.
        """
        times = torch.linspace(1.0, 0.0, checked_count("num_inference_steps", n) + 1, dtype=torch.float64)
        times = times.to(torch.float32)  # what a network is told
        return times.to(device) if _lacks_float64(device) else times.to(torch.float64).to(device)

    def alpha_sigma(self, t: Tensor | float, context: Context | None = None) -> tuple[Tensor, Tensor]:
        """α_t = 1 and σ_t, each of the shape of ``t`` (and of ``num_atoms``, where σ is scaled by it)."""
        t = _as_time(t)
        time = distinct(t)
        sigma = math.log(self.sigma_min) * (1.0 - time) + math.log(self.sigma_max) * time
        sigma = torch.where(time == 0.0, 0.0, sigma.exp()).expand(t.shape) * self._scale(context, t)
        return torch.ones_like(sigma), sigma

    def _scale(self, context: Context | None, t: Tensor) -> Tensor:
        """n^{−1/3}, or 1."""
        if not self.scale_by_num_atoms:
            return torch.ones((), dtype=t.dtype, device=t.device)
        count = context.get("num_atoms") if isinstance(context, Mapping) else None
        if not isinstance(count, Tensor) or count.ndim != 1 or (t.ndim and count.shape != t.shape):
            raise ConfigError(
                f"context['num_atoms'] has {got(count)}; expected one count per sample, since scale_by_num_atoms is on"
            )
        return count.to(t.device, t.dtype).pow(-1.0 / 3.0)

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor | float, context: Context | None = None) -> Tensor:
        """x_t = (x_0 + σ_t ε) mod 1 for unit noise ε, (B, \\*) in [0, 1), in the dtype of ``x0``."""
        _check_fit(None, "noise", noise, "x0", x0, t)
        clean = _at_least_float32(x0)
        sigma = expand_as(self.alpha_sigma(t, context)[1], clean)
        return _wrapped(clean + sigma * noise.to(clean.dtype)).to(x0.dtype)

    def prior(self, keys: Noise, shape: Sequence[int], context: Context | None = None) -> Tensor:
        """Uniform points to start a walk from, float32 (B, \\*shape) in [0, 1); ``shape`` is one sample's."""
        return _wrapped(keys.uniform(checked_shape("shape", shape, "the shape of one sample"), torch.float32))

    # ---- the score ----------------------------------------------------------------------------------------------

    def score(self, x_t: Tensor, x0: Tensor, t: Tensor | float, context: Context | None = None) -> Tensor:
        """∇ log p(x_t | x_0), (B, \\*); 0 at t = 0, where there is no density."""
        return -_safe_reciprocal(self._sigma_like(x_t, t, context)) * self._scaled_score(x_t, x0, t, context)

    def target(self, x0: Tensor, noise: Tensor, t: Tensor | float, context: Context | None = None) -> Tensor:
        """What a denoiser should output for the pair (x_0, ε) at t: −σ_t ∇ log p(x_t | x_0), (B, \\*)."""
        _check_fit(None, "noise", noise, "x0", x0, t)
        sigma = self._sigma_like(x0, t, context)
        return self._scaled_score(sigma * noise, torch.zeros_like(noise), t, context)  # unwrapped: no digits are lost

    def _scaled_score(self, x_t: Tensor, x0: Tensor, t: Tensor | float, context: Context | None) -> Tensor:
        _check_fit(None, "x0", x0, "x_t", x_t, t)
        sigma = self._sigma_like(x_t, t, context)
        offset = _at_least_float32(x_t) - _at_least_float32(x0)
        return -sigma * wrapped_normal_score(offset, sigma.clamp(min=1e-12))

    def _sigma_like(self, x: Tensor, t: Tensor | float, context: Context | None) -> Tensor:
        return expand_as(self.alpha_sigma(t, context)[1].to(x.device), _at_least_float32(x))

    def to_x0(self, model_output: Tensor, t: Tensor | float, sample: Tensor, context: Context | None = None) -> Tensor:
        """Tweedie's clean point (x_t + σ_t² ∇ log p_t) mod 1, (B, \\*): right where the posterior is narrow."""
        _check_fit(None, "model_output", model_output, "sample", sample, t)
        sigma = self.alpha_sigma(t, context)[1]
        return _wrapped(linear_combination((torch.ones_like(sigma), sample), (-sigma, model_output)))

    # ---- the kernel ---------------------------------------------------------------------------------------------

    def transition(
        self,
        model_output: Tensor,
        t: Tensor | float,
        s: Tensor | float,
        sample: Tensor,
        context: Context | None = None,
        eta: float | None = None,
    ) -> WrappedNormalTransition:
        """p(x_s | x_t) for 0 ≤ s ≤ t ≤ 1: the kernel of the module's docstring. Samples with s = t stay where they are.

        Args:
            model_output: the scaled score −σ_t ∇ log p_t at (``sample``, t), (B, \\*).
            t: current times, () or (B,).
            s: next times, () or (B,).
            sample: x_t, (B, \\*).
            context: ``"num_atoms"`` (B,), where ``scale_by_num_atoms`` is on.
            eta: stochasticity in [0, 1]; None takes the scheduler's own.
        """
        eta = self.eta if eta is None else checked_eta(eta)
        _check_fit(None, "model_output", model_output, "sample", sample, t, s)
        if not isinstance(t, Tensor) and not isinstance(s, Tensor) and s > t:
            raise ConfigError(f"s={s!r} is after t={t!r}; expected 0 ≤ s ≤ t ≤ 1, since a step goes from noise to data")
        sigma_t, sigma_s = (self.alpha_sigma(time, context)[1] for time in (t, s))
        share = (1.0 - (sigma_s * _safe_reciprocal(sigma_t)).square()).clamp(min=0.0)
        gamma = eta * sigma_s * share.sqrt()
        kept = (sigma_s.square() - gamma.square()).clamp(min=0.0).sqrt()
        stays = _match(_as_time(t) == _as_time(s), sigma_s)
        shift, width = (torch.where(stays, 0.0, value) for value in (kept - sigma_t, gamma))
        mean = linear_combination((torch.ones_like(shift), sample), (shift, model_output))
        return WrappedNormalTransition(mean, width)


def _wrapped(x: Tensor) -> Tensor:
    """x mod 1 in [0, 1): the remainder of a tiny negative number rounds up to 1."""
    wrapped = torch.remainder(x, 1.0)
    return torch.where(wrapped < 1.0, wrapped, torch.zeros_like(wrapped))
