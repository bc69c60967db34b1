"""The demo: a search on the zoo's crystal model beside plain samples of it, with the same delivered number."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

import genkit
from genkit.demo import DemoRow
from genkit.pipelines.crystal_tree_search.pipeline import CrystalTreeSearchOutput, CrystalTreeSearchPipeline
from genkit.pipelines.crystal_tree_search.plots import draw_crystals, draw_rewards, draw_tree
from genkit.pipelines.crystal_tree_search.structures import take
from genkit.plotting import figure_style, save_figure

__all__ = ["demo"]

SEED, STEPS, ROLLOUTS, DELIVERED = 0, 32, 256, 32


def demo(out: Path, progress: bool = True) -> DemoRow:
    """Samples and searches, and draws three pictures into ``out``."""
    pipe = cast(CrystalTreeSearchPipeline, genkit.load("zoo:proto8-crystal"))
    pipe.set_progress_bar_config(disable=not progress)
    settings: dict[str, Any] = {"num_inference_steps": STEPS, "output_type": "pt", "slots": ROLLOUTS // 16}
    plain, found = (
        cast(
            CrystalTreeSearchOutput,
            pipe(rollouts, DELIVERED, mode=mode, generator=torch.Generator().manual_seed(SEED), **settings),
        )
        for rollouts, mode in ((DELIVERED, "base"), (ROLLOUTS, "dts"))
    )
    above = {"plain samples": -plain.rewards[:, 0], f"search of {ROLLOUTS} leaves": -found.rewards[:, 0]}
    order = found.rewards[:, 0].argsort(descending=True)[:8]
    titles = [f"{value:.2f} eV/atom" for value in (-found.rewards[order, 0]).tolist()]
    with figure_style():
        drawn = {
            "tree.png": draw_tree(found.tree),
            "energies.png": draw_rewards(above, label="energy above hull, eV per atom (single points)", better="lower"),
            "crystals.png": draw_crystals(take(found.crystals, order), titles),
        }
        note = f"{found.diagnostics['network_calls']} network calls"
        pictures = [save_figure(figure, out / name, seed=SEED, note=note) for name, figure in drawn.items()]
    ours, baseline = (float(o.rewards[o.valid, 0].neg().mean()) for o in (found, plain))
    return DemoRow(
        name="crystal_tree_search",
        measured=f"mean energy above hull of {int(found.valid.sum())} valid of {DELIVERED} delivered crystals, eV per "
        f"atom by {pipe.potential.name}, not relaxed; baseline: {int(plain.valid.sum())} valid of {DELIVERED} plain "
        "samples. Toy scale",
        value=ours,
        baseline=baseline,
        ratio=ours / baseline,
        pictures=pictures,
    )
