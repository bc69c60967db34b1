"""
Better crystals from a frozen model
===================================

A small diffusion model of crystals (up to 8 atoms, 27 elements) is searched for crystals near the convex hull of
energy. Its weights stay as they are: the search decides which noise is worth going on with. Energies are those of the
machine-learning potential CHGNet, as single points during the search; what was found is relaxed afterwards and judged
again. Toy scale.

Run it as ``python examples/plot_crystal_search.py --out out/crystal_search``.
"""

# %%
# Plain samples and a search
# --------------------------
# Both deliver 32 crystals. The objective is stability for crystals of new formulas: those that the model was made with
# are stable, and a search for stability alone finds them again. The search spends the network calls of 256 samples,
# ``slots`` of them side by side: few slots for the number of leaves, or the search would be best-of-N by another name.
# A narrow widening lets a node's children be visited again before it gets more of them.
import argparse
from pathlib import Path

import torch

import genkit
from genkit.pipelines.crystal_tree_search.crystal_metrics import evaluate_structures
from genkit.pipelines.crystal_tree_search.plots import draw_crystals, draw_rewards, draw_tree, interactive_tree
from genkit.pipelines.crystal_tree_search.proto8 import known_crystals
from genkit.pipelines.crystal_tree_search.relaxation import RelaxationSettings
from genkit.pipelines.crystal_tree_search.structures import take
from genkit.plotting import figure_style, save_figure

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=None, help="folder for the pictures (default: none are written)")
out = parser.parse_known_args()[0].out
torch.set_num_threads(1)
seed, delivered = 0, 32

pipe = genkit.load("zoo:proto8-crystal")
pipe.set_progress_bar_config(disable=True)
settings = {"objectives": "novel_stability", "num_inference_steps": 32, "output_type": "pt"}


def show(figure, name: str, note: str) -> None:
    if out is not None:
        print(save_figure(figure, out / name, seed=seed, note=note))


plain = pipe(delivered, delivered, mode="base", generator=torch.Generator().manual_seed(seed), **settings)
search = pipe(
    4096, delivered, mode="dts", lam=10.0, levels=8, widening=(2.0, 0.5), slots=16, max_network_calls=256 * 32,
    generator=torch.Generator().manual_seed(seed), save_dir=None if out is None else out / "found",
    resume=out is not None and (out / "found").exists(), **settings,
)  # fmt: skip
for name, output in (("plain samples", plain), ("search", search)):
    rewards = output.rewards[output.valid, 0]
    print(
        f"{name}: {int(output.valid.sum())} of {delivered} valid, mean reward {rewards.mean():.3f} eV/atom, "
        f"{output.diagnostics['network_calls']} network calls, {output.diagnostics['reward_calls']} energies"
    )

# %%
# The tree
# --------
# Its first level is the number of atoms, the second one noise; below, each line is a piece of the walk. The paths to
# the best leaves are drawn.
with figure_style():
    tree = draw_tree(search.tree, max_nodes=400)
show(tree, "tree.png", f"{search.diagnostics['leaves']} leaves")
if out is not None:
    interactive_tree(search.tree, max_nodes=400).write_html(out / "tree.html", include_plotlyjs="cdn")
levels = zip(search.diagnostics["nodes_by_level"], search.diagnostics["visit_entropy_by_level"], strict=True)
for depth, (nodes, entropy) in enumerate(levels, start=1):
    print(f"level {depth}: {nodes} nodes, entropy of the visits {entropy:.2f} of its maximum")

# %%
# After relaxation
# ----------------
# A few steps of relaxation, then the usual counts. *Novel* means: not among the crystals of the set that the model was
# made with. Files of anybody's structures get the same table: ``genkit evaluate structures.extxyz``.
references = known_crystals()
for name, output in (("plain samples", plain), ("search", search)):
    found = evaluate_structures(
        output.crystals, potential=pipe.potential, hull=pipe.hull, references=references,
        relaxation=RelaxationSettings(steps=10),
    )  # fmt: skip
    counts = {key: int(flag.sum()) for key, flag in found.flags.items()}
    print(f"{name}: " + ", ".join(f"{key} {count} of {delivered}" for key, count in counts.items()))

# %%
# What was found
# --------------
order = search.rewards[:, 0].nan_to_num(nan=-9.0).argsort(descending=True)[:8]
titles = [f"reward {value:.2f}" for value in search.rewards[order, 0].tolist()]
with figure_style():
    energies = {"plain samples": -plain.rewards[:, 0], "search": -search.rewards[:, 0]}
    curves = draw_rewards(energies, label="energy above hull (+ 0.4 if known), eV per atom", better="lower")
    crystals = draw_crystals(take(search.crystals, order), titles)
show(curves, "energies.png", f"n = {delivered} each")
show(crystals, "crystals.png", "best eight, not relaxed")
