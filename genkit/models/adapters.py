"""diffusers' networks as denoisers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from genkit.errors import ConfigError, nearest

__all__ = ["DiffusersDenoiser"]


class DiffusersDenoiser(nn.Module):
    """A diffusers network (UNet2DModel, DiTTransformer2DModel, WanTransformer3DModel, …) as (x, t, cond) → output.

    The network is told ``num_train_timesteps · t``, and sees x in its own dtype; the entries of ``cond`` become its
    keyword arguments (``class_labels``, ``encoder_hidden_states``).

    Args:
        model: the network.
        prediction_type: what it was trained to predict: ``"epsilon"``, ``"sample"``, ``"v_prediction"`` or ``"flow"``.
        num_train_timesteps: the network's name for a time of 1.
        null: what a conditional network is told where ``cond`` is None, one entry each: the class that stands for no
            class, ``{"class_labels": 10}``.
        beside: entries of ``cond`` that are put beside the channels of x, (B, C', \\*), instead of being told by name.

    Raises:
        ConfigError: a condition that the network's ``forward`` does not know.
    """

    def __init__(
        self,
        model: nn.Module,
        prediction_type: str,
        num_train_timesteps: int = 1000,
        null: Mapping[str, Any] | None = None,
        beside: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model, self.prediction_type, self.num_train_timesteps = model, prediction_type, num_train_timesteps
        self.null = {name: torch.as_tensor(value) for name, value in (null or {}).items()}
        self.beside = tuple(beside)
        self._known = set(inspect.signature(model.forward).parameters) | set(self.beside)
        self._check_known(self.null)

    def forward(self, x: Tensor, t: Tensor, cond: Mapping[str, Any] | None = None) -> Tensor:
        """The network's sample output, (B, \\*)."""
        if cond is None:
            cond = {name: value.to(x.device).expand(len(x), *value.shape) for name, value in self.null.items()}
        self._check_known(cond)
        missing = [name for name in self.beside if name not in cond]
        if missing:
            raise ConfigError(f"{type(self.model).__name__} needs the condition {missing}, got {sorted(cond)}")
        dtype = next((p.dtype for p in self.model.parameters()), x.dtype)
        seen = torch.cat([x.to(dtype), *(cond[name].to(dtype) for name in self.beside)], dim=1) if self.beside else x
        named = {name: value for name, value in cond.items() if name not in self.beside}
        output = self.model(seen.to(dtype), timestep=t * self.num_train_timesteps, return_dict=False, **named)[0]
        return output.to(x.dtype)

    def _check_known(self, cond: Mapping[str, Any]) -> None:
        for name in cond:
            if name not in self._known:
                raise ConfigError(
                    f"{type(self.model).__name__} does not know the condition {name!r}.{nearest(name, self._known)}"
                )
