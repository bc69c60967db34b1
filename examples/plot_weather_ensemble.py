"""
An ensemble forecast in eight steps
===================================

A diffusion model forecasts the weather at three airports twelve hours ahead; walked again from its own forecasts it
reaches five days. The teacher asks its network 59 times for every member and step, the student, which was also rewarded
with the fair CRPS, 8 times. Toy scale: one year of hourly observations.

Run it as ``python examples/plot_weather_ensemble.py --out out/weather``.
"""

# %%
# Held-out starts
# ---------------
import argparse
import time
from pathlib import Path

import torch

import genkit
from genkit.data import StationWeather
from genkit.metrics import crps, rank_histogram, spread_skill
from genkit.pipelines.rmmd.forecast import ForecastCodec, roll_out
from genkit.pipelines.rmmd.forecast_evaluate import Truth
from genkit.pipelines.rmmd.plots import draw_fans, draw_ranks, draw_scores
from genkit.plotting import figure_style, save_figure

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=None, help="folder for the pictures (default: none are written)")
out = parser.parse_known_args()[0].out
torch.set_num_threads(1)
seed, members, leads = 0, 20, 10

pipe = genkit.load("zoo:weather-rmmd")
pipe.set_progress_bar_config(disable=True)
data = StationWeather("test")
truth = Truth(data, leads, 60)
hours = [12 * (i + 1) for i in range(leads)]


def show(figure, name: str, note: str) -> None:
    if out is not None:
        print(save_figure(figure, out / name, seed=seed, note=note))


def drawer(**options):
    def draw(condition, generator):
        return pipe(len(condition), condition=condition, generator=generator, **options).samples

    return draw


# %%
# Student and teacher, five days ahead
# ------------------------------------
codec = ForecastCodec.from_dict(pipe.config["fields"])
arms = {"student, 8 calls": drawer(), "teacher, 59 calls": drawer(network="teacher")}
found, seconds = {}, {}
for name, draw in arms.items():
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    found[name] = roll_out(codec, draw, truth.states, truth.time, members, leads, generator)
    seconds[name] = time.perf_counter() - began
scale = torch.tensor(codec.scale)
curves = {}
for name, forecast in found.items():
    score = crps(forecast.movedim(1, 0), truth.targets)
    curves[name] = (score.nanmean(dim=1) / scale).mean(dim=1).tolist()
    ratio = float(spread_skill(forecast[0], truth.targets[0]).nanmean())
    print(f"{name}: CRPS {curves[name][0]:.3f} at 12 h, {curves[name][-1]:.3f} at 120 h, {seconds[name]:.1f} s")
    print(f"{name}: spread/skill {ratio:.2f} at 12 h")
times_faster = seconds["teacher, 59 calls"] / seconds["student, 8 calls"]
print(f"{times_faster:.1f} times faster, {len(truth)} starts, {members} members")

with figure_style():
    figure = draw_scores(curves, hours, label="fair CRPS / typical change (lower is better)")
show(figure, "crps.png", f"n = {len(truth)} starts, {members} members")

# %%
# Fans
# ----
# Median, central 50 and 90 % of the members of one forecast, and what was observed.
start = len(truth) // 2
panels = {}
for variable in ("jfk_temp", "jfk_pressure", "jfk_u"):
    column = data.names.index(variable)
    panels[f"{variable} ({data.units[column]})"] = (
        found["student, 8 calls"][:, :, start, column].T,
        truth.targets[:, start, column],
    )
with figure_style():
    fans = draw_fans(panels, hours, unit="value", model="student")
show(fans, "fans.png", f"one start, {members} members")

# %%
# Ranks of the observations
# -------------------------
# Flat is calibrated; a U says that the members agree too much.
ranks = {}
for name, forecast in found.items():
    known = ~torch.isnan(truth.targets[0])
    values, observed = forecast[0][:, known], truth.targets[0][known]
    ranks[name] = rank_histogram(values, observed, generator=torch.Generator().manual_seed(seed))
with figure_style():
    histograms = draw_ranks(ranks)
show(histograms, "ranks.png", "12 hours ahead, all variables (neighbouring ones are dependent)")
