"""``genkit evaluate structures.extxyz``: the metrics of anybody's files of crystals, as text or JSON.

What is measured is that of :func:`.crystal_metrics.evaluate_structures`; nothing is assumed that was not asked for: no
energy without a hull or a relaxation, no novelty without a reference, and the text says what was left out and why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genkit._checks import checked_count
from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search.crystal_metrics import (
    CrystalEvaluation,
    evaluate_structures,
    load_crystals,
)
from genkit.pipelines.crystal_tree_search.potentials import CHGNetPotential, Potential
from genkit.pipelines.crystal_tree_search.relaxation import RelaxationSettings
from genkit.pipelines.crystal_tree_search.structures import Crystals, concatenate

__all__ = ["evaluate_samples", "load_files"]


def load_files(paths: str | Path | Sequence[str | Path]) -> tuple[Crystals, list[str]]:
    """Crystals and ids of one or several files (extxyz, CIF, POSCAR) or folders of CIFs.

    Args:
        paths: with several, each id gets the name of its file in front (``"run1:7"``), so that they stay unique.

    Raises:
        ConfigError: no file, or one that cannot be read; the message names it.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise ConfigError("no file of crystals; expected at least one")
    parts = [load_crystals(Path(path)) for path in given]
    if len(given) == 1:
        return parts[0]
    ids = [f"{name}:{one}" for name, (_, found) in zip(_short_names(given), parts, strict=True) for one in found]
    return concatenate([crystals for crystals, _ in parts]), ids


def _short_names(paths: Sequence[str | Path]) -> list[str]:
    """The stems of files, their whole names where stems occur twice, or the paths."""
    stems, names = [Path(path).stem for path in paths], [Path(path).name for path in paths]
    return next((short for short in (stems, names) if len(set(short)) == len(paths)), [str(path) for path in paths])


def evaluate_samples(
    paths: str | Path | Sequence[str | Path],
    *,
    relax_steps: int = 0,
    reference: str | Path | None = None,
    hull: Any = None,
    json_output: bool = False,
    potential: Potential | None = None,
) -> str:
    """Measures files of crystals.

    Args:
        paths: see :func:`load_files`.
        relax_steps: steps of a relaxation before stable, unique and novel are judged; 0: none.
        reference: known structures for novelty: a file, or ``"proto8"`` for the set that ships with genkit.
        hull: a file of entries, ``"self"`` for the hull that ships with genkit, or what :func:`.hull.as_hull` accepts.
        json_output: JSON with one row a structure, in place of Markdown.
        potential: of the energies; None: CHGNet, loaded only where a hull or a relaxation needs it.

    Raises:
        ConfigError: a file that cannot be read, or a hull of another potential.
    """
    steps = checked_count("relax_steps", relax_steps, "a number of steps, at least 0", 0)
    crystals, ids = load_files(paths)
    if potential is None and (hull is not None or steps):
        potential = CHGNetPotential()
    found = evaluate_structures(
        crystals,
        potential=potential,
        hull=hull,
        references=_known(reference),
        relaxation=RelaxationSettings(steps=steps) if steps else None,
        ids=ids,
    )
    left_out = _left_out(found)
    if json_output:
        return json.dumps({**found.metrics, "left_out": left_out, "structures": _rows(found)}, indent=1)
    return "\n".join([found.table, *(f"Not measured: {what}." for what in left_out)])


def _known(reference: str | Path | None) -> Any:
    if reference != "proto8":
        return reference
    from genkit.pipelines.crystal_tree_search.proto8 import known_crystals

    return known_crystals()


def _left_out(found: CrystalEvaluation) -> list[str]:
    missing = []
    if "stable" not in found.flags:
        missing.append("stable (give --hull FILE, a list of entries of CHGNet's energies, or --hull self)")
    if "novel" not in found.flags:
        missing.append("novel (give --reference FILE, or --reference proto8)")
    if found.relaxation is None:
        missing.append("distance to the relaxed crystal (give --relax-steps N)")
    return missing


def _rows(found: CrystalEvaluation) -> list[dict[str, Any]]:
    """One row a structure; an unknown E_hull is null, as JSON has no NaN."""
    rows: list[dict[str, Any]] = []
    for place, name in enumerate(found.ids):
        flags = {key: bool(flag[place]) for key, flag in found.flags.items()}
        row = {"id": name, **flags, "component": int(found.labels[place])}
        if found.above_hull is not None:
            row["above_hull"] = _finite(float(found.above_hull[place]))
        if found.relaxation is not None:
            row["rmsd"] = _finite(float(found.relaxation.rmsd[place]))
        rows.append(row)
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
