"""Batched relaxation: ASE's minima, what drops out, and what is given up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ase.calculators.lj import LennardJones
from ase.filters import FrechetCellFilter
from ase.optimize import FIRE
from pymatgen.core import Lattice, Structure
from torch import Tensor

from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search.potentials import (
    ASECalculatorPotential,
    BatchedPotential,
    CHGNetPotential,
)
from genkit.pipelines.crystal_tree_search.relaxation import RelaxationSettings, displacement, relax
from genkit.pipelines.crystal_tree_search.structures import concatenate, from_structures, take, to_atoms


def lennard_jones() -> LennardJones:
    return LennardJones(epsilon=0.2, sigma=2.5, rc=6.0, smooth=True)


def argon(seed: int, size: float = 0.1) -> Structure:
    random = np.random.default_rng(seed)
    cell = np.eye(3) * 4.1 + random.normal(size=(3, 3)) * size
    places = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]) + random.normal(size=(4, 3)) * size / 4
    return Structure(Lattice(cell), ["Ar"] * 4, places)


class Well(BatchedPotential):
    """E = k/2 Σ |r - r_0|² + V p per cell: exact minima; hydrogen raises; crystals of helium swell for ever."""

    name, version = "well", "1"

    def _evaluate(self, crystals: dict[str, Tensor], derivatives: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if (crystals["numbers"] == 1).any():
            raise ValueError("no hydrogen")
        shift = (crystals["coordinates"] - 0.5) * crystals["mask"].unsqueeze(-1)
        places = shift.double() @ crystals["lattice"].double()
        energy = 1.5 * places.square().sum((1, 2)) / crystals["mask"].sum(1)
        swell = (crystals["numbers"] == 2).any(1).double()
        return energy, -3.0 * places, -3.0 * swell[:, None, None] * torch.eye(3, dtype=torch.float64)


def wells(*numbers: int) -> dict[str, Tensor]:
    cells = [Structure(Lattice.cubic(4), [one, 3], [[0.45, 0.5, 0.5], [0.5, 0.56, 0.5]]) for one in numbers]
    return from_structures(cells)


def compare(
    batch: dict[str, Tensor], potential: Any, calculator: Any, steps: int, fmax: float
) -> list[dict[str, float]]:
    """Our minima beside those of ASE's FIRE on its FrechetCellFilter."""
    ours, found = relax(batch, potential, RelaxationSettings(steps=steps, fmax=fmax)), []
    assert ours.converged.all() and ours.valid.all() and not ours.failures
    for row, atoms in enumerate(to_atoms(batch)):
        atoms.calc = calculator
        optimiser = FIRE(FrechetCellFilter(atoms), logfile=None)
        optimiser.run(fmax=fmax, steps=steps)
        found.append(
            {
                "energy": abs(atoms.get_potential_energy() / len(atoms) - float(ours.energy[row])),
                "volume": abs(atoms.get_volume() / float(torch.linalg.det(ours.crystals["lattice"][row])) - 1),
                "steps": int(ours.steps[row]) / optimiser.nsteps,
            }
        )
    return found


def test_lennard_jones_crystals_come_to_the_minima_of_ase() -> None:
    batch = from_structures([argon(0)])
    for found in compare(batch, ASECalculatorPotential(lennard_jones), lennard_jones(), 300, 0.02):
        assert found["energy"] < 1e-4 and found["volume"] < 5e-3 and 0.5 < found["steps"] < 2.0


@pytest.mark.slow
def test_chgnet_crystals_come_to_the_minima_of_ase() -> None:
    from chgnet.model.dynamics import CHGNetCalculator

    potential = CHGNetPotential()
    perovskite = Structure(
        Lattice.cubic(3.905), ["Sr", "Ti", "O", "O", "O"], [[0, 0, 0], [0.5] * 3, *(1 - np.eye(3)) * 0.5]
    )
    face = (np.ones((3, 3)) - np.eye(3)) / 2
    salt = Structure(Lattice(face * 5.69), ["Na", "Cl"], [[0, 0, 0], [0.5] * 3])
    fluorite = Structure(Lattice(face * 5.5), ["Ca", "F", "F"], [[0, 0, 0], [0.25] * 3, [0.75] * 3])
    random = np.random.default_rng(0)
    for one in (perovskite, salt, fluorite):
        one.apply_strain([0.04, -0.03, 0.05])
        for site in range(len(one)):
            one.translate_sites([site], random.normal(size=3) * 0.1, frac_coords=False)
    batch = from_structures([perovskite, salt, fluorite])
    for found in compare(batch, potential, CHGNetCalculator(potential.model), 300, 0.02):
        assert found["energy"] < 5e-4 and found["volume"] < 5e-3


def test_a_batch_relaxes_each_crystal_as_if_it_were_alone() -> None:
    potential, settings = ASECalculatorPotential(lennard_jones), RelaxationSettings(steps=12)
    batch = from_structures([argon(2, 0.01), argon(3, 0.15)])
    together = relax(batch, potential, settings)
    for row in range(2):
        alone = relax(take(batch, slice(row, row + 1)), potential, settings)
        torch.testing.assert_close(alone.energy, together.energy[row : row + 1], rtol=0, atol=1e-6)
        torch.testing.assert_close(alone.crystals["lattice"][0], together.crystals["lattice"][row], rtol=0, atol=1e-4)
        assert alone.steps == together.steps[row]
    assert (together.energy <= together.first_energy).all()


def test_exact_minima_of_a_well_and_the_displacement_to_them() -> None:
    batch = wells(4, 4)
    batch["coordinates"][1] = 0.5
    found = relax(batch, Well(), RelaxationSettings(steps=200, fmax=1e-4))
    assert found.converged.all() and found.steps[1] == 0 < found.steps[0]  # the easy one dropped out at once
    torch.testing.assert_close(found.crystals["coordinates"], torch.full((2, 2, 3), 0.5), rtol=0, atol=2e-4)
    # atoms moved by (0.2, 0, 0) and (0, -0.24, 0); without the mean drift each moved half of (0.2, 0.24, 0)
    assert found.rmsd.tolist() == pytest.approx([np.hypot(0.2, 0.24) / 2, 0.0], abs=1e-3)
    assert found.volume_ratio.tolist() == pytest.approx([1.0, 1.0])


def test_failures_and_runaways_keep_their_last_state_and_leave_the_rest_alone() -> None:
    batch = concatenate([wells(4, 1, 2, 4), wells(4)])
    batch["coordinates"][4, 0, 0] = torch.nan
    found = relax(batch, Well(), RelaxationSettings(steps=200, fmax=1e-4))
    assert found.valid.tolist() == [True, False, False, True, False]
    assert {one.row: one.kind for one in found.failures} == {1: "raised", 2: "volume", 4: "not_finite"}
    assert found.energy.isnan().tolist() == [False, True, True, False, True]
    assert found.rmsd.isnan().tolist() == [False, True, True, False, True]
    assert torch.equal(found.crystals["coordinates"][1], batch["coordinates"][1])
    alone = relax(take(batch, torch.tensor([0, 3])), Well(), found.settings)
    torch.testing.assert_close(alone.energy, found.energy[[0, 3]], rtol=0, atol=1e-9)


def test_only_the_selected_are_relaxed_and_no_step_only_judges() -> None:
    batch = wells(4, 4)
    found = relax(batch, Well(), RelaxationSettings(steps=200, fmax=1e-3), select=torch.tensor([False, True]))
    assert found.valid.tolist() == [False, True] and found.steps[0] == 0
    assert torch.equal(found.crystals["coordinates"][0], batch["coordinates"][0])
    still = relax(batch, Well(), RelaxationSettings(steps=0))
    assert still.valid.all() and not still.converged.any() and torch.equal(still.energy, still.first_energy)
    assert torch.equal(still.crystals["lattice"], batch["lattice"]) and (still.rmsd == 0).all()


def test_a_fixed_cell_stays() -> None:
    batch = from_structures([argon(5)])
    found = relax(batch, ASECalculatorPotential(lennard_jones), RelaxationSettings(steps=40, cell=False))
    torch.testing.assert_close(found.crystals["lattice"], batch["lattice"], rtol=0, atol=1e-5)
    assert found.energy < found.first_energy


def test_displacement_ignores_drift_and_whole_cells() -> None:
    batch = from_structures([argon(6)])
    lattice, first, mask = batch["lattice"], batch["coordinates"], batch["mask"]
    drifted = (first + 0.3).remainder(1.0)
    assert float(displacement(lattice, first, lattice, drifted, mask)) == pytest.approx(0, abs=1e-6)
    moved = first.clone()
    moved[0, 0] += torch.linalg.solve(lattice[0], torch.tensor([[0.4, 0, 0]]), left=False)[0]
    # one of four atoms by 0.4: the drift is 0.1, so 0.3 and three times 0.1
    expected = np.sqrt((0.3**2 + 3 * 0.1**2) / 4)
    assert float(displacement(lattice, first, lattice, moved, mask)) == pytest.approx(expected, abs=1e-5)


def test_settings_are_checked() -> None:
    for wrong in ({"steps": -1}, {"fmax": 0.0}, {"max_volume_change": 1.0}, {"max_step": 0.0}):
        with pytest.raises(ConfigError, match="expected"):
            RelaxationSettings(**wrong)
    with pytest.raises(ConfigError, match="select has shape"):
        relax(wells(4), Well(), select=torch.ones(3, dtype=torch.bool))
