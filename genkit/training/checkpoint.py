"""Checkpoint folders ``output_dir/checkpoint-<step>``: finding, choosing, pruning, and what is inside.

A checkpoint holds, as safetensors and JSON only: trained parameters and buffers of every network (``networks/``),
moving averages (``ema/``), optimiser states (``optimizers/``), modules that a phase froze (``frozen/``),
``trainer.json`` (step, epoch, phase, counters, versions, world size) and ``config.json``. The manifest with sizes and
hashes is written last (:mod:`genkit.serialization`), so a folder is whole or it is not a checkpoint. Noise, data
order and learning rate are functions of the step and need no state.
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from genkit.errors import CheckpointError, ConfigError
from genkit.serialization import load_json, load_tensors, save_json, save_tensors, verify_folder, write_folder
from genkit.training.ema import local_part
from genkit.training.networks import TrainedNetwork
from genkit.training.optim import load_optimizer, optimizer_tensors, split_state

__all__ = [
    "CheckpointData",
    "apply_checkpoint",
    "changed_setup",
    "checkpoints",
    "choose_checkpoint",
    "collect",
    "latest_checkpoint",
    "make_output_dir",
    "prepare_output_dir",
    "prune_checkpoints",
    "read_checkpoint",
    "verify_checkpoint",
    "write_checkpoint",
]

log = logging.getLogger("genkit.training")
_NAME = re.compile(r"^checkpoint-(\d+)$")
FORMAT = 1
_SETUP = {
    "world_size": "number of processes",
    "sharded": "sharded by FSDP",
    "samples": "number of training samples",
    "data": "values of the training data (SHA-256 of some samples)",
}


# --- folders ----------------------------------------------------------------------------------------------------------


def checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything named like a checkpoint, newest first; whether it is whole is not looked at."""
    if not output_dir.is_dir():
        return []
    named = [(_NAME.match(p.name), p) for p in output_dir.iterdir() if p.is_dir()]
    return sorted(((int(m.group(1)), p) for m, p in named if m), reverse=True)


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are whole and whose name tells its step (other names are free).

    Raises:
        CheckpointError: damage, or ``checkpoint-<step>`` with another step in its manifest.
    """
    manifest = verify_folder(folder)
    named, step = _NAME.match(folder.name), manifest["meta"].get("step")
    if named and int(named.group(1)) != step:
        raise CheckpointError(
            f"{folder}: its name says step {int(named.group(1))}, its manifest says step {step}; it was renamed or "
            f"replaced. Give it its own name back, or take another checkpoint"
        )
    return manifest


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The newest checkpoint that verifies; damaged newer ones are passed over with a warning that names the damage."""
    for _, folder in checkpoints(output_dir):
        try:
            verify_checkpoint(folder)
            return folder
        except CheckpointError as error:
            log.warning("checkpoint passed over, the previous one is tried: %s", error)
    return None


def choose_checkpoint(output_dir: Path, resume: str | None) -> Path | None:
    """The folder a run starts from, or None for a fresh start.

    Args:
        output_dir: where ``latest`` looks.
        resume: a checkpoint folder, ``"latest"`` or None.

    Raises:
        CheckpointError: a named folder that is missing or damaged, or a run whose checkpoints are all damaged.
    """
    if resume is None:
        return None
    if resume != "latest":
        step = verify_checkpoint(Path(resume))["meta"].get("step", 0)
        _refuse_newer(output_dir, resume, step)
        return Path(resume)
    found = latest_checkpoint(output_dir)
    if found is not None:
        _set_aside_newer(output_dir, found)
    if found is None and checkpoints(output_dir):
        names = ", ".join(p.name for _, p in checkpoints(output_dir))
        raise CheckpointError(
            f"{output_dir}: none of {names} verifies (the warnings above say why); restore one from a backup, or start "
            f"a new run in another output_dir"
        )
    if found is None and (output_dir / "pipeline").exists():
        raise ConfigError(
            f"{output_dir} holds a finished pipeline and no checkpoint; starting fresh would replace it. Give another "
            f"output_dir, or move the pipeline away"
        )
    if found is None:
        log.info("resume_from_checkpoint=latest: %s has no checkpoint, starting fresh", output_dir)
    return found


def _refuse_newer(output_dir: Path, resume: str, step: int) -> None:
    """Steps that are run again must not mix with checkpoints of their first run: pruning goes by the step."""
    newer = [folder.name for other, folder in checkpoints(output_dir) if other > step]
    if newer:
        raise ConfigError(
            f"output_dir {output_dir} holds {', '.join(newer[:5])}, newer than the checkpoint to resume ({resume}, "
            f"step {step}); give another output_dir, or move the newer ones away"
        )


def _set_aside_newer(output_dir: Path, found: Path) -> None:
    """Damaged checkpoints that were passed over are renamed, so that the run can write those steps again."""
    for _, folder in checkpoints(output_dir):
        if folder == found:
            return
        target = output_dir / f"damaged-{folder.name}-{uuid.uuid4().hex[:8]}"
        folder.rename(target)
        log.warning("%s was renamed to %s", folder, target.name)


def make_output_dir(output_dir: Path) -> None:
    """Makes the folder; a place that cannot be made or written raises `CheckpointError`."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        probe = output_dir / ".tmp-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"output_dir {output_dir}: cannot be written ({error}); give a folder that can be"
        ) from error


def prepare_output_dir(output_dir: Path, resume: str | None) -> None:
    """Removes what killed saves left, and refuses to run over results that nobody asked to resume.

    Raises:
        ConfigError: the folder holds a run and ``resume`` is None.
    """
    kept = [p.name for _, p in checkpoints(output_dir)] + [n for n in ("pipeline",) if (output_dir / n).exists()]
    if resume is None and kept:
        raise ConfigError(
            f"output_dir {output_dir} already holds a run ({', '.join(kept[:5])}); continue it with "
            f"resume_from_checkpoint=latest, or give another output_dir"
        )
    for stale in output_dir.glob(".tmp-*"):
        shutil.rmtree(stale, ignore_errors=True) if stale.is_dir() else stale.unlink(missing_ok=True)


def prune_checkpoints(output_dir: Path, limit: int | None) -> None:
    """Removes all but the newest ``limit`` checkpoints; nothing goes unless one of those that stay verifies."""
    found = checkpoints(output_dir)
    if limit is None or len(found) <= limit:
        return
    if not any(_verifies(folder) for _, folder in found[:limit]):
        log.warning("no newer checkpoint verifies, so the older ones stay although save_total_limit is %d", limit)
        return
    for _, folder in found[limit:]:
        shutil.rmtree(folder, ignore_errors=True)


def _verifies(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except CheckpointError:
        return False
    return True


# --- content ----------------------------------------------------------------------------------------------------------


@dataclass
class CheckpointData:
    """A checkpoint in memory: ``trainer.json``, ``config.json`` and the tensors by relative path (without suffix)."""

    state: dict[str, Any]
    config: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


def collect(networks: Mapping[str, TrainedNetwork], frozen: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """Everything with tensors that a checkpoint holds, by relative path.

    Raises:
        CheckpointError: a non-finite value in a network or its average; such a state is never saved.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for name, network in networks.items():
        groups[f"networks/{name}"] = network.saved_tensors()
        groups[f"optimizers/{name}"] = optimizer_tensors(network.optimizer, network.parameters)
        if network.ema is not None:
            groups[f"ema/{name}"] = dict(network.ema.shadow)
    for name, module in frozen.items():
        groups[f"frozen/{name}"] = module.state_dict()
    for path, tensors in groups.items():
        for key, value in tensors.items():
            if value.is_floating_point() and not torch.isfinite(local_part(value)).all():
                raise CheckpointError(
                    f"{path}: {key} is not finite; the state is not saved, older checkpoints are unchanged"
                )
    return groups


def write_checkpoint(
    folder: Path,
    groups: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    shard: str = "",
    gather: Callable[[Path], None] | None = None,
) -> None:
    """Writes a checkpoint, whole or not at all.

    Args:
        folder: ``output_dir/checkpoint-<step>``.
        groups: the result of :func:`collect`.
        state: ``trainer.json``.
        config: the resolved configuration.
        shard: suffix of the tensor files, where every process writes its own (``.rank0-of-2``).
        gather: called with the staged folder, waits until the other processes have put their shards there.
    """

    def write(stage: Path) -> None:
        write_tensors(stage, groups, shard)
        if gather is not None:
            gather(stage)
        save_json(stage / "trainer.json", {"format": FORMAT, **state})
        save_json(stage / "config.json", dict(config))

    meta = {"step": state["step"], "world_size": state["world_size"], "config_hash": state["config_hash"]}
    write_folder(folder, write, meta=meta)


def write_tensors(stage: Path, groups: Mapping[str, Mapping[str, Tensor]], shard: str = "") -> None:
    """The tensor files of one process."""
    for path, tensors in groups.items():
        target = stage / f"{path}{shard}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(target, {key: local_part(value) for key, value in tensors.items()})


def read_checkpoint(folder: Path, shard: str = "") -> CheckpointData:
    """Reads a checkpoint that `verify_folder` has passed; nothing outside the result changes."""
    state, config = load_json(folder / "trainer.json"), load_json(folder / "config.json")
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(config, dict):
        raise CheckpointError(f"{folder}: trainer.json is not of format {FORMAT}; another version of genkit wrote it")
    suffix = f"{shard}.safetensors"
    files = [p for p in sorted(folder.glob("*/*.safetensors")) if p.name.endswith(suffix)]
    tensors = {p.relative_to(folder).as_posix().removesuffix(suffix): load_tensors(p) for p in files}
    return CheckpointData(state, config, tensors)


def changed_setup(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a run has besides its configuration and cannot change on resume, one line for each difference.

    A value that one side does not have (data that differ from read to read, an older checkpoint) is not compared.
    """
    return [
        f"{words}: {saved[key]} in the checkpoint, {now[key]} now"
        for key, words in _SETUP.items()
        if saved.get(key) is not None and now[key] is not None and saved[key] != now[key]
    ]


def apply_checkpoint(
    data: CheckpointData, networks: Mapping[str, TrainedNetwork], frozen: Mapping[str, nn.Module]
) -> None:
    """Puts a checkpoint into the live objects, after all of it was found to fit: on error nothing has changed.

    Raises:
        CheckpointError: networks, parameters, averages or shapes that are missing, unexpected or different.
    """
    targets = _targets(networks, frozen)
    for path, target in targets.items():
        if path not in data.tensors:
            hint = "; it was saved without a moving average" if path.startswith("ema/") else ""
            raise CheckpointError(f"the checkpoint has no {path}.safetensors, which this run needs{hint}")
        _check_fit(path, data.tensors[path], target)
    states = {}
    for name, network in networks.items():
        saved_hash = data.state.get("frozen_hashes", {}).get(name)
        if saved_hash != network.frozen_hash():
            raise CheckpointError(
                f"network {name!r}: its untrained parameters have other names or shapes than when it was saved"
            )
        states[name] = split_state(data.tensors.get(f"optimizers/{name}", {}), network.parameters)
    with torch.no_grad():
        for path, target in targets.items():
            for key, value in target.items():
                local_part(value).copy_(data.tensors[path][key])
    for name, network in networks.items():
        load_optimizer(network.optimizer, states[name])


def _targets(networks: Mapping[str, TrainedNetwork], frozen: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    targets: dict[str, dict[str, Tensor]] = {
        f"networks/{n}": network.saved_tensors() for n, network in networks.items()
    }
    targets |= {f"ema/{n}": network.ema.shadow for n, network in networks.items() if network.ema is not None}
    return targets | {f"frozen/{n}": module.state_dict() for n, module in frozen.items()}


def _check_fit(path: str, saved: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(target.keys() - saved.keys()), sorted(saved.keys() - target.keys())
    if missing or extra:
        raise CheckpointError(
            f"{path}: the checkpoint lacks {missing[:5]} and has {extra[:5]} beyond what this run trains; was it "
            f"written by another network or another set of trained parameters?"
        )
    for key, value in target.items():
        before, here = tuple(saved[key].shape), tuple(local_part(value).shape)
        if before != here:
            raise CheckpointError(f"{path}: {key} has shape {before} in the checkpoint, {here} here")
