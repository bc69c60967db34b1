"""Saves of a search: a folder of numbered parts, each of which holds what is new since the part before it.

``save_dir/part-00000``, ``part-00001``, … are written with :func:`genkit.serialization.write_folder`: staged, hashed
and renamed into place, so a part is whole or absent, and what was saved before is never touched. A search is restored
by putting its parts on top of one another. Only safetensors and JSON are read and written.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from genkit.errors import CheckpointError, ConfigError
from genkit.serialization import (
    canonical_hash,
    check_target,
    load_json,
    load_tensors,
    recover_folder,
    save_json,
    save_tensors,
    verify_folder,
    write_folder,
)

__all__ = ["SavedPart", "SearchSaver", "digest", "fingerprint", "search_settings"]

log = logging.getLogger("genkit.samplers")
_NAME = re.compile(r"^part-(\d{5})$")
_FILE, _JSON = "search.safetensors", "search.json"

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class SavedPart:
    """One part: named tensors, and JSON values."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]

    def group(self, prefix: str) -> dict[str, Any]:
        """The numpy arrays (tensors for states) whose names start with ``prefix/``, without it."""
        found = {k.removeprefix(f"{prefix}/"): v for k, v in self.tensors.items() if k.startswith(f"{prefix}/")}
        return {k: v if k.startswith("state.") else v.numpy() for k, v in found.items()}


class SearchSaver:
    """Writes and reads the parts of one search.

    Args:
        folder: where the parts are.
        settings: everything that decides what the search finds, as JSON values; a save of other settings is refused.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = Path(folder), dict(settings)
        self.parts = 0

    def open(self, resume: bool) -> list[SavedPart]:
        """The parts to continue from, oldest first; none for a fresh start.

        Raises:
            ConfigError: the folder holds a search and ``resume`` is False, or one of other settings.
            CheckpointError: the folder cannot be written, or its first part is damaged.
        """
        check_target(self.folder / "part-00000")
        found = self._found()
        if found and not resume:
            raise ConfigError(
                f"save_dir {self.folder} already holds a search ({len(found)} parts); continue it with resume=True, or "
                f"give another save_dir"
            )
        if resume and not found:
            log.info("resume=True: %s holds no search yet, starting fresh", self.folder)
        return self._read(found)

    def _found(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        for aside in self.folder.glob(".old-part-*"):  # a writer that died between its two renames
            recover_folder(self.folder / aside.name.removeprefix(".old-").rpartition("-")[0])
        return sorted(path for path in self.folder.iterdir() if _NAME.match(path.name))

    def _read(self, found: list[Path]) -> list[SavedPart]:
        parts: list[SavedPart] = []
        for number, path in enumerate(found):
            try:
                parts.append(self._read_part(path, number))
            except CheckpointError as error:
                if number == 0:
                    raise
                log.warning("saved parts from %s on are passed over: %s", path.name, error)
                _set_aside(found[number:])
                break
        self.parts = len(parts)
        return parts

    def _read_part(self, path: Path, number: int) -> SavedPart:
        manifest = verify_folder(path)
        if manifest["meta"].get("part") != number or path.name != f"part-{number:05d}":
            raise CheckpointError(
                f"{path}: is part {manifest['meta'].get('part')!r}, expected {number}: one is missing"
            )
        meta = load_json(path / _JSON)
        self._check_settings(path, meta["settings"])
        return SavedPart(load_tensors(path / _FILE), meta)

    def _check_settings(self, path: Path, saved: Mapping[str, Any]) -> None:
        names = sorted(self.settings.keys() | saved.keys())
        differ = [n for n in names if canonical_hash(saved.get(n)) != canonical_hash(self.settings.get(n))]
        if differ:
            shown = "; ".join(f"{n}: {saved.get(n)!r} saved, {self.settings.get(n)!r} now" for n in differ[:5])
            raise ConfigError(
                f"{path} was saved by a search of other settings ({shown}); use the same, or give another save_dir"
            )

    def save(self, groups: Mapping[str, Arrays], meta: Mapping[str, Any]) -> None:
        """Writes the next part.

        Args:
            groups: named arrays or tensors by group.
            meta: JSON values.

        Raises:
            CheckpointError: a full disk or a read-only folder (older parts are whole), or another search in the folder.
        """
        path = self.folder / f"part-{self.parts:05d}"
        if path.exists():
            raise CheckpointError(f"{path}: appeared while this search ran; another one writes to the same save_dir")
        tensors = {f"{g}/{name}": _tensor(v) for g, values in groups.items() for name, v in values.items()}

        def write(stage: Path) -> None:
            save_tensors(stage / _FILE, tensors)
            save_json(stage / _JSON, {"settings": self.settings, **meta})

        write_folder(path, write, meta={"part": self.parts, "settings": canonical_hash(self.settings)})
        self.parts += 1


def _set_aside(paths: list[Path]) -> None:
    for path in paths:
        path.rename(path.with_name(f"damaged-{path.name}-{uuid.uuid4().hex[:8]}"))


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))


# --- what a search was made of ----------------------------------------------------------------------------------------


def digest(values: Mapping[str, Tensor] | None) -> dict[str, str]:
    """Shape and content of tensors by name, as short text (the SHA-256 of their values)."""
    found = {}
    for name, value in sorted((values or {}).items()):
        plain = value.detach().cpu().contiguous()
        found[name] = f"{plain.dtype} {tuple(plain.shape)} {canonical_hash(plain.double().tolist())[:16]}"
    return found


def fingerprint(thing: Any) -> str:
    """The class of an object, its configuration, and a hash of a sample of its parameters, as text."""
    name = f"{type(thing).__module__}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
    config = getattr(thing, "config", None)
    text = name + (f" {sorted((k, repr(v)) for k, v in config.items())}" if isinstance(config, Mapping) else "")
    if not isinstance(thing, nn.Module):
        return text
    firsts = {key: value.detach().reshape(-1)[:256] for key, value in thing.state_dict().items()}
    return f"{text} {canonical_hash(digest(firsts))[:16]}"


def search_settings(search: Any, num_rollouts: int, cond: Any, context: Any) -> dict[str, Any]:
    """Everything that the tree depends on, as JSON values; the network's batch is not among it."""
    chain, options = search.chain, search.options
    found = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "sync"}
    found |= {"floor": str(options.floor), "lam": str(options.lam), "scalarisation": _describe(options.scalarisation)}
    found |= {"widening": list(search.policy.widening), "branching": list(search.policy.branching)}
    times, proposal = getattr(chain, "times", None), getattr(chain, "proposal", None)
    plain = " at 0x" in repr(search.reward)  # an address in memory says nothing
    return found | {
        "num_rollouts": num_rollouts,
        "denoiser": fingerprint(getattr(chain, "denoiser", chain)),
        "scheduler": fingerprint(getattr(chain, "scheduler", chain)),
        "eta": getattr(chain, "eta", None),
        "reward": fingerprint(search.reward) if plain else repr(search.reward),
        "proposal": None if proposal is None else _proposal(proposal),
        "times": None if times is None else digest({"times": times}),
        "levels": [chain.first_step(depth) for depth in range(chain.num_stages, chain.leaf_depth + 1)],
        "num_stages": chain.num_stages,
        "cond": digest(cond),
        "context": digest(context),
    }


def _proposal(proposal: Any) -> str:
    told = [digest(getattr(proposal, name, None)) for name in ("cond", "null")]
    return f"{proposal.describe()!r} {canonical_hash(told)[:16]}"


def _describe(objectives: Any) -> str | None:
    if objectives is None:
        return None
    shown = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in vars(objectives).items()}
    return f"{type(objectives).__name__} {sorted((key, repr(value)) for key, value in shown.items())}"
