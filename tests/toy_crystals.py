"""Crystals that tests can make: two structure types of alkali halides, and random triclinic cells."""

from __future__ import annotations

import torch
from torch import Tensor

from genkit.pipelines.crystal_tree_search.structures import polar_lattice

CATION_RADII = {3: 0.76, 11: 1.02, 19: 1.38, 37: 1.52}
ANION_RADII = {9: 1.33, 17: 1.81, 35: 1.96}
_FCC = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])


def polar_cells(cells: Tensor) -> Tensor:
    """The symmetric matrices (B, 3, 3) of cells without atoms."""
    return polar_lattice(cells, torch.zeros(len(cells), 0, 3))[0]


def alkali_halides(count: int = 256, max_atoms: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """Rocksalt (225) and CsCl (221) primitive cells whose ions touch; 1 % noise on the bond, random origin."""
    generator = torch.Generator().manual_seed(seed)
    pick = [torch.randint(0, n, (count,), generator=generator) for n in (len(CATION_RADII), len(ANION_RADII), 2)]
    cations, anions = torch.tensor(list(CATION_RADII)), torch.tensor(list(ANION_RADII))
    radii = torch.zeros(100)
    for number, radius in (CATION_RADII | ANION_RADII).items():
        radii[number] = radius
    numbers = torch.zeros(count, max_atoms, dtype=torch.int64)
    numbers[:, 0], numbers[:, 1] = cations[pick[0]], anions[pick[1]]
    bond = radii[numbers].sum(1) * (1.0 + 0.01 * torch.randn(count, generator=generator))
    rocksalt, cubic = polar_cells(_FCC[None])[0], torch.eye(3) * 2.0 / 3**0.5
    shape = torch.where((pick[2] == 0)[:, None, None], rocksalt, cubic)
    mask = torch.arange(max_atoms).expand(count, -1) < 2
    origin = torch.rand(count, 1, 3, generator=generator)
    coordinates = torch.remainder(origin + torch.tensor([0.0, 0.5]).reshape(1, 2, 1), 1.0)
    padded = torch.zeros(count, max_atoms, 3)
    padded[:, :2] = coordinates
    group = torch.where(pick[2] == 0, 225, 221)
    stability = 1 + (numbers[:, 0] > 11).long()
    return {
        "lattice": shape * bond[:, None, None],
        "coordinates": padded,
        "numbers": numbers,
        "mask": mask,
        "space_group": group,
        "stability": stability,
    }


def random_crystals(
    count: int, max_atoms: int = 5, elements: tuple[int, ...] = (3, 8, 22), seed: int = 0
) -> dict[str, Tensor]:
    """Triclinic cells of 1 to ``max_atoms`` atoms anywhere."""
    generator = torch.Generator().manual_seed(seed)
    cells = 4.0 * torch.eye(3) + torch.randn(count, 3, 3, generator=generator)
    sizes = torch.randint(1, max_atoms + 1, (count, 1), generator=generator)
    mask = torch.arange(max_atoms) < sizes
    chosen = torch.randint(0, len(elements), (count, max_atoms), generator=generator)
    coordinates = torch.rand(count, max_atoms, 3, generator=generator)
    return {
        "lattice": polar_cells(cells),
        "coordinates": torch.where(mask[..., None], coordinates, 0.0),
        "numbers": torch.where(mask, torch.tensor(elements)[chosen], 0),
        "mask": mask,
    }


def bond_errors(crystals: dict[str, Tensor]) -> Tensor:
    """|d/d_0 − 1| of the first two atoms, (B,): their shortest distance against the sum of the radii."""
    from genkit.pipelines.crystal_tree_search.model import PairGeometry

    f = crystals["coordinates"]
    delta = f.unsqueeze(1) - f.unsqueeze(2)
    distance = PairGeometry().distances(delta - delta.round(), crystals["lattice"])[:, 0, 1]
    radii = torch.zeros(100)
    for number, radius in (CATION_RADII | ANION_RADII).items():
        radii[number] = radius
    return (distance / radii[crystals["numbers"][:, :2]].sum(1) - 1.0).abs()
