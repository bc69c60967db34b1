"""The shipped set of small crystals: decorated prototypes of up to 8 atoms and 27 elements, judged by CHGNet.

Shapes are known prototypes (AFLOW, JARVIS minerals, robocrys), elements are 20 cations and 7 anions in charge-neutral
choices, all with two elements and a share of the others; what lay near the convex hull at its best volume was relaxed
by a few steps of CHGNet 0.3.0. Energies belong to the crystals as stored, and distances to the hull of these very
energies: no measured structure, no density-functional energy, and a hull that knows these crystals only.
``build_proto8.py`` makes the file.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_count
from genkit.errors import ConfigError, nearest
from genkit.pipelines.crystal_tree_search.hull import element_symbols
from genkit.pipelines.crystal_tree_search.structures import take
from genkit.samplers.noise import Keys

__all__ = [
    "METASTABLE",
    "STABLE",
    "TEST_SHARE",
    "Proto8",
    "Proto8Hull",
    "element_crystals",
    "in_test_split",
    "known_crystals",
    "load_hull",
    "metadata",
    "proto8_sha256",
    "reduced_formula",
    "stability_bin",
]

STABLE, METASTABLE = 0.03, 0.1  # eV/atom above the hull: upper ends of the bins 1 and 2
TEST_SHARE = 0.1  # of the formulas
_PLACES = ((0, 5, 4), (5, 1, 3), (4, 3, 2))  # of xx, yy, zz, yz, xz, xy in the symmetric cell


@lru_cache(maxsize=1)
def _table() -> dict[str, np.ndarray]:
    packed = files(__package__).joinpath("proto8.npz").read_bytes()
    with np.load(io.BytesIO(packed)) as table:  # plain arrays only: numpy refuses all else unless asked
        return {name: table[name] for name in table.files}


def proto8_sha256() -> str:
    """The hash of the packed set."""
    return hashlib.sha256(files(__package__).joinpath("proto8.npz").read_bytes()).hexdigest()


def metadata() -> dict[str, Any]:
    """Sources, versions, thresholds and the counts at every filter."""
    found: dict[str, Any] = json.loads(str(_table()["metadata"]))
    return found


def reduced_formula(numbers: Sequence[int]) -> str:
    """Symbols in order of the atomic number, with the least whole amounts; zeros (padding) are passed over.

    ``reduced_formula([17, 17, 11, 11, 0])`` is ``"NaCl"``.
    """
    symbols, present = element_symbols(), sorted(int(n) for n in numbers if n)
    amounts = {number: present.count(number) for number in present}
    common = gcd(*amounts.values())
    return "".join(
        symbols[number] + (str(amount // common) if amount > common else "") for number, amount in amounts.items()
    )


def in_test_split(formula: str) -> bool:
    """Whether a reduced formula is held out: decided by its text alone, so a formula is never in both splits."""
    digest = hashlib.blake2b(formula.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") < TEST_SHARE * 2**48


def stability_bin(e_above_hull: Tensor) -> Tensor:
    """1 up to ``STABLE``, 2 up to ``METASTABLE``, 3 above, int64 of the same shape, from eV/atom."""
    ends = torch.tensor([STABLE, METASTABLE], dtype=torch.float64)
    return torch.bucketize(e_above_hull.to(torch.float64).contiguous(), ends) + 1


@dataclass(frozen=True)
class Proto8Hull:
    """What the hull of the set is made of, in CHGNet energies.

    Args:
        elements: atomic number → energy of the element's best crystal, eV/atom.
        numbers: int64 (M, 8), atoms of a reduced formula, 0 at padding.
        energies: float64 (M,), the lowest energy of each formula, eV/atom.
    """

    elements: dict[int, float]
    numbers: Tensor
    energies: Tensor

    @property
    def compositions(self) -> Tensor:
        """Shares of the elements in each formula, float64 (M, K), columns in order of the atomic number."""
        counts = (self.numbers.unsqueeze(-1) == torch.tensor(list(self.elements))).sum(1).to(torch.float64)
        return counts / counts.sum(1, keepdim=True)


def load_hull() -> Proto8Hull:
    """The elements and the lowest crystal of every formula within the tail of the hull.

    All that lie on the hull are among them, also those of the other split: a hull is a fact of the potential.
    """
    table = _table()
    kinds = torch.from_numpy(table["elements"].astype(np.int64))
    counts = torch.from_numpy(table["hull_compositions"].astype(np.int64))
    width = int(table["numbers"].shape[1])
    numbers = torch.zeros(len(counts), width, dtype=torch.int64)
    for row, amounts in enumerate(counts):
        atoms = kinds.repeat_interleave(amounts)
        numbers[row, : len(atoms)] = atoms
    energies = table["element_energies"].astype(np.float64).tolist()
    return Proto8Hull(
        elements=dict(zip(kinds.tolist(), energies, strict=True)),
        numbers=numbers,
        energies=torch.from_numpy(table["hull_energies"].astype(np.float64)),
    )


def element_crystals() -> dict[str, Tensor]:
    """The crystal of least CHGNet energy of each element, a batch in order of the number (see :mod:`.structures`).

    They are the ends of the hull, and no part of the set: with :meth:`.hull.Hull.from_potential` they and the set make
    the hull of another potential.
    """
    table = _table()
    six, coordinates = torch.from_numpy(table["element_lattice"]), torch.from_numpy(table["element_coordinates"])
    mask = torch.arange(coordinates.shape[1]) < torch.from_numpy(table["element_sizes"].astype(np.int64)).unsqueeze(1)
    numbers = torch.from_numpy(table["elements"].astype(np.int64)).unsqueeze(1) * mask
    return {"lattice": six[:, torch.tensor(_PLACES)], "coordinates": coordinates, "numbers": numbers, "mask": mask}


def known_crystals() -> dict[str, Tensor]:
    """All crystals of the set, both splits, as a batch (see :mod:`.structures`): what novelty is judged against."""
    return take(Proto8("all", augment=False).fields, slice(None))


class Proto8:
    r"""The crystals as a map-style data set: ``data[LongTensor (b,)]`` gives a dict of tensors.

    ``lattice`` float32 (b, 3, 3), symmetric positive definite, rows are lattice vectors in Angstrom;
    ``coordinates`` float32 (b, 8, 3) in [0, 1); ``numbers`` int64 (b, 8); ``mask`` bool (b, 8), atoms first;
    ``space_group`` int64 (b,), 1 to 230; ``stability`` int64 (b,), see :func:`stability_bin`.

    Args:
        split: ``"train"``, ``"test"`` (a tenth of the reduced formulas) or ``"all"``.
        augment: whether each crystal is shifted as a whole by a random vector. A row's shift depends on ``seed`` and
            its index alone, so every read of an index gives the same crystal.
        seed: of the shifts, an integer >= 0.
        copies: how often the set is repeated, each time with other shifts; above 1 it needs ``augment``.

    Attributes:
        elements: the K atomic numbers of the whole set, increasing.
        rows: int64 (m,), places in the file.  formulas: m reduced formulas.  prototypes: m AFLOW labels.
        energy, e_above_hull: float32 (m,), eV/atom.
        density: atoms per Å³, all atoms over all volume.
        size_counts: int64 (9,), crystals of n atoms.  space_group_counts: int64 (231,), by space group number.

    Raises:
        ConfigError: an unknown split, a negative seed, copies without shifts.
        IndexError: an index outside the set.
    """

    def __init__(self, split: str = "train", *, augment: bool = True, seed: int = 0, copies: int = 1) -> None:
        known = ("train", "test", "all")
        if split not in known:
            raise ConfigError(f"split must be one of {', '.join(known)}, got {split!r}.{nearest(str(split), known)}")
        self.seed = checked_count("seed", seed, "an integer >= 0", 0)
        self.copies = checked_count("copies", copies)
        if self.copies > 1 and not augment:
            raise ConfigError(
                f"copies={copies} of crystals that are not shifted are equal; set augment=True or copies=1"
            )
        self.split, self.augment = split, bool(augment)
        table = _table()
        formulas = [reduced_formula(numbers) for numbers in table["numbers"].tolist()]
        chosen = [i for i, f in enumerate(formulas) if split == "all" or in_test_split(f) == (split == "test")]
        self.rows = torch.tensor(chosen, dtype=torch.int64)
        self.formulas = tuple(formulas[i] for i in chosen)
        labels = table["prototype_labels"].tolist()
        self.prototypes = tuple(labels[table["prototype"][i]] for i in chosen)
        self.elements = tuple(int(z) for z in table["elements"])
        self._read(table)

    def _read(self, table: dict[str, np.ndarray]) -> None:
        rows = self.rows.numpy()
        six = torch.from_numpy(table["lattice"][rows])
        self.energy = torch.from_numpy(table["energy"][rows])
        self.e_above_hull = torch.from_numpy(table["e_above_hull"][rows])
        numbers = torch.from_numpy(table["numbers"][rows].astype(np.int64))
        self.fields = {
            "lattice": six[:, torch.tensor(_PLACES)],
            "coordinates": torch.from_numpy(table["coordinates"][rows]),
            "numbers": numbers,
            "mask": numbers > 0,
            "space_group": torch.from_numpy(table["space_group"][rows].astype(np.int64)),
            "stability": stability_bin(self.e_above_hull),
        }

    def __len__(self) -> int:
        return self.copies * len(self.rows)

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        wanted = torch.as_tensor(index, dtype=torch.int64)
        if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(self):
            raise IndexError(f"indices {int(wanted.min())} to {int(wanted.max())} of {len(self)} crystals")
        flat = wanted.reshape(-1)
        found = {name: values[flat % len(self.rows)] for name, values in self.fields.items()}
        if self.augment:
            found["coordinates"] = self._shifted(found["coordinates"], found["mask"], flat)
        return found if wanted.ndim else {name: values[0] for name, values in found.items()}

    def _shifted(self, coordinates: Tensor, mask: Tensor, index: Tensor) -> Tensor:
        keys = Keys(torch.full_like(index, self.seed), index, torch.zeros((), dtype=torch.int64), "crystal shift")
        moved = (coordinates.to(torch.float64) + keys.uniform((3,)).unsqueeze(1)).remainder(1.0).to(torch.float32)
        # just below 1 rounds to 1 in float32
        return torch.where(mask.unsqueeze(-1) & (moved < 1.0), moved, torch.zeros_like(moved))

    @property
    def density(self) -> float:
        """Number density ρ, all atoms over all volume, in atoms per Å³."""
        volume = torch.linalg.det(self.fields["lattice"].to(torch.float64)).sum()
        return float(self.fields["mask"].sum() / volume)

    @property
    def size_counts(self) -> Tensor:
        """Crystals of n atoms, int64 (9,), n = 0 to 8."""
        return torch.bincount(self.fields["mask"].sum(1), minlength=self.fields["mask"].shape[1] + 1)

    @property
    def space_group_counts(self) -> Tensor:
        """Crystals by the number of their space group, int64 (231,); place 0 is empty."""
        return torch.bincount(self.fields["space_group"], minlength=231)
