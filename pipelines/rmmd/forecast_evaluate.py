"""The evidence on ensemble forecasts: CRPS, spread and calibration of teacher, students and simple forecasts.

Every arm forecasts the same held-out starts with the same number of members, step by step to several days ahead. A row
is the mean over starts and variables; how often an arm is significantly better than the teacher is counted over
variables by block bootstrap.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.metrics.ensemble import (
    compare_forecasts,
    crps,
    energy_score,
    rank_histogram,
    reliability_index,
    spread_skill,
)
from genkit.metrics.results import ResultRow
from genkit.pipeline import load
from genkit.pipelines.rmmd.config import Config, build
from genkit.pipelines.rmmd.forecast import Draw, ForecastCodec, roll_out
from genkit.pipelines.rmmd.pipeline import RMMDPipeline
from genkit.training.arms import train_pipeline

__all__ = ["FORECAST_ARMS", "Truth", "forecast_headline", "measure_forecasts", "train_forecasts"]

METHOD = "rmmd"
#: fewer calls of the teacher: levels of DPM-Solver++ 2S, two calls each but the last
LEVELS = (2, 3, 5, 8, 15, 30)
FORECAST_ARMS = (
    "climatology",
    "persistence",
    "crps_direct",
    *(f"teacher_{2 * n - 1}" for n in LEVELS),
    "mmd",
    "rmmd",
    "rmmd_offpolicy",
)
_BOOTSTRAP = 1000


class Truth:
    """The held-out starts and what came after them.

    Args:
        data: :class:`genkit.data.StationWeather` or :class:`genkit.data.Lorenz96`.
        num_steps: leads ahead.
        most: starts at most, evenly taken.

    Attributes:
        states: of the codec's history, (n, V) each.  time: int64 (n,) or None.
        targets: (num_steps, n, V), NaN where unknown.
    """

    def __init__(self, data: Any, num_steps: int, most: int) -> None:
        self.codec = ForecastCodec.of(data)
        if hasattr(data, "rollout_starts"):
            starts = data.rollout_starts(num_steps * data.lead_hours)
            index = starts[torch.linspace(0, len(starts) - 1, min(most, len(starts))).long()]
            rows = data.rows[index]
            self.states = [data.table.values[rows - h].to(torch.float32) for h in data.history_hours]
            self.time: Tensor | None = data.times[index]
            self.targets = data.truth(index, num_steps)[1:]
        else:
            walked = data.truth(num_steps, min(most, data.num_trajectories))
            self.states, self.time, self.targets = [walked[0].to(torch.float32)], None, walked[1:].to(torch.float32)

    def __len__(self) -> int:
        return len(self.states[0])


def train_forecasts(config: Config, folder: Path, seed: int) -> None:
    """Trains what a seed's arms forecast with: teacher, student, rewarded students, the directly trained network."""
    torch.set_num_threads(1)
    distil, reward = config.distil, config.reward
    if reward is None:
        raise ConfigError("a comparison of forecasts needs the part reward, with crps")
    first = {"reward": None, "distil": distil.model_copy(update={"steps": 0}), "seed": seed}
    _trained(config, first | {"max_steps": config.teacher.steps}, folder / "teacher")
    source = {"source": str(folder / "teacher" / "pipeline"), "steps": 0}
    teacher = config.teacher.model_copy(update=source)
    changes: dict[str, Any] = {"teacher": teacher, "reward": None, "seed": seed, "max_steps": distil.steps}
    _trained(config, changes, folder / "mmd")
    after = {"init_from": str(folder / "mmd" / "pipeline"), "seed": seed, "max_steps": reward.steps}
    after |= {"teacher": config.teacher.model_copy(update={"steps": 0})}
    after |= {"distil": distil.model_copy(update={"steps": 0})}
    _trained(config, after, folder / "rmmd")
    offpolicy = {"reward": reward.model_copy(update={"on_policy": False})}
    _trained(config, after | offpolicy, folder / "rmmd_offpolicy")
    direct = reward.model_copy(update={"steps": distil.steps, "on_policy": "discrete", "lam": 1.0, "lam_reg": 0.0})
    alone = distil.model_copy(update={"steps": 0, "weight": "none", "teacher_weight": 0.0})
    changes = {"teacher": teacher, "num_inference_steps": 1, "seed": seed}
    changes |= {"reward": direct, "distil": alone}
    _trained(config, changes | {"max_steps": distil.steps}, folder / "crps_direct")


def _trained(config: Config, changes: Mapping[str, Any], folder: Path) -> None:
    if not (folder / "pipeline" / "manifest.json").is_file():
        config = config.model_copy(update=dict(changes))
        train_pipeline(build(config), config, folder, keep=True)


def measure_forecasts(values: Mapping[str, Any], folder: Path, name: str, seed: int) -> list[ResultRow]:
    """The rows of all arms of one seed; runs in a process of its own."""
    torch.set_num_threads(1)
    config = Config.model_validate(values)
    run = config.evaluation
    train, data = config.data.load("train").data, config.data.load("test").data
    truth = Truth(data, run.leads, run.starts)
    rows: list[ResultRow] = []
    scores: dict[str, Tensor] = {}
    for arm in FORECAST_ARMS:
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(seed)
        found = _forecast(arm, config, folder, train, truth, generator)
        seconds = time.perf_counter() - began
        scores[arm] = crps(found.movedim(1, 0), truth.targets)  # (L, n, V)
        for step in range(run.leads):
            for metric, value, n in _numbers(found[step], truth.targets[step], scores[arm][step], train, seed):
                rows.append(_row(arm, _setting(config, step), name, seed, metric, value, n, seconds))
        rows.append(_row(arm, _setting(config, 0), name, seed, "seconds", seconds, len(truth), seconds))
    best = f"teacher_{2 * LEVELS[-1] - 1}"
    for arm in FORECAST_ARMS:
        if arm != best:
            for step in range(run.leads):
                counts = _against(scores[arm][step], scores[best][step], run.block, seed)
                rows += [
                    _row(arm, _setting(config, step), name, seed, k, v, len(truth), 0.0) for k, v in counts.items()
                ]
    return rows


def forecast_headline(pipe: RMMDPipeline, config: Config) -> tuple[str, float]:
    """The one number a model card states: its name with n and setting, and its value."""
    run, codec = config.evaluation, ForecastCodec.from_dict(pipe.config["fields"])
    truth = Truth(config.data.load("test").data, 1, run.starts)
    pipe.set_progress_bar_config(disable=True)
    teacher = _teacher_draw(pipe, 2 * pipe.config["teacher_steps"] - 1)
    scores = []
    for draw in (pipe.draw_from(), teacher):
        generator = torch.Generator().manual_seed(config.seed)
        found = roll_out(codec, draw, truth.states, truth.time, run.members, 1, generator)[0]
        scores.append(float((crps(found, truth.targets[0]).nanmean(dim=0) / torch.tensor(codec.scale)).mean()))
    return (
        f"fair CRPS in units of a typical change, {len(truth)} held-out starts, {run.members} members, one lead ahead, "
        f"{config.num_inference_steps} steps (the teacher in {pipe.config['teacher_steps']}: {scores[1]:.4f})",
        scores[0],
    )


def _row(arm: str, setting: str, name: str, seed: int, metric: str, value: float, n: int, seconds: float) -> ResultRow:
    return ResultRow(METHOD, arm, setting, name, seed, metric, value, n, round(seconds, 1))


def _setting(config: Config, step: int) -> str:
    lead = getattr(config.data, "lead_hours", None)
    return f"{(step + 1) * lead} h" if lead else f"lead {(step + 1) * cast(Any, config.data).lead:g}"


def _forecast(arm: str, config: Config, folder: Path, train: Any, truth: Truth, generator: torch.Generator) -> Tensor:
    """(L, M, n, V) in units."""
    members, steps = config.evaluation.members, config.evaluation.leads
    if arm == "climatology":
        return _climatology(train, truth, members, steps, generator)
    if arm == "persistence":
        return _persistence(train, truth, members, steps, generator)
    name = "mmd" if arm.startswith("teacher") else arm
    pipe = cast(RMMDPipeline, load(folder / name / "pipeline"))
    pipe.set_progress_bar_config(disable=True)
    draw = _teacher_draw(pipe, int(arm.partition("_")[2])) if arm.startswith("teacher") else pipe.draw_from()
    return roll_out(truth.codec, draw, truth.states, truth.time, members, steps, generator)


def _teacher_draw(pipe: RMMDPipeline, calls: int) -> Draw:
    return pipe.draw_from("teacher", (calls + 1) // 2, "dpmpp_2s")


def _climatology(train: Any, truth: Truth, members: int, steps: int, generator: torch.Generator) -> Tensor:
    """States of the training set, at the same hour of the day and within 45 days of the year where there is a clock."""
    if truth.time is None:
        pick = torch.randint(len(train.states), (steps, members, len(truth)), generator=generator)
        return train.states[pick].to(torch.float32)
    rows = train.rows
    states, hours = train.table.values[rows].to(torch.float32), train.times
    found = torch.empty(steps, members, len(truth), states.shape[1])
    for step in range(steps):
        for i, then in enumerate((truth.time + (step + 1) * truth.codec.lead).tolist()):
            away = (hours - then).abs()
            near = ((hours - then) % 24 == 0) & (torch.minimum(away, 8766 - away).abs() <= 45 * 24)
            known = near.nonzero().flatten()
            found[step, :, i] = states[known[torch.randint(len(known), (members,), generator=generator)]]
    return found


def _persistence(train: Any, truth: Truth, members: int, steps: int, generator: torch.Generator) -> Tensor:
    """The last state plus a change drawn from the training set's over the same lead."""
    walked = train.truth(steps, train.num_trajectories) if truth.time is None else None
    found = []
    for step in range(steps):
        if walked is not None:
            changes = (walked[step + 1] - walked[0]).to(torch.float32)
        else:
            states, ahead = train.table.values, train.rows + (step + 1) * truth.codec.lead
            inside = ahead < len(states)
            changes = (states[ahead[inside]] - states[train.rows[inside]]).to(torch.float32)
        pick = torch.randint(len(changes), (members, len(truth)), generator=generator)
        found.append(truth.states[0] + changes[pick])
    return torch.stack(found)


def _numbers(members: Tensor, target: Tensor, score: Tensor, train: Any, seed: int) -> Iterator[tuple[str, float, int]]:
    """Of one lead: members (M, n, V), target and score (n, V)."""
    count = len(target)
    scale = train.scale.to(torch.float32)
    yield "crps", float((score.nanmean(dim=0) / scale).mean()), count
    yield "spread_skill", float(spread_skill(members, target).nanmean()), count
    known = ~torch.isnan(target).any(dim=1)
    energy = energy_score(members[:, known] / scale, target[known] / scale)
    yield "energy_score", float(energy.mean()), int(known.sum())
    index = []
    for v in range(target.shape[1]):
        seen = ~torch.isnan(target[:, v])
        counts = rank_histogram(members[:, seen, v], target[seen, v], generator=torch.Generator().manual_seed(seed))
        index.append(reliability_index(counts))
    yield "reliability_index", sum(index) / len(index), count


def _against(ours: Tensor, theirs: Tensor, block: int, seed: int) -> dict[str, float]:
    """Shares of variables that are significantly better, tied and worse, and the mean change of CRPS in per cent."""
    known = ~(torch.isnan(ours) | torch.isnan(theirs)).any(dim=1)
    generator = torch.Generator().manual_seed(seed)
    found = compare_forecasts(ours[known], theirs[known], block, generator=generator, num_resamples=_BOOTSTRAP)
    change = 100.0 * (1.0 - ours[known].mean(dim=0) / theirs[known].mean(dim=0))
    verdict = found.verdict
    shares = {name: float((verdict == v).double().mean()) for name, v in (("better", 1), ("tied", 0), ("worse", -1))}
    return shares | {"lower": float((change > 0).double().mean()), "improvement": float(change.mean())}
