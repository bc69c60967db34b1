"""Variance-preserving noise levels: α² + σ² = 1."""

from __future__ import annotations

import math

import torch
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin  # noqa: F401  (diffusers looks it up here by name)
from torch import Tensor

from genkit._checks import checked_count, checked_number
from genkit.errors import ConfigError, nearest
from genkit.schedulers.gaussian import GaussianScheduler

__all__ = ["SCHEDULES", "VPScheduler"]

SCHEDULES = ("cosine", "linear", "scaled_linear", "edm")


class VPScheduler(GaussianScheduler):
    """x_t = α_t x_0 + σ_t ε with α_t² + σ_t² = 1.

    ======================  ==========================================================================================
    ``schedule``            levels
    ======================  ==========================================================================================
    ``"cosine"``            α = cos(πt/2), σ = sin(πt/2); α(1) = 0 exactly
    ``"linear"``            α² = Π_{i ≤ N t} (1 − β_i) with β_i equally spaced (DDPM)
    ``"scaled_linear"``     the same with √β_i equally spaced (Stable Diffusion)
    ``"edm"``               σ/α = σ_max t^ρ; a walk of n steps visits the n Karras levels σ_max … σ_min, then 0
    ======================  ==========================================================================================

    The two products are continued to all t in [0, 1] by the Euler–Maclaurin formula, which is smooth and equal to the
    table of N = ``num_train_timesteps`` factors at t = k/N: to 1e-12 for the usual N = 1000, to the third power of β's
    spacing in general. Where β starts below half its spacing, so that the formula would not be monotone before the
    first factor, log α² there is the power of t that meets it at t = 1/N in value and slope.

    References: Nichol, Dhariwal, arXiv 2102.09672 (cosine; here without the offset); Ho et al., arXiv 2006.11239
    (linear); Karras et al., arXiv 2206.00364, eq. 5 (EDM levels).

    Args:
        schedule: one of the table above.
        prediction_type: ``"epsilon"`` (not with ``"cosine"``, where α(1) = 0), ``"sample"``, ``"v_prediction"`` or
            ``"flow"`` (ε − x_0).
        eta: stochasticity of :meth:`transition` and :meth:`step`: 0 is DDIM, 1 ancestral.
        num_train_timesteps: N; what a time of 1 is called in diffusers' loops.
        beta_start, beta_end: first and last β of the linear schedules.
        sigma_min, sigma_max, rho: the EDM levels.

    Raises:
        ConfigError: an option of another type or range; fewer than two factors, or factors too widely spaced for the
            formula.
    """

    @register_to_config
    def __init__(
        self,
        schedule: str = "cosine",
        prediction_type: str = "v_prediction",
        eta: float = 1.0,
        num_train_timesteps: int = 1000,
        beta_start: float = 1e-4,
        beta_end: float = 0.02,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        rho: float = 7.0,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ConfigError(
                f"schedule={schedule!r} is unknown; expected one of {', '.join(SCHEDULES)}."
                + nearest(schedule, SCHEDULES)
            )
        self.schedule = schedule
        self.beta_start = checked_number("beta_start", beta_start, "a number")
        self.beta_end = checked_number("beta_end", beta_end, "a number")
        self.sigma_min = checked_number("sigma_min", sigma_min, "a number")
        self.sigma_max = checked_number("sigma_max", sigma_max, "a number")
        self.rho = checked_number("rho", rho, "a number")
        if not 0 < beta_start < beta_end < 1:
            given = f"beta_start={beta_start!r}, beta_end={beta_end!r}"
            raise ConfigError(f"{given}; expected 0 < beta_start < beta_end < 1")
        if not (0 < sigma_min < sigma_max < math.inf and 0 < rho < math.inf):
            given = f"sigma_min={sigma_min!r}, sigma_max={sigma_max!r}, rho={rho!r}"
            raise ConfigError(f"{given}; expected 0 < sigma_min < sigma_max, rho > 0, all finite")
        self.num_train_timesteps = checked_count("num_train_timesteps", num_train_timesteps)
        if "linear" in schedule:
            self._prepare_product()
        self._register(prediction_type, eta, num_train_timesteps)

    def _prepare_product(self) -> None:
        """The sum's start, and (value, exponent) of the power of N t before the first factor, where one is needed."""
        n, self._first_sum, self._first_power = self.num_train_timesteps, 0.0, None
        if n < 2:
            raise ConfigError(f"num_train_timesteps={n}; expected at least 2 with schedule={self.schedule!r}")
        eighths = torch.linspace(0.0, 1.0, 8 * n + 1, dtype=torch.float64)
        self._first_sum = float(_euler_maclaurin(*self._weight(eighths[0])))
        rates, first = self._log_alpha_bar_rate(eighths), float(self._log_alpha_bar(eighths[8]))
        if not (first < 0 and bool((rates[8:] < 0).all())):
            raise ConfigError(
                f"schedule={self.schedule!r} with num_train_timesteps={n}, beta_start={self.beta_start:g}, "
                f"beta_end={self.beta_end:g} has factors too widely spaced to be continued between them; raise "
                "num_train_timesteps or lower beta_end"
            )
        if bool((rates[:8] >= 0).any()):
            self._first_power = (first, float(rates[8]) / (n * first))

    def _levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        if self.schedule == "cosine":
            angle = 0.5 * math.pi * t
            # cos(π/2) is 6e-17 in floating point; at t = 1 the signal is exactly 0
            return torch.where(t == 1.0, torch.zeros_like(t), torch.cos(angle)), torch.sin(angle)
        if self.schedule == "edm":
            ratio = self.sigma_max * t.pow(self.rho)
            alpha = torch.rsqrt(1.0 + ratio.square())
            return alpha, ratio * alpha
        log_alpha_bar = self._log_alpha_bar(t)
        return torch.exp(0.5 * log_alpha_bar), torch.sqrt(-torch.expm1(log_alpha_bar))

    def _level_rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = self._levels(t)
        if self.schedule == "cosine":
            return -0.5 * math.pi * sigma, 0.5 * math.pi * alpha
        if self.schedule == "edm":
            angle_rate = self.sigma_max * self.rho * t.pow(self.rho - 1.0) * alpha.square()
            return -sigma * angle_rate, alpha * angle_rate
        rate = self._log_alpha_bar_rate(t)
        return 0.5 * alpha * rate, -0.5 * alpha.square() * rate / sigma

    def _grid(self, n: int) -> Tensor:
        if self.schedule != "edm":
            return super()._grid(n)
        last = (self.sigma_min / self.sigma_max) ** (1.0 / self.rho)
        levels = torch.linspace(1.0, last, n, dtype=torch.float64)
        return torch.cat((levels, torch.zeros(1, dtype=torch.float64)))

    def _weight(self, t: Tensor) -> tuple[Tensor, float, bool]:
        """w at index N t + ½, its slope, and whether β is w² (``scaled_linear``) or w; w is affine in the index."""
        scaled = self.schedule == "scaled_linear"
        start, end = (beta**0.5 if scaled else beta for beta in (self.beta_start, self.beta_end))
        slope = (end - start) / (self.num_train_timesteps - 1)
        return (start - 0.5 * slope) + slope * self.num_train_timesteps * t, slope, scaled

    def _log_alpha_bar(self, t: Tensor) -> Tensor:
        """log α²: Σ_{i=1}^{k} g(i) = [G(u) − g'(u)/24] from ½ to k + ½, with g = log(1 − β), G' = g, k = N t.

        The next term of the expansion is of order (dw/du)³ ≈ 1e-14.
        """
        value = _euler_maclaurin(*self._weight(t)) - self._first_sum
        if self._first_power is None:
            return value
        first, exponent = self._first_power
        k = self.num_train_timesteps * t
        return torch.where(k < 1.0, first * k.pow(exponent), value)

    def _log_alpha_bar_rate(self, t: Tensor) -> Tensor:
        w, slope, scaled = self._weight(t)
        g = torch.log1p(-w.square() if scaled else -w)
        rate = self.num_train_timesteps * (g - _log_rates(w, slope, scaled)[1] / 24.0)
        if self._first_power is None:
            return rate
        first, exponent = self._first_power
        k = self.num_train_timesteps * t
        return torch.where(k < 1.0, self.num_train_timesteps * first * exponent * k.pow(exponent - 1.0), rate)


def _euler_maclaurin(w: Tensor, slope: float, scaled: bool) -> Tensor:
    return _antiderivative(w, slope, scaled) - _log_rates(w, slope, scaled)[0] / 24.0


def _antiderivative(w: Tensor, slope: float, scaled: bool) -> Tensor:
    """G(u) with G' = log(1 − β) and β = w or w², where w is affine in u with the given slope."""
    value = -((1.0 - w) * torch.log1p(-w) + w)
    if scaled:
        value = value + (1.0 + w) * torch.log1p(w) - w
    return value / slope


def _log_rates(w: Tensor, slope: float, scaled: bool) -> tuple[Tensor, Tensor]:
    """First and second derivative with respect to u of g = log(1 − β)."""
    if scaled:
        rest = 1.0 - w.square()
        return -2.0 * slope * w / rest, -2.0 * slope**2 * (1.0 + w.square()) / rest.square()
    return -slope / (1.0 - w), -(slope**2) / (1.0 - w).square()
