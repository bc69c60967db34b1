"""One step: read and weigh a window, accumulate the gradient of its global mean, check it, update or leave alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genkit.errors import GenkitError
from genkit.samplers.noise import training_keys
from genkit.training.accelerator import step_rng, sum_over_processes
from genkit.training.batches import BatchReader
from genkit.training.config import TrainerConfig
from genkit.training.networks import TrainedNetwork
from genkit.training.objective import LossOutput, Objective
from genkit.training.order import DataOrder

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["StepResult", "Stepper"]


@dataclass(frozen=True)
class StepResult:
    """Means over the whole window and all processes; ``finite`` is False where nothing was updated.

    ``overflow`` marks a float16 gradient that only asks for a smaller loss scale. ``stop`` is True on every process
    as soon as one of them was told to stop. ``sample_ids`` belong to a step that is not finite.
    """

    loss: float
    grad_norm: float
    logs: dict[str, float]
    finite: bool
    overflow: bool
    stop: bool
    sample_ids: tuple[int, ...]


@dataclass
class _Window:
    """This process's micro-batches of one step, their shares of the global mean, and what they gave."""

    batches: list[dict[str, Any]]
    shares: list[float]
    names: list[str] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)


class Stepper:
    """Makes single optimiser updates of an objective's networks.

    The update is the gradient of Σ w_i L_i / Σ w_i over all micro-batches i of all processes, L_i their mean losses
    and w_i their weights, so that it does not depend on how a window is cut up.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        objective: Objective,
        config: TrainerConfig,
        reader: BatchReader,
        order: DataOrder,
    ) -> None:
        self.accelerator, self.objective, self.config = accelerator, objective, config
        self.reader, self.order = reader, order

    def run(self, network: TrainedNetwork, step: int, rate: float, stop: bool) -> StepResult:
        """Step ``step`` (from 0) of ``network`` at learning rate ``rate``; ``stop`` is told to the other processes."""
        window = self._read(step)
        with step_rng(self.config.seed, self.accelerator.process_index, step, self.accelerator.device):
            sums = self._accumulate(network, window, step)
        told = torch.tensor([float(stop)], dtype=sums.dtype, device=sums.device)
        sums = sum_over_processes(self.accelerator, torch.cat((sums, told)))
        norm = self._clip(network)
        # the one wait for the device in a step: a non-finite update must be stopped before it is made
        loss, *logs, stops, grad_norm = torch.cat((sums, norm.to(sums).reshape(1))).tolist()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        ids = () if finite else self._suspects(window, step)
        self._update(network, step, rate, finite)
        named = dict(zip(window.names, logs, strict=True))
        return StepResult(loss, grad_norm, named, finite, self._overflow(loss, finite), stops > 0, ids)

    def _read(self, step: int) -> _Window:
        micro = self.order.micro_batches(step, self.accelerator.process_index)
        batches = [self.reader.read(m.indices) for m in micro]
        weights = [self.objective.weight(b) if m.real else 0.0 for b, m in zip(batches, micro, strict=True)]
        total = self._total(weights, step)
        if not (total > 0 and math.isfinite(total)) or min(weights) < 0:
            raise GenkitError(
                f"step {step}: the micro-batches weigh {weights}, {total} over all processes; weight() must give "
                f"numbers >= 0 that are not all 0 (samples {self.order.window(step).tolist()[:20]})"
            )
        return _Window(batches, [w / total for w in weights])

    def _total(self, weights: list[float], step: int) -> float:
        if type(self.objective).weight is Objective.weight:  # samples, which every process can count by itself
            return float(len(self.order.window(step)))
        own = torch.tensor([sum(weights)], dtype=torch.float64, device=self.accelerator.device)
        return float(sum_over_processes(self.accelerator, own))

    def _accumulate(self, network: TrainedNetwork, window: _Window, step: int) -> Tensor:
        """Leaves the gradient in the parameters; returns this process's part of (loss, logs), float64 (1 + logs,)."""
        world, device, last = self.accelerator.num_processes, self.accelerator.device, len(window.batches) - 1
        parts: list[Tensor] = []
        for i, (batch, share) in enumerate(zip(window.batches, window.shares, strict=True)):
            moved = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}
            keys = training_keys(self.config.seed, step, moved["sample_id"])
            with nullcontext() if i == last else self.accelerator.no_sync(network.wrapped):
                output = self.objective.loss(network.name, moved, step=step, keys=keys)
                _check_output(output, window, network.name)
                self._backward(output.loss * (share * world))  # synchronising averages over processes
            window.losses.append(output.loss.detach())
            numbers = (output.loss, *output.logs.values())
            parts.append(
                share * torch.stack([torch.as_tensor(n, dtype=torch.float64, device=device).detach() for n in numbers])
            )
        network.check_gradients()
        return torch.stack(parts).sum(dim=0)

    def _backward(self, loss: Tensor) -> None:
        # not accelerator.backward, which divides by an accumulation count that the environment may set
        scaler = self.accelerator.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def _clip(self, network: TrainedNetwork) -> Tensor:
        """Clips to ``max_grad_norm``; returns the norm before."""
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.unscale_(network.optimizer)
        parameters = list(network.parameters.values())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if self.config.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm, foreach=True)
        return norm

    def _update(self, network: TrainedNetwork, step: int, rate: float, finite: bool) -> None:
        scaler, optimizer = self.accelerator.scaler, network.optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate
        if finite:
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if network.ema is not None:
                network.ema.update(network.parameters, step + 1)
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def _overflow(self, loss: float, finite: bool) -> bool:
        scaler = self.accelerator.scaler
        return not finite and scaler is not None and math.isfinite(loss) and scaler.get_scale() > 1.0

    def _suspects(self, window: _Window, step: int) -> tuple[int, ...]:
        """The samples of the micro-batches whose loss is not finite; all of the window where only gradients are not."""
        bad = [b["sample_id"] for b, x in zip(window.batches, window.losses, strict=True) if not torch.isfinite(x)]
        return tuple((torch.cat(bad) if bad else self.order.window(step)).tolist())


def _check_output(output: Any, window: _Window, turn: str) -> None:
    if not isinstance(output, LossOutput) or not isinstance(output.loss, Tensor):
        got = f"LossOutput({type(output.loss).__name__})" if isinstance(output, LossOutput) else type(output).__name__
        raise GenkitError(f"loss({turn!r}) gave a {got}, expected LossOutput(loss, logs) with a scalar tensor as loss")
    _check_logs(output.logs, turn)
    if output.loss.ndim or not output.loss.requires_grad:
        raise GenkitError(
            f"loss({turn!r}) gave a tensor of shape {tuple(output.loss.shape)} with requires_grad="
            f"{output.loss.requires_grad}, expected a scalar that depends on the network's parameters"
        )
    names = list(output.logs)
    if window.losses and names != window.names:
        raise GenkitError(
            f"loss({turn!r}) logged {names} after {window.names}; every micro-batch of a step logs the same names"
        )
    window.names = names


def _check_logs(logs: Any, turn: str) -> None:
    if not isinstance(logs, Mapping):
        raise GenkitError(f"loss({turn!r}) gave a {type(logs).__name__} as logs, expected a dict of named numbers")
    for name, value in logs.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if shape if shape is not None else not isinstance(value, Real):
            got = f"a tensor of shape {shape}" if shape else f"a {type(value).__name__}"
            raise GenkitError(
                f"loss({turn!r}) logged {name!r} as {got}, expected a number or a scalar tensor; log a mean"
            )
