"""The convex hull of energies over composition: how far a crystal is from decomposing into known ones.

E_hull(x) = E(x) - min { Σ_i w_i E_i : w_i >= 0, Σ_i w_i x_i = x }, all per atom, over the entries i of x's elements. It
is negative for a crystal below every mixture of entries. Where an element has no entry of its own the hull is unknown:
NaN, counted, never stable.

Entries and crystals must come from one potential (or one level of DFT, with its corrections): a hull of relaxed
energies beside unrelaxed ones, or of two potentials, shifts every number.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from genkit.errors import ConfigError, nearest
from genkit.pipelines.crystal_tree_search.structures import check_crystals, optional_module

if TYPE_CHECKING:
    from genkit.pipelines.crystal_tree_search.potentials import Potential

__all__ = ["Hull", "HullDistances", "HullEntry", "HullMethod", "as_hull", "check_not_pointer", "element_symbols"]

HullMethod = Literal["phase_diagram", "linear_program"]

_SYMBOLS = (
    "X H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb "
    "Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au "
    "Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts "
    "Og"
).split()
_NUMBER = {symbol: number for number, symbol in enumerate(_SYMBOLS)}

#: First bytes of a file that Git LFS has not fetched.
_LFS = b"version https://git-lfs.github.com/spec/"


def element_symbols() -> tuple[str, ...]:
    """Chemical symbols by atomic number; ``X`` at 0."""
    return tuple(_SYMBOLS)


@dataclass(frozen=True)
class HullEntry:
    """One known crystal.

    Args:
        composition: atomic number → atoms (any multiple of the formula).
        energy: eV per atom.
        entry_id: unique in its hull.
    """

    composition: tuple[tuple[int, float], ...]
    energy: float
    entry_id: str = ""

    @property
    def elements(self) -> frozenset[int]:
        """Its atomic numbers."""
        return frozenset(number for number, _ in self.composition)

    @property
    def fractions(self) -> dict[int, float]:
        """Atomic number → share of the atoms."""
        total = sum(amount for _, amount in self.composition)
        return {number: amount / total for number, amount in self.composition}


@dataclass(frozen=True)
class HullDistances:
    """Distances of B crystals from a hull.

    Args:
        values: (B,) float64, eV per atom; NaN where the energy or the hull is not known.
        known: (B,) bool, whether the hull is known for the composition (the energy may still be NaN).
        missing: atomic numbers without an entry of their own, and how many crystals hold each.
    """

    values: Tensor
    known: Tensor
    missing: Mapping[int, int]


class Hull:
    """The hull of some entries.

    Hull energies are kept by reduced composition, so that each is found once, through pymatgen's ``PhaseDiagram`` of
    the chemical system (kept too) or, without pymatgen, by a linear program.

    Args:
        entries: known crystals, the elements among them; ids that occur twice get a suffix, since pymatgen loses
            entries of one id.
        name: where the energies come from, for records.
        method: ``"phase_diagram"`` or ``"linear_program"``; they agree.
        potential: name and version of the potential whose energies these are, such as ``"CHGNet 0.3.0"``; None where
            that is not known. :meth:`check_potential` refuses another one.

    Raises:
        ConfigError: no entry, an energy that is not finite, or an unknown method.
    """

    def __init__(
        self,
        entries: Iterable[HullEntry],
        *,
        name: str = "entries",
        method: HullMethod = "phase_diagram",
        potential: str | None = None,
    ) -> None:
        if method not in get_args(HullMethod):
            known = get_args(HullMethod)
            raise ConfigError(f"method={method!r}; expected one of {', '.join(known)}.{nearest(method, known)}")
        self.entries, self.name, self.method, self.potential = _unique(entries), name, method, potential
        if not self.entries:
            raise ConfigError("the hull has no entry; expected the elements at least")
        self.elements = frozenset(min(e.elements) for e in self.entries if len(e.elements) == 1)
        self._diagrams: dict[frozenset[int], Any] = {}
        self._energies: dict[tuple[tuple[int, int], ...], float] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the diagrams, which another process makes itself."""
        return {**self.__dict__, "_diagrams": {}}

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"Hull({self.name}: {len(self.entries)} entries, {len(self.elements)} elements)"

    # --- making one ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_arrays(
        cls, numbers: Any, energies: Any, ids: Sequence[Any] | None = None, *, name: str = "arrays", **options: Any
    ) -> Hull:
        """From atomic numbers (M, N), 0 at padding, and energies per atom (M,).

        Raises:
            ConfigError: arrays that do not fit, an energy that is not finite.
        """
        table, values = np.asarray(numbers), np.asarray(energies, dtype=np.float64)
        if table.ndim != 2 or values.shape != table.shape[:1] or (ids is not None and len(ids) != len(values)):
            raise ConfigError(
                f"numbers {table.shape}, energies {values.shape}, ids {None if ids is None else len(ids)}; "
                "expected (M, N), (M,) and M ids"
            )
        names = [str(one) for one in ids] if ids is not None else [f"entry-{row}" for row in range(len(values))]
        rows = zip(table.tolist(), values.tolist(), names, strict=True)
        return cls((HullEntry(_counted(row), value, one) for row, value, one in rows), name=name, **options)

    @classmethod
    def from_crystals(
        cls, crystals: Mapping[str, Tensor], energies: Tensor, ids: Sequence[Any] | None = None, **options: Any
    ) -> Hull:
        """The self-consistent hull of crystals and their own energies per atom (B,); NaN energies are left out."""
        check_crystals(crystals)
        kept = torch.isfinite(energies)
        numbers = (crystals["numbers"] * crystals["mask"]).cpu()[kept.cpu()].numpy()
        names = None if ids is None else [one for one, good in zip(ids, kept.tolist(), strict=True) if good]
        return cls.from_arrays(numbers, energies[kept].double().cpu().numpy(), names, **{"name": "self", **options})

    @classmethod
    def from_potential(
        cls, crystals: Mapping[str, Tensor], potential: Potential, ids: Sequence[Any] | None = None, **options: Any
    ) -> Hull:
        """The self-consistent hull: crystals (the elements among them) with the energies that ``potential`` gives them.

        What a second judge needs, whose energies have another zero. Crystals that it cannot judge are left out.
        """
        energies = potential.energies(crystals).energy
        told = {"potential": f"{potential.name} {potential.version}", "name": f"self, {potential.name}"}
        return cls.from_crystals(crystals, energies, ids, **{**told, **options})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **options: Any) -> Hull:
        """Entries of a file.

        ``*.json`` (``.gz`` too): a list (or ``{"entries": [...]}``) of ``{"composition": {"Li": 2, "O": 1}`` or
        ``"formula": "Li2O"``, ``"energy_per_atom": eV`` or ``"energy": eV of the composition, "id" or "entry_id"}``,
        which includes pymatgen's ``ComputedEntry.as_dict()``. ``*.csv``: the same names as columns, with ``formula``.
        ``*.extxyz`` / ``*.xyz``: structures with an ``energy`` (of the cell) or ``energy_per_atom`` in the comment
        line.

        Raises:
            ConfigError: no such file, a Git LFS pointer, a damaged file, or an entry without a usable energy.
        """
        source = Path(path)
        check_not_pointer(source)
        read = next((found for ending, found in _READERS.items() if source.name.lower().endswith(ending)), None)
        if read is None:
            raise ConfigError(f"{source}: entries of a hull are read from {', '.join(_READERS)}; got another ending")
        return cls(read(source), **{"name": source.name, **options})

    def check_potential(self, potential: Potential) -> None:
        """Refuses a potential whose energies have another zero than those of the hull.

        Raises:
            ConfigError: the hull is known to be of another one.
        """
        if self.potential is None:
            return  # without asking for a name, which makes an ASE calculator
        asked = f"{potential.name} {potential.version}"
        if self.potential != asked:
            raise ConfigError(
                f"the hull {self.name!r} is of {self.potential} and the energies are of {asked}, which have different "
                "zeros; make a hull of its own with Hull.from_potential(crystals, potential)"
            )

    # --- asking it ----------------------------------------------------------------------------------------------------

    def energy_above_hull(self, crystals: Mapping[str, Tensor], energies: Tensor) -> HullDistances:
        """Distances of crystals.

        Args:
            crystals: B of them; only ``numbers`` and ``mask`` matter.
            energies: (B,) eV per atom.

        Raises:
            ConfigError: another number of energies.
        """
        size, _ = check_crystals(crystals)
        if energies.shape != (size,):
            raise ConfigError(f"energies have shape {tuple(energies.shape)}; expected ({size},), eV per atom")
        numbers = (crystals["numbers"] * crystals["mask"]).tolist()
        missing: dict[int, int] = {}
        hull = torch.full((size,), math.nan, dtype=torch.float64)
        for row, kinds in enumerate(numbers):
            composition = _counted(kinds)
            absent = [number for number, _ in composition if number not in self.elements]
            for number in absent:
                missing[number] = missing.get(number, 0) + 1
            if composition and not absent:
                hull[row] = self.hull_energy(composition)
        return HullDistances(energies.double().cpu() - hull, torch.isfinite(hull), missing)

    def hull_energy(self, composition: Sequence[tuple[int, float]] | Mapping[int, float]) -> float:
        """Energy per atom of the best mixture of entries of this composition; NaN where an element has no entry.

        Args:
            composition: atomic number → atoms.
        """
        amounts = dict(composition)
        if not amounts or not amounts.keys() <= self.elements:
            return math.nan
        key = _reduced(amounts)
        if key not in self._energies:
            best = self._diagram_energy if self.method == "phase_diagram" else self._program_energy
            self._energies[key] = best(amounts)
        return self._energies[key]

    def formation_energy(self, crystals: Mapping[str, Tensor], energies: Tensor) -> HullDistances:
        """Energies per atom against the lowest entries of the elements alone; the same as :meth:`energy_above_hull`
        of a hull that has no compound."""
        return self.elemental().energy_above_hull(crystals, energies)

    def elemental(self) -> Hull:
        """The hull of the elements alone."""
        return Hull(
            (e for e in self.entries if len(e.elements) == 1),
            name=f"{self.name}, elements",
            method=self.method,
            potential=self.potential,
        )

    def _system(self, elements: frozenset[int]) -> list[HullEntry]:
        return [entry for entry in self.entries if entry.elements <= elements]

    def _diagram_energy(self, amounts: Mapping[int, float]) -> float:
        system = frozenset(amounts)
        if len(system) == 1:
            return min(entry.energy for entry in self._system(system))
        core = optional_module("pymatgen.core")
        if system not in self._diagrams:
            diagrams = optional_module("pymatgen.analysis.phase_diagram")
            entries = []
            for entry in self._system(system):
                composition = _composition(core, dict(entry.composition))
                entries.append(diagrams.PDEntry(composition, entry.energy * composition.num_atoms))
            self._diagrams[system] = diagrams.PhaseDiagram(entries)
        return float(self._diagrams[system].get_hull_energy_per_atom(_composition(core, amounts)))

    def _program_energy(self, amounts: Mapping[int, float]) -> float:
        """min Σ w_i E_i over mixtures, from scipy."""
        from scipy.optimize import linprog

        entries, total = self._system(frozenset(amounts)), sum(amounts.values())
        shares = np.array([[entry.fractions.get(number, 0.0) for entry in entries] for number in amounts])
        found = linprog(
            [entry.energy for entry in entries], A_eq=shares, b_eq=[value / total for value in amounts.values()]
        )
        return float(found.fun) if found.success else math.nan


def as_hull(source: Any, **options: Any) -> Hull:
    """A hull from a :class:`Hull`, a file, entries, or an object with arrays.

    Args:
        source: a :class:`Hull`; ``"self"``, the hull that ships with genkit, of CHGNet's energies of its own small
            crystals; a path; an iterable of :class:`HullEntry`; an object (or mapping) with ``numbers`` (M, N) and
            ``energies`` (M,) eV per atom, where ``elements`` → energy per atom may add elements.
        **options: those of :class:`Hull`.

    Raises:
        ConfigError: anything else.
    """
    if isinstance(source, Hull):
        return source
    if source == "self":
        return _shipped(options)
    if isinstance(source, str | os.PathLike):
        return Hull.from_file(source, **options)
    parts = source if isinstance(source, Mapping) else {k: getattr(source, k, None) for k in _PARTS}
    if parts.get("numbers") is not None and parts.get("energies") is not None:
        base = Hull.from_arrays(parts["numbers"], parts["energies"], parts.get("ids"), **options)
        extra = [
            HullEntry(((_element(key), 1.0),), float(value), f"element-{key}")
            for key, value in dict(parts.get("elements") or {}).items()
        ]
        return Hull([*base.entries, *extra], **{"name": base.name, **options}) if extra else base
    if isinstance(source, Iterable) and not isinstance(source, Mapping):
        return Hull(source, **options)
    raise ConfigError(
        f"hull={type(source).__name__}; expected a Hull, a file of entries, a list of HullEntry, or an object with "
        "numbers (M, N) and energies (M,)"
    )


_PARTS = ("numbers", "energies", "ids", "elements")


def _shipped(options: Mapping[str, Any]) -> Hull:
    from genkit.pipelines.crystal_tree_search.proto8 import load_hull

    try:
        found = load_hull()
    except OSError as error:
        raise ConfigError(
            f"hull='self': the data that ships with genkit cannot be read ({error}); install genkit again, or give a "
            "file of entries"
        ) from error
    return as_hull(found, **{"name": "self, proto8", "potential": "CHGNet 0.3.0", **options})


# --- parts ------------------------------------------------------------------------------------------------------------


def _unique(entries: Iterable[HullEntry]) -> tuple[HullEntry, ...]:
    taken: set[str] = set()
    found = []
    for position, entry in enumerate(entries):
        if not isinstance(entry, HullEntry):
            raise ConfigError(f"hull entry {position} is a {type(entry).__name__}; expected a HullEntry")
        if not entry.composition or not math.isfinite(entry.energy):
            raise ConfigError(f"hull entry {entry.entry_id or position!r}: energy {entry.energy}, {entry.composition}")
        name, repeat = entry.entry_id or f"entry-{position}", 1
        while name in taken:
            repeat += 1
            name = f"{entry.entry_id or 'entry'}#{repeat}"
        taken.add(name)
        found.append(HullEntry(tuple(sorted(entry.composition)), float(entry.energy), name))
    return tuple(found)


def _counted(numbers: Iterable[int]) -> tuple[tuple[int, float], ...]:
    counts: dict[int, float] = {}
    for number in numbers:
        if number:
            counts[number] = counts.get(number, 0.0) + 1.0
    return tuple(sorted(counts.items()))


def _reduced(amounts: Mapping[int, float]) -> tuple[tuple[int, int], ...]:
    """A key that multiples of one formula share: shares of the atoms to nine digits."""
    total = sum(amounts.values())
    return tuple(sorted((number, round(1e9 * value / total)) for number, value in amounts.items()))


def _composition(core: Any, amounts: Mapping[int, float]) -> Any:
    return core.Composition({_SYMBOLS[number]: amount for number, amount in amounts.items()})


def _element(name: Any) -> int:
    number = _NUMBER.get(str(name), 0) if isinstance(name, str) and not name.isdigit() else int(name)
    if not 0 < number < len(_SYMBOLS):
        raise ConfigError(
            f"element {name!r} is not known; expected a symbol or an atomic number.{nearest(name, _NUMBER)}"
        )
    return number


def check_not_pointer(path: str | os.PathLike[str]) -> None:
    """Refuses a file that is missing, empty, or a Git LFS pointer in the place of the data.

    Raises:
        ConfigError: says which of them.
    """
    try:
        with open(path, "rb") as stream:
            head = stream.read(len(_LFS))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); expected a file") from error
    if head == _LFS:
        raise ConfigError(
            f"{path} is a Git LFS pointer, not the data: run `git lfs pull` in its repository, or download the "
            "file itself"
        )
    if not head:
        raise ConfigError(f"{path} is empty; expected data")


def _json_entries(path: Path) -> list[HullEntry]:
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}; copy it again") from error
    rows = data.get("entries") if isinstance(data, Mapping) else data
    if not isinstance(rows, list) or not rows:
        raise ConfigError(
            f'{path} holds no list of entries; expected [{{"formula": "Li2O", "energy_per_atom": -4.76}}, …]'
        )
    return [_json_entry(row, f"{path} entry {position}") for position, row in enumerate(rows)]


def _json_entry(row: Any, where: str) -> HullEntry:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is a {type(row).__name__}; expected an object")
    amounts = row.get("composition") or row.get("formula")
    if isinstance(amounts, str):
        amounts = _parsed(amounts, where)
    if not isinstance(amounts, Mapping) or not amounts:
        raise ConfigError(f"{where} has {sorted(row)}; expected a composition or a formula")
    composition = tuple((_element(symbol), _number(amount, where)) for symbol, amount in amounts.items())
    if min(amount for _, amount in composition) <= 0.0:
        raise ConfigError(f"{where} has the amounts {dict(amounts)}; expected numbers above 0")
    total = sum(amount for _, amount in composition)
    if row.get("energy_per_atom") is not None:
        energy = _number(row["energy_per_atom"], where)
    else:
        # the corrections of pymatgen's ComputedEntry belong to its energy
        energy = (_number(row.get("energy"), where) + _number(row.get("correction") or 0.0, where)) / total
    return HullEntry(composition, energy, str(row.get("entry_id") or row.get("id") or ""))


def _csv_entries(path: Path) -> list[HullEntry]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.DictReader(stream, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is damaged: {error}; copy it again") from error
    if not rows:
        raise ConfigError(f"{path} has no row below its header; expected the columns formula and energy_per_atom")
    return [_json_entry(_csv_row(row), f"{path} line {line}") for line, row in enumerate(rows, start=2)]


def _csv_row(row: Mapping[str | None, Any]) -> dict[str, Any]:
    """A row's cells, numbers where they are some, without the empty ones; cells beyond the header stay text."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if value not in (None, "") and key is not None:
            name = key.strip()
            found[name] = _float(value) if name in ("energy", "energy_per_atom", "correction") else value.strip()
    return found


def _float(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text  # _number says what is wrong with it


def _parsed(formula: str, where: str) -> dict[str, float]:
    try:
        found = optional_module("pymatgen.core").Composition(formula)
    except ValueError as error:
        raise ConfigError(f"{where}: formula {formula!r} cannot be read ({error})") from error
    return {str(element): float(amount) for element, amount in found.items()}


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: {value!r} in the place of a finite number (energy in eV, or an amount)")
    return float(value)


def _extxyz_entries(path: Path) -> list[HullEntry]:
    images = optional_module("ase.io")
    try:
        atoms = images.read(path, index=":", format="extxyz")
    except Exception as error:  # ase raises all sorts on damaged text
        raise ConfigError(f"{path} cannot be read as extxyz ({type(error).__name__}: {error})") from error
    return [_atoms_entry(one, f"{path} entry {row}", str(one.info.get("id", row))) for row, one in enumerate(atoms)]


def _atoms_entry(atoms: Any, where: str, name: str) -> HullEntry:
    if "energy_per_atom" in atoms.info:
        energy = _number(_plain(atoms.info["energy_per_atom"]), where)
    elif atoms.calc is not None and "energy" in atoms.calc.results:
        energy = _number(_plain(atoms.calc.results["energy"]), where) / len(atoms)
    else:
        raise ConfigError(
            f"{where} has no energy; expected energy= (eV of the cell) or energy_per_atom= in its comment"
        )
    return HullEntry(_counted(atoms.numbers.tolist()), energy, name)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


#: Endings of the files that hold entries, and what reads them.
_READERS = {
    ".json": _json_entries,
    ".json.gz": _json_entries,
    ".csv": _csv_entries,
    ".extxyz": _extxyz_entries,
    ".xyz": _extxyz_entries,
}
