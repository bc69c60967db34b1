"""The evidence: what every arm delivers from the same number of network calls on a frozen base, over several seeds.

Rows are appended to ``<results_dir>/crystal_tree_search/<data>-<family>.jsonl``; a row that is there is not measured
again. A seed is one of the search: the base is the same for all. Settings are ``stability`` (a search for stable
crystals of new formulas; what is delivered is relaxed, and judged again), ``space_group <g>`` (rare symmetries, with
the condition as proposal) and ``pareto`` (stability and scarcity together, beside the same calls split over two
searches).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.metrics.pareto import hypervolume
from genkit.metrics.results import ResultRow, mean_interval, read_rows, rows_of_configuration, summary_table
from genkit.pipeline import load
from genkit.pipelines.crystal_tree_search.config import Config, build
from genkit.pipelines.crystal_tree_search.crystal_metrics import (
    CrystalEvaluation,
    MetricSettings,
    evaluate_structures,
)
from genkit.pipelines.crystal_tree_search.hull import Hull
from genkit.pipelines.crystal_tree_search.pipeline import CrystalTreeSearchOutput, CrystalTreeSearchPipeline
from genkit.pipelines.crystal_tree_search.potentials import Potential, SevenNetPotential
from genkit.pipelines.crystal_tree_search.proto8 import element_crystals, known_crystals, proto8_sha256
from genkit.pipelines.crystal_tree_search.relaxation import RelaxationSettings
from genkit.pipelines.crystal_tree_search.rewards import SpaceGroupReward, assess_stability
from genkit.pipelines.crystal_tree_search.structures import concatenate, take
from genkit.pipelines.crystal_tree_search.symmetry import space_group_ladder
from genkit.pipelines.crystal_tree_search.validity import ValidityRules
from genkit.samplers.tree.objectives import Directions
from genkit.serialization import MANIFEST, canonical_hash, file_sha256, save_json
from genkit.training.arms import Job, measure_rows, train_pipeline
from genkit.zoo import list_zoo

__all__ = ["ARMS", "evaluate", "headline", "measure", "run_arm"]

METHOD = "crystal_tree_search"
#: The arguments of each arm's call.
ARMS: dict[str, dict[str, Any]] = {
    "base": {"mode": "base"},
    "cfg": {"mode": "base"},
    "best_of_n": {"mode": "best_of_n"},
    "snis": {"mode": "snis"},
    "smc": {"mode": "smc"},
    "dts": {"mode": "dts"},
    "dts_star": {"mode": "dts_star"},
    "dts_guided": {"mode": "dts"},
    "dts_multi": {"mode": "dts"},
    "dts_single": {"mode": "dts"},
    "reference": {"mode": "snis"},
}
STABILITY_ARMS = ("base", "cfg", "best_of_n", "snis", "smc", "dts", "dts_star", "dts_guided")
SPACE_GROUP_ARMS = ("base", "cfg", "best_of_n", "dts", "dts_guided")
PARETO_ARMS = ("dts_multi", "dts_single")
GUIDED = ("cfg", "dts_guided")
OBJECTIVES = ("stability", "scarcity")
#: The worst values of both, from which the hypervolume is measured.
REFERENCE = (-1.0, -1.0)
TOLERANCE = 0.1  # Angstrom, of a hit
#: What of the evaluation decides no row's numbers.
UNHASHED = {"seeds", "arms", "space_groups", "workers", "minutes"}


def evaluate(config: Config, *, table_only: bool = False, results_dir: str | Path = "docs/results") -> str:
    """Measures the rows that are missing (unless ``table_only``) and returns the tables as Markdown.

    Raises:
        ConfigError: there are no rows to make a table of, or an arm of ``evaluation.arms`` is unknown.
    """
    unknown = sorted(set(config.evaluation.arms or ()) - set(ARMS))
    if unknown:
        raise ConfigError(f"evaluation.arms names {unknown}; expected some of {', '.join(ARMS)}")
    path = Path(results_dir) / METHOD / f"{config.data.name}-{config.family}.jsonl"
    if not table_only:
        _run_missing(config, path)
    rows = rows_of_configuration(path, {row_hash(config)})
    return "\n\n".join(_tables(config, rows))


def row_hash(config: Config) -> str:
    """Of everything that decides a row but arm, setting and seed: the base, the set, the thresholds and the budget."""
    budget = config.evaluation.model_dump(mode="json", exclude=UNHASHED)
    rules = {"metrics": asdict(MetricSettings()), "validity": asdict(ValidityRules())}
    parts = {"training": config.config_hash(), "base": _weights(config), "set": proto8_sha256(), "budget": budget}
    return canonical_hash(parts | rules)


def _weights(config: Config) -> str | None:
    """The hash of the base's files, which a retrained base changes; None where it is trained by this very file."""
    base = config.evaluation.base
    if base is None:
        return None
    if base.startswith("zoo:"):
        return next((entry.sha256 for entry in list_zoo() if entry.name == base.removeprefix("zoo:")), None)
    path = Path(base) / MANIFEST
    return file_sha256(path) if path.is_file() else None


def _cells(config: Config) -> Iterator[tuple[str, str, int]]:
    """(arm, setting, seed) of everything that is measured."""
    settings: dict[str, Sequence[str]] = {"stability": STABILITY_ARMS}
    settings |= {f"space_group {group}": SPACE_GROUP_ARMS for group in config.evaluation.space_groups}
    settings["pareto"] = PARETO_ARMS
    for seed in range(config.evaluation.seeds):
        for setting, arms in settings.items():
            for arm in arms:
                if config.evaluation.arms is None or arm in config.evaluation.arms:
                    yield arm, setting, seed
    if config.evaluation.arms is None or "reference" in config.evaluation.arms:
        yield "reference", "stability", 0


def _run_missing(config: Config, path: Path) -> None:
    done = {(row.arm, row.setting, row.seed) for row in read_rows(path) if row.config_hash == row_hash(config)}
    missing = [cell for cell in _cells(config) if cell not in done]
    if (
        missing
        and config.evaluation.base is None
        and not (_run_folder(config) / "pipeline" / "manifest.json").is_file()
    ):
        train_pipeline(build(config), config, _run_folder(config), keep=True)
    values, run = config.resolved(), config.evaluation
    jobs = [
        Job(f"{arm} {setting} seed {seed}", _measure, (values, arm, setting, seed)) for arm, setting, seed in missing
    ]
    measure_rows(jobs, path, workers=run.workers, minutes=run.minutes)


def _run_folder(config: Config) -> Path:
    return Path(f"{config.output_dir}-base") / config.config_hash()[:12]


def _measure(values: Mapping[str, Any], arm: str, setting: str, seed: int) -> list[ResultRow]:
    """One row's numbers; runs in a process of its own."""
    torch.set_num_threads(1)
    config = Config.model_validate(values)
    source = config.evaluation.base or _run_folder(config) / "pipeline"
    pipe = cast(CrystalTreeSearchPipeline, load(source))
    pipe.set_progress_bar_config(disable=True)
    began = time.perf_counter()
    numbers = list(measure(pipe, config, arm, setting, seed))
    seconds = round(time.perf_counter() - began, 1)
    name = row_hash(config)
    return [ResultRow(METHOD, arm, setting, name, seed, metric, value, n, seconds) for metric, value, n in numbers]


# ---- one arm ---------------------------------------------------------------------------------------------------------


def run_arm(
    pipe: CrystalTreeSearchPipeline, config: Config, arm: str, setting: str, seed: int
) -> CrystalTreeSearchOutput:
    """What an arm delivers: ``evaluation.num_samples`` crystals from ``rollouts · num_inference_steps`` network calls.

    A search may start as many rollouts as those calls allow: most leave the tree below its root and cost less.
    """
    budget = config.evaluation
    calls = budget.rollouts * budget.num_inference_steps
    options = {**ARMS[arm], **_goal(config, arm, setting)}
    rollouts = budget.rollouts * (8 if arm == "reference" else 1)
    if options["mode"] in ("dts", "dts_star"):
        rollouts, options["max_network_calls"] = 8 * budget.rollouts, calls
        options |= {"widening": tuple(budget.widening), "min_visits": budget.min_visits}
    output = pipe(
        rollouts,
        budget.num_samples,
        num_inference_steps=budget.num_inference_steps,
        levels=budget.levels,
        lam=budget.lam,
        slots=budget.slots,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
        **options,
    )
    return cast(CrystalTreeSearchOutput, output)


def _goal(config: Config, arm: str, setting: str) -> dict[str, Any]:
    """Objective, condition and guidance of an arm in a setting."""
    scales = {"cfg": config.evaluation.guidance_scale, "dts_guided": "auto"}
    guidance = {"guidance_scale": scales[arm]} if arm in GUIDED else {}
    if setting == "pareto":
        return {"objectives": list(OBJECTIVES)}
    if setting == "stability":
        condition = {"condition": {"stability": 1}} if arm in GUIDED else {}
        return {"objectives": "novel_stability", **condition, **guidance}
    group = int(setting.removeprefix("space_group "))
    condition = {"condition": {"space_group": group}} if arm in GUIDED else {}
    return {"objectives": SpaceGroupReward(group), **condition, **guidance}


def measure(
    pipe: CrystalTreeSearchPipeline, config: Config, arm: str, setting: str, seed: int
) -> Iterator[tuple[str, float, int]]:
    """(metric, value, n) of one arm."""
    if setting == "pareto":
        yield from _pareto_numbers(pipe, config, arm, seed)
        return
    output = run_arm(pipe, config, arm, setting, seed)
    count = len(output.ids)
    report = output.diagnostics
    calls = float(report["network_calls"] + report.get("pilot_calls", 0))
    yield "network_calls", calls, count
    yield "reward_calls", float(report["reward_calls"]), count
    yield "delivered", float(count), count
    yield from _tilted_numbers(output, config.evaluation.lam)
    if arm == "reference":
        return
    if output.valid.any():
        yield "reward", float(output.rewards[output.valid, 0].mean()), int(output.valid.sum())
    if arm == "dts_guided":
        yield _mean_weight(output)
    asked = config.evaluation.num_samples
    if setting == "stability":
        found = assess(output.crystals, pipe, config.evaluation.relax_steps)
        yield from _rate_numbers(found, asked, calls)
        if config.evaluation.judge is not None:
            yield from _judge_numbers(output.crystals, found, config)
    else:
        yield from _hit_numbers(output, int(setting.removeprefix("space_group ")), asked, calls)


def _mean_weight(output: CrystalTreeSearchOutput) -> tuple[str, float, int]:
    """The mean of p/q over all edges but the noise's, which is drawn from the base's: number of atoms and walk."""
    store = output.tree.store
    depth = store.depth[: store.size]
    edges = (depth == 1) | (depth > 2)
    return "mean_weight", float(np.exp(store.log_weight[: store.size][edges]).mean()), int(edges.sum())


def assess(
    crystals: Mapping[str, Tensor], pipe: CrystalTreeSearchPipeline, steps: int, potential: Potential | None = None
) -> CrystalEvaluation:
    """Delivered crystals, relaxed and compared with the set that the base was trained on."""
    return evaluate_structures(
        dict(crystals),
        potential=potential or pipe.potential,
        hull=pipe.hull,
        references=known_crystals(),
        relaxation=RelaxationSettings(steps=steps) if steps else None,
    )


def _judge_numbers(
    crystals: Mapping[str, Tensor], found: CrystalEvaluation, config: Config
) -> Iterator[tuple[str, float, int]]:
    """What a second potential says of the first crystals delivered, as the first one relaxed them: energies and hull
    are its own."""
    potential, hull = _second_judge(str(_run_folder(config).parent))
    relaxed = crystals if found.relaxation is None else found.relaxation.crystals
    rows = torch.arange(min(config.evaluation.judged, len(found.ids)))
    told = assess_stability(take(relaxed, rows), potential, hull)
    agreed = told.above_hull <= MetricSettings().stable_below
    yield "judge/stable", float(agreed.sum()) / config.evaluation.judged, config.evaluation.judged
    for name in ("stable", "sun"):
        if name in found.flags:
            chosen = found.flags[name][rows]
            if chosen.any():
                yield f"judge/of_{name}", float(agreed[chosen].double().mean()), int(chosen.sum())
    known = told.above_hull[torch.isfinite(told.above_hull)]
    if len(known):
        yield "judge/above_hull", float(known.mean()), len(known)


@functools.cache
def _second_judge(folder: str) -> tuple[Potential, Hull]:
    """SevenNet and the hull of its own energies of proto8, which are kept in a file: they take minutes."""
    potential = SevenNetPotential()
    path = Path(folder) / f"hull-{potential.name}-{potential.version}-{proto8_sha256()[:12]}.json"
    if not path.is_file():
        made = Hull.from_potential(concatenate([element_crystals(), known_crystals()]), potential)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"composition": dict(e.composition), "energy_per_atom": e.energy} for e in made.entries]
        save_json(path, {"entries": rows})
    return potential, Hull.from_file(path, potential=f"{potential.name} {potential.version}")


def _rate_numbers(found: CrystalEvaluation, asked: int, calls: float) -> Iterator[tuple[str, float, int]]:
    """Shares of what should have been delivered; a crystal that was not delivered counts as a failure."""
    for name, flag in found.flags.items():
        yield f"share/{name}", float(flag.sum()) / asked, asked
    if "sun" in found.flags:
        yield "sun_per_1000_calls", 1000.0 * float(found.flags["sun"].sum()) / calls, asked
    if found.above_hull is not None:
        known = found.above_hull[torch.isfinite(found.above_hull)]
        if len(known):
            yield "above_hull", float(known.mean()), len(known)
    if found.relaxation is not None:
        moved = found.relaxation.rmsd[torch.isfinite(found.relaxation.rmsd)]
        if len(moved):
            yield "rmsd", float(moved.mean()), len(moved)


def _hit_numbers(
    output: CrystalTreeSearchOutput, group: int, asked: int, calls: float
) -> Iterator[tuple[str, float, int]]:
    """The share of crystals that have the group, and of those that differ in composition among them."""
    found = space_group_ladder(output.crystals, (TOLERANCE,), select=output.valid).numbers[:, 0] == group
    hits = found & output.valid
    yield "share/valid", float(output.valid.sum()) / asked, asked
    yield "share/hits", float(hits.sum()) / asked, asked
    yield "hits_per_1000_calls", 1000.0 * float(hits.sum()) / calls, asked
    formulas = {tuple(sorted(row)) for row in take(output.crystals, hits)["numbers"].tolist()}
    yield "share/formulas", len(formulas) / asked, asked


def _tilted_numbers(output: CrystalTreeSearchOutput, lam: float) -> Iterator[tuple[str, float, int]]:
    """Averages under the tilted law of the arms that estimate it, over everything they judged, and log Z."""
    tree = output.tree
    everyone = getattr(tree, "population", None)
    if everyone is not None and tree.log_z is not None:
        weights, valid = everyone.log_weights.softmax(0), everyone.valid
        rewards, mask = everyone.rewards[:, 0], everyone.samples["mask"]
        log_z = tree.log_z
    elif everyone is None and tree.policy.mode == "dts" and tree.leaves.rewards.shape[1] == 1:
        leaves = tree.leaves
        weights, valid, rewards, mask = tree.probabilities(), leaves.valid, leaves.rewards[:, 0], leaves.states["mask"]
        log_z = float(tree.log_z_tree[0, 0])
    else:
        return
    weights = torch.where(valid, weights, 0.0)
    weights = weights / weights.sum()
    yield "tilted/log_z", float(log_z), len(weights)
    yield "tilted/reward", float((weights * torch.where(valid, rewards, 0.0)).sum()), len(weights)
    yield "tilted/num_atoms", float((weights * mask.sum(1)).sum()), len(weights)
    yield "effective_samples", float(1.0 / weights.square().sum()), len(weights)


def _pareto_numbers(
    pipe: CrystalTreeSearchPipeline, config: Config, arm: str, seed: int
) -> Iterator[tuple[str, float, int]]:
    """The volume above :data:`REFERENCE` of everything judged, of one search or of one for each objective."""
    budget = config.evaluation
    calls = budget.rollouts * budget.num_inference_steps
    options: dict[str, Any] = {"mode": "dts", "objectives": list(OBJECTIVES), "output_type": "pt", "lam": budget.lam}
    options |= {"num_inference_steps": budget.num_inference_steps, "levels": budget.levels, "slots": budget.slots}
    options |= {"widening": tuple(budget.widening), "min_visits": budget.min_visits}
    size = len(OBJECTIVES)
    ways: list[Any] = [None]
    if arm == "dts_single":
        ways = [Directions(size, torch.eye(size, dtype=torch.float64)[i : i + 1]) for i in range(size)]
    fronts, total = [], 0
    for number, way in enumerate(ways):
        generator = torch.Generator().manual_seed(seed + 1000 * number)
        shared = {"scalarisation": way, "max_network_calls": calls // len(ways), "generator": generator, **options}
        output = cast(CrystalTreeSearchOutput, pipe(8 * budget.rollouts, 1, **shared))
        leaves = output.tree.leaves
        fronts.append(leaves.rewards[leaves.valid])
        total += output.diagnostics["network_calls"]
    points = torch.cat(fronts)
    yield "network_calls", float(total), len(points)
    yield "hypervolume", hypervolume(points, REFERENCE), len(points)


def headline(pipe: CrystalTreeSearchPipeline, config: Config) -> tuple[str, float]:
    """The one number a model card states: its name with n and setting, and its value."""
    pipe.set_progress_bar_config(disable=True)
    budget = config.evaluation
    output = run_arm(pipe, config, "base", "stability", config.seed)
    found = assess(output.crystals, pipe, budget.relax_steps)
    flags = {name: int(flag.sum()) for name, flag in found.flags.items()}
    counts = ", ".join(f"{name} {flags[name]}" for name in ("valid", "stable", "unique", "novel"))
    return (
        f"stable, unique and novel share of {budget.num_samples} samples at {budget.num_inference_steps} steps after "
        f"{budget.relax_steps} steps of relaxation by {pipe.potential.name} ({counts}), seed {config.seed}",
        flags["sun"] / budget.num_samples,
    )


# ---- tables ----------------------------------------------------------------------------------------------------------


def _tables(config: Config, rows: Sequence[ResultRow]) -> list[str]:
    calls = config.evaluation.rollouts * config.evaluation.num_inference_steps
    tables = [
        f"{config.data.name}, {config.family}: mean ± 95 % interval over seeds; at most {calls} network calls an arm "
        "(base and cfg walk what they deliver, no more).",
    ]
    metrics = {
        "stability": [f"share/{n}" for n in ("valid", "stable", "unique", "novel", "sun")]
        + [
            "sun_per_1000_calls",
            "above_hull",
            "reward",
            "rmsd",
            "judge/stable",
            "judge/of_sun",
            "network_calls",
            "reward_calls",
        ],
        "pareto": ["hypervolume", "network_calls"],
    }
    symmetry = ["share/hits", "share/formulas", "share/valid", "hits_per_1000_calls", "mean_weight", "network_calls"]
    for setting in dict.fromkeys(row.setting for row in rows):
        chosen = [row for row in rows if row.setting == setting]
        arms = [arm for arm in ARMS if arm != "reference" and any(row.arm == arm for row in chosen)]
        if arms:
            tables.append(f"{setting}:\n\n{summary_table(chosen, metrics.get(setting, symmetry), arms)}")
    tilted = _tilted_table(rows)
    return [*tables, tilted] if tilted else tables


def _tilted_table(rows: Sequence[ResultRow]) -> str:
    """Mean and root of the mean squared error of each arm's averages, against the reference's."""
    truth = {row.metric: row.value for row in rows if row.arm == "reference" and row.metric.startswith("tilted/")}
    if not truth:
        return ""
    lines = ["| arm | seeds | " + " | ".join(f"{m}, rmse" for m in truth) + " |", "|" + "---|" * (len(truth) + 2)]
    known = ", ".join(f"{metric} {value:.4f}" for metric, value in truth.items())
    for arm in ("snis", "smc", "dts", "dts_guided"):
        found = {m: [r.value for r in rows if (r.arm, r.metric, r.setting) == (arm, m, "stability")] for m in truth}
        if not all(found.values()):
            continue
        cells = []
        for metric, values in found.items():
            error = math.sqrt(sum((v - truth[metric]) ** 2 for v in values) / len(values))
            cells.append(f"{mean_interval(values)[0]:.4f}, {error:.4f}")
        lines.append(f"| {arm} | {len(next(iter(found.values())))} | " + " | ".join(cells) + " |")
    head = f"Averages under the tilted law, beside the weighted average of 8 times as many base samples ({known}):"
    return head + "\n\n" + "\n".join(lines)
