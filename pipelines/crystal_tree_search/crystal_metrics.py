"""Metrics of generated crystals: valid, stable, unique, novel (S.U.N.), distance to the relaxed crystal, symmetry.

Every rate is a count with its denominator, which is all crystals that were given: an invalid one is not stable, not
unique and not novel. Thresholds, versions, the potential and the hull are in the output, because numbers of other
evaluations are not comparable without them. A rate of exactly 0 or 1, and crystals that are the references themselves,
raise a warning: these are what mistakes in an evaluation look like.

Matching is pymatgen's ``StructureMatcher`` on reduced primitive cells, both ways. It is no equivalence relation, so the
unique crystals are counted as connected components of all pairs that match, taken in a fixed order: the result depends
neither on the order of the crystals nor on which one came first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from genkit._checks import checked_number
from genkit.errors import ConfigError, MissingExtraError
from genkit.metrics.text import wilson_interval
from genkit.pipelines.crystal_tree_search.hull import as_hull, check_not_pointer
from genkit.pipelines.crystal_tree_search.potentials import Potential
from genkit.pipelines.crystal_tree_search.relaxation import Relaxation, RelaxationSettings, relax
from genkit.pipelines.crystal_tree_search.rewards import StabilityAssessment, assess_stability
from genkit.pipelines.crystal_tree_search.structures import (
    Crystals,
    check_crystals,
    formula_key,
    formula_keys,
    from_atoms,
    from_structures,
    optional_module,
    read_cifs,
    read_extxyz,
    to_structures,
)
from genkit.pipelines.crystal_tree_search.symmetry import TOLERANCES, space_group_ladder
from genkit.pipelines.crystal_tree_search.validity import ValidityRules, check_validity

__all__ = [
    "CrystalEvaluation",
    "MetricSettings",
    "StructureIndex",
    "evaluate_structures",
    "load_crystals",
    "matched_to",
    "novel_mask",
    "unique_labels",
]


@dataclass(frozen=True)
class MetricSettings:
    """Thresholds of the metrics; change one, and give another ``version``.

    Args:
        version: of these thresholds, for the record.
        stable_below: E_hull of a stable crystal is at most this, eV per atom.
        ltol: of ``StructureMatcher``: lengths, relative.
        stol: sites, in units of (volume per atom)^(1/3).
        angle_tol: degrees.
        space_group_tolerance: crystals only match when they have the same space group at this tolerance (Angstrom)
            too; None: whatever their space groups. The matcher scales volumes and joins distorted phases.
    """

    version: str = "1"
    stable_below: float = 0.1
    ltol: float = 0.2
    stol: float = 0.3
    angle_tol: float = 5.0
    space_group_tolerance: float | None = None

    def __post_init__(self) -> None:
        checked_number("stable_below", self.stable_below, "eV per atom, finite", math.isfinite)
        for name in ("ltol", "stol", "angle_tol"):
            checked_number(name, getattr(self, name), "a positive tolerance", lambda value: value > 0)


@dataclass(frozen=True)
class CrystalEvaluation:
    """The outcome of :func:`evaluate_structures`.

    Args:
        metrics: a JSON-able dict: ``rates`` (each ``count``, ``total``, ``rate``, ``low``, ``high``), ``energies``,
            ``rmsd``, ``symmetry``, ``counts``, ``settings``, ``versions``, ``warnings``.
        table: the same as Markdown.
        flags: name → (B,) bool: ``valid``, ``stable``, ``unique``, ``novel``, ``sun``, those that were measured.
        above_hull: (B,) float64, after relaxation where there was one; None without a hull.
        labels: (B,) int64, the component of each crystal, -1 where invalid.
        ids: B names.
        relaxation: None where nothing was relaxed.
    """

    metrics: Mapping[str, Any]
    table: str
    flags: Mapping[str, Tensor]
    above_hull: Tensor | None
    labels: Tensor
    ids: Sequence[str]
    relaxation: Relaxation | None


# --- matching ---------------------------------------------------------------------------------------------------------


class StructureIndex:
    """Structures by reduced formula and size of the primitive cell, reduced once, on first use.

    Args:
        structures: pymatgen structures (None where there is none), or a batch of crystals.
        settings: of the matcher.
    """

    def __init__(self, structures: Any, settings: MetricSettings | None = None) -> None:
        self.settings = settings or MetricSettings()
        self._crystals: Crystals | None = None
        self._given: list[Any] = []
        if isinstance(structures, Mapping):
            check_crystals(structures)
            self._crystals = {name: value.detach().cpu() for name, value in structures.items()}
            keys: list[Any] = list(formula_keys(self._crystals))
        else:
            self._given = list(structures)
            keys = [None if one is None else formula_key([site.specie.Z for site in one]) for one in self._given]
        self.keys = keys
        self.rows: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for row, key in enumerate(keys):
            if key:
                self.rows.setdefault(key, []).append(row)
        matcher = optional_module("pymatgen.analysis.structure_matcher").StructureMatcher
        chosen = self.settings
        self._matcher = matcher(ltol=chosen.ltol, stol=chosen.stol, angle_tol=chosen.angle_tol)
        self._reduced: dict[int, Any] = {}
        self._groups: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def structure(self, row: int) -> Any:
        """The structure as given; None where it cannot be one."""
        if self._crystals is None:
            return self._given[row]
        one = {name: value[row : row + 1] for name, value in self._crystals.items()}
        return to_structures(one, skip=True)[0]

    def reduced(self, row: int) -> Any:
        """The primitive Niggli cell, as the matcher makes it; None where that fails."""
        if row not in self._reduced:
            try:
                niggli = self.structure(row).get_reduced_structure(reduction_algo="niggli")
                self._reduced[row] = niggli.get_primitive_structure()
            except Exception:  # degenerate cells raise all sorts
                self._reduced[row] = None
        return self._reduced[row]

    def space_group(self, row: int) -> int:
        """The number at the settings' tolerance, 0 without one."""
        if row not in self._groups:
            tolerance, structure = self.settings.space_group_tolerance, self.structure(row)
            found = 0
            if tolerance is not None and structure is not None:
                found = int(space_group_ladder(from_structures([structure]), (tolerance,)).numbers)
            self._groups[row] = found
        return self._groups[row]

    def match(self, row: int, other: StructureIndex, column: int) -> bool:
        """Whether two structures are the same to within the settings."""
        one, two = self.reduced(row), other.reduced(column)
        if one is None or two is None or len(one) != len(two) or self.keys[row] != other.keys[column]:
            return False
        if self.space_group(row) != other.space_group(column):
            return False
        try:
            return bool(self._matcher.fit(one, two, symmetric=True, skip_structure_reduction=True))
        except Exception:  # a failed comparison is no match; it never ends an evaluation
            return False

    def order(self, row: int) -> tuple[float, ...]:
        """What structures of one formula are sorted by: it does not depend on where they stood."""
        reduced = self.reduced(row)
        if reduced is None:
            return (math.inf,)
        # loose rounding, so that copies that differ by float noise do not change places
        return (len(reduced), round(reduced.volume, 3), *(round(length, 3) for length in reduced.lattice.abc))


def unique_labels(structures: Any, settings: MetricSettings | None = None, select: Tensor | None = None) -> Tensor:
    """(B,) int64: the component of each structure under "matches", numbered from 0 by first member; -1 outside.

    Args:
        structures: pymatgen structures, a batch of crystals, or a :class:`StructureIndex`.
        settings: of the matcher.
        select: (B,) bool; None: all that are structures.
    """
    index = structures if isinstance(structures, StructureIndex) else StructureIndex(structures, settings)
    wanted = [True] * len(index) if select is None else select.tolist()
    parent = list(range(len(index)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for rows in index.rows.values():
        chosen = sorted((row for row in rows if wanted[row]), key=index.order)
        for place, row in enumerate(chosen):
            for earlier in chosen[:place]:
                if root(row) != root(earlier) and index.match(earlier, index, row):
                    parent[root(row)] = root(earlier)
    labels = torch.full((len(index),), -1, dtype=torch.int64)
    names: dict[int, int] = {}
    for row in range(len(index)):
        if wanted[row] and index.keys[row]:
            labels[row] = names.setdefault(root(row), len(names))
    return labels


def novel_mask(index: StructureIndex, references: StructureIndex, select: Tensor | None = None) -> Tensor:
    """(B,) bool: structures that match no reference.

    Args:
        index: B structures.
        references: what is known.
        select: (B,) bool, which to ask; the others are False. None: all.
    """
    novel = torch.zeros(len(index), dtype=torch.bool)
    for row, key in enumerate(index.keys):
        if key and (select is None or bool(select[row])):
            novel[row] = not any(index.match(row, references, one) for one in references.rows.get(key, ()))
    return novel


def matched_to(index: StructureIndex, others: StructureIndex, select: Tensor) -> Tensor:
    """(B,) bool: structures that match the one in the same row of ``others``; False outside ``select``."""
    rows = [bool(select[row]) and index.match(row, others, row) for row in range(len(index))]
    return torch.tensor(rows, dtype=torch.bool)


# --- evaluation -------------------------------------------------------------------------------------------------------


def load_crystals(source: Any) -> tuple[Crystals, list[str]]:
    """Crystals and ids of a file (extxyz, CIF with any number of crystals, POSCAR), a folder of CIFs, a batch of
    crystals, or a list of objects of pymatgen or ASE.

    Raises:
        ConfigError: something else, a Git LFS pointer, or a damaged file.
    """
    if isinstance(source, Mapping):
        return dict(source), [str(row) for row in range(check_crystals(source)[0])]
    if isinstance(source, str | Path):
        return _load_path(Path(source))
    if isinstance(source, Sequence) and source:
        ids = [str(row) for row in range(len(source))]
        atoms = all(hasattr(one, "get_scaled_positions") for one in source)
        return (from_atoms(source) if atoms else from_structures(source)), ids
    raise ConfigError(
        f"structures={type(source).__name__}; expected a file, a batch of crystals, or a list of pymatgen structures "
        "or ASE atoms, at least one"
    )


def _load_path(path: Path) -> tuple[Crystals, list[str]]:
    if path.is_dir():
        return read_cifs(path)
    check_not_pointer(path)
    if path.suffix.lower() in (".extxyz", ".xyz"):
        crystals, ids, _ = read_extxyz(path)
        return crystals, ids
    structures = _read_structures(path)
    if len(structures) == 1:
        return from_structures(structures), [path.stem]
    return from_structures(structures), [f"{path.stem}-{row}" for row in range(len(structures))]


def _read_structures(path: Path) -> list[Any]:
    """All crystals of a CIF or POSCAR; a CIF of which a part cannot be read is refused, not cut short."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            if path.suffix.lower() == ".cif":
                found = optional_module("pymatgen.io.cif").CifParser.from_str(text).parse_structures(primitive=False)
            else:
                found = [optional_module("pymatgen.core").Structure.from_str(text, fmt="poscar")]
    except MissingExtraError:
        raise
    except Exception as error:  # the parsers raise all sorts on damaged text
        raise ConfigError(f"{path} cannot be read ({error}); expected {_FORMATS}") from error
    failed = next((str(note.message) for note in notes if "No structure parsed" in str(note.message)), None)
    if failed or not found:
        raise ConfigError(f"{path} cannot be read ({failed or 'no structure'}); expected {_FORMATS}")
    return list(found)


_FORMATS = ".extxyz, .xyz, .cif, .vasp, .poscar or a folder of CIFs"


def evaluate_structures(
    structures: Any,
    *,
    potential: Potential | None = None,
    hull: Any = None,
    references: Any = None,
    relaxation: RelaxationSettings | None = None,
    settings: MetricSettings | None = None,
    rules: ValidityRules | None = None,
    ids: Sequence[str] | None = None,
) -> CrystalEvaluation:
    """Measures crystals; what has no potential, hull or references is left out.

    With ``relaxation`` the valid crystals are relaxed first, and stable, unique and novel are said of the relaxed ones;
    single-point stability stands beside them. A crystal is *unique* when it is the best of its component (lowest
    energy, else first).

    Args:
        structures: what :func:`load_crystals` accepts.
        potential: of energies.
        hull: what :func:`.hull.as_hull` accepts, of the same potential's energies; of relaxed ones with ``relaxation``.
        references: known structures: a batch of crystals, pymatgen structures, or a file.
        relaxation: steps and force; None: no relaxation.
        settings: thresholds.
        rules: of validity.
        ids: B names; None: those of the source.

    Raises:
        ConfigError: no structures, another number of ids, a hull or a relaxation without a potential, or a hull of
            another potential.
    """
    if potential is None and (hull is not None or relaxation is not None):
        raise ConfigError("a hull and a relaxation need a potential, got None; pass potential=CHGNetPotential()")
    settings, rules = settings or MetricSettings(), rules or ValidityRules()
    crystals, found = load_crystals(structures)
    names = found if ids is None else [str(one) for one in ids]
    if not found or len(names) != len(found):
        raise ConfigError(f"{len(found)} structures and {len(names)} ids; expected at least one, and as many ids")
    parts = _Evaluation(crystals, names, settings, rules)
    parts.energies(potential, None if hull is None else as_hull(hull), relaxation)
    parts.matching(structures, references)
    return parts.result()


class _Evaluation:
    """Collects flags, counts and warnings in the order in which they are measured."""

    def __init__(self, crystals: Crystals, ids: list[str], settings: MetricSettings, rules: ValidityRules) -> None:
        self.crystals, self.ids, self.settings, self.rules = crystals, ids, settings, rules
        validity = check_validity(crystals, rules)
        self.flags: dict[str, Tensor] = {"valid": validity.mask.cpu()}
        self.counts: dict[str, int] = {f"invalid/{reason}": count for reason, count in validity.counts.items()}
        self.metrics: dict[str, Any] = {}
        self.versions = _versions()
        self.notes: list[str] = []
        self.energy: Tensor | None = None
        self.above_hull: Tensor | None = None
        self.relaxation: Relaxation | None = None
        self.judged = crystals
        self.labels = torch.full((len(ids),), -1, dtype=torch.int64)

    def energies(self, potential: Potential | None, hull: Any, relaxation: RelaxationSettings | None) -> None:
        if potential is None:
            return
        self.versions["potential"] = f"{potential.name} {potential.version}"
        if relaxation is not None:
            self._relaxed(potential, relaxation)
        if hull is None:
            return
        self.versions["hull"] = f"{hull.name}, {len(hull)} entries"
        first = assess_stability(self.crystals, potential, hull, self.rules)
        self._stability("stable_single_point" if self.relaxation else "stable", first)
        self.above_hull = first.above_hull
        if self.relaxation is not None:
            distances = hull.energy_above_hull(self.judged, self.relaxation.energy)
            self.above_hull = distances.values
            self.flags["stable"] = distances.values <= self.settings.stable_below
            self.metrics["energies"] = {"above_hull": _spread(distances.values, len(self.ids))}

    def _relaxed(self, potential: Potential, settings: RelaxationSettings) -> None:
        found = relax(self.crystals, potential, settings, select=self.flags["valid"])
        collapsed = ~check_validity(found.crystals, self.rules).mask.cpu() | (
            found.energy.abs() >= self.rules.max_energy
        )
        self.counts["relaxation/collapsed"] = int((found.valid & collapsed).sum())
        found = replace(
            found,
            valid=found.valid & ~collapsed,
            energy=found.energy.masked_fill(collapsed, math.nan),
            rmsd=found.rmsd.masked_fill(collapsed, math.nan),
        )
        self.relaxation, self.judged, self.energy = found, found.crystals, found.energy
        self.flags["relaxed"] = found.converged
        self.counts["relaxation/given_up"] = len(found.failures)
        same = matched_to(self._index(self.crystals), self._index(found.crystals), found.valid)
        unmatched = int((found.valid & ~same).sum())
        self.counts["relaxation/unmatched"] = unmatched
        self.metrics["rmsd"] = {
            **_spread(found.rmsd, len(self.ids)),
            "unmatched_share": unmatched / max(int(found.valid.sum()), 1),
            "volume_ratio": _spread(found.volume_ratio, len(self.ids)),
        }

    def _stability(self, name: str, found: StabilityAssessment) -> None:
        self.flags[name] = found.above_hull <= self.settings.stable_below
        self.counts |= found.counts
        self.metrics["energies"] = {"above_hull": _spread(found.above_hull, len(self.ids))}
        if self.energy is None:
            self.energy = found.energy

    def _index(self, crystals: Crystals) -> StructureIndex:
        return StructureIndex(crystals, self.settings)

    def matching(self, source: Any, references: Any) -> None:
        valid = self.flags["valid"] if self.relaxation is None else self.relaxation.valid
        index = self._index(self.judged)
        self.labels = unique_labels(index, select=valid)
        self.flags["unique"] = _best_of(self.labels, self.energy)
        if references is not None:
            known = load_crystals(references)[0]
            if source is references or _share_of(self.crystals, known) > 0.5:
                self.notes.append("most of the evaluated crystals are references themselves, bit for bit")
            self.flags["novel"] = novel_mask(index, self._index(known), valid)
            self.counts["references"] = len(known["numbers"])
            formulas = set(formula_keys(known))
            new = [key is not None and key not in formulas for key in index.keys]
            self.counts["novel/new_formula"] = int((torch.tensor(new) & valid).sum())
        if {"stable", "novel"} <= self.flags.keys():
            self.flags["sun"] = self.flags["stable"] & self.flags["unique"] & self.flags["novel"]
        ladder = space_group_ladder(self.judged, TOLERANCES, select=valid)
        self.metrics["symmetry"] = {str(step): _groups(ladder.at(step)[valid]) for step in TOLERANCES}

    def result(self) -> CrystalEvaluation:
        total = len(self.ids)
        rates = {name: _rate(int(flag.sum()), total) for name, flag in self.flags.items()}
        self.notes += [
            f"{name} is exactly {rate['rate']:.0f} ({rate['count']} of {total}): implausible, check the inputs"
            for name, rate in rates.items()
            if rate["rate"] in (0.0, 1.0) and total > 1
        ]
        for note in self.notes:
            warnings.warn(note, stacklevel=3)
        metrics = {
            "rates": rates,
            **self.metrics,
            "counts": self.counts,
            "settings": {
                "metrics": asdict(self.settings),
                "validity": asdict(self.rules),
                "relaxation": None if self.relaxation is None else asdict(self.relaxation.settings),
            },
            "versions": self.versions,
            "warnings": self.notes,
        }
        return CrystalEvaluation(
            metrics, _table(metrics), self.flags, self.above_hull, self.labels, self.ids, self.relaxation
        )


def _groups(numbers: Tensor) -> dict[str, int]:
    return {"p1": int((numbers == 1).sum()), "groups": len(set(numbers.tolist()) - {0})}


def _best_of(labels: Tensor, energy: Tensor | None) -> Tensor:
    """(B,) bool: the member of lowest energy of each component, else the first."""
    best: dict[int, int] = {}
    cost = [math.inf] * len(labels) if energy is None else [math.inf if e != e else e for e in energy.tolist()]
    for row, label in enumerate(labels.tolist()):
        if label >= 0 and (label not in best or cost[row] < cost[best[label]]):
            best[label] = row
    flag = torch.zeros(len(labels), dtype=torch.bool)
    flag[list(best.values())] = True
    return flag


def _share_of(crystals: Crystals, known: Crystals) -> float:
    def keys(batch: Crystals) -> list[bytes]:
        counts = batch["mask"].sum(1).tolist()
        parts = (batch["lattice"].float().cpu(), batch["coordinates"].float().cpu(), batch["numbers"].int().cpu())
        return [
            b"".join(x.numpy().tobytes() for x in (parts[0][row], parts[1][row, :n], parts[2][row, :n]))
            for row, n in enumerate(counts)
        ]

    ours, theirs = keys(crystals), set(keys(known))
    return sum(one in theirs for one in ours) / len(ours)


def _rate(count: int, total: int) -> dict[str, float]:
    interval = wilson_interval(count, total)
    return {"count": count, "total": total, "rate": count / total, "low": interval.low, "high": interval.high}


def _spread(values: Tensor, total: int) -> dict[str, float | None]:
    """Mean and median of the finite values, with how many they are of all."""
    known = values[torch.isfinite(values)]
    mean, median = (float(known.mean()), float(known.median())) if len(known) else (None, None)
    return {"mean": mean, "median": median, "count": len(known), "total": total}


def _versions() -> dict[str, str]:
    found = {}
    for package in ("genkit-diffusion", "pymatgen", "moyopy", "spglib", "chgnet", "ase", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _table(metrics: Mapping[str, Any]) -> str:
    lines = ["| metric | count | of | share | 95 % |", "|---|---:|---:|---:|---|"]
    for name, rate in metrics["rates"].items():
        share = f"{100 * rate['rate']:.1f} %"
        interval = f"{100 * rate['low']:.1f} to {100 * rate['high']:.1f}"
        lines.append(f"| {name.replace('_', ' ')} | {rate['count']} | {rate['total']} | {share} | {interval} |")
    lines += ["", *_measured(metrics), ""]
    refused = ", ".join(f"{key} {count}" for key, count in metrics["counts"].items() if count)
    lines.append(f"Counts: {refused or 'nothing refused'}.")
    settings, versions = metrics["settings"], metrics["versions"]
    rules = "; ".join(f"{part} {values}" for part, values in settings.items() if values)
    lines += [f"Thresholds: {rules}.", "Versions: " + ", ".join(f"{key} {one}" for key, one in versions.items()) + "."]
    return "\n".join(lines + [f"Warning: {note}." for note in metrics["warnings"]])


def _measured(metrics: Mapping[str, Any]) -> list[str]:
    lines = []
    for title, unit, spread in (
        ("E_hull", "eV/atom", metrics.get("energies", {}).get("above_hull")),
        ("RMSD to relaxed", "A", metrics.get("rmsd")),
    ):
        if spread and spread["count"]:
            of = f"{spread['count']} of {spread['total']}"
            lines.append(f"{title}: mean {spread['mean']:.4f}, median {spread['median']:.4f} {unit} ({of}).")
    if "rmsd" in metrics:
        lines.append(f"Unmatched after relaxation: {100 * metrics['rmsd']['unmatched_share']:.1f} %.")
    ladder = ", ".join(f"{part['p1']} at {step} A" for step, part in metrics.get("symmetry", {}).items())
    return [*lines, f"P1: {ladder}."]
