"""FSDP2: sharding one network, and checkpoints that every process writes its own part of."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from genkit.errors import CheckpointError, GenkitError
from genkit.training import checkpoint as folders
from genkit.training.accelerator import broadcast, decide_on_main, on_every_process

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["is_sharded", "save_on_all", "shard_network", "shard_suffix"]


def is_sharded(accelerator: Accelerator) -> bool:
    """True under FSDP2."""
    return accelerator.distributed_type.value == "FSDP"


def shard_suffix(accelerator: Accelerator) -> str:
    """What a process's tensor files carry before ``.safetensors``; nothing where processes hold equal copies."""
    if not is_sharded(accelerator):
        return ""
    return f".rank{accelerator.process_index}-of-{accelerator.num_processes}"


def shard_network(accelerator: Accelerator, module: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """The sharded module, and on the main process an unsharded copy on the CPU to save the final pipeline with."""
    whole = copy.deepcopy(module).cpu() if accelerator.is_main_process else None
    # accelerate shards a model only together with an optimiser; ours is made from the sharded parameters afterwards
    stand_in = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0)
    wrapped, _ = accelerator.prepare(module, stand_in)
    return wrapped, whole


def save_on_all(
    accelerator: Accelerator,
    folder: Path,
    groups: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    """Writes a checkpoint: by the main process alone, or under FSDP by every process into the same staged folder.

    Raises:
        CheckpointError: on every process where one of them could not write.
    """
    if not is_sharded(accelerator):
        decide_on_main(accelerator, lambda: folders.write_checkpoint(folder, groups, state, config))
        return
    suffix = shard_suffix(accelerator)
    if accelerator.is_main_process:
        _save_as_main(accelerator, folder, groups, state, config, suffix)
    else:
        _save_as_other(accelerator, groups, suffix)


def _save_as_main(
    accelerator: Accelerator,
    folder: Path,
    groups: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    suffix: str,
) -> None:
    announced = False

    def gather(stage: Path) -> None:
        nonlocal announced
        announced = True
        broadcast(accelerator, str(stage))
        on_every_process(accelerator, lambda: None)

    error: GenkitError | None = None
    try:
        folders.write_checkpoint(folder, groups, state, config, shard=suffix, gather=gather)
    except GenkitError as caught:
        error = caught
    if not announced:
        broadcast(accelerator, None)
    broadcast(accelerator, None if error is None else str(error))
    if error is not None:
        raise error


def _save_as_other(accelerator: Accelerator, groups: Mapping[str, Mapping[str, Tensor]], suffix: str) -> None:
    stage = broadcast(accelerator, None)
    own: GenkitError | None = None
    if stage is not None:
        try:
            on_every_process(accelerator, lambda: folders.write_tensors(Path(stage), groups, suffix))
        except GenkitError as caught:
            own = caught
    failed = broadcast(accelerator, None)
    if failed is not None or own is not None:
        raise own or CheckpointError(f"the main process could not save: {failed}")
