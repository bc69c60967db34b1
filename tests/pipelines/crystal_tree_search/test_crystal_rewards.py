"""Rewards of crystals: values by hand, what is filtered before an energy, and what must not change a value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pymatgen.analysis.hhi import HHIModel
from pymatgen.core import Lattice, Structure
from torch import Tensor

from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search.hull import Hull
from genkit.pipelines.crystal_tree_search.potentials import (
    ASECalculatorPotential,
    BatchedPotential,
    CHGNetPotential,
)
from genkit.pipelines.crystal_tree_search.rewards import (
    ASECalculatorReward,
    CompositionReward,
    DensityReward,
    FormationEnergyReward,
    NovelStabilityReward,
    ScarcityReward,
    SpaceGroupReward,
    StabilityReward,
    densities,
)
from genkit.pipelines.crystal_tree_search.structures import concatenate, from_structures, take, to_structures
from genkit.rewards import Reward, StackedRewards, WeightedSum

FACE = (np.ones((3, 3)) - np.eye(3)) / 2
NACL = Structure(Lattice(FACE * 5.69), ["Na", "Cl"], [[0, 0, 0], [0.5] * 3])
LIF = Structure(Lattice(FACE * 4.03), ["Li", "F"], [[0, 0, 0], [0.5] * 3])
MGO = Structure(Lattice(FACE * 4.21), ["Mg", "O"], [[0, 0, 0], [0.5] * 3])
ELEMENTS = {11: -1.3, 17: -1.8, 3: -1.9, 9: -1.9, 12: -1.6}  # no oxygen


class Table(BatchedPotential):
    """The energy of a crystal is written in the last digits of nothing but its numbers: a lookup by first element."""

    name, version = "table", "1"

    def __init__(self, energies: dict[int, float]) -> None:
        super().__init__()
        self.energies_of, self.asked = energies, 0

    def _evaluate(self, crystals: dict[str, Tensor], derivatives: bool) -> tuple[Tensor, None, None]:
        self.asked += len(crystals["numbers"])
        values = [self.energies_of[int(row[0])] for row in crystals["numbers"]]
        return torch.tensor(values, dtype=torch.float64), None, None


def hull(*extra: tuple[list[int], float]) -> Hull:
    rows = [([number, 0], energy) for number, energy in ELEMENTS.items()] + list(extra)
    return Hull.from_arrays([row for row, _ in rows], [energy for _, energy in rows])


def broken() -> dict[str, Tensor]:
    """NaN, a singular cell, a clash and an isolated atom (Cs beyond 5 A, which CHGNet refuses)."""
    nan, flat = from_structures([NACL], 8), from_structures([NACL], 8)
    nan["coordinates"][0, 0, 0] = torch.nan
    flat["lattice"][0, 1] = flat["lattice"][0, 0]
    corner = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)][:7]) * 0.8 / 7.6
    lonely = Structure(Lattice.cubic(7.6), ["Be"] * 7 + ["Cs"], [*corner, [0.5, 0.5, 0.5]])
    clash = Structure(Lattice.cubic(4), ["Na", "Cl"], [[0, 0, 0], [0.1, 0, 0]])
    return concatenate([nan, flat, from_structures([clash, lonely], 8)])


def test_stability_is_the_clipped_distance_from_the_hull_with_its_sign_turned() -> None:
    potential = Table({11: -3.0, 3: -1.0, 12: -9.0})
    reward = StabilityReward(potential, hull(([11, 17], -3.05)))
    output = reward(from_structures([NACL, LIF, MGO]))
    assert output.values.dtype == torch.float64
    # NaCl 0.05 above; LiF 0.9 above the elements; MgO has no oxygen to compare with
    assert output.values[:2].tolist() == pytest.approx([-0.05, -0.9])
    assert output.valid.tolist() == [True, True, False] and output.values[2].isnan()
    assert output.logs["hull/unknown"] == 1
    assert reward.assess(from_structures([NACL, MGO])).unknown.tolist() == [False, True]


def test_known_formulas_pay_whatever_their_structure() -> None:
    potential = Table({11: -3.0, 3: -1.0})
    double = Structure(
        Lattice.cubic(5.0), ["Na", "Na", "Cl", "Cl"], [[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0], [0, 0, 0.5]]
    )
    given = from_structures([NACL, LIF, double])
    plain = StabilityReward(potential, hull(([11, 17], -3.05)))(given)
    reward = NovelStabilityReward(potential, hull(([11, 17], -3.05)), from_structures([NACL, MGO]), penalty=0.25)
    output = reward(given)
    assert (output.values - plain.values).tolist() == pytest.approx([-0.25, 0.0, -0.25])  # Na2Cl2 is NaCl
    assert output.logs["formula/known"] == 2
    with pytest.raises(ConfigError, match="penalty=-1"):
        NovelStabilityReward(potential, hull(), from_structures([NACL]), penalty=-1)


def test_the_clip_bounds_both_sides() -> None:
    deep = StabilityReward(Table({11: -9.0, 3: 5.0}), hull())
    assert deep(from_structures([NACL, LIF])).values.tolist() == pytest.approx([0.1, -1.0])
    wide = StabilityReward(Table({11: -9.0, 3: 5.0}), hull(), clip=(-20.0, 20.0))
    assert wide(from_structures([NACL, LIF])).values.tolist() == pytest.approx([9.0 - 1.55, -5.0 - 1.9])


def test_formation_energy_ignores_compounds() -> None:
    reward = FormationEnergyReward(Table({11: -3.0}), hull(([11, 17], -3.05)))
    assert float(reward(from_structures([NACL])).values) == pytest.approx(3.0 - (1.3 + 1.8) / 2)


def test_no_energy_is_asked_for_an_invalid_crystal_and_exploding_ones_are_refused() -> None:
    potential = Table({11: -3.0, 3: -15138.0, 12: math.inf})
    batch = concatenate([broken(), from_structures([NACL, LIF, MGO], 8)])
    output = StabilityReward(potential, hull())(batch)
    assert potential.asked == 3
    assert output.valid.tolist() == [False] * 4 + [True, False, False]
    assert {key: value for key, value in output.logs.items() if value} == {
        "invalid/not_finite": 1,
        "invalid/singular_cell": 1,
        "invalid/too_close": 1,
        "invalid/isolated": 1,
        "energy/exploded": 1,
        "energy/failed": 1,
    }
    assert output.values[~output.valid].isnan().all()


def test_chgnet_rewards_do_not_see_shifts_order_or_whole_cells() -> None:
    reward = StabilityReward(CHGNetPotential(), hull(([11, 17], -3.7)))
    batch = from_structures([NACL])
    batch["coordinates"] += torch.tensor([[[0.02, 0.0, 0.01], [0.0, 0.03, 0.0]]])
    order = torch.tensor([1, 0])
    shifted = {**batch, "coordinates": batch["coordinates"] + 0.41}
    whole = {**batch, "coordinates": batch["coordinates"] + torch.tensor([[[1.0, -2, 0], [0, 3, 1]]])}
    permuted = {**batch, "coordinates": batch["coordinates"][:, order], "numbers": batch["numbers"][:, order]}
    output = reward(concatenate([batch, shifted, whole, permuted, broken()]))
    assert output.valid.tolist() == [True] * 4 + [False] * 4
    values = output.values[:4]
    assert float(values.max() - values.min()) < 1e-5 and -0.2 < float(values[0]) < 0
    assert float(reward(batch).values) == pytest.approx(float(values[0]), abs=2e-6)


def test_an_ase_calculator_rewards_too() -> None:
    from ase.calculators.lj import LennardJones

    potential = ASECalculatorPotential(lambda: LennardJones(epsilon=0.1, sigma=2.5))
    output = StabilityReward(potential, hull(), clip=(-9.0, 9.0))(from_structures([NACL]))
    assert float(output.values) == pytest.approx(-1.55 - float(potential.energies(from_structures([NACL])).energy))


def test_densities_are_those_of_pymatgen() -> None:
    batch = from_structures([NACL, LIF, MGO])
    expected = [float(one.density) for one in to_structures(batch)]
    assert densities(batch).tolist() == pytest.approx(expected, rel=1e-6)
    assert DensityReward()(batch).values.tolist() == pytest.approx(expected, rel=1e-6)
    near = DensityReward(target=expected[1], scale=0.5)(batch).values
    assert near.tolist() == pytest.approx([-abs(one - expected[1]) / 0.5 for one in expected], abs=1e-4)


def test_a_cell_of_no_volume_does_not_win_on_density() -> None:
    crushed = from_structures([Structure(Lattice(FACE * 1.0), ["Os", "Os"], [[0, 0, 0], [0.5] * 3])])
    assert not DensityReward()(crushed).valid.any()


@pytest.mark.parametrize("kind", ["reserve", "production"])
def test_scarcity_is_the_index_that_pymatgen_ships(kind: Any) -> None:
    batch = from_structures([NACL, LIF, MGO])
    model = HHIModel()
    index = {"reserve": model.get_hhi_reserve, "production": model.get_hhi_production}[kind]
    values = ScarcityReward(kind)(batch).values
    assert values.tolist() == pytest.approx([-index(f) / 1e4 for f in ("NaCl", "LiF", "MgO")], rel=1e-6)
    assert ((values <= 0) & (values >= -1)).all()


def test_an_element_outside_the_table_is_not_judged() -> None:
    thorium = from_structures([Structure(Lattice(FACE * 5.08), ["Th"], [[0, 0, 0]]), NACL])
    output = ScarcityReward()(thorium)
    assert output.valid.tolist() == [False, True] and output.logs["scarcity/unknown"] == 1


def test_composition_counts_wanted_elements_and_forbidden_atoms() -> None:
    reward = CompositionReward(wanted=["Na", "Li"], forbidden=["Cl", 12])
    assert reward(from_structures([NACL, LIF, MGO], 8)).values.tolist() == pytest.approx([0.0, 0.5, -0.5])
    with pytest.raises(ConfigError, match="Did you mean 'Na'"):
        CompositionReward(wanted=["na"])
    for wrong in ({}, {"wanted": ["Na"], "forbidden": [11]}, {"wanted": [0]}):
        with pytest.raises(ConfigError, match="element"):
            CompositionReward(**wrong)


def test_space_groups_are_graded_over_the_ladder() -> None:
    rattled = NACL.copy()
    rattled.translate_sites([1], [0.02, 0.035, 0.0], frac_coords=False)
    cubic = Structure(Lattice.cubic(4.1), ["Cs", "Cl"], [[0, 0, 0], [0.5] * 3])
    flat = Structure(Lattice.tetragonal(3, 4), ["Cu"], [[0, 0, 0]])
    batch = from_structures([NACL, rattled, cubic, flat])
    assert SpaceGroupReward(225)(batch).values.tolist() == pytest.approx([1.25, 0.75, 0.25, 0.0])
    assert SpaceGroupReward(225, backend="spglib")(batch).values[0] == 1.25
    wanted = {"space_group": torch.tensor([225, 225, 221, 0])}
    output = SpaceGroupReward(None)(batch, wanted)
    assert output.values[:3].tolist() == pytest.approx([1.25, 0.75, 1.25]) and not output.valid[3]
    with pytest.raises(ConfigError, match=r"needs context\['space_group'\]"):
        SpaceGroupReward(None)(batch)
    for wrong in (0, 231, 2.5):
        with pytest.raises(ConfigError, match="1 to 230"):
            SpaceGroupReward(wrong)  # type: ignore[arg-type]


def test_objectives_stack_and_add_up() -> None:
    parts: dict[str, Reward] = {
        "stability": StabilityReward(Table({11: -3.0, 3: -1.0, 12: -9.0}), hull()),
        "density": DensityReward(),
    }
    batch = from_structures([NACL, LIF, MGO])
    stacked = StackedRewards(parts)
    output = stacked(batch)
    assert stacked.names == ("stability", "density") and output.values.shape == (3, 2)
    assert output.valid.tolist() == [True, True, False] and output.values[2].isnan().all()
    assert torch.equal(output.values[:2, 1], parts["density"](batch).values[:2])
    assert output.logs["stability/hull/unknown"] == 1
    total = WeightedSum(parts, {"stability": 1.0, "density": 0.1})(batch)
    torch.testing.assert_close(total.values[:2], output.values[:2] @ torch.tensor([1.0, 0.1], dtype=torch.float64))


def test_stacks_are_checked() -> None:
    for wrong in ({}, [DensityReward()], {"density": 3}):
        with pytest.raises(ConfigError, match="expected"):
            StackedRewards(wrong)  # type: ignore[arg-type]
    inner = StackedRewards({"a": DensityReward(), "b": DensityReward()})
    with pytest.raises(ConfigError, match="2 objectives"):
        StackedRewards({"both": inner})(from_structures([NACL]))
    assert not inner.differentiable


def test_arguments_are_checked() -> None:
    potential = Table({})
    for wrong in ((1.0, -1.0), (0.0, 0.0), (1.0,)):
        with pytest.raises(ConfigError, match="clip"):
            StabilityReward(potential, hull(), clip=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ASECalculatorPotential wraps"):
        StabilityReward(3.0, hull())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a Hull"):
        StabilityReward(potential, 3.0)
    with pytest.raises(ConfigError, match="expected a dict of the tensors"):
        DensityReward()(torch.zeros(3, 2))
    with pytest.raises(ConfigError, match="Did you mean 'reserve'"):
        ScarcityReward("reserves")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="positive number"):
        DensityReward(target=0.0)
    assert take(from_structures([NACL]), slice(0, 0))["numbers"].shape == (0, 2)


def test_any_ase_calculator_is_a_reward():
    """Copper by effective-medium theory: 0 at the cell of least energy, minus the energy difference elsewhere."""
    from ase.calculators.emt import EMT

    def copper(edge):
        return Structure(Lattice(FACE * edge), ["Cu"], [[0, 0, 0]])

    crystals = from_structures([copper(edge) for edge in (3.59, 3.70, 3.50)])
    potential = ASECalculatorPotential(EMT)
    energies = potential.energies(crystals).energy
    reward = ASECalculatorReward(EMT, Hull.from_arrays([[29]], [float(energies[0])]))
    output = reward(crystals, None)
    torch.testing.assert_close(output.values, energies[0] - energies, rtol=0.0, atol=1e-6)
    assert output.valid.all() and float(output.values[1]) < -0.01
