"""Classifier-free guidance as a wrapper that is itself a denoiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from genkit.errors import ConfigError

__all__ = ["ClassifierFreeGuidance"]


class ClassifierFreeGuidance:
    """D_w(x, t, c) = D(x, t, ∅) + w (D(x, t, c) − D(x, t, ∅)), in one call of the network at twice the batch.

    Reference: Ho, Salimans, "Classifier-free diffusion guidance", arXiv 2207.12598, eq. 6, in the convention of
    diffusers: w = 1 is the conditional network.

    Args:
        denoiser: (x, t, cond) → output.
        scale: the guidance scale w.
        null: the negative condition: entries of ``cond`` replaced in the unconditional half, each (1, \\*) or (B, \\*).
    """

    def __init__(self, denoiser: Callable[..., Tensor], scale: float, null: Mapping[str, Tensor]) -> None:
        if not null:
            raise ConfigError("guidance needs a negative condition: null={'class_labels': …}; got an empty mapping")
        self.denoiser, self.scale, self.null = denoiser, float(scale), dict(null)
        self.prediction_type = getattr(denoiser, "prediction_type", None)

    def __call__(self, x: Any, t: Tensor, cond: Mapping[str, Tensor] | None = None) -> Tensor:
        """The guided output, (B, \\*)."""
        cond = dict(cond or {})
        missing = sorted(set(self.null) - set(cond))
        if missing:
            raise ConfigError(
                f"the negative condition replaces {missing}, which the condition {sorted(cond)} does not have"
            )
        without = {**cond, **{name: value.expand_as(cond[name]) for name, value in self.null.items()}}
        both = {name: torch.cat((without[name], value)) for name, value in cond.items()}
        unconditional, conditional = self.denoiser(torch.cat((x, x)), torch.cat((t, t)), both).chunk(2)
        return torch.lerp(unconditional, conditional, self.scale)
