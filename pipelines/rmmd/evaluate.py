"""The evidence: what the student keeps of its teacher, and what each way to reward it costs in quality.

Rows are appended to ``<results_dir>/rmmd/<data>.jsonl``; a row that is there is not measured again. For each seed a
base is trained first (a teacher, students of several steps); then every arm starts from it. Settings are ``<n> steps``,
``reward <name>`` and ``phases <name>``, the latter for the orders of distillation and reward.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.metrics.images import (
    class_diversity,
    frechet_distance,
    precision_recall,
    spectrum_of_change,
)
from genkit.metrics.pareto import hypervolume, non_dominated
from genkit.metrics.results import ResultRow, read_rows, rows_of_configuration, summary_table
from genkit.pipeline import load
from genkit.pipelines.rmmd.arms import ARMS, grid, make_arm, sampler, unit_strength
from genkit.pipelines.rmmd.config import Config, build
from genkit.pipelines.rmmd.forecast_evaluate import FORECAST_ARMS, forecast_headline, measure_forecasts, train_forecasts
from genkit.pipelines.rmmd.networks import as_denoiser
from genkit.pipelines.rmmd.orders import ORDERS, students_in_order
from genkit.pipelines.rmmd.parts import RewardPart, RewardTerm, TrainingData, build_reward
from genkit.pipelines.rmmd.pipeline import RMMDPipeline
from genkit.rewards import Reward
from genkit.serialization import canonical_hash
from genkit.training import Trainer, TrainerConfig
from genkit.training.arms import Job, measure_rows, train_pipeline

__all__ = ["Judge", "evaluate", "headline"]

METHOD = "rmmd"
DISTILLED = ("mmd", "dmd2")
IMAGES = ("digits", "emoji")
#: shares of an arm's steps at which its points are measured
CHECKPOINTS = (0.1, 0.25, 0.5, 1.0)
#: how far above the base's a Fréchet distance may lie to add to a hypervolume: about four times the digits' floor
ROOM = 0.2
#: points of a front that are kept as rows
FRONT = 8


def evaluate(config: Config, *, table_only: bool = False, results_dir: str | Path = "docs/results") -> str:
    """Measures the rows that are missing (unless ``table_only``) and returns the tables as Markdown.

    Raises:
        ConfigError: there are no rows to make a table of, or an arm of ``evaluation.arms`` is unknown.
    """
    known = list(dict.fromkeys(["teacher", *DISTILLED, *ARMS, *ORDERS]))
    unknown = sorted(set(config.evaluation.arms or ()) - set(known))
    if unknown:
        raise ConfigError(f"evaluation.arms names {unknown}; expected some of {', '.join(known)}")
    path = Path(results_dir) / METHOD / f"{config.data.name}.jsonl"
    if not table_only:
        _run_missing(config, path)
    rows = rows_of_configuration(path, {row_hash(config)})
    return "\n\n".join(_tables(config, rows))


def row_hash(config: Config) -> str:
    """Of everything that decides a row but arm, setting and seed."""
    unhashed = {"seeds", "arms", "rewards", "phases", "workers", "minutes"}
    budget = config.evaluation.model_dump(mode="json", exclude=unhashed)
    training = config.model_copy(update={"seed": 0}).config_hash()
    return canonical_hash({"training": training, "budget": budget})


def _cells(config: Config) -> Iterator[tuple[str, str, int]]:
    """(arm, setting, seed) of everything that is measured; ``base`` first, since all others start from it."""
    run, wanted = config.evaluation, config.evaluation.arms
    for seed in range(run.seeds):
        cells = [(arm, f"{steps} steps") for steps in run.student_steps for arm in ("teacher", *DISTILLED)]
        cells.append(("teacher", f"{config.teacher.num_inference_steps} steps"))
        cells += [(arm, f"reward {name}") for name in run.rewards for arm in ARMS]
        cells += [(arm, f"phases {name}") for name in run.phases for arm in ORDERS]
        yield from ((arm, setting, seed) for arm, setting in cells if wanted is None or arm in wanted)


def _run_missing(config: Config, path: Path) -> None:
    if config.data.name not in IMAGES:
        return _run_forecasts(config, path)
    done = {(row.arm, row.setting, row.seed) for row in read_rows(path) if row.config_hash == row_hash(config)}
    missing = [cell for cell in _cells(config) if cell not in done]
    values, run = config.resolved(), config.evaluation
    for seed in sorted({seed for _, _, seed in missing}):
        _bases(config, seed, {(arm, setting) for arm, setting, other in missing if other == seed})
    jobs = [
        Job(f"{arm} {setting} seed {seed}", _measure, (values, arm, setting, seed)) for arm, setting, seed in missing
    ]
    measure_rows(jobs, path, workers=run.workers, minutes=run.minutes)


def _run_forecasts(config: Config, path: Path) -> None:
    run, name = config.evaluation, row_hash(config)
    done = {row.seed for row in read_rows(path) if row.config_hash == name}
    seeds = [seed for seed in range(run.seeds) if seed not in done]
    jobs = [Job(f"all arms, seed {seed}", _forecasts, (config.resolved(), seed)) for seed in seeds]
    measure_rows(jobs, path, workers=run.workers, minutes=run.minutes)


def _forecasts(values: Mapping[str, Any], seed: int) -> list[ResultRow]:
    config = Config.model_validate(values)
    folder = _folder(config, seed)
    train_forecasts(config, folder, seed)
    return measure_forecasts(values, folder, row_hash(config), seed)


# ---- bases -----------------------------------------------------------------------------------------------------------


def _folder(config: Config, seed: int) -> Path:
    return Path(f"{config.output_dir}-bases") / row_hash(config)[:12] / f"seed-{seed}"


def _bases(config: Config, seed: int, cells: set[tuple[str, str]]) -> None:
    """Trains what these arms of a seed start from: the teacher, and students of it."""
    torch.set_num_threads(1)
    folder = _folder(config, seed)
    teacher = {"reward": None, "distil": config.distil.model_copy(update={"steps": 0}), "seed": seed}
    teacher |= {"max_steps": config.teacher.steps}
    _trained(config.model_copy(update=teacher), folder / "teacher")
    source = {"source": str(folder / "teacher" / "pipeline"), "steps": 0}
    students = _students(config)
    for name in sorted({name for arm, setting in cells for name in _needed(config, arm, setting)}):
        changes = students[name]
        update = {"teacher": config.teacher.model_copy(update=source), "reward": None, "seed": seed, **changes}
        update["max_steps"] = update.get("distil", config.distil).steps
        _trained(config.model_copy(update=update), folder / name)


def _students(config: Config) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}
    for steps in config.evaluation.student_steps:
        made[f"mmd-{steps}"] = {"num_inference_steps": steps}
        dmd = config.distil.model_copy(update={"objective": "dmd2", "aux_steps_per_student": 5})
        made[f"dmd2-{steps}"] = {"num_inference_steps": steps, "distil": dmd}
    one = config.distil.model_copy(update={"objective": "diff_instruct"})
    return made | {"one_step": {"num_inference_steps": 1, "distil": one}}


def _needed(config: Config, arm: str, setting: str) -> list[str]:
    """The students that a row is measured on or starts from."""
    if setting.endswith("steps"):
        return [] if arm == "teacher" else [f"{arm}-{setting.split()[0]}"]
    own = ["one_step"] if setting.startswith("reward") and ARMS[arm].base == "one_step" else []
    return [f"mmd-{config.num_inference_steps}", *own]


def _trained(config: Config, folder: Path) -> None:
    if not (folder / "pipeline" / "manifest.json").is_file():
        train_pipeline(build(config), config, folder, keep=True)


# ---- one row ---------------------------------------------------------------------------------------------------------


def _measure(values: Mapping[str, Any], arm: str, setting: str, seed: int) -> list[ResultRow]:
    """One row's numbers; runs in a process of its own."""
    torch.set_num_threads(1)
    config = Config.model_validate(values)
    began = time.perf_counter()
    measured = {"reward": _rewarded, "phases": _ordered}.get(setting.split()[0], _distilled)
    numbers = list(measured(config, arm, setting, seed))
    seconds, name = round(time.perf_counter() - began, 1), row_hash(config)
    return [ResultRow(METHOD, arm, setting, name, seed, metric, value, n, seconds) for metric, value, n in numbers]


class Judge:
    """Measures samples against the held-out images, in the features of a named network, at one n for all.

    Args:
        data: the held-out set.
        features: the feature network's pipeline.
        num_samples: n; its labels are those of the held-out set, repeated or cut.
        repeats: draws that are averaged.
    """

    def __init__(self, data: TrainingData, features: Any, num_samples: int, repeats: int) -> None:
        self.features, self.repeats = features, repeats
        features.set_progress_bar_config(disable=True)
        real = data[torch.arange(len(data))]
        self.real = features(real["sample"]).features
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
        self.labels = real["class_labels"][order].repeat(-(-num_samples // len(data)))[:num_samples]

    def draw(self, sample: Any, seed: int) -> Tensor:
        """Images (repeats, n, C, H, W) of a sampler; the noise depends on the seed alone."""
        cond = {"class_labels": self.labels}
        draws = [
            sample(cond, len(self.labels), torch.Generator().manual_seed(1000 * seed + i)) for i in range(self.repeats)
        ]
        return torch.stack(draws)

    def __call__(self, draws: Tensor, reward: Reward | None = None, before: Tensor | None = None) -> dict[str, float]:
        """Means over the draws: Fréchet distance, accuracy, precision, recall, diversity; reward and what changed."""
        sums: dict[str, float] = {}
        for i, images in enumerate(draws):
            for name, value in self._one(images, reward, None if before is None else before[i]).items():
                sums[name] = sums.get(name, 0.0) + value / len(draws)
        return sums

    def _one(self, images: Tensor, reward: Reward | None, before: Tensor | None) -> dict[str, float]:
        shown = torch.nan_to_num(images).clamp(-1.0, 1.0)
        found = self.features(shown)
        near = precision_recall(self.real, found.features)
        values = {
            "frechet": frechet_distance(self.real, found.features),
            "accuracy": float((found.logits.argmax(1) == self.labels).double().mean()),
            "precision": near.precision,
            "recall": near.recall,
            "diversity": class_diversity(shown, self.labels).mean,
        }
        if reward is not None:
            with torch.no_grad():
                values["reward"] = float(reward(images, {"class_labels": self.labels}).mean())
        if before is not None and not torch.equal(images, before):
            values["high_share"] = float(spectrum_of_change(before, images).high_frequency_share)
        return values


def judge(config: Config) -> Judge:
    """The judge of a configuration's held-out set."""
    run = config.evaluation
    return Judge(config.data.load("test"), load(run.features), run.num_samples, run.repeats)


def _distilled(config: Config, arm: str, setting: str, seed: int) -> Iterator[tuple[str, float, int]]:
    steps = int(setting.split()[0])
    name = "teacher" if arm == "teacher" else f"{arm}-{steps}"
    pipe = cast(RMMDPipeline, load(_folder(config, seed) / name / "pipeline"))
    network = as_denoiser(pipe.teacher if arm == "teacher" else pipe.student, pipe.scheduler.prediction_type)
    look = judge(config)
    for metric, value in look(look.draw(sampler(network, pipe, num_inference_steps=steps), seed)).items():
        yield metric, value, config.evaluation.num_samples
    if arm == "teacher":
        train = config.data.load("train")
        real = look.features(train[torch.arange(len(train))]["sample"]).features
        yield "frechet_floor", frechet_distance(look.real, real), len(real)


def _rewarded(config: Config, arm: str, setting: str, seed: int) -> Iterator[tuple[str, float, int]]:
    """The hypervolume of an arm's points above (base's Fréchet distance + ROOM, base's reward), and its front."""
    data, look, reward, base = _scene(config, setting, seed)
    own = ARMS[arm].base
    pipe = base if own == "student" else cast(RMMDPipeline, load(_folder(config, seed) / own / "pipeline"))
    before = look.draw(sampler(as_denoiser(base.student, base.scheduler.prediction_type), base), seed)
    start = look(before, reward)
    points = [start] if pipe is base else []
    points += list(_points(config, arm, pipe, data, reward, look, seed, before))
    yield from _front(start, points, config.evaluation.num_samples)


def _ordered(config: Config, arm: str, setting: str, seed: int) -> Iterator[tuple[str, float, int]]:
    """As :func:`_rewarded`, of the students that one order of distillation and reward ends in."""
    data, look, reward, base = _scene(config, setting, seed)
    before = look.draw(sampler(as_denoiser(base.student, base.scheduler.prediction_type), base), seed)
    start, points = look(before, reward), []
    for number, student in enumerate(students_in_order(arm, config, base, data, reward, seed)):
        found = look(look.draw(sampler(student, base), seed), reward, before)
        points.append(found | {"strength": float(number)})
        for metric in ("frechet", "reward", "accuracy", "diversity"):
            yield f"point/{number}/{metric}", found[metric], config.evaluation.num_samples
    yield from _front(start, points, config.evaluation.num_samples)


def _scene(config: Config, setting: str, seed: int) -> tuple[TrainingData, Judge, Reward, RMMDPipeline]:
    """What every arm of a setting shares: training set, judge, reward, and the student to start from."""
    term = RewardTerm(name=cast(Any, setting.split()[1]), network=config.evaluation.features)
    folder = _folder(config, seed) / f"mmd-{config.num_inference_steps}" / "pipeline"
    reward = build_reward(RewardPart(terms=[term]))
    return config.data.load("train"), judge(config), reward, cast(RMMDPipeline, load(folder))


_OF_A_POINT = ("frechet", "reward", "accuracy", "recall", "diversity", "high_share", "learning_rate", "strength")


def _front(
    start: Mapping[str, float], points: Sequence[dict[str, float]], count: int
) -> Iterator[tuple[str, float, int]]:
    scores = torch.tensor([[start["frechet"] + ROOM - p["frechet"], p["reward"] - start["reward"]] for p in points])
    scores = torch.nan_to_num(scores.double(), nan=-1.0)
    yield "hypervolume", hypervolume(scores, (0.0, 0.0)), len(points)
    yield "base/frechet", start["frechet"], count
    yield "base/reward", start["reward"], count
    front = [p for p, kept in zip(points, non_dominated(scores).tolist(), strict=True) if kept]
    front = [p for p in front if p["frechet"] < start["frechet"] + ROOM and p["reward"] >= start["reward"]]
    for i, point in enumerate(_spread(sorted(front, key=lambda p: p["frechet"]), FRONT)):
        yield from ((f"front/{i}/{metric}", point[metric], count) for metric in _OF_A_POINT if metric in point)


def _spread(points: list[dict[str, float]], most: int) -> list[dict[str, float]]:
    """At most so many of them, evenly taken, both ends among them."""
    places = torch.linspace(0, len(points) - 1, min(most, len(points))).round().long().tolist()
    return [points[i] for i in places]


def _points(
    config: Config,
    arm: str,
    pipe: RMMDPipeline,
    data: TrainingData,
    reward: Reward,
    look: Judge,
    seed: int,
    before: Tensor,
) -> Iterator[dict[str, float]]:
    """An arm's measurements over its grid; a run that diverges ends there."""
    steps = config.evaluation.steps
    unit = unit_strength(ARMS[arm], pipe, data, reward)
    for rate, number in grid():
        objective, sample = make_arm(ARMS[arm], pipe, data, reward, steps, number, unit)
        with tempfile.TemporaryDirectory() as folder:
            settings = _trainer_config(config, folder, steps, rate, seed, ARMS[arm].options.get("group_size", 1))
            for entry in Trainer(objective, settings, data).train():
                if entry.step in {max(1, round(share * steps)) for share in CHECKPOINTS}:
                    found = look(look.draw(sample, seed), reward, before)
                    if math.isfinite(found["frechet"]):
                        yield found | {"learning_rate": rate, "strength": float(number)}


def _trainer_config(config: Config, folder: str, steps: int, rate: float, seed: int, group_size: int) -> TrainerConfig:
    """A group of walks from one condition counts as so many samples of the batch, which is equal for all arms."""
    shared = {key: getattr(config, key) for key in ("adam_beta1", "adam_beta2", "max_grad_norm")}
    shared["batch_size"] = max(1, config.batch_size // group_size)
    return TrainerConfig(
        method=METHOD, output_dir=folder, max_steps=steps, save_steps=10 * steps, learning_rate=rate, seed=seed,
        lr_scheduler="linear", progress=False, **shared,
    )  # fmt: skip


def headline(pipe: Any, config: Config) -> tuple[str, float]:
    """The one number a model card states: its name with n and setting, and its value."""
    if config.classifier is not None:
        data = config.data.load("test")
        test = data[torch.arange(len(data))]
        right = pipe(test["sample"]).logits.argmax(1) == test["class_labels"]
        return f"accuracy on {len(data)} held-out images", float(right.double().mean())
    if config.data.name not in IMAGES:
        return forecast_headline(pipe, config)
    look = judge(config)
    network = as_denoiser(pipe.student, pipe.scheduler.prediction_type)
    found = look(look.draw(sampler(network, pipe), config.seed))
    return (
        f"Fréchet distance of {config.evaluation.num_samples} samples in {config.num_inference_steps} steps to the "
        f"{len(look.real)} held-out images ({look.features.config.name}, mean of {look.repeats} draws)",
        found["frechet"],
    )


# ---- tables ----------------------------------------------------------------------------------------------------------


def _tables(config: Config, rows: Sequence[ResultRow]) -> list[str]:
    run = config.evaluation
    tables = [
        f"{config.data.name}: mean ± 95 % interval over seeds; Fréchet distances of {run.num_samples} samples to the "
        f"held-out images, mean of {run.repeats} draws, in the features of {run.features}. Toy scale."
    ]
    if config.data.name not in IMAGES:
        return _forecast_tables(config, rows)
    for setting in dict.fromkeys(row.setting for row in rows):
        chosen = [row for row in rows if row.setting == setting]
        arms = list(dict.fromkeys(row.arm for row in chosen))
        if setting.startswith("reward"):
            metrics = ["hypervolume", "front/0/frechet", "front/0/reward", "base/frechet", "base/reward"]
            arms = [arm for arm in ARMS if arm in arms]
        else:
            metrics = ["frechet", "accuracy", "precision", "recall", "diversity", "frechet_floor"]
        tables.append(f"{setting}:\n\n{summary_table(chosen, metrics, arms)}")
    return tables


def _forecast_tables(config: Config, rows: Sequence[ResultRow]) -> list[str]:
    run, best = config.evaluation, FORECAST_ARMS[-4]
    tables = [
        f"{config.data.name}: mean ± 95 % interval over seeds of training and sampling; {run.members} members; fair "
        f"CRPS in units of a typical change; shares of variables are against {best}, by block bootstrap. Toy scale."
    ]
    metrics = ["crps", "spread_skill", "energy_score", "reliability_index", "improvement", "better", "tied", "worse"]
    for setting in dict.fromkeys(row.setting for row in rows):
        chosen = [row for row in rows if row.setting == setting]
        own = metrics + (["seconds"] if any(row.metric == "seconds" for row in chosen) else [])
        tables.append(f"{setting}:\n\n{summary_table(chosen, own, FORECAST_ARMS)}")
    return tables
