"""diffusers' networks as denoisers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from genkit.errors import ConfigError, nearest

__all__ = ["DiffusersDenoiser"]


class DiffusersDenoiser:
    """A diffusers network (UNet2DModel, DiTTransformer2DModel, WanTransformer3DModel, …) as (x, t, cond) → output.

    The network is told ``num_train_timesteps · t``, and sees x in its own dtype; the entries of ``cond`` become its
    keyword arguments (``class_labels``, ``encoder_hidden_states``).

    Args:
        model: the network.
        prediction_type: what it was trained to predict: ``"epsilon"``, ``"sample"``, ``"v_prediction"`` or ``"flow"``.
        num_train_timesteps: the network's name for a time of 1.

    Raises:
        ConfigError: a condition that the network's ``forward`` does not know.
    """

    def __init__(self, model: nn.Module, prediction_type: str, num_train_timesteps: int = 1000) -> None:
        self.model, self.prediction_type, self.num_train_timesteps = model, prediction_type, num_train_timesteps
        self._known = set(inspect.signature(model.forward).parameters)

    def __call__(self, x: Tensor, t: Tensor, cond: Mapping[str, Any] | None = None) -> Tensor:
        """The network's sample output, (B, \\*)."""
        for name in cond or {}:
            if name not in self._known:
                raise ConfigError(
                    f"{type(self.model).__name__} does not know the condition {name!r}.{nearest(name, self._known)}"
                )
        dtype = next((p.dtype for p in self.model.parameters()), x.dtype)
        output = self.model(x.to(dtype), timestep=t * self.num_train_timesteps, return_dict=False, **(cond or {}))[0]
        return output.to(x.dtype)
