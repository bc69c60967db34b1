"""From an objective's modules to trained networks: placement, wrapping by accelerate, optimiser, moving average."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from genkit.errors import ConfigError, nearest
from genkit.training.config import TrainerConfig
from genkit.training.ema import EMA
from genkit.training.networks import TrainedNetwork, set_turn, trainable_parameters
from genkit.training.objective import Objective
from genkit.training.optim import base_rate, make_optimizer
from genkit.training.sharding import is_sharded, shard_network

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["build_networks", "release_networks"]

log = logging.getLogger("genkit.training")


def build_networks(
    accelerator: Accelerator, objective: Objective, config: TrainerConfig, previous: Mapping[str, TrainedNetwork]
) -> dict[str, TrainedNetwork]:
    """The networks of a phase with fresh optimisers; a moving average goes on where the same parameters are trained.

    Raises:
        ConfigError: names that cannot be files or that the configuration has wrong, nothing to train, or more than one
            network under FSDP.
    """
    if previous:
        accelerator.free_memory()  # accelerate keeps what it prepared
    objective.bind({})
    modules = dict(objective.networks())
    _check_names(config, modules)
    if is_sharded(accelerator) and len(modules) > 1:
        raise ConfigError(
            f"FSDP shards one network, the objective trains {sorted(modules)}; put them into one container module "
            f"whose forward(name, …) dispatches, or use configs/accelerate/ddp.yaml"
        )
    for module in objective.frozen().values():
        module.to(accelerator.device).eval().requires_grad_(False)
        _restore_forward(module)
        accelerator.prepare_model(module, evaluation_mode=True)
    return {
        name: _build(accelerator, objective, config, name, module, previous.get(name))
        for name, module in modules.items()
    }


def _build(
    accelerator: Accelerator,
    objective: Objective,
    config: TrainerConfig,
    name: str,
    module: nn.Module,
    before: TrainedNetwork | None,
) -> TrainedNetwork:
    _restore_forward(module)
    module.to(accelerator.device).train()
    trainable_parameters(name, module)
    if config.compile:
        module.compile()
    allowed = frozenset(objective.parameters_without_gradient(name))
    whole = None
    if is_sharded(accelerator):
        wrapped, whole = shard_network(accelerator, module)
    else:
        if accelerator.ddp_handler is not None:
            accelerator.ddp_handler.find_unused_parameters = bool(allowed)
        wrapped = accelerator.prepare_model(module)
        if wrapped is not module:
            # a network may be called several times in a step; broadcasting its buffers in place between two calls
            # would break the backward pass
            wrapped.broadcast_buffers = False
    parameters = trainable_parameters(name, module)
    rate = base_rate(config, name)
    optimizer = make_optimizer(parameters, config, rate)
    optimizer.zero_grad(set_to_none=True)
    network = TrainedNetwork(name, module, wrapped, parameters, optimizer, rate, None, allowed, whole)
    network.ema = _average(network, config, before)
    return network


def _average(network: TrainedNetwork, config: TrainerConfig, before: TrainedNetwork | None) -> EMA | None:
    decay = config.ema_decay.get(network.name) if isinstance(config.ema_decay, dict) else config.ema_decay
    if decay is None:
        return None
    if before is not None and before.ema is not None:
        shapes = {n: p.shape for n, p in network.parameters.items()}
        if shapes == {n: s.shape for n, s in before.ema.shadow.items()}:
            return before.ema
    initial = decay**config.max_steps
    if config.ema_start_step == 0 and initial > 0.01:
        log.warning(
            "ema_decay=%s over max_steps=%d leaves %.0f %% of the initial weights in the average of %s; set "
            "ema_start_step (half of the steps, say) or a smaller ema_decay",
            decay,
            config.max_steps,
            100 * initial,
            network.name,
        )
    return EMA(network.parameters, decay, config.ema_start_step)


def _check_names(config: TrainerConfig, modules: Mapping[str, nn.Module]) -> None:
    for name in modules:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ConfigError(f"network name {name!r}: names become file names; use letters, digits, _ and -")
    for key, value in (("learning_rate", config.learning_rate), ("ema_decay", config.ema_decay)):
        unknown = sorted(value.keys() - modules.keys()) if isinstance(value, dict) else []
        if unknown:
            close = nearest(unknown[0], modules)
            raise ConfigError(f"{key}: {unknown[0]!r} is not a trained network; they are {sorted(modules)}.{close}")


def release_networks(objective: Objective, networks: Mapping[str, TrainedNetwork]) -> None:
    """Gives the caller's modules back as they were: plain forward, gradients wanted again, nothing bound."""
    set_turn(networks, None)
    objective.bind({})
    for module in (*(n.module for n in networks.values()), *objective.frozen().values()):
        _restore_forward(module)


def _restore_forward(module: nn.Module) -> None:
    """Takes off accelerate's mixed-precision forward, which would otherwise be put on twice."""
    if "_original_forward" in module.__dict__:
        del module.__dict__["_original_forward"]
        module.__dict__.pop("forward", None)
