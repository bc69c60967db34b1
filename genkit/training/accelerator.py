"""The one place that makes the Accelerator, and the few things processes say to one another.

Messages travel as JSON bytes, decisions are made by the main process and followed by all, and an error on one process
becomes an error on every process instead of a wait without end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from genkit.errors import CheckpointError, ConfigError, GenkitError
from genkit.training.config import TrainerConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["broadcast", "decide_on_main", "make_accelerator", "on_every_process", "step_rng", "sum_over_processes"]

log = logging.getLogger("genkit.training")
T = TypeVar("T")
_ERRORS: dict[str, type[GenkitError]] = {e.__name__: e for e in (GenkitError, ConfigError, CheckpointError)}


# --- making it --------------------------------------------------------------------------------------------------------


def make_accelerator(config: TrainerConfig) -> Accelerator:
    """The Accelerator of a run, on the asked-for device, with the asked-for number of processes.

    Raises:
        ConfigError: CUDA asked for and absent, half precision that the device cannot do, another number of processes
            than asked for, or a kind of distribution that is not supported.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedDataParallelKwargs

    cpu = _use_cpu(config)
    # Both states are process-wide; a second Trainer in one process (a notebook, a test) may ask for something else.
    if PartialState._shared_state and PartialState().device.type != ("cpu" if cpu else "cuda"):
        AcceleratorState._reset_state(reset_partial_state=True)
    elif AcceleratorState._shared_state and AcceleratorState().mixed_precision != config.mixed_precision:
        AcceleratorState._reset_state()
    ddp = DistributedDataParallelKwargs()
    accelerator = Accelerator(cpu=cpu, mixed_precision=config.mixed_precision, kwargs_handlers=[ddp])
    _shard_on_cpu(accelerator)
    _name_ignored_settings(config)
    check_world_size(config, accelerator.num_processes)
    _check_kind(accelerator)
    return accelerator


def _use_cpu(config: TrainerConfig) -> bool:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device; use device=cpu or device=auto")
    cpu = config.device == "cpu" or not has_cuda
    if cpu and config.mixed_precision == "fp16":
        raise ConfigError("mixed_precision: fp16 needs a CUDA device, and this run is on the CPU; use bf16 or no")
    return cpu


def check_world_size(config: TrainerConfig, got: int) -> None:
    """Fails where a launcher started another number of processes than was asked for.

    ``accelerate launch --cpu --num_processes 2`` starts one process and says nothing; it leaves a rendezvous address
    in the environment without a WORLD_SIZE, which is how it is recognised.
    """
    env = os.environ
    remedy = (
        "On a CPU several processes start with 'accelerate launch --config_file configs/accelerate/cpu2.yaml "
        "-m genkit.train …' (not with --cpu) or 'torchrun --nproc_per_node 2 -m genkit.train …'."
    )
    if config.num_processes is not None and config.num_processes != got:
        raise ConfigError(f"num_processes: {config.num_processes} asked for, {got} running. {remedy}")
    asked = int(env.get("WORLD_SIZE", "1"))
    if asked != got:
        raise ConfigError(f"the launcher set WORLD_SIZE={asked}, but {got} process(es) work together. {remedy}")
    if got == 1 and "ACCELERATE_MIXED_PRECISION" in env and "MASTER_PORT" in env and "WORLD_SIZE" not in env:
        raise ConfigError(f"accelerate launch was asked for several processes and started 1. {remedy}")


def _name_ignored_settings(config: TrainerConfig) -> None:
    """The training configuration decides; what a launcher's file says differently is named, not obeyed."""
    for key, value in (
        ("mixed_precision", config.mixed_precision),
        ("gradient_accumulation_steps", str(config.gradient_accumulation_steps)),
    ):
        launched = os.environ.get(f"ACCELERATE_{key.upper()}", value)
        if launched not in (value, "no", "1"):
            log.warning("the launcher says %s=%s, which is not used: the configuration says %s", key, launched, value)


def _shard_on_cpu(accelerator: Accelerator) -> None:
    """accelerate ignores a request for FSDP on the CPU; torch's FSDP2 runs there, so the request is honoured."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, str_to_bool

    asked = str_to_bool(os.environ.get("ACCELERATE_USE_FSDP", "false"))
    if asked and accelerator.distributed_type == DistributedType.MULTI_CPU:
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        # both states, as accelerate does it: the one is copied over the other again and again
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if asked and accelerator.distributed_type != DistributedType.FSDP:
        raise ConfigError(
            f"FSDP was asked for, but accelerate runs {accelerator.distributed_type.value} with "
            f"{accelerator.num_processes} process(es); start at least 2 (configs/accelerate/fsdp2.yaml)"
        )


def _check_kind(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        raise ConfigError(f"distributed_type {kind} is not supported; use one of the files in configs/accelerate")
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise ConfigError("FSDP version 1 is not supported; set fsdp_version: 2 (configs/accelerate/fsdp2.yaml)")


# --- talking ----------------------------------------------------------------------------------------------------------


def sum_over_processes(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The sum of ``values`` over all processes, on every process."""
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(values)
    return values


def broadcast(accelerator: Accelerator, value: Any) -> Any:
    """The main process's ``value`` (plain JSON) on every process."""
    if accelerator.num_processes == 1:
        return value
    device = accelerator.device
    data = json.dumps(value).encode() if accelerator.is_main_process else b""
    length = sum_over_processes(accelerator, torch.tensor([len(data)], device=device))
    buffer = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    torch.distributed.broadcast(buffer, src=0)
    return json.loads(bytes(buffer.tolist()))


def decide_on_main(accelerator: Accelerator, decide: Callable[[], Any]) -> Any:
    """``decide()`` run by the main process; its plain result, or its error, reaches every process."""
    message: dict[str, Any] = {}
    own: GenkitError | None = None
    if accelerator.is_main_process:
        try:
            message = {"result": decide()}
        except (GenkitError, OSError) as error:
            own = _as_genkit_error(error)
            message = {"error": type(own).__name__, "text": str(own)}
    message = broadcast(accelerator, message)
    if own is not None:
        raise own
    if "error" in message:
        raise _ERRORS.get(message["error"], GenkitError)(message["text"])
    return message["result"]


def on_every_process(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """``work()`` on every process; where one fails, all raise."""
    result: T | None = None
    own: GenkitError | None = None
    try:
        result = work()
    except (GenkitError, OSError) as error:
        own = _as_genkit_error(error)
    failed = sum_over_processes(accelerator, torch.tensor([float(own is not None)], device=accelerator.device))
    if own is not None:
        raise own
    if failed.item():
        raise GenkitError(f"{int(failed.item())} other process(es) failed; their messages say why")
    return result  # type: ignore[return-value]


def _as_genkit_error(error: GenkitError | OSError) -> GenkitError:
    if isinstance(error, GenkitError):
        return error
    wrapped = CheckpointError(f"{error}; check free space and permissions")
    wrapped.__cause__ = error
    return wrapped


# --- randomness inside networks ---------------------------------------------------------------------------------------


@contextmanager
def step_rng(seed: int, rank: int, step: int, device: torch.device) -> Iterator[None]:
    """Torch's generators, which dropout reads, seeded by (seed, rank, step) inside and untouched afterwards.

    Dropout takes no generator, so this is the one place where the process-wide ones are set: a resumed run drops the
    same units, no two ranks drop the same, and the caller's own draws do not notice.
    """
    digest = hashlib.sha256(f"genkit/{seed}/{rank}/{step}".encode()).digest()
    number = int.from_bytes(digest[:8], "little") >> 1
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(number)
        if devices:
            torch.cuda.manual_seed(number)
        yield
