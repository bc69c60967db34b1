"""Folders of safetensors and JSON that are either whole or absent: staged writes, a manifest of hashes, verified reads.

A folder is written beside its final place (``.tmp-<name>-<id>``), flushed to disk, described by ``manifest.json``
(written last) and renamed into place. A reader calls `verify_folder` first, which hashes every file before any is
opened for its content. No pickle is read or written here or anywhere else in genkit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any

import genkit
from genkit.errors import CheckpointError

if TYPE_CHECKING:  # hashing and JSON must not cost the import of torch
    from torch import Tensor

__all__ = [
    "MANIFEST",
    "canonical_hash",
    "check_target",
    "file_sha256",
    "installed_versions",
    "load_json",
    "load_tensors",
    "recover_folder",
    "saved_parts",
    "save_json",
    "save_tensors",
    "verify_folder",
    "write_folder",
]

MANIFEST = "manifest.json"
FORMAT = 1

#: What a person, git or a download client adds to a folder and nothing here ever reads: these names anywhere, these
#: suffixes and folders at the top. Any other file that the manifest does not list makes `verify_folder` fail, because a
#: loader might pick it up (a weight shard, a vocabulary, a planted script).
UNREAD_NAMES = frozenset({".gitattributes", ".gitignore", ".DS_Store", "Thumbs.db", "LICENSE", "NOTICE"})
UNREAD_SUFFIXES = frozenset({".md", ".txt", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".csv", ".jsonl", ".log"})
UNREAD_FOLDERS = frozenset({".git", ".cache"})

_PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy")


# --- values -----------------------------------------------------------------------------------------------------------


def canonical_hash(value: Any) -> str:
    """SHA-256 (hex) of ``value`` as canonical JSON (sorted keys, no spaces): equal values hash equally everywhere."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that a saved folder depends on; absent packages are left out."""
    return dict(_versions())


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "genkit-diffusion": genkit.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def save_json(path: Path, value: Any) -> None:
    """Write ``value`` as strict JSON (NaN and infinity are refused: other readers cannot parse them)."""
    try:
        text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        message = f"{path}: cannot be written as JSON ({error}); give plain finite numbers, strings, lists and dicts."
        raise CheckpointError(message) from error
    Path(path).write_text(text + "\n", encoding="utf-8")


def load_json(path: Path) -> Any:
    """Read strict JSON; a key given twice, NaN or broken text raises `CheckpointError` naming the file."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable JSON file ({error}).") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice: " + ", ".join(sorted(k for k, _ in pairs)))
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# --- tensors ----------------------------------------------------------------------------------------------------------


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as one safetensors file (moved to the CPU, contiguous; shared memory is written twice)."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(_storable(tensors)), str(path), metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: could not be written ({error}); check free space and permissions.") from error


def _storable(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        pointer = value.untyped_storage().data_ptr()
        # safetensors refuses shared storage, and a view would drag its whole base along.
        if pointer in seen or value.untyped_storage().nbytes() != value.numel() * value.element_size():
            value = value.clone()
        seen.add(pointer)
        yield name, value


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU; a damaged or missing file raises `CheckpointError` naming it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(str(path), device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing.") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error}).") from error


# --- writing a folder -------------------------------------------------------------------------------------------------


def write_folder(folder: Path, write: Callable[[Path], None], *, meta: Mapping[str, Any]) -> Path:
    """Write a folder that is whole or absent, whatever kills the process.

    ``write(tmp)`` puts the files into an empty sibling folder. They are flushed to disk, `MANIFEST` (sizes, SHA-256,
    ``meta``, versions) is written last, and the folder is renamed into place; an existing one is moved aside first and
    removed afterwards (`verify_folder` and the next write put it back if the process died between the two renames).
    One writer per folder at a time. Every failure leaves what was saved before untouched.

    Returns the folder. Raises `CheckpointError` for a full disk, a read-only place or a ``write`` that made a symlink.
    """
    folder = Path(os.path.abspath(folder))
    stage = folder.parent / f".tmp-{folder.name}-{uuid.uuid4().hex[:12]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        recover_folder(folder)
        _refuse_foreign_target(folder)
        stage.mkdir()
        write(stage)
        _seal(stage, meta)
        _swap(stage, folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: could not be written ({error}); what was saved before is unchanged. "
            "Check free space and permissions."
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    _remove_leftovers(folder)
    return folder


def check_target(folder: Path) -> None:
    """Refuse before a long computation what `write_folder` would refuse after it: a foreign or unwritable place.

    Raises `CheckpointError`.
    """
    folder = Path(os.path.abspath(folder))
    _refuse_foreign_target(folder)
    parent = next(place for place in folder.parents if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise CheckpointError(f"{folder}: cannot be made, since {parent} is not a writable folder; give another path.")


def _refuse_foreign_target(folder: Path) -> None:
    """Replace only folders that genkit wrote: ``output_dir: ~`` must never swap a home directory away."""
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{folder}: exists and is not a plain folder; give another path.")
    if any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder}: already holds other files (it has no {MANIFEST}), so it is not replaced; "
            "give a new or an empty folder."
        )


def _seal(stage: Path, meta: Mapping[str, Any]) -> None:
    files: dict[str, dict[str, Any]] = {}
    written = _files(stage)
    (stage / MANIFEST).touch()
    mode = (stage / MANIFEST).stat().st_mode & 0o777  # safetensors writes for the owner alone, whatever the umask
    for path in written:
        relative = path.relative_to(stage).as_posix()
        if path.is_symlink():
            raise CheckpointError(f"{relative}: is a symbolic link; write a plain file.")
        path.chmod(mode)
        _fsync(path)
        files[relative] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    manifest = {"format": FORMAT, "files": files, "meta": dict(meta), "versions": installed_versions()}
    save_json(stage / MANIFEST, manifest | {"sha256": canonical_hash(manifest)})
    _fsync(stage / MANIFEST)
    for root, _, _ in os.walk(stage):
        _fsync(Path(root))


def _swap(stage: Path, folder: Path) -> None:
    aside = folder.parent / f".old-{folder.name}-{uuid.uuid4().hex[:12]}"
    if folder.exists():
        os.rename(folder, aside)
    try:
        os.rename(stage, folder)
    except OSError:
        if aside.exists():
            os.rename(aside, folder)
        raise
    _fsync(folder.parent)


def _remove_leftovers(folder: Path) -> None:
    for prefix in (".old", ".tmp"):
        for path in folder.parent.glob(f"{prefix}-{_glob_escape(folder.name)}-" + "[0-9a-f]" * 12):
            shutil.rmtree(path, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Put a folder back that was moved aside by a writer which died before its replacement was in place."""
    folder = Path(os.path.abspath(folder))
    if folder.exists() or not folder.parent.is_dir():
        return
    for aside in sorted(folder.parent.glob(f".old-{_glob_escape(folder.name)}-" + "[0-9a-f]" * 12)):
        if (aside / MANIFEST).is_file():
            os.rename(aside, folder)
            return


def _glob_escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _fsync(path: Path) -> None:
    if path.is_dir() and os.name != "posix":  # directories cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    """Every file and every symbolic link below ``folder`` (links are not followed), sorted."""
    found: list[Path] = []
    for root, directories, names in os.walk(folder, followlinks=False):
        found += [Path(root, name) for name in names]
        found += [Path(root, name) for name in directories if Path(root, name).is_symlink()]
    return sorted(found)


# --- reading a folder -------------------------------------------------------------------------------------------------


def verify_folder(folder: Path, *, links_within: Path | None = None) -> dict[str, Any]:
    """The manifest of ``folder``, after every listed file was found to have the listed size and SHA-256.

    Call it before anything is loaded. Files that nothing reads (`UNREAD_NAMES`, `UNREAD_SUFFIXES`) may be unlisted.

    Args:
        folder: what `write_folder` wrote.
        links_within: symbolic links are accepted when they end below this folder (a download cache); else none are.

    Raises:
        CheckpointError: names the file and what is wrong: missing, wrong size or hash, a path that leaves the folder, a
            symbolic link, a file that the manifest does not list.
    """
    folder = Path(folder)
    with contextlib.suppress(OSError):  # a read-only place: the check below says what is missing
        recover_folder(folder)
    manifest = _read_manifest(folder, links_within)
    for relative, entry in manifest["files"].items():
        _verify_file(_inside(folder, relative, links_within), folder, relative, entry)
    _refuse_unlisted(folder, manifest["files"])
    return manifest


def saved_parts(folder: Path) -> list[str]:
    """The sub-folders ``pipeline`` and ``checkpoint-<step>`` (newest first) of a training run's folder; else empty."""
    if (folder / MANIFEST).exists() or not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    saved = [name for name in names if re.fullmatch(r"checkpoint-\d+", name)]
    newest_first = sorted(saved, key=lambda name: int(name.split("-")[1]), reverse=True)
    return [name for name in names if name == "pipeline"] + newest_first


def _read_manifest(folder: Path, links_within: Path | None) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder.")
    path = _inside(folder, MANIFEST, links_within)
    if parts := saved_parts(folder):
        raise CheckpointError(
            f"{folder}: is the folder of a training run, not a checkpoint or a pipeline; give one of its sub-folders: "
            f"{', '.join(str(folder / part) for part in parts[:5])}."
        )
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: has no {MANIFEST}: genkit did not write it, or its writing never finished; use another folder."
        )
    manifest = load_json(path)
    got = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
    if got != FORMAT:
        raise CheckpointError(f"{path}: format {got!r}, expected {FORMAT}; another version or program wrote it.")
    if manifest.pop("sha256", None) != canonical_hash(manifest):
        raise CheckpointError(f"{path}: differs from its own SHA-256; it is damaged or was edited.")
    for key in ("files", "meta"):
        if not isinstance(manifest.get(key), dict):
            raise CheckpointError(f"{path}: {key!r} must be a mapping, got {type(manifest.get(key)).__name__}.")
    return manifest


def _verify_file(path: Path, folder: Path, relative: str, entry: Any) -> None:
    if not path.is_file():
        raise CheckpointError(f"{folder}: {relative} is missing.")
    if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
        raise CheckpointError(f"{folder}: the manifest's entry of {relative} needs 'size' and 'sha256', got {entry!r}.")
    size = path.stat().st_size
    if size != entry["size"]:
        raise CheckpointError(
            f"{folder}: {relative} has {size} bytes, the manifest says {entry['size']}; truncated or replaced."
        )
    if file_sha256(path) != entry["sha256"]:
        raise CheckpointError(f"{folder}: {relative} differs from its SHA-256 in the manifest; damaged or edited.")


def _inside(folder: Path, relative: str, links_within: Path | None) -> Path:
    """The listed path, refused when it is absolute, climbs out of the folder or passes a foreign symbolic link."""
    pure = PurePosixPath(relative)
    odd = any(c in relative for c in "\\:\0") or pure.as_posix() != relative
    if odd or pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise CheckpointError(f"{folder}: the manifest lists {relative!r}, which does not stay inside the folder.")
    path = folder
    for part in pure.parts:
        path = path / part
        inside = links_within is not None and path.resolve().is_relative_to(links_within.resolve())
        if path.is_symlink() and not inside:
            raise CheckpointError(f"{folder}: {relative} is or passes a symbolic link; copy the file itself.")
    return path


def _refuse_unlisted(folder: Path, files: Mapping[str, Any]) -> None:
    for path in _files(folder):
        relative = path.relative_to(folder)
        if relative.as_posix() not in files and relative.as_posix() != MANIFEST and not _unread(relative):
            raise CheckpointError(
                f"{folder}: {relative.as_posix()} is not listed in {MANIFEST}, so genkit did not write it; "
                "move it elsewhere if you need it, else delete it."
            )


def _unread(relative: PurePath) -> bool:
    top = len(relative.parts) == 1
    return (
        relative.name in UNREAD_NAMES
        or (top and relative.suffix.lower() in UNREAD_SUFFIXES)
        or (not top and relative.parts[0] in UNREAD_FOLDERS)
    )
