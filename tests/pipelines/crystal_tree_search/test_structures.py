"""Conversion keeps the crystal: distances, handedness, ids and order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pymatgen.core import Lattice, Structure

from genkit.errors import ConfigError, MissingExtraError
from genkit.pipelines.crystal_tree_search.structures import (
    cif_text,
    concatenate,
    from_atoms,
    from_structures,
    optional_module,
    polar_lattice,
    read_cifs,
    read_extxyz,
    take,
    to_atoms,
    to_structures,
    write_cifs,
    write_extxyz,
)
from genkit.pipelines.crystal_tree_search.symmetry import space_group_ladder


def quartz() -> Structure:
    return Structure.from_spacegroup(
        "P3_221", Lattice.hexagonal(4.913, 5.405), ["Si", "O"], [[0.4697, 0, 0], [0.4135, 0.2669, 0.1191]]
    )


def random_structures(count: int = 6, seed: int = 0) -> list[Structure]:
    random = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        cell = random.normal(size=(3, 3)) * 4
        if abs(np.linalg.det(cell)) > 20:
            atoms = int(random.integers(1, 6))
            kinds = [["Na", "Cl", "O"][one] for one in random.integers(0, 3, atoms)]
            found.append(Structure(Lattice(cell), kinds, random.random((atoms, 3)) * 4 - 2))
    return found


def test_structures_come_back_up_to_a_rotation_and_whole_cells() -> None:
    given = random_structures()
    crystals = from_structures(given, max_atoms=8)
    assert crystals["numbers"].shape == (6, 8)
    assert ((crystals["coordinates"] >= 0) & (crystals["coordinates"] < 1)).all()
    assert (crystals["numbers"][~crystals["mask"]] == 0).all()
    for before, after in zip(given, to_structures(crystals), strict=True):
        assert [s.specie for s in before] == [s.specie for s in after]
        np.testing.assert_allclose(after.distance_matrix, before.distance_matrix, atol=2e-5)
        np.testing.assert_allclose(after.lattice.parameters, before.lattice.parameters, rtol=1e-5)


def test_the_lattice_is_the_symmetric_positive_definite_factor() -> None:
    crystals = from_structures(random_structures())
    lattice = crystals["lattice"].double()
    assert torch.equal(lattice, lattice.mT)
    assert (torch.linalg.eigvalsh(lattice) > 0).all()
    for polar, one in zip(lattice, random_structures(), strict=True):
        gram = torch.tensor(one.lattice.matrix @ one.lattice.matrix.T)
        torch.testing.assert_close(polar @ polar.mT, gram, rtol=1e-5, atol=1e-4)


def test_a_rotated_crystal_gives_the_same_tensors() -> None:
    one = random_structures(1)[0]
    turn, _ = np.linalg.qr(np.random.default_rng(3).normal(size=(3, 3)))
    turn *= np.sign(np.linalg.det(turn))
    turned = Structure(Lattice(one.lattice.matrix @ turn), one.species, one.frac_coords)
    for name, value in from_structures([one]).items():
        torch.testing.assert_close(from_structures([turned])[name], value, rtol=0, atol=2e-6)


def test_a_left_handed_cell_keeps_the_handedness_of_the_crystal() -> None:
    crystal = quartz()
    matrix = crystal.lattice.matrix[[1, 0, 2]]
    swapped = Structure(Lattice(matrix), crystal.species, crystal.frac_coords[:, [1, 0, 2]])
    assert np.linalg.det(matrix) < 0
    both = from_structures([crystal, swapped])
    assert space_group_ladder(both, (0.01,)).numbers.tolist() == [[154], [154]]
    # without the change of sign it would be the other enantiomorph
    rows = torch.tensor(matrix)
    squares, vectors = torch.linalg.eigh(rows @ rows.T)
    naive = {**take(both, slice(1, 2)), "coordinates": torch.tensor(swapped.frac_coords).float()[None]}
    naive["lattice"] = (vectors * squares.sqrt() @ vectors.T).float()[None]
    assert space_group_ladder(naive, (0.01,)).numbers.tolist() == [[152]]


def test_the_polar_form_of_a_symmetric_lattice_is_itself() -> None:
    crystals = from_structures(random_structures())
    lattice, coordinates = polar_lattice(crystals["lattice"], crystals["coordinates"])
    torch.testing.assert_close(lattice, crystals["lattice"], rtol=1e-5, atol=1e-5)
    assert torch.equal(coordinates, crystals["coordinates"])


def test_coordinates_just_below_zero_are_wrapped_into_the_cell() -> None:
    crystals = from_structures([Structure(Lattice.cubic(4), ["Na"], [[-1e-12, 1 - 1e-12, 3.0]])])
    assert ((crystals["coordinates"] >= 0) & (crystals["coordinates"] < 1)).all()


def test_ase_gets_the_same_crystal_and_gives_it_back() -> None:
    crystals = from_structures(random_structures())
    atoms = to_atoms(crystals)
    for one, structure in zip(atoms, to_structures(crystals), strict=True):
        assert one.pbc.all()
        np.testing.assert_allclose(one.get_all_distances(mic=True), structure.distance_matrix, atol=1e-5)
    for name, value in from_atoms(atoms, 5).items():
        torch.testing.assert_close(value, crystals[name], rtol=0, atol=1e-5)


def test_files_keep_ids_properties_and_crystals(tmp_path: Path) -> None:
    crystals = from_structures(random_structures())
    ids = torch.tensor([7, 3, 12, 40, 5, 6])
    path = write_extxyz(tmp_path / "leaves.extxyz", crystals, ids, {"reward": torch.arange(6.0), "arm": ["dts"] * 6})
    read, names, properties = read_extxyz(path)
    assert names == ["7", "3", "12", "40", "5", "6"]
    assert properties["reward"] == [0, 1, 2, 3, 4, 5] and properties["arm"][0] == "dts"
    for name, value in crystals.items():
        torch.testing.assert_close(read[name], value, rtol=0, atol=1e-5)
    write_cifs(tmp_path / "cif", crystals, ids)
    assert "data_40" in (tmp_path / "cif" / "40.cif").read_text()
    from_cifs, stems = read_cifs(tmp_path / "cif")
    assert stems == ["3", "5", "6", "7", "12", "40"]
    order = torch.tensor([names.index(one) for one in stems])
    for before, after in zip(to_structures(take(crystals, order)), to_structures(from_cifs), strict=True):
        np.testing.assert_allclose(
            np.sort(after.distance_matrix, axis=None), np.sort(before.distance_matrix, axis=None), atol=1e-4
        )
    assert cif_text(to_structures(crystals)[0]).startswith("# generated")


def test_files_are_never_overwritten_unless_told(tmp_path: Path) -> None:
    crystals = from_structures(random_structures(2))
    path = write_extxyz(tmp_path / "a.extxyz", crystals, [0, 1])
    with pytest.raises(ConfigError, match="exists"):
        write_extxyz(path, crystals, [0, 1])
    write_extxyz(path, crystals, [2, 3], overwrite=True)
    assert read_extxyz(path)[1] == ["2", "3"]
    assert [p.name for p in tmp_path.iterdir()] == ["a.extxyz"]
    write_cifs(tmp_path / "c", crystals, [0, 1])
    with pytest.raises(ConfigError, match="exists"):
        write_cifs(tmp_path / "c", crystals, [1, 2])


@pytest.mark.parametrize("ids", [[1, 1], [1], ["a/b", "c"], ["", "x"]])
def test_ids_that_cannot_name_files_are_refused(ids: list, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="id"):
        write_cifs(tmp_path, from_structures(random_structures(2)), ids)


def test_batches_of_different_width_join() -> None:
    a, b = from_structures(random_structures(2)), from_structures(random_structures(3, seed=1), max_atoms=9)
    joined = concatenate([a, b])
    assert joined["numbers"].shape == (5, 9)
    assert joined["mask"].sum(1).tolist() == [*a["mask"].sum(1).tolist(), *b["mask"].sum(1).tolist()]


def test_what_is_no_crystal_is_named_or_skipped() -> None:
    crystals = from_structures(random_structures(4), max_atoms=5)
    crystals["coordinates"][1, 0, 0] = torch.nan
    crystals["lattice"][2, 2] = crystals["lattice"][2, 1]
    crystals["numbers"][3, 0] = 0
    assert [one is None for one in to_structures(crystals, skip=True)] == [False, True, True, True]
    with pytest.raises(ConfigError, match="crystal 1 is not finite"):
        to_atoms(crystals)
    with pytest.raises(ConfigError, match="singular cell"):
        to_structures(take(crystals, torch.tensor([2])))


def test_bad_input_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most max_atoms=2"):
        from_structures([quartz()], max_atoms=2)
    mixed = Structure(Lattice.cubic(4), [{"Cu": 0.5, "Au": 0.5}], [[0, 0, 0]])
    with pytest.raises(ConfigError, match="disordered"):
        from_structures([mixed])
    with pytest.raises(ConfigError, match="expected a dict of the tensors"):
        to_structures({"lattice": torch.eye(3)[None]})
    broken = tmp_path / "broken.extxyz"
    broken.write_text("3\nnot a comment line\nNa 0 0\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_extxyz(broken)
    with pytest.raises(ConfigError, match=r"no \*\.cif"):
        read_cifs(tmp_path)
    (tmp_path / "x.cif").write_text("data_x\n_cell_length_a oops\n")
    with pytest.raises(ConfigError, match="no CIF"):
        read_cifs(tmp_path)
    with pytest.raises(MissingExtraError, match=r"genkit-diffusion\[crystals\]"):
        optional_module("a_package_that_is_not_there")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error_and_keeps_the_older_file(tmp_path: Path) -> None:
    old, new = from_structures(random_structures(1)), from_structures(random_structures(1, seed=5))
    table, folder = write_extxyz(tmp_path / "s.extxyz", old, ["a"]), tmp_path / "cif"
    (one,) = write_cifs(folder, old, ["a"])
    before = table.read_text(), one.read_text()
    (tmp_path / ".s.extxyz.partial").symlink_to("/dev/full")
    (folder / ".a.cif.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_extxyz(table, new, ["a"], overwrite=True)
    with pytest.raises(OSError, match="No space left"):
        write_cifs(folder, new, ["a"], overwrite=True)
    assert (table.read_text(), one.read_text()) == before
    assert sorted(path.name for path in folder.iterdir()) == ["a.cif"]  # and nothing half-written is left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cif", "s.extxyz"]
    assert write_extxyz(table, new, ["a"], overwrite=True).read_text() != before[0]
