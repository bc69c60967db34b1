"""Folders that are whole or absent: hashes, hostile manifests, full disks, kills between any two steps."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from genkit import serialization
from genkit.errors import CheckpointError
from genkit.serialization import (
    canonical_hash,
    load_json,
    load_tensors,
    save_json,
    save_tensors,
    saved_parts,
    verify_folder,
    write_folder,
)


def write_number(number: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        save_json(folder / "sub" / "number.json", number)
        save_tensors(folder / "x.safetensors", {"x": torch.full((3,), float(number))})

    return write


def number_in(folder: Path) -> int:
    verify_folder(folder)
    assert load_tensors(folder / "x.safetensors")["x"].tolist() == [float(load_json(folder / "sub/number.json"))] * 3
    return load_json(folder / "sub" / "number.json")


# --- values -----------------------------------------------------------------------------------------------------------


def test_canonical_hash_ignores_order_and_tells_values_apart() -> None:
    assert canonical_hash({"a": 1, "b": [1, 2.5]}) == canonical_hash({"b": [1, 2.5], "a": 1})
    assert canonical_hash({"a": 1}) != canonical_hash({"a": 1.5}) != canonical_hash({"a": "1"})
    # sha256 of the two bytes "{}": a published value, so another implementation agrees
    assert canonical_hash({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_tensors_round_trip_bit_for_bit_views_and_shared_memory_included(tmp_path: Path) -> None:
    base = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    tensors = {
        "view": base.T,
        "row": base[1],
        "again": base,
        "same": base,
        "int": torch.tensor([2**62 + 1]),
        "bf": torch.tensor([1.5], dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1e-300, dtype=torch.float64),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    save_tensors(tmp_path / "t.safetensors", tensors)
    loaded = load_tensors(tmp_path / "t.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0, equal_nan=True)


def test_json_is_strict_both_ways(tmp_path: Path) -> None:
    for bad in (float("nan"), float("inf"), {"x": {1, 2}}, {"x": torch.tensor(1)}):
        with pytest.raises(CheckpointError, match=r"v\.json.*plain finite"):
            save_json(tmp_path / "v.json", bad)
    for text in ('{"a": 1, "a": 2}', '{"a": NaN}', '{"a": ', "\xff", "[" * 100_000):
        (tmp_path / "v.json").write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=r"v\.json: not a readable JSON file"):
            load_json(tmp_path / "v.json")
    with pytest.raises(CheckpointError, match=r"none\.json: the file is missing"):
        load_json(tmp_path / "none.json")
    with pytest.raises(CheckpointError, match=r"none\.safetensors"):
        load_tensors(tmp_path / "none.safetensors")


# --- whole or absent --------------------------------------------------------------------------------------------------


def test_manifest_lists_every_file_and_the_next_write_replaces_all(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "deep" / "f", write_number(1), meta={"step": 7})
    manifest = verify_folder(folder)
    assert set(manifest["files"]) == {"sub/number.json", "x.safetensors"}
    assert manifest["meta"] == {"step": 7}
    assert manifest["versions"]["torch"]
    assert len({p.stat().st_mode for p in folder.rglob("*") if p.is_file()}) == 1, (
        "others may read what the umask allows"
    )
    write_folder(folder, lambda tmp: save_json(tmp / "other.json", 2), meta={})
    assert sorted(os.listdir(folder)) == ["manifest.json", "other.json"]
    assert os.listdir(folder.parent) == ["f"]


def test_foreign_places_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name, pattern in (("mine", "already holds other files"), ("file", "plain folder"), ("link", "plain folder")):
        with pytest.raises(CheckpointError, match=pattern):
            write_folder(tmp_path / name, write_number(1), meta={})
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "mine"]


def test_a_symbolic_link_is_not_sealed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="secret is a symbolic link|secret: is a symbolic link"):
        write_folder(tmp_path / "f", lambda tmp: (tmp / "secret").symlink_to("/etc/hostname"), meta={})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["write", "os.fsync", "os.rename", "save_json", "load of a value"])
def test_full_disk_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    folder = write_folder(tmp_path / "f", write_number(1), meta={})

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write = write_number(2)
    if place == "write":
        write = full
    elif place == "save_json":
        monkeypatch.setattr(serialization, "save_json", full)
    elif place == "load of a value":
        write = lambda tmp: save_json(tmp / "x.json", float("nan"))  # noqa: E731
    else:
        monkeypatch.setattr(place, full)
    with pytest.raises(CheckpointError, match="No space left.*unchanged|plain finite"):
        write_folder(folder, write, meta={})
    monkeypatch.undo()
    assert number_in(folder) == 1
    assert os.listdir(tmp_path) == ["f"]


def test_failed_second_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "f", write_number(1), meta={})
    rename = os.rename

    def fail_for_stage(source: Path, target: Path) -> None:
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr("os.rename", fail_for_stage)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_folder(folder, write_number(2), meta={})
    assert number_in(folder) == 1


def test_read_only_place_fails_loudly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        write_folder(tmp_path / "file" / "f", write_number(1), meta={})


def _kill_at(call: int) -> None:
    """Die, as by SIGKILL, at the ``call``-th change of the disk that `write_folder` makes."""
    count = 0

    def counted(function: Callable) -> Callable:
        def wrapper(*args: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count == call:
                os._exit(9)
            return function(*args, **options)

        return wrapper

    os.rename, os.fsync = counted(os.rename), counted(os.fsync)
    serialization.shutil.rmtree = counted(serialization.shutil.rmtree)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kill_at_any_step_leaves_old_or_new_whole(tmp_path: Path) -> None:
    results = []
    for call in range(1, 40):
        folder = write_folder(tmp_path / str(call) / "f", write_number(1), meta={})
        child = os.fork()
        if child == 0:
            try:
                _kill_at(call)
                write_folder(folder, write_number(2), meta={})
            finally:
                os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        results.append(number_in(folder))
        write_folder(folder, write_number(3), meta={})
        assert number_in(folder) == 3
        assert os.listdir(folder.parent) == ["f"], "leftovers of the dead writer are cleared"
        if not killed:
            break
    assert results == sorted(results)
    assert set(results) == {1, 2}
    assert len(results) > 10


# --- verification -----------------------------------------------------------------------------------------------------


def test_flip_truncate_delete_extend_every_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", write_number(1), meta={"note": "x"})
    damages = {
        "flip": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :],
        "truncate": lambda data: data[:-2],
        "extend": lambda data: data + b"}",
        "empty": lambda data: b"",
        "delete": None,
    }
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        for damage in damages.values():
            path.write_bytes(damage(content)) if damage else path.unlink()
            with pytest.raises(CheckpointError, match=path.name):
                verify_folder(folder)
            path.write_bytes(content)
    assert number_in(folder) == 1


def _forge(folder: Path, **changes: object) -> None:
    manifest = load_json(folder / "manifest.json") | changes
    manifest.pop("sha256")
    save_json(folder / "manifest.json", manifest | {"sha256": canonical_hash(manifest)})


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "a/../../x", "sub\\x", "C:x", "./x", "", "a//b", "x\x00"])
def test_paths_that_leave_the_folder(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "f", write_number(1), meta={})
    (tmp_path / "x").write_text("x")
    _forge(folder, files={name: {"size": 1, "sha256": serialization.file_sha256(tmp_path / "x")}})
    with pytest.raises(CheckpointError, match="does not stay inside the folder"):
        verify_folder(folder)


@pytest.mark.parametrize(
    "changes",
    [{"files": []}, {"meta": None}, {"format": 2}, {"files": {"x.safetensors": 3}}, {"files": {"x.safetensors": {}}}],
)
def test_forged_manifests_fail_with_a_reason(tmp_path: Path, changes: dict) -> None:
    folder = write_folder(tmp_path / "f", write_number(1), meta={})
    _forge(folder, **changes)
    with pytest.raises(CheckpointError, match="mapping|format|needs 'size'"):
        verify_folder(folder)


def test_links_and_unlisted_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", write_number(1), meta={})
    for name in ("notes.md", "picture.png", ".gitattributes", "sub/.DS_Store"):
        (folder / name).write_text("harmless")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.lock").write_text("")
    verify_folder(folder)
    for name in ("evil.py", "sub/vocab.txt", "y.safetensors", "sub/x.bin"):
        (folder / name).write_text("")
        with pytest.raises(CheckpointError, match=f"{Path(name).name} is not listed"):
            verify_folder(folder)
        (folder / name).unlink()
    real = tmp_path / "x.safetensors"
    (folder / "x.safetensors").rename(real)
    (folder / "x.safetensors").symlink_to(real)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is or passes a symbolic link"):
        verify_folder(folder)
    verify_folder(folder, links_within=tmp_path)
    with pytest.raises(CheckpointError, match="symbolic link"):
        verify_folder(folder, links_within=tmp_path / "elsewhere")


def test_not_a_folder_of_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        verify_folder(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        verify_folder(tmp_path)


def test_a_run_folder_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    write_folder(tmp_path / "run" / "pipeline", write_number(1), meta={})
    write_folder(tmp_path / "run" / "checkpoint-3", write_number(2), meta={})
    with pytest.raises(CheckpointError, match="folder of a training run.*run/pipeline, .*run/checkpoint-3"):
        verify_folder(tmp_path / "run")
    assert saved_parts(tmp_path / "run" / "pipeline") == [] and saved_parts(tmp_path / "none") == []
