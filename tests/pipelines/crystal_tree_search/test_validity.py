"""Validity against brute force, its thresholds, and what must not change it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase.data import covalent_radii
from pymatgen.core import Element, Lattice, Structure
from torch import Tensor

from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search.structures import concatenate, from_structures, take
from genkit.pipelines.crystal_tree_search.validity import (
    COVALENT_RADII,
    REASONS,
    ValidityRules,
    check_validity,
    neighbor_pairs,
    reduced_cells,
)


def sodium_chloride(length: float = 5.69) -> Structure:
    cell = (np.ones((3, 3)) - np.eye(3)) * length / 2
    return Structure(Lattice(cell), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]])


def crystals(*structures: Structure) -> dict[str, Tensor]:
    return from_structures(structures, 8)


def reasons(batch: dict[str, Tensor], rules: ValidityRules | None = None) -> list[str]:
    return [("valid", *REASONS)[code] for code in check_validity(batch, rules).reason.tolist()]


def random_cell(random: np.random.Generator, skew: int) -> np.ndarray:
    """A reasonable cell, written in vectors that are far from reduced."""
    cell = np.diag(random.uniform(3, 6, 3)) + random.normal(size=(3, 3)) * 0.4
    for _ in range(skew):
        i, j = random.choice(3, 2, replace=False)
        cell[i] += random.integers(-3, 4) * cell[j]
    return cell


@pytest.mark.parametrize("skew", [0, 3])
def test_neighbours_are_those_of_pymatgen(skew: int) -> None:
    random = np.random.default_rng(skew)
    for _ in range(10):
        atoms = int(random.integers(1, 6))
        cell, places = random_cell(random, skew), random.random((atoms, 3)) * 6 - 3
        _, _, _, expected = Structure(Lattice(cell), ["Na"] * atoms, places).get_neighbor_list(6.0, exclude_self=True)
        lattice, coordinates = torch.tensor(cell)[None], torch.tensor(places)[None]
        found = neighbor_pairs(lattice, coordinates, torch.ones(1, atoms, dtype=torch.bool), 6.0)
        np.testing.assert_allclose(np.sort(found.distance.repeat(2).numpy()), np.sort(expected), atol=1e-7)
        vectors = (coordinates[0, found.j] - coordinates[0, found.i] + found.image) @ lattice[0]
        torch.testing.assert_close(vectors, found.vector, rtol=0, atol=1e-8)


def test_reduction_keeps_the_lattice_and_shortens_it() -> None:
    random = np.random.default_rng(0)
    cells = torch.tensor(np.array([random_cell(random, 8) for _ in range(50)]))
    reduced, transform = reduced_cells(cells)
    assert torch.equal(transform, transform.round())
    torch.testing.assert_close(torch.linalg.det(transform).abs(), torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(transform @ cells, reduced)
    for cell, short in zip(cells, reduced, strict=True):
        niggli = Lattice(cell.numpy()).get_niggli_reduced_lattice()
        assert sorted(short.norm(dim=1).tolist()) == pytest.approx(sorted(niggli.abc), rel=1e-6)


def test_radii_are_those_that_ase_cites() -> None:
    np.testing.assert_allclose(COVALENT_RADII[1:], covalent_radii[1:97])


def test_verdicts_agree_with_brute_force_over_random_crystals() -> None:
    random, rules = np.random.default_rng(1), ValidityRules()
    structures = []
    for trial in range(60):
        atoms = int(random.integers(1, 7))
        kinds = random.choice(["Li", "O", "Cs", "Ti"], atoms)
        structures.append(Structure(Lattice(random_cell(random, trial % 5)), kinds, random.random((atoms, 3))))
    batch = crystals(*structures)
    found = check_validity(batch, rules)
    expected = []
    for one in structures:
        radii = np.array([covalent_radii[Element(s.specie.symbol).Z] for s in one])
        centre, neighbour, _, distance = one.get_neighbor_list(5.0, exclude_self=True)
        inside = 4 <= one.volume / len(one) <= 60
        apart = bool((distance >= 0.6 * (radii[centre] + radii[neighbour])).all())
        expected.append(inside and apart and set(centre) == set(range(len(one))))
    assert found.mask.tolist() == expected
    assert 5 < sum(expected) < 55
    assert sum(found.counts.values()) == 60 - sum(expected)


def test_a_clash_through_a_skewed_cell_is_seen() -> None:
    """Two atoms 0.5 A apart over images that the 27 nearest cells of the given vectors do not hold."""
    cell = np.array([[4.0, 0, 0], [0, 4.0, 0], [0, 0, 4.0]])
    skewed = np.array([[1, 0, 0], [5, 1, 0], [3, 4, 1]]) @ cell
    place = np.array([0, 0, 0.5]) @ np.linalg.inv(skewed)
    batch = crystals(Structure(Lattice(skewed), ["Na", "Na"], [[0, 0, 0], place]))
    assert reasons(batch) == ["too_close"]
    steps = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3), -1).reshape(-1, 3)
    nearest = np.linalg.norm((batch["coordinates"][0, 1].numpy() + steps) @ batch["lattice"][0].numpy(), axis=1).min()
    assert nearest > 0.6 * 2 * 1.66  # so a fixed set of 27 images would have passed it


def test_every_reason_is_found_and_counted() -> None:
    good = crystals(sodium_chloride())
    nan, flat, empty, unknown, left = (concatenate([good]) for _ in range(5))
    nan["coordinates"][0, 1, 2] = torch.nan
    flat["lattice"][0, 2] = flat["lattice"][0, 1]
    empty["mask"][:] = False
    unknown["numbers"][0, 0] = 110
    left["lattice"] = -left["lattice"]
    corner = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)][:7]) * 0.8 / 7.6
    lonely = Structure(Lattice.cubic(7.6), ["Be"] * 7 + ["Cs"], [*corner, [0.5, 0.5, 0.5]])
    batch = concatenate(
        [
            *(good, nan, flat, empty, unknown, left),
            crystals(sodium_chloride(3.0), sodium_chloride(8.5)),
            crystals(Structure(Lattice.cubic(4), ["Na", "Cl"], [[0, 0, 0], [0.2, 0, 0]]), lonely),
        ]
    )
    expected = ["valid", "not_finite", "singular_cell", "empty", "unknown_element", "singular_cell", "volume", "volume"]
    assert reasons(batch) == [*expected, "too_close", "isolated"]
    counts = check_validity(batch).counts
    assert counts["singular_cell"] == 2 and counts["isolated"] == 1 and sum(counts.values()) == 9


def test_thresholds_are_where_they_are_said_to_be() -> None:
    def cesium(length: float) -> dict[str, Tensor]:
        return crystals(Structure(Lattice.cubic(length), ["Na"], [[0, 0, 0]]))

    loose = ValidityRules(max_volume=1000.0)
    assert reasons(cesium(4.99), loose) == ["valid"] and reasons(cesium(5.01), loose) == ["isolated"]
    limit = 0.6 * 2 * 1.66
    assert reasons(cesium(limit + 1e-3)) == ["valid"] and reasons(cesium(limit - 1e-3)) == ["too_close"]
    for volume, verdict in ((59.9, "valid"), (60.1, "volume"), (4.1, "too_close"), (3.9, "volume")):
        assert reasons(cesium(volume ** (1 / 3))) == [verdict]


def test_translations_permutations_whole_cells_and_padding_change_nothing() -> None:
    random = np.random.default_rng(2)
    structures = [
        Structure(Lattice(random_cell(random, 0)), ["Li", "O", "Ti", "O"], random.random((4, 3))) for _ in range(30)
    ]
    batch = crystals(*structures)
    before = check_validity(batch).reason
    assert 0 < int((before == 0).sum()) < 30
    shifted = {**batch, "coordinates": batch["coordinates"] + torch.rand(30, 1, 3, generator=torch.Generator())}
    whole = {**batch, "coordinates": batch["coordinates"] + torch.randint(-3, 4, (30, 8, 3))}
    order = torch.tensor([2, 0, 3, 1, 4, 5, 6, 7])
    permuted = {**batch, "coordinates": batch["coordinates"][:, order], "numbers": batch["numbers"][:, order]}
    garbage = {**batch, "coordinates": batch["coordinates"].masked_fill(~batch["mask"].unsqueeze(-1), torch.nan)}
    for other in (shifted, whole, permuted, garbage):
        assert torch.equal(check_validity(other).reason, before)
    alone = torch.cat([check_validity(take(batch, slice(row, row + 1))).reason for row in range(30)])
    assert torch.equal(alone, before)


def test_rules_carry_a_version_and_fields_are_checked() -> None:
    rules = ValidityRules(version="mine", min_distance_ratio=0.9)
    found = check_validity(crystals(sodium_chloride()), rules)
    assert found.rules.version == "mine"
    with pytest.raises(ConfigError, match="expected a dict"):
        check_validity({"lattice": torch.eye(3)[None]})
    none = check_validity({key: value[:0] for key, value in crystals(sodium_chloride()).items()})
    assert none.mask.shape == (0,) and sum(none.counts.values()) == 0
