"""``genkit evaluate`` of anybody's files of crystals: by their ending, several at once, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pymatgen.core import Lattice, Structure
from torch import Tensor

from genkit import cli, registry
from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search import files
from genkit.pipelines.crystal_tree_search.files import evaluate_samples, load_files
from genkit.pipelines.crystal_tree_search.potentials import BatchedPotential
from genkit.pipelines.crystal_tree_search.structures import cif_text, from_structures, write_cifs, write_extxyz

FACE = (np.ones((3, 3)) - np.eye(3)) / 2
SALT = Structure(Lattice(FACE * 5.69), ["Na", "Cl"], [[0, 0, 0], [0.5] * 3])
LITHIUM = Structure(Lattice(FACE * 5.13), ["Li", "Cl"], [[0, 0, 0], [0.5] * 3])
CRUSHED = Structure(Lattice(FACE * 2.0), ["Na", "Cl"], [[0, 0, 0], [0.5] * 3])
HULL = [("Na", -1.3), ("Cl", -1.8), ("Li", -1.9), ("NaCl", -3.0)]

pytestmark = pytest.mark.filterwarnings("ignore:.*implausible")


class Table(BatchedPotential):
    """-3.05 eV per atom with sodium, else -1.7; no forces on anything."""

    name, version = "table", "1"

    def _evaluate(self, crystals: dict[str, Tensor], derivatives: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        energy = torch.where((crystals["numbers"] == 11).any(1), -3.05, -1.7).double()
        if not derivatives:
            return energy, None, None
        return energy, torch.zeros_like(crystals["coordinates"]), torch.zeros(len(energy), 3, 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three crystals in an extxyz file, two of them as CIF, and a hull; CHGNet is replaced by a table."""
    monkeypatch.setattr(files, "CHGNetPotential", Table)
    write_extxyz(tmp_path / "all.extxyz", from_structures([SALT, LITHIUM, CRUSHED]), ["salt", "lithium", "crushed"])
    write_cifs(tmp_path / "cif", from_structures([SALT, LITHIUM]), ["salt", "lithium"])
    SALT.to(filename=str(tmp_path / "salt.vasp"), fmt="poscar")
    rows = "".join(f"{formula},{energy}\n" for formula, energy in HULL)
    (tmp_path / "hull.csv").write_text("formula,energy_per_atom\n" + rows)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert cli.main(["evaluate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_file_of_crystals_is_known_by_its_ending(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, folder / "all.extxyz")
    assert "| valid | 2 | 3 | 66.7 % |" in text and "| unique | 2 | 3 |" in text
    assert "Not measured: stable (give --hull FILE" in text and "Not measured: novel (give --reference FILE" in text
    assert text == run(capsys, folder / "all.extxyz", "--method", "crystal_tree_search")
    for ending in (".CIF", ".xyz", ".vasp", ".poscar"):
        assert registry.sample_method(f"x{ending}") == "crystal_tree_search"
    assert registry.sample_method("x.npz") is None and registry.sample_method("x.yaml") is None


def test_everything_is_measured_where_it_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--hull", folder / "hull.csv", "--reference", folder / "cif" / "lithium.cif", "--relax-steps", 2)
    found = json.loads(run(capsys, folder / "all.extxyz", *more, "--json"))
    assert {name: rate["count"] for name, rate in found["rates"].items()} == {
        "valid": 2,
        "relaxed": 2,
        "stable_single_point": 1,
        "stable": 1,
        "unique": 2,
        "novel": 1,
        "sun": 1,
    }
    assert found["left_out"] == [] and found["versions"]["potential"] == "table 1"
    assert found["versions"]["hull"] == "hull.csv, 4 entries" and found["settings"]["relaxation"]["steps"] == 2
    rows = {row["id"]: row for row in found["structures"]}
    assert list(rows) == ["salt", "lithium", "crushed"]
    assert rows["salt"]["above_hull"] == pytest.approx(-0.05) and rows["salt"]["sun"] and rows["salt"]["rmsd"] == 0.0
    # LiCl against its elements, as the hull has no compound of them
    assert rows["lithium"]["above_hull"] == pytest.approx(1.85 - 1.7) and not rows["lithium"]["novel"]
    assert rows["crushed"] == {
        **dict.fromkeys(found["rates"], False),
        "id": "crushed",
        "component": -1,
        "above_hull": None,
        "rmsd": None,
    }


def test_several_files_are_one_set(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (folder / "cif" / "salt.cif", folder / "all.extxyz", folder / "salt.vasp")
    found = json.loads(run(capsys, *given, "--json"))
    names = [row["id"] for row in found["structures"]]
    rows = ["salt", "lithium", "crushed"]
    assert names == ["salt.cif:salt", *(f"all.extxyz:{row}" for row in rows), "salt.vasp:salt"]
    assert [row["component"] for row in found["structures"]] == [0, 0, 1, -1, 0]
    assert found["rates"]["unique"]["count"] == 2
    assert load_files(given[:2])[1] == ["salt:salt", *(f"all:{row}" for row in rows)]
    twice = [folder / "all.extxyz"] * 2
    assert load_files(twice)[1][-1] == f"{twice[1]}:crushed"


def test_every_crystal_of_a_cif_is_read(folder: Path) -> None:
    both = folder / "both.cif"
    both.write_text(cif_text(SALT, "one") + "\n" + cif_text(LITHIUM, "two"))
    crystals, ids = load_files(both)
    assert ids == ["both-0", "both-1"] and crystals["numbers"].tolist() == [[11, 17], [3, 17]]
    both.write_text(both.read_text() + "\n" + cif_text(SALT, "three").replace("5.69", "five").replace("4.02", "four"))
    with pytest.raises(ConfigError, match=r"both.cif cannot be read \(No structure parsed"):
        load_files(both)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all.extxyz", "--hull", "missing.json"], "cannot be read"),
        (["all.extxyz", "--reference", "missing.cif"], "cannot be read"),
        (["missing.extxyz"], "cannot be read"),
        (["broken.extxyz"], "cannot be read as extxyz"),
        (["broken.poscar"], "cannot be read"),
        (["samples.npz", "--method", "plain", "--json"], "but not --json"),
        (["samples.npz", "more.npz", "--method", "plain"], "more than one file (more.npz)"),
    ],
)
def test_what_cannot_be_done_is_one_message(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(folder)
    known, plain = registry.sample_judge, lambda path: f"judged {path}"
    monkeypatch.setattr(registry, "sample_judge", lambda name: plain if name == "plain" else known(name))
    assert "judged x.npz" in run(capsys, "x.npz", "--method", "plain")
    for name in ("broken.extxyz", "broken.poscar"):
        (folder / name).write_text("two\natoms\n")
    assert cli.main(["evaluate", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.out == ""


def test_the_shipped_set_is_a_reference_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from genkit.pipelines.crystal_tree_search import proto8

    monkeypatch.setattr(proto8, "known_crystals", lambda: from_structures([SALT]))
    found = json.loads(evaluate_samples(folder / "all.extxyz", reference="proto8", json_output=True))
    assert [row["novel"] for row in found["structures"]] == [False, True, False]


def test_no_file_and_no_steps() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        evaluate_samples([])
    with pytest.raises(ConfigError, match="relax_steps=-1"):
        evaluate_samples("x.cif", relax_steps=-1)


@pytest.mark.slow
def test_chgnet_judges_files(tmp_path: Path) -> None:
    write_extxyz(tmp_path / "s.extxyz", from_structures([SALT, LITHIUM]), "ab")
    rows = "".join(f"{formula},{energy}\n" for formula, energy in [("Na", -1.31), ("Cl", -1.84), ("NaCl", -3.668)])
    (tmp_path / "hull.csv").write_text("formula,energy_per_atom\n" + rows)
    text = evaluate_samples(tmp_path / "s.extxyz", hull=tmp_path / "hull.csv", relax_steps=10, json_output=True)
    found = json.loads(text)
    assert found["versions"]["potential"] == "CHGNet 0.3.0" and found["counts"]["hull/unknown"] == 1
    assert abs(found["structures"][0]["above_hull"]) < 5e-3 and found["structures"][1]["above_hull"] is None
