"""What every evaluation needs: a configuration trained into a pipeline, and missing rows measured side by side."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genkit.errors import GenkitError
from genkit.metrics.results import ResultRow, append_rows
from genkit.pipeline import GenkitPipeline, load
from genkit.training.config import TrainerConfig
from genkit.training.recipe import Recipe

__all__ = ["Job", "measure_rows", "train_pipeline"]


@dataclass(frozen=True)
class Job:
    """One arm and seed: what is printed, and the call that measures it in a process of its own.

    Args:
        name: for the progress lines.
        measure: a function at the top level of its module; returns the rows.
        arguments: what it is called with (they are sent to the process).
    """

    name: str
    measure: Callable[..., list[ResultRow]]
    arguments: tuple[Any, ...]


def train_pipeline(recipe: Recipe, config: TrainerConfig, folder: Path, *, keep: bool = False) -> GenkitPipeline:
    """Trains a recipe to its end and returns its pipeline.

    Args:
        recipe, config: what is trained and how.
        folder: checkpoints and the pipeline go here.
        keep: continue what an interrupted run left in ``folder``, and save by ``config.save_steps``.
    """
    from genkit.training.trainer import Trainer

    changes: dict[str, Any] = {"output_dir": str(folder), "resume_from_checkpoint": "latest" if keep else None}
    if not keep:
        changes["save_steps"] = config.max_steps
    config = config.model_copy(update=changes)
    for _ in Trainer(recipe.objective, config, recipe.data, recipe.save_pipeline).train():
        pass
    pipe = load(folder / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def measure_rows(jobs: Sequence[Job], path: Path, *, workers: int, minutes: float) -> None:
    """Runs jobs in ``workers`` processes and appends their rows to ``path`` as they come.

    Args:
        jobs: what is missing.
        path: a JSON-lines file of rows.
        workers: processes side by side.
        minutes: expected core-minutes of one job, to announce the cost.

    Raises:
        GenkitError: jobs failed; the message lists them, the rows of the others are kept.
    """
    print(f"{len(jobs)} rows to train and measure, about {len(jobs) * minutes / 60:.1f} core-hours", flush=True)
    if not jobs:
        return
    failed = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        futures = {pool.submit(job.measure, *job.arguments): job.name for job in jobs}
        for future in as_completed(futures):
            name = futures[future]
            if (error := future.exception()) is not None:
                failed.append(f"{name}: {type(error).__name__}: {error}")
                print(f"failed {failed[-1]}", flush=True)
                continue
            append_rows(path, future.result())
            print(f"measured {name}", flush=True)
    if failed:
        raise GenkitError(
            f"{len(failed)} of {len(jobs)} rows could not be measured; the others are in {path}:\n  "
            + "\n  ".join(failed)
        )
