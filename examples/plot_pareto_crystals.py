"""
Two objectives at once
======================

Crystals should be stable, and their elements should not depend on few suppliers. A search with one soft value for each
objective draws a preference anew for every rollout, so that one tree serves all compromises. Its front is compared with
the same network calls split over two searches, one for each objective. Toy scale.

Run it as ``python examples/plot_pareto_crystals.py --out out/pareto_crystals``.
"""

# %%
# One search for both, and one for each
# -------------------------------------
# ``Directions`` with a single preference makes a single-objective search that judges both, so that everything it sees
# counts for its front too.
import argparse
from pathlib import Path

import torch

import genkit
from genkit.metrics import hypervolume
from genkit.pipelines.crystal_tree_search.plots import draw_crystals, draw_fronts, interactive_front
from genkit.pipelines.crystal_tree_search.proto8 import reduced_formula
from genkit.pipelines.crystal_tree_search.structures import take
from genkit.plotting import figure_style, save_figure
from genkit.samplers.tree import Directions

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=None, help="folder for the pictures (default: none are written)")
out = parser.parse_known_args()[0].out
torch.set_num_threads(1)
seed, calls = 0, 256 * 32
names = ["stability", "scarcity"]
reference = (-1.0, -1.0)

pipe = genkit.load("zoo:proto8-crystal")
pipe.set_progress_bar_config(disable=True)


def show(figure, name: str, note: str) -> None:
    if out is not None:
        print(save_figure(figure, out / name, seed=seed, note=note))


def search(part: int, scalarisation=None, number: int = 0):
    return pipe(
        2048, 16, objectives=names, scalarisation=scalarisation, max_network_calls=part, num_inference_steps=32,
        lam=20.0, slots=16, generator=torch.Generator().manual_seed(seed + number), output_type="pt",
    )  # fmt: skip


both = search(calls)
alone = [search(calls // 2, Directions(2, [direction]), i) for i, direction in enumerate(([1.0, 0.0], [0.0, 1.0]))]
points = {
    "one search for both": both.archive.values,
    "one search for each": torch.cat([output.archive.values for output in alone]),
}
for name, values in points.items():
    volume = hypervolume(values[torch.isfinite(values).all(1)], reference)
    print(f"{name}: hypervolume {volume:.4f} above {reference}, {len(values)} crystals judged")

# %%
# The fronts
# ----------
# Stability is minus the energy above the hull in eV per atom, scarcity minus the Herfindahl–Hirschman index of the
# elements' reserves ÷ 10,000; both are better when higher.
with figure_style():
    fronts = draw_fronts(points, names)
show(fronts, "fronts.png", f"{calls} network calls each")

# %%
# What lies on it
# ---------------
# The front thinned to steps of 0.05 in both objectives. The same archive as an interactive picture names each crystal.
tree = both.tree
crystals = pipe.codec.decode(tree.leaves.states)
place = {number: i for i, number in enumerate(tree.leaves.simulation.tolist())}  # leaves by the archive's numbers
front = torch.tensor([place[i] for i in both.archive.ids[both.archive.thinned(0.05)].tolist()])
labels = [f"{stability:.2f}, {scarcity:.2f}" for stability, scarcity in tree.leaves.rewards[front].tolist()]
with figure_style():
    drawn = draw_crystals(take(crystals, front[:8]), labels[:8])
show(drawn, "front_crystals.png", "stability, scarcity")
if out is not None:
    texts = [reduced_formula(crystals["numbers"][place[i]].tolist()) for i in both.archive.ids.tolist()]
    interactive_front(both.archive.values, names, texts).write_html(out / "front.html", include_plotlyjs="cdn")
