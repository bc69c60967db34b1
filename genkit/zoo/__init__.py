"""The zoo: small trained pipelines that ship with genkit; ``genkit.load("zoo:<name>")`` loads one.

``manifest.json`` is ``{"format": 1, "entries": [{...}, ...]}`` with the fields of `ZooEntry`. A folder's hash covers
its own ``manifest.json``, which in turn covers every file: a changed byte anywhere is found before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from genkit.errors import CheckpointError, ConfigError, nearest
from genkit.serialization import MANIFEST, file_sha256, load_json, save_json, verify_folder

__all__ = ["ZooEntry", "add_to_zoo", "list_zoo", "zoo_path"]

ROOT = Path(__file__).resolve().parent


@dataclass(frozen=True)
class ZooEntry:
    """One checkpoint of the zoo.

    Args:
        name: what follows ``zoo:``.
        folder: path below the zoo's folder.
        method: name of the method that made it.
        config: the configuration file it was trained with.
        command: what reproduces it.
        metric: the measured number that its card states, with its setting.
        licence: SPDX identifier of the weights.
        size: bytes of all files.
        sha256: hash of the folder's ``manifest.json``.
    """

    name: str
    folder: str
    method: str
    config: str
    command: str
    metric: str
    licence: str
    size: int
    sha256: str


def list_zoo(root: Path | None = None) -> list[ZooEntry]:
    """The entries, in the manifest's order; none when there is no manifest."""
    path = (root or ROOT) / MANIFEST
    if not path.exists():
        return []
    value = load_json(path)
    if not isinstance(value, dict) or value.get("format") != 1 or not isinstance(value.get("entries"), list):
        raise CheckpointError(f"{path}: expected {{'format': 1, 'entries': [...]}}; reinstall genkit.")
    return [_entry(item, path) for item in value["entries"]]


def _entry(item: Any, path: Path) -> ZooEntry:
    types = {f.name: (int if f.type == "int" else str) for f in fields(ZooEntry)}
    if not isinstance(item, dict) or item.keys() != types.keys():
        got = sorted(item) if isinstance(item, dict) else item
        raise CheckpointError(f"{path}: an entry has the fields {got}, expected {sorted(types)}.")
    for key, kind in types.items():
        if not isinstance(item[key], kind):
            raise CheckpointError(f"{path}: {item['name']}: {key} is {item[key]!r}, expected {kind.__name__}.")
    return ZooEntry(**item)


def zoo_path(name: str, root: Path | None = None) -> Path:
    """The verified folder of a zoo entry.

    Raises:
        ConfigError: unknown name; the message gives the nearest.
        CheckpointError: the folder is not the one that the manifest describes.
    """
    root = root or ROOT
    entries = {entry.name: entry for entry in list_zoo(root)}
    if name not in entries:
        known = ", ".join(entries) or "none in this installation"
        raise ConfigError(f"zoo:{name} is not known; the zoo has: {known}.{nearest(name, entries)}")
    entry = entries[name]
    folder = root / entry.folder
    if not folder.resolve().is_relative_to(root.resolve()):
        raise CheckpointError(f"zoo:{name}: folder {entry.folder!r} leaves the zoo; reinstall genkit.")
    verify_folder(folder)
    if file_sha256(folder / MANIFEST) != entry.sha256:
        raise CheckpointError(f"zoo:{name}: {folder} is not the folder that the zoo lists; reinstall genkit.")
    return folder


def add_to_zoo(facts: Mapping[str, str], root: Path | None = None) -> ZooEntry:
    """Enter (or replace) a saved folder in the manifest: measures its size and hash. Used by maintainers.

    Args:
        facts: the text fields of `ZooEntry` (all but ``size`` and ``sha256``).
    """
    root = root or ROOT
    folder = root / facts["folder"]
    verify_folder(folder)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    entry = _entry({**facts, "size": size, "sha256": file_sha256(folder / MANIFEST)}, root / MANIFEST)
    kept = [e for e in list_zoo(root) if e.name != entry.name]
    save_json(root / MANIFEST, {"format": 1, "entries": [asdict(e) for e in [*kept, entry]]})
    return entry
