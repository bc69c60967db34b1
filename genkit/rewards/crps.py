"""The CRPS of an ensemble as a reward: members drawn for one condition are judged together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from genkit._checks import checked_number
from genkit.errors import ConfigError, nearest
from genkit.metrics.ensemble import crps
from genkit.rewards.base import Context, Reward, Sample, context_entry, field_of

__all__ = ["CRPSReward"]

_KINDS = ("fair", "biased", "almost_fair")


class CRPSReward(Reward):
    r"""r = − Σ_c w_c · CRPS_c / s_c ÷ Σ_c w_c over the cells c that were observed: a mean, with 0 the best.

    The sample holds ensembles, (B, M, \*shape): M members side by side for each of B conditions. From a batch of B·M
    rows in which the members of a condition are adjacent it is ``rows.unflatten(0, (B, M))``. The context holds
    ``context["observation"]``, (B, \*shape), and the values are (B,), one a condition.

    A cell whose observation is NaN has gradient 0 and counts as if it were not there. A condition without any observed
    cell, or with a NaN member in an observed one, is invalid. Samples below float32 are judged in float32.

    Args:
        kind: ``"fair"`` (M >= 2, does not depend on M in the mean), ``"biased"`` or ``"almost_fair"`` (M >= 2), which
            leaves a gradient where the fair score of two members is flat: see :func:`genkit.metrics.crps`.
        alpha: α in [0, 1] of the almost fair score.
        weights: w >= 0, broadcast against (\*shape): area weights, say of :func:`genkit.metrics.latitude_weights`.
        scale: s > 0, broadcast against (\*shape), in the unit of the sample: a typical change of each variable.
        field: the part of the sample that is judged, when it has parts.

    Raises:
        ConfigError: an unknown kind, numbers outside their range, and at a call shapes that do not fit.

    Reference: Gneiting, Raftery, "Strictly proper scoring rules, prediction, and estimation", JASA 2007.
    """

    differentiable = True

    def __init__(
        self,
        *,
        kind: str = "fair",
        alpha: float = 0.95,
        weights: Tensor | float = 1.0,
        scale: Tensor | float = 1.0,
        field: str | None = None,
    ) -> None:
        if kind not in _KINDS:
            raise ConfigError(f"CRPSReward(kind={kind!r}): expected one of {', '.join(_KINDS)}.{nearest(kind, _KINDS)}")
        self.kind, self.field = kind, field
        self.alpha = checked_number("alpha", alpha, "a number from 0 (biased) to 1 (fair)", lambda a: 0.0 <= a <= 1.0)
        self.weights, self.scale = torch.as_tensor(weights), torch.as_tensor(scale)
        if not bool(((self.weights >= 0) & self.weights.isfinite()).all()) or not bool((self.weights > 0).any()):
            raise ConfigError("CRPSReward: weights must be finite, >= 0 and somewhere positive; 0 leaves a cell out.")
        if not bool(((self.scale > 0) & self.scale.isfinite()).all()):
            raise ConfigError("CRPSReward: scale must be positive and finite; give weight 0 to a constant variable.")

    def values(self, sample: Sample, context: Context | None) -> Tensor:
        x = field_of(sample, self.field, of=self)
        y = context_entry(context, "observation", x.shape[0], of=self).to(x.device)
        if x.ndim < 2 or x.shape[:1] + x.shape[2:] != y.shape:
            raise ConfigError(
                f"{self}: the sample has shape {tuple(x.shape)}, the observation {tuple(y.shape)}; expected "
                "(B, M, *shape) and (B, *shape). Rows of M adjacent members are sample.unflatten(0, (B, M))."
            )
        score = crps(x.movedim(1, 0), y, kind=self.kind, alpha=self.alpha)
        # not weighted_mean: it would leave out a NaN member where there is an observation
        known = ~torch.isnan(y)
        weights = torch.where(known, self._fitted("weights", self.weights, score), 0.0)
        scaled = torch.where(known, score, 0.0) / self._fitted("scale", self.scale, score)
        return -(weights * scaled).flatten(1).sum(dim=1) / weights.flatten(1).sum(dim=1)

    def _fitted(self, name: str, value: Tensor, score: Tensor) -> Tensor:
        """``value`` repeated over the cells (B, *shape); it may not distinguish conditions."""
        try:
            return value.to(score).broadcast_to(score.shape[1:]).expand_as(score)
        except RuntimeError as error:
            raise ConfigError(
                f"{self}: {name} has shape {tuple(value.shape)}, expected one that broadcasts to the cells "
                f"{tuple(score.shape[1:])} of a member."
            ) from error

    def __repr__(self) -> str:
        options: dict[str, Any] = {"kind": self.kind} | ({"alpha": self.alpha} if self.kind == "almost_fair" else {})
        return f"CRPSReward({', '.join(f'{key}={value!r}' for key, value in options.items())})"
