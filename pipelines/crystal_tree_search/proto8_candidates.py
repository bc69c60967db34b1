"""Which crystals ``build_proto8`` judges: prototypes of three libraries, and elements on their sites.

Unique prototypes with at most 8 atoms in the primitive cell come from pymatgen's AFLOW library, from JARVIS minerals
and from robocrys; every charge-neutral decoration with 20 cations and 7 anions is a candidate. Elemental crystals, for
the ends of the hull, are the unary prototypes and the crystals of matcalc.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import math
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from genkit.errors import ConfigError, MissingExtraError
from genkit.pipelines.crystal_tree_search.structures import optional_module

__all__ = [
    "Candidate",
    "Prototype",
    "atomic_number",
    "candidates",
    "element_references",
    "elementals",
    "make_structure",
    "prototypes",
    "symmetry",
    "uniform",
    "worth_judging",
]

CHARGES = {
    **dict.fromkeys(("Li", "Na", "K", "Rb"), 1),
    **dict.fromkeys(("Mg", "Ca", "Sr", "Ba", "Zn"), 2),
    **dict.fromkeys(("Al", "Ga", "Y", "La", "Sc"), 3),
    **dict.fromkeys(("Ti", "Zr", "Hf", "Sn"), 4),
    **dict.fromkeys(("Nb", "Ta"), 5),
    **dict.fromkeys(("O", "S", "Se"), -2),
    **dict.fromkeys(("F", "Cl", "Br"), -1),
    "N": -3,
}
MAX_ATOMS, MAX_SOURCE_ATOMS = 8, 200
SHARE, QUATERNARY_SHARE = 0.45, 0.05  # of the candidates with three elements or more; of those, with four or more
STAND_INS = ("Al", "Br", "Cl", "F", "Ga", "K", "Li", "Mg")  # rising in the alphabet, as AFLOW labels order the kinds
SYMPREC = 0.05  # Angstrom, of the sources
PACKING = 1.35  # v0 over the volume of the ions' spheres
SCALES = np.geomspace(1.0, 2.6, 10)  # of v0
ELEMENT_SCALES = np.geomspace(0.7, 1.5, 10)  # of the volume per atom of the element's best known crystal
OWN_SCALES = np.geomspace(0.8, 1.25, 7)  # of an elemental crystal's own volume
MAX_ELEMENT_ATOMS = 64


@dataclass(frozen=True)
class Prototype:
    """A crystal shape: which sites hold the same kind of atom.

    Args:
        label: AFLOW label without elements, such as ``AB_cF8_225_a_b``.
        source: where it is from.
        space_group: 1 to 230.
        lattice: rows are the vectors in Angstrom, (3, 3).
        kinds: the kind 0, 1, ... of each site, (n,).
        coordinates: fractional, (n, 3).
    """

    label: str
    source: str
    space_group: int
    lattice: np.ndarray
    kinds: tuple[int, ...]
    coordinates: np.ndarray


@dataclass(frozen=True)
class Candidate:
    """Elements on the kinds of sites of a prototype, with the base volume in Angstrom^3 and the scales to try."""

    prototype: Prototype
    species: tuple[str, ...]
    base_volume: float
    scales: np.ndarray

    @property
    def key(self) -> str:
        """What names the candidate, and decides its fate in keyed choices."""
        return f"{self.prototype.label}|{'-'.join(self.species)}"

    def structure(self, volume: float) -> Any:
        """A pymatgen ``Structure`` of that volume in Angstrom^3."""
        lattice = optional_module("pymatgen.core").Lattice(self.prototype.lattice).scale(volume)
        species = [self.species[kind] for kind in self.prototype.kinds]
        return make_structure(lattice, species, self.prototype.coordinates)

    @property
    def numbers(self) -> list[int]:
        """Atomic number of each site."""
        return [atomic_number(self.species[kind]) for kind in self.prototype.kinds]


def make_structure(lattice: Any, species: Any, coordinates: Any, **options: Any) -> Any:
    """A pymatgen ``Structure``."""
    return optional_module("pymatgen.core").Structure(lattice, species, coordinates, **options)


def atomic_number(symbol: str) -> int:
    """Of an element's symbol."""
    return int(optional_module("pymatgen.core").Element(symbol).Z)


def uniform(key: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big") / 2.0**56


def _member(path: str | None, package: str, ending: str) -> bytes:
    """The file that ends so, from an archive, an unpacked folder or the installed package."""
    where = Path(path).expanduser() if path else _installed(package)
    if where.is_dir():
        found = sorted(p for p in where.rglob(Path(ending).name) if p.as_posix().endswith(ending))
        return found[0].read_bytes() if found else _absent(where, ending)
    if zipfile.is_zipfile(where):
        with zipfile.ZipFile(where) as archive:
            names = [name for name in archive.namelist() if name.endswith(ending)]
            return archive.read(names[0]) if names else _absent(where, ending)
    with tarfile.open(where) as tar:
        for entry in tar:
            stream = tar.extractfile(entry) if entry.name.endswith(ending) else None
            if stream is not None:
                return stream.read()
    return _absent(where, ending)


def _absent(where: Path, ending: str) -> bytes:
    raise ConfigError(f"{where} has no {ending}; give the package's wheel, source distribution or folder")


def _installed(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(f"{package} is not installed; give its wheel with the option of that name")
    return Path(next(iter(spec.submodule_search_locations)))


def _aflow() -> Iterator[Any]:
    library = Path(optional_module("pymatgen.analysis.prototypes").__file__).parent / "aflow_prototypes.json.gz"
    for entry in optional_module("monty.serialization").loadfn(library):
        yield entry["snl"].structure


def _jarvis(path: str | None) -> Iterator[Any]:
    packed = _member(path, "jarvis", "core/mineral_name_prototype.json.zip")
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        groups = json.loads(archive.read(archive.namelist()[0]))
    for label in sorted(groups):
        for _, _, _, atoms in groups[label]:
            where = (atoms["lattice_mat"], atoms["elements"], atoms["coords"])
            yield make_structure(*where, coords_are_cartesian=bool(atoms["cartesian"]))


def _robocrys(path: str | None) -> Iterator[Any]:
    table = json.loads(gzip.decompress(_member(path, "robocrys", "condense/mineral_db.json.gz")))
    column = table["columns"].index("structure")
    for row in table["data"]:
        yield optional_module("pymatgen.core").Structure.from_dict(row[column])


def element_references(path: str | None) -> dict[str, list[tuple[Any, float]]]:
    """Symbol → known crystals and their energies per atom (another functional's: for orientation only)."""
    table = json.loads(gzip.decompress(_member(path, "matcalc", "MP-PBE-Element-Refs.json.gz")))
    read = optional_module("pymatgen.core").Structure.from_dict
    pairs = {
        symbol: zip(table[symbol]["structure"], table[symbol]["energy_per_atom"], strict=True) for symbol in CHARGES
    }
    return {symbol: [(read(crystal), float(energy)) for crystal, energy in known] for symbol, known in pairs.items()}


def _prototype(structure: Any, source: str) -> Prototype | None:
    """The symmetrised primitive cell, None where it is too large."""
    if not structure.is_ordered or len(structure) > MAX_SOURCE_ATOMS:
        return None
    data = symmetry(structure, SYMPREC)
    cell = data.prim_std_cell
    if len(cell.numbers) > MAX_ATOMS:
        return None
    basis, places = np.array(cell.basis, dtype=float), np.array(cell.positions, dtype=float) % 1.0
    label, kinds = _canonical(basis, places, cell.numbers)
    return Prototype(label, source, int(data.number), basis, kinds, places)


def symmetry(structure: Any, symprec: float) -> Any:
    """The moyopy ``MoyoDataset`` of a structure; ``symprec`` in Angstrom."""
    cell = optional_module("moyopy.interface").MoyoAdapter.from_structure(structure)
    return optional_module("moyopy").MoyoDataset(cell, symprec=symprec)


def _canonical(basis: np.ndarray, places: np.ndarray, numbers: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The least AFLOW label over all orders of the kinds with rising counts, and the kinds in that order.

    An AFLOW label follows the alphabet of the elements that a source happens to hold; the crystal's shape does not.
    """
    named = optional_module("pymatgen.analysis.prototypes").get_protostructure_label_from_moyopy
    counts, best = Counter(numbers), None
    for order in itertools.permutations(sorted(counts)):
        if sorted(counts[z] for z in order) != [counts[z] for z in order]:
            continue
        kinds = tuple(order.index(z) for z in numbers)
        crystal = make_structure(basis, [STAND_INS[kind] for kind in kinds], places)
        label = named(crystal, raise_errors=True, symprec=SYMPREC)
        pair = (str(label).split(":")[0], kinds)
        best = pair if best is None else min(best, pair)
    if best is None:
        raise ConfigError("a crystal without atoms has no prototype; remove it from the source")
    return best


def prototypes(jarvis: str | None, robocrys: str | None) -> tuple[list[Prototype], dict[str, int]]:
    """Unique prototypes in order of their label, and how many crystals each source gave."""
    found: dict[str, Prototype] = {}
    counts: Counter[str] = Counter()
    for source, crystals in (("aflow", _aflow()), ("jarvis", _jarvis(jarvis)), ("robocrys", _robocrys(robocrys))):
        for crystal in crystals:
            counts[source] += 1
            prototype = _prototype(crystal, source)
            if prototype is not None:
                counts[f"{source} up to {MAX_ATOMS} atoms"] += 1
                found.setdefault(prototype.label, prototype)
    return [found[label] for label in sorted(found)], dict(counts)


def _swaps(prototype: Prototype) -> list[tuple[int, ...]]:
    """Permutations of the kinds that give the same crystal up to its size, the identity first."""
    matcher = optional_module("pymatgen.analysis.structure_matcher").StructureMatcher(
        ltol=0.05, stol=0.03, angle_tol=1.0, primitive_cell=False
    )
    counts = Counter(prototype.kinds)

    def decorated(order: Sequence[int]) -> Any:
        return Candidate(prototype, tuple(STAND_INS[i] for i in order), 100.0, SCALES).structure(100.0)

    first, *others = itertools.permutations(sorted(counts))
    fitting = [order for order in others if all(counts[i] == counts[j] for i, j in enumerate(order))]
    return [first, *(order for order in fitting if matcher.fit(decorated(first), decorated(order)))]


def _neutral(counts: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """All choices of distinct elements, one per kind, whose charges cancel."""
    for species in itertools.permutations(CHARGES, len(counts) - 1):
        rest = -sum(CHARGES[s] * n for s, n in zip(species, counts, strict=False))
        for last in CHARGES:
            if last not in species and CHARGES[last] * counts[-1] == rest:
                yield (*species, last)


def candidates(shapes: Iterable[Prototype]) -> list[Candidate]:
    """Every charge-neutral decoration once, in a keyed order; swaps that give the same crystal are left out."""
    found = []
    for prototype in shapes:
        counts = [prototype.kinds.count(kind) for kind in range(max(prototype.kinds) + 1)]
        if len(counts) < 2:
            continue
        swaps = _swaps(prototype)
        for species in _neutral(counts):
            if species == min(tuple(species[i] for i in order) for order in swaps):
                volume = PACKING * sum(n * _ion_volume(s) for s, n in zip(species, counts, strict=True))
                found.append(Candidate(prototype, species, volume, SCALES))
    return sorted(found, key=lambda c: uniform(c.key))  # a scan that stops early has judged a fair sample


def worth_judging(candidate: Candidate) -> bool:
    """Every binary, since these make the hull; keyed shares of the others, which are nearly all candidates."""
    first, second = uniform(candidate.key), uniform(f"quaternary {candidate.key}")
    kinds = len(candidate.species)
    return kinds == 2 or (first < SHARE and (kinds == 3 or second < QUATERNARY_SHARE))


def _ion_volume(symbol: str) -> float:
    radius = optional_module("pymatgen.core").Species(symbol, CHARGES[symbol]).ionic_radius
    return 4.0 / 3.0 * math.pi * float(radius) ** 3


def elementals(shapes: Iterable[Prototype], references: Mapping[str, list[tuple[Any, float]]]) -> list[Candidate]:
    """Unary prototypes with each element, and each element's known crystals of at most ``MAX_ELEMENT_ATOMS``."""
    unary = [p for p in shapes if max(p.kinds) == 0]
    found = []
    for symbol, known in references.items():
        best = min(known, key=lambda pair: pair[1])[0]
        per_atom = best.volume / len(best)
        found += [Candidate(p, (symbol,), per_atom * len(p.kinds), ELEMENT_SCALES) for p in unary]
        for i, (crystal, _) in enumerate(known):
            if (size := len(crystal)) <= MAX_ELEMENT_ATOMS:
                cell, places = np.array(crystal.lattice.matrix), np.array(crystal.frac_coords)
                shape = Prototype(f"{symbol}_known_{i}", "matcalc", 0, cell, (0,) * size, places)
                found.append(Candidate(shape, (symbol,), crystal.volume, OWN_SCALES))
    return found
