"""
Rare symmetries
===============

A space group that a model seldom draws can be asked for in two ways: the model was trained with the group as a
condition, and a reward can count it. Guided sampling follows the condition and leaves the base's law by an unknown
amount. A search takes the guided kernel as a *proposal*: edges are drawn from it, and weights p/q keep the target where
it was. Toy scale.

Run it as ``python examples/plot_rare_space_groups.py --out out/rare_space_groups``.
"""

# %%
# A rare group
# ------------
# The groups of the set that the model was trained on, by their shares.
import argparse
from pathlib import Path

import torch

import genkit
from genkit.metrics.text import wilson_interval
from genkit.pipelines.crystal_tree_search.plots import draw_crystals
from genkit.pipelines.crystal_tree_search.proto8 import Proto8
from genkit.pipelines.crystal_tree_search.rewards import SpaceGroupReward
from genkit.pipelines.crystal_tree_search.structures import take
from genkit.pipelines.crystal_tree_search.symmetry import space_group_ladder
from genkit.plotting import figure_style, save_figure

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=None, help="folder for the pictures (default: none are written)")
out = parser.parse_known_args()[0].out
torch.set_num_threads(1)
seed, delivered, steps = 0, 32, 32

pipe = genkit.load("zoo:proto8-crystal")
pipe.set_progress_bar_config(disable=True)
counts = Proto8("train").space_group_counts
shares = counts.double() / counts.sum()
common = shares.argsort(descending=True)[:12].tolist()
print("most frequent groups: " + ", ".join(f"{group} ({shares[group]:.1%})" for group in common))
wanted = 225
print(f"wanted: {wanted}, {shares[wanted]:.1%} of the training set; the model itself rarely reaches it")


def show(figure, name: str, note: str) -> None:
    if out is not None:
        print(save_figure(figure, out / name, seed=seed, note=note))


# %%
# Base, guided sampling, search, guided search
# --------------------------------------------
# All but the first two have the network calls of 512 samples (a guided step costs two). A hit has the group at 0.1 Å.
# ``mean weight`` is the average of p/q over the edges of the guided search: 1 if the correction is right. Its guidance
# differs by level: these are the largest at which the weights keep an effective share of one half, as
# ``guidance_scale="auto"`` finds them with a pilot of 12,288 calls. A guidance of 1.5 on all levels would leave a few
# weights that decide everything.
by_level = [0.75, 0.625, 0.375, 0.25, 0.125, 0.125, 0.0, 0.125]
arms = {
    "base": {"mode": "base"},
    "guided sampling": {"mode": "base", "condition": {"space_group": wanted}, "guidance_scale": 1.5},
    "search": {"mode": "dts"},
    "guided search": {"mode": "dts", "condition": {"space_group": wanted}, "guidance_scale": by_level},
}
outputs = {}
for name, options in arms.items():
    searches = options["mode"] == "dts"
    output = pipe(
        4096 if searches else delivered, delivered, objectives=SpaceGroupReward(wanted), num_inference_steps=steps,
        lam=10.0, levels=8, widening=(2.0, 0.5), slots=32, max_network_calls=512 * steps if searches else None,
        generator=torch.Generator().manual_seed(seed), output_type="pt", **options,
    )  # fmt: skip
    group = space_group_ladder(output.crystals, (0.1,), select=output.valid).numbers[:, 0]
    hits = wilson_interval(int((group == wanted).sum()), delivered)
    line = f"{name:16s} {hits.value:.2f} [{hits.low:.2f}, {hits.high:.2f}] hits of {delivered} delivered"
    line += f", {output.diagnostics['network_calls']} calls"
    if name == "guided search":
        weights = output.diagnostics["mean_weight_by_level"][2:]  # behind the number of atoms and the noise
        line += f", mean weight {sum(weights) / len(weights):.2f}"
    print(line)
    outputs[name] = (output, group)

# %%
# Some of the hits
# ----------------
output, group = outputs["guided search"]
rows = torch.nonzero(group == wanted).squeeze(1)[:8]
if len(rows):
    with figure_style():
        crystals = draw_crystals(take(output.crystals, rows), [f"group {wanted}"] * len(rows))
    show(crystals, "hits.png", "guided search")
