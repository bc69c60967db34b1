"""Potentials: pinned energies, batch against single, derivatives, and failures that stay where they are."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pymatgen.core import Lattice, Structure
from torch import Tensor

from genkit.errors import ConfigError, MissingExtraError
from genkit.pipelines.crystal_tree_search import potentials
from genkit.pipelines.crystal_tree_search.potentials import (
    ASECalculatorPotential,
    BatchedPotential,
    CHGNetPotential,
    Potential,
    SevenNetPotential,
)
from genkit.pipelines.crystal_tree_search.structures import concatenate, from_structures, take

NACL = Structure(Lattice((np.ones((3, 3)) - np.eye(3)) * 2.845), ["Na", "Cl"], [[0, 0, 0], [0.5] * 3])
SRTIO3 = Structure(
    Lattice.cubic(3.905),
    ["Sr", "Ti", "O", "O", "O"],
    [[0, 0, 0], [0.5] * 3, [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]],
)
MGAL2O4 = Structure.from_spacegroup(
    "Fd-3m", Lattice.cubic(8.08), ["Mg", "Al", "O"], [[0.125] * 3, [0.5] * 3, [0.2624] * 3]
).get_primitive_structure()
ISOLATED = Structure(Lattice.cubic(9), ["Cs"], [[0, 0, 0]])


@pytest.fixture(scope="module")
def chgnet() -> CHGNetPotential:
    return CHGNetPotential(chunk=8)


def rattled(*structures: Structure, seed: int = 0, size: float = 0.08) -> dict[str, Tensor]:
    random, moved = np.random.default_rng(seed), []
    for one in structures:
        shifts = random.normal(size=(len(one), 3)) * size
        cell = one.lattice.matrix @ (np.eye(3) + random.normal(size=(3, 3)) * 0.02)
        moved.append(Structure(Lattice(cell), one.species, one.frac_coords + shifts @ np.linalg.inv(cell)))
    return from_structures(moved)


class Spring(BatchedPotential):
    """A cheap potential: the mean of the squared coordinates; it raises for hydrogen, and is infinite for helium."""

    name, version = "spring", "1"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.groups: list[list[int]] = []

    def _evaluate(self, crystals: dict[str, Tensor], derivatives: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        self.groups.append(crystals["mask"].sum(1).tolist())
        if (crystals["numbers"] == 1).any():
            raise ValueError("no hydrogen")
        energy = crystals["coordinates"].square().sum((1, 2))
        energy = energy.masked_fill((crystals["numbers"] == 2).any(1), torch.inf)
        if not derivatives:
            return energy, None, None
        return energy, -2 * crystals["coordinates"], torch.zeros(len(energy), 3, 3)


def test_energies_are_those_that_were_measured_with_chgnet_itself(chgnet: CHGNetPotential) -> None:
    found = chgnet.energies(from_structures([NACL, SRTIO3, MGAL2O4]))
    assert found.energy.dtype == torch.float64 and found.valid.all() and found.failures == ()
    assert found.energy.tolist() == pytest.approx([-3.66797, -8.41826, -5.78794], abs=1e-4)
    assert chgnet.backend == "vectorised" and (chgnet.name, chgnet.version) == ("CHGNet", "0.3.0")
    assert isinstance(chgnet, Potential)


def test_all_three_graph_backends_agree(chgnet: CHGNetPotential) -> None:
    batch = rattled(NACL, SRTIO3, NACL)
    ours = chgnet._by_backend(batch, "vectorised", True)
    fast = chgnet._by_backend(batch, "fast", True)
    legacy = chgnet._by_backend(batch, "legacy", False)
    torch.testing.assert_close(ours[0], fast[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(legacy[0], fast[0], rtol=0, atol=2e-6)
    assert fast[1].abs().max() > 0.3
    torch.testing.assert_close(ours[1], fast[1], rtol=0, atol=2e-4)
    torch.testing.assert_close(ours[2].float(), fast[2].float(), rtol=0, atol=2e-5)


def test_a_batch_gives_each_crystal_what_it_gets_alone(chgnet: CHGNetPotential) -> None:
    batch = rattled(NACL, SRTIO3, NACL, SRTIO3)
    together = chgnet.energy_forces_stress(batch)
    for row in range(4):
        alone = chgnet.energy_forces_stress(take(batch, slice(row, row + 1)))
        for name in ("energy", "forces", "stress"):
            torch.testing.assert_close(getattr(together, name)[row], getattr(alone, name)[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(together.energy, chgnet.energies(batch).energy, rtol=0, atol=2e-6)
    assert (together.forces[~batch["mask"]] == 0).all()


def test_forces_and_stress_are_derivatives_of_the_energy(chgnet: CHGNetPotential) -> None:
    batch, step = rattled(SRTIO3, size=0.15), 0.02
    found = chgnet.energy_forces_stress(batch)
    direction = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    strain = torch.tensor([[0.6, 0.2, 0.0], [0.2, -0.3, 0.1], [0.0, 0.1, 0.5]])
    moved, strained = [], []
    for sign in (1, -1):
        shift = sign * step * direction @ torch.linalg.inv(batch["lattice"][0])
        moved.append({**batch, "coordinates": batch["coordinates"] + shift})
        strained.append({**batch, "lattice": batch["lattice"] @ (torch.eye(3) + sign * step * strain / 4)})
    energy = 5 * chgnet.energies(concatenate(moved + strained)).energy
    slope = float(energy[0] - energy[1]) / (2 * step)
    assert slope == pytest.approx(-float((found.forces[0] * direction).sum()), rel=2e-2)
    volume = float(torch.linalg.det(batch["lattice"][0]))
    pull = float(energy[2] - energy[3]) / (2 * step / 4)
    assert pull == pytest.approx(volume * float((found.stress[0] * strain).sum()), rel=2e-2)


def test_energies_do_not_see_shifts_order_or_whole_cells(chgnet: CHGNetPotential) -> None:
    batch = rattled(SRTIO3)
    order = torch.tensor([3, 1, 4, 0, 2])
    shifted = {**batch, "coordinates": batch["coordinates"] + 0.37}
    whole = {**batch, "coordinates": batch["coordinates"] + torch.randint(-2, 3, (1, 5, 3))}
    permuted = {**batch, "coordinates": batch["coordinates"][:, order], "numbers": batch["numbers"][:, order]}
    energy = chgnet.energies(concatenate([batch, shifted, whole, permuted])).energy
    assert float(energy.max() - energy.min()) < 1e-5


def test_what_cannot_be_judged_is_recorded_and_the_rest_survives(chgnet: CHGNetPotential) -> None:
    good = from_structures([NACL, SRTIO3], 5)
    nan, flat, tiny = (from_structures([NACL], 5) for _ in range(3))
    nan["coordinates"][0, 1, 0] = torch.nan
    flat["lattice"][0, 0] = flat["lattice"][0, 1]
    tiny["lattice"] *= 0.1
    batch = concatenate([take(good, slice(0, 1)), from_structures([ISOLATED], 5), nan, flat, tiny, good])
    found = chgnet.energies(batch)
    assert found.valid.tolist() == [True, False, False, False, False, True, True]
    assert {one.row: one.kind for one in found.failures} == {
        1: "raised",
        2: "not_finite",
        3: "singular_cell",
        4: "too_dense",
    }
    assert "isolated" in next(one.message for one in found.failures if one.row == 1)
    assert found.energy[found.valid].tolist() == pytest.approx([-3.66797, -3.66797, -8.41826], abs=1e-4)
    assert found.energy[~found.valid].isnan().all()
    partly = chgnet.energies(batch, torch.tensor([True, False, False, False, False, False, True]))
    assert partly.failures == () and partly.valid.tolist() == [True, *[False] * 5, True]


def test_chunks_stand_at_fixed_rows_so_parts_of_a_batch_give_the_same_bits(chgnet: CHGNetPotential) -> None:
    batch = rattled(*[NACL, SRTIO3] * 6)
    whole = chgnet.energies(batch).energy
    parts = [chgnet.energies(take(batch, slice(start, start + 8))).energy for start in (0, 8)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_backend_that_does_not_work_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise IndexError("index dtype")

    monkeypatch.setattr(potentials, "_vectorised", broken)
    potential = CHGNetPotential()
    with pytest.warns(UserWarning, match="vectorised graphs do not work"):
        energy = potential.energies(from_structures([NACL])).energy
    assert float(energy) == pytest.approx(-3.66797, abs=1e-4) and potential.backend == "fast"
    wrong = CHGNetPotential()
    monkeypatch.setattr(potentials, "_by_converter", lambda *_: (torch.tensor([-3.0]), None, None))
    with pytest.warns(UserWarning), pytest.raises(ConfigError, match="any graph converter"):
        _ = wrong.model


def test_a_failing_converter_leaves_no_file(chgnet: CHGNetPotential, tmp_path: Any, monkeypatch: Any) -> None:
    from chgnet.graph.graph import Graph

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("no line graph")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Graph, "line_graph_adjacency_list", broken)
    with pytest.raises(RuntimeError):
        chgnet._by_backend(from_structures([NACL]), "legacy", False)
    assert not list(tmp_path.iterdir())


# --- without a network ------------------------------------------------------------------------------------------------


def test_one_that_raises_or_explodes_costs_only_itself() -> None:
    batch = from_structures([NACL, NACL, NACL, NACL])
    batch["numbers"][1, 0], batch["numbers"][2, 0] = 1, 2
    found = Spring().energy_forces_stress(batch)
    assert found.valid.tolist() == [True, False, False, True]
    assert [(one.row, one.kind) for one in sorted(found.failures, key=lambda f: f.row)] == [
        (1, "raised"),
        (2, "not_finite_energy"),
    ]
    assert (found.forces[1:3] == 0).all() and torch.isfinite(found.forces).all()


def test_batches_hold_no_more_atoms_than_told() -> None:
    potential = Spring(chunk=4, max_atoms=7)
    potential.energies(from_structures([NACL, SRTIO3, NACL, NACL, SRTIO3, MGAL2O4]))
    assert potential.groups == [[2, 5], [2, 2], [5], [14]]  # rows 0-3, then 4-5; one crystal may be larger


def test_any_ase_calculator_is_a_potential() -> None:
    from ase.calculators.lj import LennardJones

    def make() -> LennardJones:
        return LennardJones(epsilon=0.1, sigma=3.0, rc=7.0)

    argon = Structure(Lattice.cubic(4.7), ["Ar"] * 2, [[0, 0, 0], [0.52, 0.5, 0.5]])
    for source in (make, make()):
        potential = ASECalculatorPotential(source)
        found = potential.energy_forces_stress(from_structures([argon, argon]))
        atoms = argon.to_ase_atoms()
        atoms.calc = make()
        assert found.energy.tolist() == pytest.approx([atoms.get_potential_energy() / 2] * 2, rel=1e-5)
        np.testing.assert_allclose(found.forces[0], atoms.get_forces(), atol=1e-5)
        np.testing.assert_allclose(found.stress[0], atoms.get_stress(voigt=False), atol=1e-6)
        assert potential.name == "LennardJones" and isinstance(potential, Potential)


def test_a_missing_sevennet_says_how_to_get_it() -> None:
    if importlib.util.find_spec("sevenn"):
        pytest.skip("sevenn is installed")
    with pytest.raises(MissingExtraError, match="genkit-diffusion\\[sevennet"):
        _ = SevenNetPotential().calculator
    # a missing package is no fault of a crystal: it is raised, not counted as crystals without an energy
    with pytest.raises(MissingExtraError, match="genkit-diffusion\\[sevennet"):
        SevenNetPotential().energies(from_structures([NACL]))


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("sevenn"), reason="sevenn is not installed")
def test_sevennet_judges_with_its_own_zero() -> None:
    found = SevenNetPotential().energies(from_structures([NACL, NACL]))
    assert found.energy.tolist() == pytest.approx([-3.384] * 2, abs=2e-3)  # CHGNet: -3.668


@pytest.fixture
def fake_sevennet(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    from ase.calculators.lj import LennardJones

    asked: list[dict[str, Any]] = []
    package, module = types.ModuleType("sevenn"), types.ModuleType("sevenn.calculator")

    def calculator(**options: Any) -> LennardJones:
        asked.append(options)
        return LennardJones()

    module.SevenNetCalculator = calculator
    monkeypatch.setitem(sys.modules, "sevenn", package)
    monkeypatch.setitem(sys.modules, "sevenn.calculator", module)
    yield asked


def test_sevennet_is_loaded_on_first_use(fake_sevennet: list[dict[str, Any]]) -> None:
    potential = SevenNetPotential("7net-0")
    assert not fake_sevennet and (potential.name, potential.version) == ("SevenNet", "7net-0")
    assert potential.energies(from_structures([NACL])).valid.all()
    potential.energies(from_structures([NACL]))
    assert fake_sevennet == [{"model": "7net-0", "device": "cpu"}]


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'r2scan'"):
        CHGNetPotential("r2scam")
    with pytest.raises(ConfigError, match="Did you mean 'legacy'"):
        CHGNetPotential(backend="legcy")
    with pytest.raises(ConfigError, match="chunk=0"):
        Spring(chunk=0)
    with pytest.raises(ConfigError, match="expected a dict"):
        Spring().energies({"lattice": torch.eye(3)[None]})
