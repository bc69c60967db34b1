"""Space groups over a ladder of tolerances.

A generated crystal has no symmetry to within a tight tolerance, and everything has one to within a loose one, so a
single number says little: 0.02 A of rattling turns rock salt into P1 at 0.01 and leaves Fm-3m at 0.1. The ladder gives
the number at each tolerance.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from genkit.errors import ConfigError, nearest
from genkit.pipelines.crystal_tree_search.structures import check_crystals, optional_module

__all__ = [
    "CRYSTAL_SYSTEMS",
    "TOLERANCES",
    "SpaceGroupLadder",
    "SymmetryBackend",
    "crystal_system",
    "space_group_ladder",
]

SymmetryBackend = Literal["moyopy", "spglib"]

#: Angstrom, loose to tight.
TOLERANCES = (0.3, 0.1, 0.03, 0.01)

#: In the order of their space groups; index 0 is "unknown".
CRYSTAL_SYSTEMS = (
    "unknown",
    "triclinic",
    "monoclinic",
    "orthorhombic",
    "tetragonal",
    "trigonal",
    "hexagonal",
    "cubic",
)
_LAST = (0, 2, 15, 74, 142, 167, 194, 230)


@dataclass(frozen=True)
class SpaceGroupLadder:
    """Space groups of B crystals at T tolerances.

    Args:
        numbers: (B, T) int64, 1 to 230; 0 where none was found.
        tolerances: T lengths in Angstrom.
        backend: what found them, with its version.
    """

    numbers: Tensor
    tolerances: tuple[float, ...]
    backend: str

    def at(self, tolerance: float) -> Tensor:
        """(B,) numbers at one tolerance of the ladder.

        Raises:
            ConfigError: a tolerance that the ladder does not have.
        """
        if tolerance not in self.tolerances:
            raise ConfigError(f"tolerance={tolerance}; the ladder has {', '.join(map(str, self.tolerances))}")
        return self.numbers[:, self.tolerances.index(tolerance)]


def crystal_system(numbers: Tensor) -> Tensor:
    """Index into ``CRYSTAL_SYSTEMS`` of space group numbers (0 for 0), of any shape."""
    return torch.bucketize(numbers.contiguous(), torch.tensor(_LAST, device=numbers.device))


def space_group_ladder(
    crystals: Mapping[str, Tensor],
    tolerances: Sequence[float] = TOLERANCES,
    *,
    backend: SymmetryBackend = "moyopy",
    select: Tensor | None = None,
) -> SpaceGroupLadder:
    """Space group numbers at every tolerance; what one library cannot tell, the other is asked for.

    Args:
        crystals: B of them.
        tolerances: positive, Angstrom.
        backend: asked first.
        select: (B,) bool; the other rows are 0. None: all.

    Raises:
        ConfigError: an unknown backend, or a tolerance that is not positive.
        MissingExtraError: neither library is installed.
    """
    if backend not in get_args(SymmetryBackend):
        known = get_args(SymmetryBackend)
        raise ConfigError(f"backend={backend!r}; expected one of {', '.join(known)}.{nearest(backend, known)}")
    steps = tuple(float(one) for one in tolerances)
    if not steps or not all(0 < one < math.inf for one in steps):
        raise ConfigError(f"tolerances={tolerances!r}; expected positive lengths in Angstrom, such as {TOLERANCES}")
    size, _ = check_crystals(crystals)
    first, second = _FINDERS[backend], _FINDERS["spglib" if backend == "moyopy" else "moyopy"]
    lattices, coordinates = crystals["lattice"].double().cpu(), crystals["coordinates"].double().cpu()
    kinds, masks = crystals["numbers"].cpu(), crystals["mask"].bool().cpu()
    wanted = torch.ones(size, dtype=torch.bool) if select is None else select.bool().cpu()
    numbers = torch.zeros(size, len(steps), dtype=torch.int64)
    for row in torch.nonzero(wanted).squeeze(1).tolist():
        cell = lattices[row], coordinates[row][masks[row]], kinds[row][masks[row]]
        if not _sound(*cell):
            continue
        parts = tuple(part.tolist() for part in cell)
        for column, tolerance in enumerate(steps):
            numbers[row, column] = first(parts, tolerance) or second(parts, tolerance)
    return SpaceGroupLadder(numbers, steps, f"{backend} {getattr(optional_module(backend), '__version__', '?')}")


def _sound(lattice: Tensor, coordinates: Tensor, numbers: Tensor) -> bool:
    finite = bool(torch.isfinite(lattice).all()) and bool(torch.isfinite(coordinates).all())
    return finite and len(numbers) > 0 and float(torch.linalg.det(lattice).abs()) > 1e-6


def _by_moyopy(cell: tuple[Any, ...], tolerance: float) -> int:
    moyopy = optional_module("moyopy")
    try:
        return int(moyopy.MoyoDataset(moyopy.Cell(*cell), symprec=tolerance).number)
    except (ValueError, RuntimeError):  # no primitive cell to be found at this tolerance, say
        return 0


def _by_spglib(cell: tuple[Any, ...], tolerance: float) -> int:
    spglib = optional_module("spglib")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of how it will report errors one day
            dataset = spglib.get_symmetry_dataset(cell, symprec=tolerance)
    except Exception:  # an error class that only newer versions have
        return 0
    return 0 if dataset is None else int(dataset.number)


_FINDERS = {"moyopy": _by_moyopy, "spglib": _by_spglib}
