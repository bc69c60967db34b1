"""Space groups over the ladder, on crystals whose groups are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pymatgen.core import Lattice, Structure

from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search import symmetry
from genkit.pipelines.crystal_tree_search.structures import from_structures
from genkit.pipelines.crystal_tree_search.symmetry import CRYSTAL_SYSTEMS, crystal_system, space_group_ladder


def rock_salt() -> Structure:
    return Structure(Lattice((np.ones((3, 3)) - np.eye(3)) * 2.845), ["Na", "Cl"], [[0, 0, 0], [0.5] * 3])


def rattled(size: float) -> Structure:
    """The cubic cell of rock salt, every atom moved by about ``size``."""
    crystal = Structure(rock_salt().lattice, rock_salt().species, rock_salt().frac_coords)
    crystal.make_supercell([[-1, 1, 1], [1, -1, 1], [1, 1, -1]])
    shifts = np.random.default_rng(0).normal(size=(8, 3)) * size / np.sqrt(3)
    return Structure(crystal.lattice, crystal.species, crystal.cart_coords + shifts, coords_are_cartesian=True)


@pytest.mark.parametrize("backend", ["moyopy", "spglib"])
def test_rattled_rock_salt_loses_its_group_at_tight_tolerances(backend: str) -> None:
    batch = from_structures([rattled(0.0), rattled(0.02)])
    ladder = space_group_ladder(batch, (0.3, 0.1, 0.03, 0.01), backend=backend)
    assert ladder.numbers[0].tolist() == [225] * 4
    assert ladder.numbers[1, 0] == ladder.numbers[1, 1] == 225
    assert ladder.numbers[1, 3] == 1
    assert ladder.at(0.1).tolist() == [225, 225] and ladder.backend.startswith(backend)
    with pytest.raises(ConfigError, match="the ladder has"):
        ladder.at(0.2)


def test_known_groups() -> None:
    cesium_chloride = Structure(Lattice.cubic(4.1), ["Cs", "Cl"], [[0, 0, 0], [0.5] * 3])
    zinc_blende = Structure(rock_salt().lattice, ["Zn", "S"], [[0, 0, 0], [0.25] * 3])
    tetragonal = Structure(Lattice.tetragonal(3, 4), ["Cu"], [[0, 0, 0]])
    found = space_group_ladder(from_structures([cesium_chloride, zinc_blende, tetragonal]), (0.01,)).numbers
    assert found.squeeze(1).tolist() == [221, 216, 123]


def test_the_other_library_is_asked_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(symmetry._FINDERS, "moyopy", lambda *_: 0)
    assert space_group_ladder(from_structures([rock_salt()]), (0.1,)).numbers.tolist() == [[225]]
    monkeypatch.setitem(symmetry._FINDERS, "spglib", lambda *_: 0)
    assert space_group_ladder(from_structures([rock_salt()]), (0.1,)).numbers.tolist() == [[0]]


def test_what_is_no_crystal_has_no_group() -> None:
    batch = from_structures([rock_salt()] * 4)
    batch["coordinates"][0, 0, 0] = torch.nan
    batch["lattice"][1] = 0
    batch["mask"][2] = False
    chosen = torch.tensor([True, True, True, False])
    assert (space_group_ladder(batch, (0.1,), select=chosen).numbers == 0).all()


def test_crystal_systems_change_at_their_first_and_last_groups() -> None:
    edges = [0, 1, 2, 3, 15, 16, 74, 75, 142, 143, 167, 168, 194, 195, 230]
    names = [CRYSTAL_SYSTEMS[one] for one in crystal_system(torch.tensor(edges)).tolist()]
    assert names[0] == "unknown" and names[1] == names[2] == "triclinic" and names[-1] == "cubic"
    assert names[3::2] == [CRYSTAL_SYSTEMS[one] for one in range(2, 8)]
    assert names[4::2] == [CRYSTAL_SYSTEMS[one] for one in range(2, 8)]


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'spglib'"):
        space_group_ladder(from_structures([rock_salt()]), backend="spglibb")
    for bad in ((), (0.0,), (-0.1,), (float("nan"),)):
        with pytest.raises(ConfigError, match="positive lengths"):
            space_group_ladder(from_structures([rock_salt()]), bad)
