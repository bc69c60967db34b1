"""
Reward against quality
======================

A reward moves a student away from its teacher; how far depends on what holds it. Moment matching on the student's own
samples (RMMD) is compared with the gradient through the last step of the walk (DRaFT-1): the same reward (left-right
symmetry of digits), the same student, the same number of steps. Toy scale, one seed.

Run it as ``python examples/plot_reward_pareto.py --out out/reward_pareto``.
"""

# %%
# Two ways to the same reward
# ---------------------------
import argparse
import tempfile
from pathlib import Path

import torch

import genkit
from genkit.metrics.images import spectrum_of_change
from genkit.pipelines.rmmd.arms import ARMS, make_arm, sampler, unit_strength
from genkit.pipelines.rmmd.evaluate import Judge
from genkit.pipelines.rmmd.networks import as_denoiser
from genkit.pipelines.rmmd.parts import DigitsData
from genkit.pipelines.rmmd.plots import draw_front, draw_samples, draw_spectra
from genkit.plotting import figure_style, save_figure
from genkit.rewards import Symmetry
from genkit.training import Trainer, TrainerConfig

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=None, help="folder for the pictures (default: none are written)")
out = parser.parse_known_args()[0].out
torch.set_num_threads(1)
seed, count, steps, every = 0, 898, 240, 30

pipe = genkit.load("zoo:digits-rmmd")
data = DigitsData(name="digits")
train, reward = data.load("train"), Symmetry()
look = Judge(data.load("test"), genkit.load("zoo:features-digits"), count, repeats=1)
student = as_denoiser(pipe.student, pipe.scheduler.prediction_type)
before = look.draw(sampler(student, pipe), seed)
start = look(before, reward)
print(f"before: reward {start['reward']:.4f}, Fréchet distance {start['frechet']:.4f}")


def show(figure, name: str, note: str) -> None:
    if out is not None:
        print(save_figure(figure, out / name, seed=seed, note=note))


# %%
# Points on the way
# -----------------
# Every 30 steps the student of that moment is measured, and its samples are kept.
fronts, kept = {}, {}
for name, rate in (("rmmd", 3e-4), ("draft_1", 1e-4)):
    unit = unit_strength(ARMS[name], pipe, train, reward)
    objective, sample = make_arm(ARMS[name], pipe, train, reward, steps, 2, unit)
    points = []
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainerConfig(
            output_dir=folder,
            max_steps=steps,
            save_steps=steps,
            batch_size=128,
            learning_rate=rate,
            adam_beta1=0.0,
            adam_beta2=0.99,
            progress=False,
        )
        for entry in Trainer(objective, settings, train).train():
            if entry.step % every == 0:
                draws = look.draw(sample, seed)
                found = look(draws, reward, before)
                points.append((found["frechet"], found["reward"], draws))
    fronts[name] = torch.tensor([point[:2] for point in points])
    kept[name] = points
    print(f"{name}: reward {points[-1][1]:.4f}, Fréchet distance {points[-1][0]:.4f} after {steps} steps")

with figure_style():
    figure = draw_front(fronts, (start["frechet"], start["reward"]), reward="left-right symmetry")
show(figure, "front.png", f"n = {count}, one draw, points every {every} steps")

# %%
# Samples at matched reward
# -------------------------
# The point of each arm that is nearest to a reward which both reach, from the same noise and labels.
target = min(float(front[:, 1].max()) for front in fronts.values())
matched = {name: min(points, key=lambda p: abs(p[1] - target))[2] for name, points in kept.items()}
with figure_style():
    shown = draw_samples({"before": before[0][:12], **{name: draws[0][:12] for name, draws in matched.items()}})
show(shown, "samples.png", f"reward about {target:.3f}")

# %%
# Which frequencies changed
# -------------------------
changes = {}
for name, draws in matched.items():
    found = spectrum_of_change(before[0], draws[0])
    changes[name] = (found.frequencies, found.shares)
    print(f"{name}: {100 * found.high_frequency_share:.0f} % of the change above half of Nyquist")
with figure_style():
    spectra = draw_spectra(changes)
show(spectra, "spectra.png", f"n = {count}, reward about {target:.3f}")
