"""Moment matching of Gaussians in closed form: what a perfect auxiliary network makes of a one-step affine student.

Teacher N(m, c) in one dimension, cosine noise levels, weight w = 1, s ~ U(0, 1), t = 1; the student is x̂ = μ + a z with
z ~ N(0, 1). With

    K = E_s[σ²/(α² c + σ²)] = 1/(1 + √c) ,     κ = 1/(1 + τ) ,

(the mean of sin²/(c cos² + sin²) over a quarter circle, and what the teacher's weight τ in the auxiliary loss leaves of
the moment gap) the expected gradient of the moment loss is κ K (μ − m) in the mean and κ a (K − 1/(1 + |a|)) in the
scale. The functions below give the zeros of that plus the reward's gradient.

Differs from the paper in: the paper is not known to give these forms; they were worked out for tests and documents.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from genkit.errors import ConfigError
from genkit.pipelines.rmmd.weights import checked_choice
from genkit.schedulers.transition import expand_as

__all__ = [
    "AffineDenoiser",
    "collapse_threshold",
    "crps_reward_std",
    "linear_reward_mean",
    "moment_constant",
    "quadratic_reward",
]

Kind = Literal["generator", "posterior"]


def moment_constant(variance: float) -> float:
    """K = E_s[σ²/(α² c + σ²)] = 1/(1 + √c) of a Gaussian of variance c > 0 under cosine levels."""
    return 1.0 / (1.0 + math.sqrt(variance))


def linear_reward_mean(
    mean: float, variance: float, slope: float, lam: float, *, teacher_weight: float = 0.0, lam_reg: float = 0.0
) -> float:
    """μ* = m + λ b/(κ K + 2 ρ) of the reward R = b x with the L2 weight ρ = ``lam_reg``; the variance stays c.

    Args:
        mean, variance: m and c of the teacher.
        slope: b.
        lam: λ.
        teacher_weight: τ.
        lam_reg: ρ, λ/2 by default in training; 0: no tie to the student's start, which is the teacher's law.
    """
    return mean + lam * slope / (moment_constant(variance) / (1.0 + teacher_weight) + 2.0 * lam_reg)


def quadratic_reward(
    mean: float, variance: float, target: float, curvature: float, lam: float, *, teacher_weight: float = 0.0
) -> tuple[float, float]:
    """(μ*, c*) of the reward R = −(A/2)(x − y)² without the L2 tie.

    μ* = (κ K m + λ A y)/(κ K + λ A), and 1/(1 + √c*) = K + λ A/κ while that is below 1; beyond
    :func:`collapse_threshold` the variance is 0.

    Args:
        mean, variance: m and c of the teacher.
        target, curvature: y and A > 0.
        lam: λ.
        teacher_weight: τ.
    """
    own, pull = moment_constant(variance) / (1.0 + teacher_weight), lam * curvature
    level = moment_constant(variance) + pull * (1.0 + teacher_weight)
    return (own * mean + pull * target) / (own + pull), (1.0 / level - 1.0) ** 2 if level < 1.0 else 0.0


def collapse_threshold(variance: float, curvature: float, *, teacher_weight: float = 0.0) -> float:
    """λ from which on the quadratic reward of :func:`quadratic_reward` leaves no variance: κ (1 − K)/A."""
    return (1.0 - moment_constant(variance)) / (curvature * (1.0 + teacher_weight))


def crps_reward_std(
    teacher_std: float, lam: float, *, truth_std: float = 1.0, teacher_weight: float = 0.0, lam_reg: float = 0.0
) -> float:
    """σ* of the reward −CRPS (fair) against observations N(0, σ_y²), for a teacher N(0, σ_T²): the root of

        (κ/2)[1/(1 + σ_T) − 1/(1 + σ)] + λ [√(2/π) σ/√(σ_y² + σ²) − 1/√π]/(2 σ) + ρ (σ − σ_T)/σ = 0

    Regularisers are averaged over the ensemble's members. The root lies between σ_T and σ_y.

    Args:
        teacher_std: σ_T > 0.
        lam: λ ≥ 0.
        truth_std: σ_y > 0.
        teacher_weight: τ.
        lam_reg: ρ of the L2 tie to the student's start.
    """

    def slope(std: float) -> float:
        moment = 0.5 * (moment_constant(teacher_std**2) - moment_constant(std**2)) / (1.0 + teacher_weight)
        crps = math.sqrt(2.0 / math.pi) * std / math.hypot(truth_std, std) - 1.0 / math.sqrt(math.pi)
        return moment + 0.5 * lam * crps / std + lam_reg * (std - teacher_std) / std

    low, high = sorted((teacher_std, truth_std))
    if lam == 0.0 or low == high:
        return teacher_std
    return float(brentq(slope, low, high, xtol=1e-12))


class AffineDenoiser(nn.Module):
    """An affine clean prediction of d numbers, exact for a Gaussian law N(μ, A Aᵀ).

    ``"generator"``: x̂ = μ + A x, which has that law where x is unit noise (t = 1: a one-step student).
    ``"posterior"``: x̂ = E[x_0 | x_t = x] = μ + α C (α² C + σ² I)⁻¹ (x − α μ) with C = A Aᵀ (a teacher, an auxiliary).

    Both have the parameters ``mean`` (d,) and ``factor`` (d, d).

    Args:
        mean: μ, (d,).
        factor: A, (d, d).
        scheduler: Gaussian noise levels; its prediction type is answered in.
        kind: see above.

    Raises:
        ConfigError: an unknown kind, or shapes that do not fit.
    """

    def __init__(self, mean: Tensor, factor: Tensor, scheduler: Any, kind: Kind = "posterior") -> None:
        super().__init__()
        if mean.ndim != 1 or factor.shape != (*mean.shape, *mean.shape):
            raise ConfigError(
                f"mean has shape {tuple(mean.shape)}, factor {tuple(factor.shape)}; expected (d,) and (d, d)"
            )
        self.kind: Kind = checked_choice("kind", kind, get_args(Kind))
        self.mean, self.factor = nn.Parameter(mean.clone()), nn.Parameter(factor.clone())
        self.scheduler, self.prediction_type = scheduler, scheduler.prediction_type

    def clean(self, x: Tensor, t: Tensor) -> Tensor:
        """x̂ at (x, t), (B, d)."""
        if self.kind == "generator":
            return self.mean + x @ self.factor.T
        alpha, sigma = (expand_as(level, x) for level in self.scheduler.alpha_sigma(t))
        covariance = self.factor @ self.factor.T
        own = alpha.unsqueeze(-1).square() * covariance
        noisy = own + sigma.unsqueeze(-1).square() * torch.eye(len(self.mean), dtype=x.dtype, device=x.device)
        centred = torch.linalg.solve(noisy, (x - alpha * self.mean).unsqueeze(-1)).squeeze(-1)
        return self.mean + alpha * (centred @ covariance)

    def forward(self, x: Tensor, t: Tensor, cond: Any = None) -> Tensor:
        """x (B, d), t (B,) → the model output (B, d); ``cond`` is not looked at."""
        clean = self.clean(x, t)
        return clean if self.prediction_type == "sample" else self.scheduler.from_x0(clean, t, x)
