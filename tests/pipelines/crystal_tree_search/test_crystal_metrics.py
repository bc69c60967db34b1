"""Metrics on sets that are made by hand: copies, supercells, polymorphs, references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pymatgen.core import Lattice, Structure
from torch import Tensor

from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search.crystal_metrics import (
    MetricSettings,
    StructureIndex,
    evaluate_structures,
    load_crystals,
    matched_to,
    novel_mask,
    unique_labels,
)
from genkit.pipelines.crystal_tree_search.hull import Hull
from genkit.pipelines.crystal_tree_search.potentials import BatchedPotential
from genkit.pipelines.crystal_tree_search.relaxation import RelaxationSettings
from genkit.pipelines.crystal_tree_search.structures import (
    concatenate,
    from_structures,
    to_structures,
    write_cifs,
    write_extxyz,
)

FACE = (np.ones((3, 3)) - np.eye(3)) / 2


def salt(length: float = 5.69, kinds: tuple[str, str] = ("Na", "Cl")) -> Structure:
    return Structure(Lattice(FACE * length), list(kinds), [[0, 0, 0], [0.5] * 3])


def copy_of(structure: Structure, seed: int) -> Structure:
    """The same crystal: turned, shifted, its atoms in another order, rattled by a hundredth of an Angstrom."""
    random = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(random.normal(size=(3, 3)))
    turn *= np.sign(np.linalg.det(turn))
    order = random.permutation(len(structure))
    places = (structure.frac_coords + random.random(3))[order]
    moved = Structure(Lattice(structure.lattice.matrix @ turn), [structure.species[one] for one in order], places)
    return moved.perturb(0.01) or moved


def supercell(structure: Structure) -> Structure:
    return structure.copy().make_supercell([2, 1, 1], in_place=False)


def cesium_chloride() -> Structure:
    return Structure(Lattice.cubic(3.4), ["Na", "Cl"], [[0, 0, 0], [0.5] * 3])


def hand_made() -> list[Structure]:
    """Two copies, a supercell, a polymorph, another compound and its copy."""
    other = salt(5.2, ("Li", "Cl"))
    return [salt(), copy_of(salt(), 1), supercell(salt()), cesium_chloride(), other, copy_of(other, 2)]


class Table(BatchedPotential):
    """Energies per atom by the volume per atom: rock salt is stable, the polymorph is not; no forces."""

    name, version = "table", "7"

    def _evaluate(self, crystals: dict[str, Tensor], derivatives: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        volume = torch.linalg.det(crystals["lattice"].double()) / crystals["mask"].sum(1)
        lithium = (crystals["numbers"] == 3).any(1)
        energy = torch.where(lithium, -2.5, torch.where(volume > 22, -3.0, -2.0)).double()
        if not derivatives:
            return energy, None, None
        return energy, torch.zeros_like(crystals["coordinates"]), torch.zeros(len(energy), 3, 3)


def hull() -> Hull:
    return Hull.from_arrays([[11, 0], [17, 0], [3, 0], [11, 17], [3, 17]], [-1.3, -1.8, -1.9, -3.0, -3.0])


def test_copies_and_supercells_are_one_and_polymorphs_are_not() -> None:
    assert unique_labels(hand_made()).tolist() == [0, 0, 0, 1, 2, 2]
    assert unique_labels(from_structures(hand_made())).tolist() == [0, 0, 0, 1, 2, 2]


def test_components_do_not_depend_on_the_order() -> None:
    structures = hand_made()
    order = torch.tensor([3, 5, 1, 0, 4, 2])
    labels = unique_labels([structures[one] for one in order.tolist()])
    pairs = labels[:, None] == labels[None]
    expected = unique_labels(structures)
    assert torch.equal(pairs, expected[order][:, None] == expected[order][None])


def test_a_chain_of_matches_is_one_component(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching is no equivalence: where a ~ b ~ c but not a ~ c, the three are one, whoever comes first."""
    near = {(0, 1), (1, 2)}
    monkeypatch.setattr(StructureIndex, "match", lambda self, row, other, column: tuple(sorted((row, column))) in near)
    assert unique_labels([salt(5.6), salt(5.7), salt(5.8), salt(5.9)]).tolist() == [0, 0, 0, 1]


def test_space_groups_tell_distorted_phases_apart() -> None:
    """The matcher joins a perovskite and its ferroelectric phase; their space groups differ."""
    places = np.array([[0, 0, 0], [0.5] * 3, [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
    cubic = Structure(Lattice.cubic(4.0), ["Ba", "Ti", "O", "O", "O"], places)
    polar = Structure(
        Lattice.tetragonal(4.0, 4.05), cubic.species, places + np.array([[0, 0, 0.03]]) * (places[:, :1] > 0)
    )
    assert unique_labels([cubic, polar]).tolist() == [0, 0]
    assert unique_labels([cubic, polar], MetricSettings(space_group_tolerance=0.01)).tolist() == [0, 1]


def test_novelty_is_against_what_matches_in_the_references() -> None:
    index = StructureIndex(hand_made())
    references = StructureIndex([supercell(salt()), salt(4.2, ("Mg", "O"))])
    assert novel_mask(index, references).tolist() == [False, False, False, True, True, True]
    assert novel_mask(index, StructureIndex([])).all()
    some = novel_mask(index, references, torch.tensor([True, True, True, True, False, False]))
    assert some.tolist() == [False, False, False, True, False, False]


def test_what_is_no_crystal_matches_nothing() -> None:
    batch = concatenate([from_structures([salt(), salt()]), from_structures([salt()])])
    batch["coordinates"][1, 0, 0] = torch.nan
    index = StructureIndex(batch)
    assert not index.match(0, index, 1) and index.match(0, index, 2)
    assert unique_labels(index, select=torch.tensor([True, False, True])).tolist() == [0, -1, 0]
    assert matched_to(index, index, torch.tensor([True, True, True])).tolist() == [True, False, True]


def test_an_evaluation_counts_every_rate_over_all_that_were_given() -> None:
    batch = from_structures([*hand_made(), salt(2.0), salt(5.7, ("Na", "Br"))])
    found = evaluate_structures(batch, potential=Table(), hull=hull(), references=[salt(5.2, ("Li", "Cl"))])
    flags = {name: flag.tolist() for name, flag in found.flags.items()}
    assert flags["valid"] == [True] * 6 + [False, True]
    assert flags["stable"] == [True, True, True, False, False, False, False, False]
    assert flags["unique"] == [True, False, False, True, True, False, False, True]
    assert flags["novel"] == [True, True, True, True, False, False, False, True]
    assert flags["sun"] == [True] + [False] * 7
    rates = found.metrics["rates"]
    assert rates["sun"]["count"] == 1 and rates["sun"]["total"] == 8 and rates["sun"]["rate"] == 1 / 8
    assert rates["sun"]["low"] < 1 / 8 < rates["sun"]["high"]
    counts = found.metrics["counts"]
    assert counts["invalid/volume"] == 1 and counts["hull/unknown"] == 1 and counts["references"] == 1
    assert counts["novel/new_formula"] == 5
    assert found.metrics["energies"]["above_hull"]["count"] == 6  # bromine has no entry, the crushed one no energy
    assert found.labels.tolist() == [0, 0, 0, 1, 2, 2, -1, 3]


@pytest.mark.filterwarnings("ignore")
def test_the_output_says_how_it_was_made() -> None:
    found = evaluate_structures(hand_made(), potential=Table(), hull=hull(), references=[salt()])
    again = json.loads(json.dumps(found.metrics))
    assert again["settings"]["metrics"]["stable_below"] == 0.1
    assert again["settings"]["validity"]["version"] == "1"
    assert again["versions"]["potential"] == "table 7" and "entries" in again["versions"]["hull"]
    assert again["versions"]["pymatgen"] != "not installed"
    assert "| sun |" in found.table and "stable_below" in found.table and "P1: " in found.table
    assert again["symmetry"]["0.1"] == {"p1": 0, "groups": 2}


@pytest.mark.filterwarnings("ignore")
def test_the_best_of_a_component_is_the_one_that_counts() -> None:
    class Rising(Table):
        def _evaluate(self, crystals: dict[str, Tensor], derivatives: bool) -> tuple[Tensor, None, None]:
            return -3.0 - torch.arange(len(crystals["numbers"])).double() / 100, None, None

    found = evaluate_structures([salt(), copy_of(salt(), 1)], potential=Rising(), hull=hull())
    assert found.flags["unique"].tolist() == [False, True]


@pytest.mark.filterwarnings("ignore")
def test_relaxed_crystals_are_what_is_judged() -> None:
    settings = RelaxationSettings(steps=2, fmax=0.1)
    found = evaluate_structures(
        hand_made(), potential=Table(), hull=hull(), references=[cesium_chloride()], relaxation=settings
    )
    assert found.relaxation is not None and found.flags["relaxed"].all()
    assert found.metrics["rmsd"]["mean"] == 0.0 and found.metrics["rmsd"]["count"] == 6
    assert found.metrics["rmsd"]["unmatched_share"] == 0.0
    assert torch.equal(found.flags["stable"], found.flags["stable_single_point"])
    assert found.metrics["settings"]["relaxation"]["steps"] == 2 and "RMSD to relaxed" in found.table


@pytest.mark.filterwarnings("ignore")
def test_without_a_potential_only_geometry_is_measured() -> None:
    found = evaluate_structures(hand_made())
    assert set(found.flags) == {"valid", "unique"} and found.above_hull is None
    for wrong in ({"hull": hull()}, {"relaxation": RelaxationSettings()}):
        with pytest.raises(ConfigError, match="need a potential"):
            evaluate_structures(hand_made(), **wrong)
    for nothing in ([], 3):
        with pytest.raises(ConfigError, match="at least one"):
            evaluate_structures(nothing)


def test_implausible_rates_and_self_comparison_are_called_out() -> None:
    structures = hand_made()
    with pytest.warns(UserWarning, match="references themselves"):
        found = evaluate_structures(structures, references=structures)
    assert not found.flags["novel"].any()
    assert any("novel is exactly 0 (0 of 6)" in note for note in found.metrics["warnings"])
    assert any("valid is exactly 1 (6 of 6)" in note for note in found.metrics["warnings"])
    assert "Warning: " in found.table
    # the same crystals in another file are still the same
    with pytest.warns(UserWarning, match="references themselves"):
        evaluate_structures(from_structures(structures), references=from_structures(structures, 12))


@pytest.mark.filterwarnings("ignore")
def test_anybodys_files_can_be_evaluated(tmp_path: Path) -> None:
    crystals = from_structures(hand_made())
    write_extxyz(tmp_path / "s.extxyz", crystals, range(10, 16))
    write_cifs(tmp_path / "cif", crystals, range(10, 16))
    for source in (tmp_path / "s.extxyz", str(tmp_path / "cif")):
        found = evaluate_structures(source)
        assert list(found.ids) == ["10", "11", "12", "13", "14", "15"] and found.labels.tolist() == [0, 0, 0, 1, 2, 2]
    one, ids = load_crystals(tmp_path / "cif" / "13.cif")
    assert ids == ["13"] and len(to_structures(one)[0]) == 2
    atoms = [one.to_ase_atoms() for one in hand_made()]
    assert load_crystals(atoms)[0]["numbers"].shape == (6, 4)


def test_files_that_are_none_say_so(tmp_path: Path) -> None:
    pointer = tmp_path / "s.extxyz"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        evaluate_structures(pointer)
    (tmp_path / "x.cif").write_text("not a cif")
    with pytest.raises(ConfigError, match="cannot be read"):
        evaluate_structures(tmp_path / "x.cif")
    with pytest.raises(ConfigError, match="cannot be read"):
        evaluate_structures(tmp_path / "missing.extxyz")


def test_settings_are_checked() -> None:
    wrong: list[dict[str, Any]] = [{"stol": 0.0}, {"stable_below": float("nan")}, {"ltol": -1.0}]
    for one in wrong:
        with pytest.raises(ConfigError, match="expected"):
            MetricSettings(**one)
