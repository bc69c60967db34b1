"""The demo: four steps of the zoo's student beside its teacher, on held-out digits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import genkit
from genkit.demo import DemoRow
from genkit.pipelines.rmmd.evaluate import Judge
from genkit.pipelines.rmmd.parts import DigitsData
from genkit.pipelines.rmmd.pipeline import RMMDPipeline
from genkit.pipelines.rmmd.plots import draw_samples
from genkit.plotting import figure_style, save_figure

__all__ = ["demo"]

SEED, SAMPLES, REPEATS = 0, 898, 2


def demo(out: Path, progress: bool = True) -> DemoRow:
    """Measures student and teacher at equal and at unequal steps, and draws their samples into ``out``."""
    pipe = cast(RMMDPipeline, genkit.load("zoo:digits-rmmd"))
    pipe.set_progress_bar_config(disable=not progress)
    look = Judge(DigitsData(name="digits").load("test"), genkit.load("zoo:features-digits"), SAMPLES, REPEATS)
    steps, many = pipe.config["num_inference_steps"], pipe.config["teacher_steps"]
    arms = {
        f"student, {steps} steps": {},
        f"teacher, {steps} steps": {"network": "teacher", "num_inference_steps": steps},
        f"teacher, {many} steps": {"network": "teacher"},
    }
    scores, shown, seconds = [], {}, []
    for name, options in arms.items():
        began = time.perf_counter()
        draws = look.draw(_sampler(pipe, options), SEED)
        seconds.append(time.perf_counter() - began)
        scores.append(look(draws)["frechet"])
        shown[name] = draws[0][:12]
    with figure_style():
        figure = draw_samples(shown)
        picture = save_figure(figure, out / "samples.png", seed=SEED, note="the same noise and labels in each column")
    return DemoRow(
        name="rmmd",
        measured=f"Fréchet distance of {SAMPLES} samples of the {steps}-step student to {len(look.real)} held-out "
        f"digits, lower is better, {seconds[2] / seconds[0]:.0f} times faster than the baseline, its teacher in {many} "
        f"steps (the teacher in {steps} steps: {scores[1]:.3f}). Toy scale",
        value=scores[0],
        baseline=scores[2],
        ratio=scores[0] / scores[2],
        pictures=[picture],
    )


def _sampler(pipe: RMMDPipeline, options: dict[str, Any]) -> Any:
    def sample(cond: Any, count: int, generator: torch.Generator) -> Tensor:
        return cast(Any, pipe(count, class_labels=cond["class_labels"], generator=generator, **options)).samples

    return sample
