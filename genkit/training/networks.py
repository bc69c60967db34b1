"""A network as the Trainer holds it: trained parameters, optimiser and moving average under one name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from genkit.errors import ConfigError, GenkitError
from genkit.serialization import canonical_hash
from genkit.training.ema import EMA

__all__ = ["TrainedNetwork", "averaged_weights", "set_turn", "trainable_parameters"]


@dataclass
class TrainedNetwork:
    """One entry of ``Objective.networks()`` in a phase.

    Attributes:
        name: its turn.
        module: the plain module.
        wrapped: what is called in its own turn (synchronises gradients over processes).
        parameters: the trained ones by name; parameters that did not require a gradient are left alone.
        base_rate: the learning rate before warm-up and decay.
        whole: under FSDP, an unsharded copy on the main process to save the final pipeline with.
        allowed_without_gradient: names from the objective's ``parameters_without_gradient``.
    """

    name: str
    module: nn.Module
    wrapped: nn.Module
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    base_rate: float
    ema: EMA | None = None
    allowed_without_gradient: Collection[str] = ()
    whole: nn.Module | None = None
    gradients_checked: bool = field(default=False, init=False)

    def saved_tensors(self) -> dict[str, Tensor]:
        """Trained parameters and persistent buffers: what a checkpoint needs beside the frozen base."""
        kept = self.module.state_dict()
        buffers = {n: b for n, b in self.module.named_buffers() if n in kept}
        return {**{n: p.detach() for n, p in self.parameters.items()}, **buffers}

    def unsharded(self) -> nn.Module:
        """The module in evaluation mode; where it is sharded, the copy that holds all of its values (main process)."""
        if not any(hasattr(p, "full_tensor") for p in self.module.parameters()):
            return self.module.eval()
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in self.module.state_dict().items()}
        if self.whole is None:
            return self.module
        self.whole.load_state_dict(full)
        return self.whole.eval()

    def frozen_hash(self) -> str:
        """Names and shapes of the parameters that are not trained; their values are not in the checkpoint."""
        rest = {n: list(p.shape) for n, p in self.module.named_parameters() if n not in self.parameters}
        return canonical_hash(rest)

    def check_gradients(self) -> None:
        """After the first backward pass of a turn: a trained parameter without a gradient would silently never move."""
        if self.gradients_checked:
            return
        missing = [n for n, p in self.parameters.items() if p.grad is None and n not in self.allowed_without_gradient]
        if missing:
            raise GenkitError(
                f"network {self.name!r}: {len(missing)} trained parameter(s) got no gradient from the loss: "
                f"{', '.join(missing[:8])}{' …' if len(missing) > 8 else ''}. Call the network through "
                f"net({self.name!r}), set requires_grad=False on what should not train, "
                f"or name them in parameters_without_gradient()"
            )
        self.gradients_checked = True


def trainable_parameters(name: str, module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name; none at all is a `ConfigError`."""
    found = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if not found:
        raise ConfigError(f"network {name!r} has no parameter with requires_grad=True, so there is nothing to train")
    return found


def set_turn(networks: Mapping[str, TrainedNetwork], turn: str | None) -> None:
    """Lets only the turn's trained parameters require gradients; None gives all of them back."""
    for name, network in networks.items():
        for parameter in network.parameters.values():
            parameter.requires_grad_(turn is None or name == turn)


@contextmanager
def averaged_weights(networks: Mapping[str, TrainedNetwork]) -> Iterator[dict[str, nn.Module]]:
    """Inside, every network with a moving average holds it and is in evaluation mode; afterwards all is as before.

    Of a sharded network the main process gets a whole copy.
    """
    modes = {name: network.module.training for name, network in networks.items()}
    with ExitStack() as stack:
        for network in networks.values():
            if network.ema is not None:
                stack.enter_context(network.ema.swapped_into(network.parameters))
        try:
            yield {name: network.unsharded() for name, network in networks.items()}
        finally:
            for name, network in networks.items():
                network.module.train(modes[name])
