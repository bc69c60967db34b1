"""The zoo's list: empty or filled, and every folder the one that was entered."""

from __future__ import annotations

from pathlib import Path

import pytest

from genkit import zoo
from genkit.errors import CheckpointError, ConfigError
from genkit.serialization import load_json, save_json, write_folder
from genkit.training import build_zoo, load_config
from genkit.zoo import add_to_zoo, list_zoo, zoo_path

FACTS = {
    "name": "tiny",
    "folder": "tiny",
    "method": "heavy_tailed_flow",
    "config": "configs/x.yaml",
    "command": "genkit train configs/x.yaml",
    "metric": "tail index 1.5 (n = 10)",
    "licence": "Apache-2.0",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_folder(tmp_path / "tiny", lambda folder: save_json(folder / "x.json", 1), meta={})
    add_to_zoo(FACTS, tmp_path)
    return tmp_path


def test_empty_zoo(tmp_path: Path) -> None:
    assert list_zoo(tmp_path) == []
    with pytest.raises(ConfigError, match="zoo:tiny is not known; the zoo has: none"):
        zoo_path("tiny", tmp_path)


def test_entries_are_found_and_replaced(root: Path) -> None:
    assert zoo_path("tiny", root) == root / "tiny"
    (entry,) = list_zoo(root)
    assert entry.size == sum(p.stat().st_size for p in (root / "tiny").iterdir())
    assert add_to_zoo({**FACTS, "metric": "better"}, root).metric == "better"
    assert len(list_zoo(root)) == 1
    with pytest.raises(ConfigError, match="Did you mean 'tiny'"):
        zoo_path("tinny", root)


def test_changed_or_swapped_folders_are_refused(root: Path) -> None:
    (root / "tiny" / "x.json").write_text("2\n")
    with pytest.raises(CheckpointError, match=r"x\.json differs"):
        zoo_path("tiny", root)
    write_folder(root / "tiny", lambda folder: save_json(folder / "x.json", 2), meta={})
    with pytest.raises(CheckpointError, match="is not the folder that the zoo lists"):
        zoo_path("tiny", root)


@pytest.mark.parametrize("change", [{"folder": "../x"}, {"folder": "/etc"}, {"size": "3"}, {"extra": 1}])
def test_forged_entries(root: Path, change: dict) -> None:
    value = load_json(root / "manifest.json")
    value["entries"][0] |= change
    save_json(root / "manifest.json", value)
    with pytest.raises(CheckpointError, match="leaves the zoo|expected int|fields"):
        zoo_path("tiny", root)


def test_every_shipped_entry_verifies() -> None:
    for entry in list_zoo():
        folder = zoo_path(entry.name)
        sizes = [p.stat().st_size for p in folder.rglob("*") if p.is_file()]
        assert sum(sizes) == entry.size and max(sizes) <= 3_000_000
        assert (zoo.ROOT / entry.folder / "README.md").is_file()


def test_a_run_of_another_configuration_does_not_become_an_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What decides the weights must be the command's; where the run was written and how often it was saved need not."""
    recipe = build_zoo.RECIPES["tasks-block"]
    monkeypatch.chdir(Path(__file__).resolve().parents[1])
    config = load_config(recipe.config, [])
    moved = {"output_dir": "elsewhere", "save_steps": 7, "progress": False}
    save_json(tmp_path / "config.json", config.model_copy(update=moved).resolved())
    build_zoo._check_run(config, tmp_path)
    for changes in (["learning_rate=0.5"], ["seed=1"], ["max_steps=4801"], ["diffusion.block_length=4"]):
        other = load_config(recipe.config, changes)
        save_json(tmp_path / "config.json", other.resolved())
        with pytest.raises(ConfigError, match="other settings than the zoo's command"):
            build_zoo.build_entry("tasks-block", tmp_path / "zoo", run=tmp_path)
    with pytest.raises(ConfigError, match=r"diffusion\.block_length: 4 in the checkpoint, 8 now"):
        build_zoo._check_run(config, tmp_path)
    assert not (tmp_path / "zoo").exists()
