"""Which crystals may be given to a potential: one function, vectorised, versioned, with a count of every reason.

The rules come before any energy, because potentials give wild energies of both signs for clashing atoms, and raise or
extrapolate for isolated ones. Reported shares of valid structures depend on whose rules they are, so the rules travel
with every number that they made (:class:`ValidityRules`).

Distances are exact over all periodic images: the cell is reduced first, then as many images are taken as the cutoff
needs (plane spacings), so skewed cells are no special case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from genkit.pipelines.crystal_tree_search.structures import check_crystals

__all__ = [
    "COVALENT_RADII",
    "REASONS",
    "Neighbors",
    "Validity",
    "ValidityRules",
    "check_validity",
    "neighbor_pairs",
    "reduced_cells",
]

#: Covalent radii in Angstrom by atomic number, 0 for none (Cordero et al., Dalton Trans. 2008, 2832).
COVALENT_RADII = (
    0.0, 0.31, 0.28,
    1.28, 0.96, 0.84, 0.76, 0.71, 0.66, 0.57, 0.58,
    1.66, 1.41, 1.21, 1.11, 1.07, 1.05, 1.02, 1.06,
    2.03, 1.76, 1.70, 1.60, 1.53, 1.39, 1.39, 1.32, 1.26, 1.24, 1.32, 1.22, 1.22, 1.20, 1.19, 1.20, 1.20, 1.16,
    2.20, 1.95, 1.90, 1.75, 1.64, 1.54, 1.47, 1.46, 1.42, 1.39, 1.45, 1.44, 1.42, 1.39, 1.39, 1.38, 1.39, 1.40,
    2.44, 2.15, 2.07, 2.04, 2.03, 2.01, 1.99, 1.98, 1.98, 1.96, 1.94, 1.92, 1.92, 1.89, 1.90, 1.87, 1.87, 1.75, 1.70,
    1.62, 1.51, 1.44, 1.41, 1.36, 1.36, 1.32, 1.45, 1.46, 1.48, 1.40, 1.50, 1.50,
    2.60, 2.21, 2.15, 2.06, 2.00, 1.96, 1.90, 1.87, 1.80, 1.69,
)  # fmt: skip

#: Why a crystal is refused, in the order of the checks; the first that applies is counted.
REASONS = ("not_finite", "empty", "unknown_element", "singular_cell", "volume", "too_close", "isolated")

#: Candidate pairs held at once.
_CHUNK = 2**20


@dataclass(frozen=True)
class ValidityRules:
    """The thresholds of :func:`check_validity`; change one, and give another ``version``.

    Args:
        version: of these thresholds, for the record.
        min_volume: per atom, Angstrom^3.
        max_volume: per atom, Angstrom^3.
        min_distance_ratio: two atoms may not be nearer than this times the sum of their covalent radii.
        isolation_radius: every atom needs a neighbour within it, Angstrom.
        max_length: of a vector of the reduced cell, Angstrom.
        max_energy: |energy| per atom, eV; what judges energies applies it (:mod:`.rewards`).
    """

    version: str = "1"
    min_volume: float = 4.0
    max_volume: float = 60.0
    min_distance_ratio: float = 0.6
    isolation_radius: float = 5.0
    max_length: float = 1000.0
    max_energy: float = 15.0


@dataclass(frozen=True)
class Validity:
    """What :func:`check_validity` says.

    Args:
        mask: (B,) bool, True where a crystal is valid.
        reason: (B,) int64, 0 where valid, else 1 + the position in ``REASONS`` of the first reason.
        rules: the thresholds.
    """

    mask: Tensor
    reason: Tensor
    rules: ValidityRules = field(default_factory=ValidityRules)

    @property
    def counts(self) -> dict[str, int]:
        """How many crystals each reason refused; every reason is named."""
        found = torch.bincount(self.reason, minlength=len(REASONS) + 1).tolist()
        return dict(zip(REASONS, found[1:], strict=True))


def check_validity(crystals: Mapping[str, Tensor], rules: ValidityRules | None = None) -> Validity:
    """Which crystals are physically sensible, and why the others are not.

    Args:
        crystals: B crystals, see :mod:`.structures`.
        rules: thresholds; None: the defaults.

    Raises:
        ConfigError: fields of another shape.
    """
    check_crystals(crystals)
    rules = rules or ValidityRules()
    lattice, coordinates = crystals["lattice"].detach().double(), crystals["coordinates"].detach().double()
    numbers, mask = crystals["numbers"], crystals["mask"].bool()
    reason = _cheap_reasons(lattice, coordinates, numbers, mask, rules)
    rows = torch.nonzero(reason == 0).squeeze(1)
    if len(rows):
        reason[rows] = _distance_reasons(lattice[rows], coordinates[rows], numbers[rows], mask[rows], rules)
    return Validity(reason == 0, reason, rules)


def _code(name: str) -> int:
    return 1 + REASONS.index(name)


def _cheap_reasons(lattice: Tensor, coordinates: Tensor, numbers: Tensor, mask: Tensor, rules: ValidityRules) -> Tensor:
    """(B,) codes of everything but distances."""
    finite = torch.isfinite(lattice).flatten(1).all(1) & (torch.isfinite(coordinates).all(-1) | ~mask).all(1)
    count = mask.sum(1)
    known = (((numbers >= 1) & (numbers < len(COVALENT_RADII))) | ~mask).all(1)
    volume = torch.linalg.det(torch.where(finite[:, None, None], lattice, torch.zeros_like(lattice)))
    longest = lattice.norm(dim=-1).amax(-1)
    per_atom = volume / count.clamp_min(1)
    checks = {
        "volume": (per_atom >= rules.min_volume) & (per_atom <= rules.max_volume),
        "singular_cell": (volume > 1e-6) & (longest <= rules.max_length),
        "unknown_element": known,
        "empty": count > 0,
        "not_finite": finite,
    }
    reason = torch.zeros(len(lattice), dtype=torch.int64, device=lattice.device)
    for name, passed in checks.items():  # the first check of REASONS comes last, so it wins
        reason = torch.where(passed, reason, torch.full_like(reason, _code(name)))
    return reason


def _distance_reasons(
    lattice: Tensor, coordinates: Tensor, numbers: Tensor, mask: Tensor, rules: ValidityRules
) -> Tensor:
    """(B,) codes of crystals that passed everything else."""
    radii = lattice.new_tensor(COVALENT_RADII)[numbers.where(mask, torch.zeros_like(numbers))]
    reason = torch.zeros(len(lattice), dtype=torch.int64, device=lattice.device)
    # vectors of the reduced cell join an atom to its own image: cells of short ones would need very many images
    shortest = reduced_cells(lattice)[0].norm(dim=-1).amin(-1)
    smallest = radii.where(mask, torch.full_like(radii, torch.inf)).amin(1)
    reason[shortest < 2 * rules.min_distance_ratio * smallest] = _code("too_close")
    rows = torch.nonzero(reason == 0).squeeze(1)
    if not len(rows):
        return reason
    largest = 2 * rules.min_distance_ratio * float(radii.max())
    pairs = neighbor_pairs(lattice[rows], coordinates[rows], mask[rows], max(largest, rules.isolation_radius))
    allowed = rules.min_distance_ratio * (radii[rows[pairs.crystal], pairs.i] + radii[rows[pairs.crystal], pairs.j])
    near = pairs.distance <= rules.isolation_radius
    joined = torch.zeros_like(mask[rows])
    joined[pairs.crystal[near], pairs.i[near]] = True
    joined[pairs.crystal[near], pairs.j[near]] = True
    reason[rows[~(joined | ~mask[rows]).all(1)]] = _code("isolated")
    reason[rows[pairs.crystal[pairs.distance < allowed]]] = _code("too_close")
    return reason


# --- distances over periodic images -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Neighbors:
    """Pairs of atoms nearer than a cutoff, each once: (i < j, any image) and (i = j, half of the images).

    Args:
        crystal: (E,) int64, row of the batch.
        i: (E,) int64, an atom.
        j: (E,) int64, its neighbour.
        image: (E, 3) int64, the lattice translation of j, in the vectors of the given cell.
        vector: (E, 3) float64, from i to j, Angstrom.
        distance: (E,) float64, Angstrom.
    """

    crystal: Tensor
    i: Tensor
    j: Tensor
    image: Tensor
    vector: Tensor
    distance: Tensor


def neighbor_pairs(lattice: Tensor, coordinates: Tensor, mask: Tensor, cutoff: float) -> Neighbors:
    """All pairs within ``cutoff``, over every periodic image that it reaches.

    Args:
        lattice: (B, 3, 3) rows, not singular.
        coordinates: (B, N, 3) fractional, any integers added.
        mask: (B, N) bool, atoms first.
        cutoff: Angstrom.

    Two atoms on the same place have distance 0 and are a pair.
    """
    lattice, coordinates = lattice.double(), coordinates.double()
    cells, transform = reduced_cells(lattice)
    inverse = torch.linalg.inv(cells)
    reach = (cutoff * inverse.norm(dim=-2) + 0.5 + 1e-9).floor().long()  # images along each vector, coordinates wrapped
    reduced = torch.linalg.solve(transform, coordinates, left=False)
    parts = [
        _pairs_of(rows, cells[rows], reduced[rows], mask[rows], reach[rows], cutoff)
        for rows in _chunks(mask.sum(1), reach)
    ]
    joined = [torch.cat(columns) for columns in zip(*parts, strict=True)] if parts else _no_pairs(lattice)
    crystal, i, j, translation, vector = joined
    # translations are relative to coordinates as given, in the vectors of the given cell
    image = (translation.unsqueeze(1) @ transform[crystal]).squeeze(1).round().long()
    return Neighbors(crystal, i, j, image, vector, vector.norm(dim=1))


def _no_pairs(like: Tensor) -> list[Tensor]:
    none = torch.zeros(0, dtype=torch.int64, device=like.device)
    return [none, none, none, like.new_zeros(0, 3), like.new_zeros(0, 3)]


def _chunks(count: Tensor, reach: Tensor) -> Iterator[Tensor]:
    """Rows in order, as many at once as ``_CHUNK`` candidates allow, one at least."""
    candidates = (count * (count + 1) // 2 * (2 * reach + 1).prod(1)).tolist()
    start, total = 0, 0
    for row, number in enumerate(candidates):
        if row > start and total + number > _CHUNK:
            yield torch.arange(start, row, device=count.device)
            start, total = row, 0
        total += number
    if candidates:
        yield torch.arange(start, len(candidates), device=count.device)


def _pairs_of(
    rows: Tensor, cells: Tensor, coordinates: Tensor, mask: Tensor, reach: Tensor, cutoff: float
) -> tuple[Tensor, ...]:
    """(crystal, i, j, translation (E, 3), vector (E, 3)) of some rows; candidates are enumerated as one flat list."""
    count, width = mask.sum(1), 2 * reach + 1
    images = width.prod(1)
    candidates = count * (count + 1) // 2 * images
    local = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), candidates)
    rank = torch.arange(len(local), device=rows.device) - (candidates.cumsum(0) - candidates)[local]
    pair, image = rank // images[local], rank % images[local]
    # pairs i <= j counted as j (j + 1) / 2 + i: the same numbers whatever the size of the crystal
    j_of, i_of = torch.tril_indices(mask.shape[1], mask.shape[1], device=rows.device)
    i, j = i_of[pair], j_of[pair]
    span = width[local]
    steps = torch.stack((image // (span[:, 1] * span[:, 2]), image // span[:, 2] % span[:, 1], image % span[:, 2]), 1)
    steps = steps - reach[local]
    difference = coordinates[local, j] - coordinates[local, i]
    nearest = difference.round()
    vector = ((difference - nearest + steps).unsqueeze(1) @ cells[local]).squeeze(1)
    # a self-pair and its opposite are one: keep the one of positive order, which leaves the atom itself out too
    ahead = image > (images[local] - 1) // 2
    kept = (vector.square().sum(1) <= cutoff**2) & ((i != j) | ahead)
    return rows[local[kept]], i[kept], j[kept], (steps - nearest)[kept], vector[kept]


def reduced_cells(lattice: Tensor, sweeps: int = 100) -> tuple[Tensor, Tensor]:
    """Cells of short vectors of the same lattices, and the integer matrices T (B, 3, 3) with reduced = T @ lattice.

    Vectors lose multiples of one another, and sums of two others, as long as one gets shorter. This bounds the number
    of images; no distance depends on how far it comes.

    Args:
        lattice: (B, 3, 3) rows, float64, not singular.
        sweeps: at most.
    """
    cells = lattice.clone()
    transform = torch.eye(3, dtype=lattice.dtype, device=lattice.device).expand_as(lattice).clone()
    for _ in range(sweeps):
        before = cells.square().sum((1, 2))
        for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1), (1, 0, 2), (2, 1, 0)):
            multiple = ((cells[:, i] * cells[:, j]).sum(1) / cells[:, j].square().sum(1)).round()
            _shorten(cells, transform, i, {j: multiple})
            for sign in (1.0, -1.0):
                ones = torch.ones_like(multiple)
                _shorten(cells, transform, i, {j: ones, k: sign * ones})
                _shorten(cells, transform, i, {j: -ones, k: sign * ones})
        if not bool((cells.square().sum((1, 2)) < before * (1 - 1e-9)).any()):
            break
    return transform @ lattice, transform


def _shorten(cells: Tensor, transform: Tensor, i: int, multiples: Mapping[int, Tensor]) -> None:
    """Vector i minus multiples of others, in place, in the rows where that is shorter."""
    vector, change = cells[:, i].clone(), transform[:, i].clone()
    for j, multiple in multiples.items():
        vector -= multiple.unsqueeze(1) * cells[:, j]
        change -= multiple.unsqueeze(1) * transform[:, j]
    better = (vector.square().sum(1) < cells[:, i].square().sum(1) * (1 - 1e-9)).unsqueeze(1)
    cells[:, i] = torch.where(better, vector, cells[:, i])
    transform[:, i] = torch.where(better, change, transform[:, i])
