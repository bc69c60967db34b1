"""
A student of four steps
=======================

A diffusion model walks many steps. A student that matches its conditional moments walks four, from the same noise to
nearly the same quality: handwritten digits of 8 x 8 pixels, toy scale. How good samples are is measured by the Fréchet
distance to digits that no network has seen, always beside what a perfect model would get at that sample size.

Run it as ``python examples/plot_distillation.py --out out/distillation``.
"""

# %%
# Student and teacher
# -------------------
# Both are in one pipeline. The student only walks the grid it was distilled for; the teacher walks any.
import argparse
from pathlib import Path

import torch

import genkit
from genkit.metrics.images import frechet_distance
from genkit.pipelines.rmmd.evaluate import Judge
from genkit.pipelines.rmmd.parts import DigitsData
from genkit.pipelines.rmmd.plots import draw_samples, draw_scores
from genkit.plotting import figure_style, save_figure

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=None, help="folder for the pictures (default: none are written)")
out = parser.parse_known_args()[0].out
torch.set_num_threads(1)
seed, count = 0, 898

pipe = genkit.load("zoo:digits-rmmd")
pipe.set_progress_bar_config(disable=True)
steps, many = pipe.config["num_inference_steps"], pipe.config["teacher_steps"]


def show(figure, name: str, note: str) -> None:
    if out is not None:
        print(save_figure(figure, out / name, seed=seed, note=note))


def sampler(**options):
    def sample(cond, number, generator):
        return pipe(number, class_labels=cond["class_labels"], generator=generator, **options).samples

    return sample


# %%
# The same noise and labels
# -------------------------
labels = {"class_labels": torch.arange(10)}
rows = {
    f"student, {steps} steps": sampler(),
    f"teacher, {steps} steps": sampler(network="teacher", num_inference_steps=steps),
    f"teacher, {many} steps": sampler(network="teacher"),
}
with figure_style():
    grid = draw_samples({name: one(labels, 10, torch.Generator().manual_seed(seed)) for name, one in rows.items()})
show(grid, "samples.png", "one column, one noise and label")

# %%
# Fréchet distance against steps
# ------------------------------
# The floor is the distance of the training half to the held-out half: what digits themselves get at this sample size.
data = DigitsData(name="digits")
look = Judge(data.load("test"), genkit.load("zoo:features-digits"), count, repeats=1)
train = data.load("train")
floor = frechet_distance(look.real, look.features(train[torch.arange(len(train))]["sample"]).features)
walked = [2, 4, 8, 16, 32, 64]
teacher = []
for number in walked:
    draws = look.draw(sampler(network="teacher", num_inference_steps=number), seed)
    teacher.append(look(draws)["frechet"])
    print(f"teacher, {number:2d} steps: Fréchet distance {teacher[-1]:.4f}")
student = look(look.draw(sampler(), seed))
print(f"student, {steps:2d} steps: Fréchet distance {student['frechet']:.4f} (floor {floor:.4f}, n = {count})")

with figure_style():
    curves = {"teacher": teacher, f"student ({steps} steps)": [student["frechet"]] * len(walked)}
    figure = draw_scores(curves | {"floor": [floor] * len(walked)}, walked, label="Fréchet distance (lower is better)")
    figure.axes[0].set(xscale="log", xlabel="network calls of the teacher", ylim=(0, None))
    figure.axes[0].minorticks_off()
    figure.axes[0].set_xticks(walked, [str(number) for number in walked])
show(figure, "frechet.png", f"n = {count}, one draw")
