"""The learning rate as a function of the step, and AdamW with its state under the parameters' names."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from genkit.errors import CheckpointError, ConfigError, nearest
from genkit.training.config import TrainerConfig
from genkit.training.ema import local_part

__all__ = ["base_rate", "learning_rate", "load_optimizer", "make_optimizer", "optimizer_tensors", "split_state"]


def learning_rate(base: float, step: int, steps: int, *, scheduler: str = "constant", warmup_steps: int = 0) -> float:
    """η_k for step k = 0 … ``steps`` − 1 of a phase; the number of processes and micro-batches has no part in it.

    With W warm-up steps: η_k = η (k + 1) / W for k < W, then with p = (k − W) / (``steps`` − W): η (``constant``),
    η (1 − p) (``linear``), η (1 + cos πp) / 2 (``cosine``).
    """
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    if scheduler == "linear":
        return base * (1.0 - progress)
    if scheduler == "cosine":
        return base * 0.5 * (1.0 + math.cos(math.pi * progress))
    return base


def base_rate(config: TrainerConfig, network: str) -> float:
    """The configured learning rate of a network."""
    if not isinstance(config.learning_rate, dict):
        return config.learning_rate
    if network not in config.learning_rate:
        names = sorted(config.learning_rate)
        close = nearest(network, names)
        raise ConfigError(f"learning_rate: names {names} but not {network!r}, which is trained; add it.{close}")
    return config.learning_rate[network]


def make_optimizer(parameters: Mapping[str, nn.Parameter], config: TrainerConfig, rate: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov, Hutter, "Decoupled weight decay regularization", ICLR 2019), one kernel for all tensors."""
    plain = all(p.device.type in ("cpu", "cuda") and not hasattr(p, "to_local") for p in parameters.values())
    return torch.optim.AdamW(
        list(parameters.values()),
        lr=rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True if plain else None,
        foreach=None if plain else True,
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The state as flat tensors ``<parameter>.<entry>``; parameters that were never stepped have none."""
    return {
        f"{name}.{entry}": torch.as_tensor(value)
        for name, parameter in parameters.items()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def split_state(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[int, dict[str, Tensor]]:
    """The flat tensors by the parameter's position, as an optimiser's ``load_state_dict`` wants them.

    Raises:
        CheckpointError: an entry of a parameter that does not exist, or of another shape.
    """
    position = {name: i for i, name in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, entry = key.rpartition(".")
        if name not in position:
            raise CheckpointError(f"the optimiser state names the parameter {name!r}, which is not trained now")
        parameter = parameters[name]
        expected = local_part(parameter).shape
        if entry != "step" and value.shape != expected:
            raise CheckpointError(f"the optimiser state {key!r} has shape {tuple(value.shape)}, not {tuple(expected)}")
        state.setdefault(position[name], {})[entry] = value if entry == "step" else _like(parameter, value)
    return state


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """``value`` as a tensor that is sharded as the parameter is."""
    if not hasattr(parameter, "to_local"):
        return value
    sharded = torch.zeros_like(parameter)
    local_part(sharded).copy_(value)
    return sharded


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Puts the result of :func:`split_state` into a fresh optimiser."""
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {i: dict(s) for i, s in state.items()}, "param_groups": groups})
