"""Denoising: the regression that every diffusion model is trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from genkit._checks import checked_number
from genkit.errors import ConfigError, nearest
from genkit.samplers.noise import Keys
from genkit.training.objective import LossOutput, Objective

__all__ = ["DenoisingObjective"]


class DenoisingObjective(Objective):
    """L = E |D(x_t, t, c) − y|² per element, with t ~ U(0, 1), x_t = α x_0 + σ ε, and y what D predicts.

    y is ε, x_0, v = α ε − σ x_0 or ε − x_0, by the scheduler's prediction type. In a conditional model the condition is
    replaced by ``null`` with probability ``drop``, which is what guidance needs.

    References: Ho et al., arXiv 2006.11239; Salimans, Ho, arXiv 2202.00512 (v); Ho, Salimans, arXiv 2207.12598 (drop).

    Args:
        denoiser: (x_t, t, cond) → model output.
        scheduler: a Gaussian scheduler.
        condition_names: entries of a batch that the denoiser is told.
        drop: probability that a sample's condition is replaced, in [0, 1).
        null: the values it is replaced by, one entry for each name that is dropped.
        name: of the network.

    Raises:
        ConfigError: ``drop`` without ``null``, a name in ``null`` that is no condition.

    A batch holds ``sample`` (B, \\*), ``sample_id`` and the conditions.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        scheduler: Any,
        *,
        condition_names: Sequence[str] = (),
        drop: float = 0.0,
        null: Mapping[str, Any] | None = None,
        name: str = "denoiser",
    ) -> None:
        self.denoiser, self.scheduler, self.name = denoiser, scheduler, name
        self.condition_names, self.null = tuple(condition_names), dict(null or {})
        self.drop = checked_number("drop", drop, "a probability below 1", lambda p: 0.0 <= p < 1.0)
        unknown = sorted(set(self.null) - set(self.condition_names))
        if unknown:
            raise ConfigError(
                f"null names {unknown}, which is no condition; expected some of {list(self.condition_names)}."
                + nearest(unknown[0], self.condition_names)
            )
        if self.drop > 0.0 and not self.null:
            raise ConfigError(f"drop={drop} needs null=: what a dropped condition is replaced by")

    def networks(self) -> Mapping[str, nn.Module]:
        return {self.name: self.denoiser}

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        x0 = batch["sample"]
        t = keys.at(purpose="time").uniform().to(torch.float32)
        noise = keys.at(purpose="noise").normal(x0.shape[1:], x0.dtype)
        x_t = self.scheduler.add_noise(x0, noise, t)
        target = self.scheduler.target(x0, noise, t)
        output = self.net(self.name)(x_t, t, self._told(batch, keys))
        return LossOutput((output - target).square().mean())

    def _told(self, batch: Mapping[str, Tensor], keys: Keys) -> dict[str, Tensor] | None:
        told = {name: batch[name] for name in self.condition_names}
        if self.drop > 0.0:
            dropped = keys.at(purpose="drop").uniform() < self.drop
            for name, value in self.null.items():
                null = torch.as_tensor(value, dtype=told[name].dtype, device=told[name].device)
                mask = dropped.reshape(-1, *(1,) * (told[name].ndim - 1))
                told[name] = torch.where(mask, null, told[name])
        return told or None
