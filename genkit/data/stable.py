"""The positive stable law, from which symmetric stable noise is made: x = sqrt(A) Z with A a stable clock."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["positive_stable", "stable_tail_constant"]

_EDGE = 1e-12


def positive_stable(a: float, uniform: Tensor, exponential: Tensor) -> Tensor:
    r"""Kanter's draw of S_a, the positive a-stable law with E exp(-l S_a) = exp(-l^a).

    With U = π·uniform and E exponential::

        log S_a = log sin(a U) - (1/a) log sin U + ((1-a)/a) [log sin((1-a) U) - log E]

    Everything is done in logarithms and float64: S_a itself spans hundreds of decades at small a. For a stability
    index α, A = 2 c² S_{α/2} makes √A Z symmetric α-stable with characteristic function exp(-|c k|^α).

    Args:
        a: index in (0, 1]; a = 1 is the constant S = 1.
        uniform: numbers in (0, 1), any shape.
        exponential: standard exponential numbers of the same shape, independent of ``uniform``.

    Returns:
        float64 tensor of that shape, > 0.

    Raises:
        ValueError: ``a`` outside (0, 1].

    Reference: Kanter, "Stable densities under change of scale and total variation inequalities", Ann. Probab. 1975.
    """
    if not 0.0 < a <= 1.0:
        raise ValueError(
            f"a must lie in (0, 1], got {a!r}; for a symmetric α-stable law with 0 < α <= 2 pass a = α / 2"
        )
    if a == 1.0:  # log sin 0 times 0 would be NaN
        return torch.ones_like(uniform, dtype=torch.float64)
    angle = (math.pi * uniform.to(torch.float64)).clamp(_EDGE, math.pi - _EDGE)
    log_e = exponential.to(torch.float64).clamp_min(torch.finfo(torch.float64).tiny).log()
    log_s = torch.log(torch.sin(a * angle)) - torch.log(torch.sin(angle)) / a
    log_s += (1.0 - a) / a * (torch.log(torch.sin((1.0 - a) * angle)) - log_e)
    return torch.exp(log_s)


def stable_tail_constant(alpha: float) -> float:
    """C_α in the two-sided tail P(\\|X\\| > x) ~ C_α (c/x)^α of a symmetric α-stable law, 0 < α < 2.

    C_α = (2/π) Γ(α) sin(πα/2); it is 2/π for the Cauchy law and .39894 at α = 1.5.
    """
    if not 0.0 < alpha < 2.0:
        raise ValueError(
            f"alpha must lie in (0, 2), got {alpha!r}; at alpha = 2 the law is Gaussian and has no power tail"
        )
    return 2.0 / math.pi * math.gamma(alpha) * math.sin(math.pi * alpha / 2.0)
