"""A small untrained base of each family, whose laws are as exact as those of a trained one."""

from __future__ import annotations

import pytest
import torch

from genkit.pipelines.crystal_tree_search.model import CrystalTransformer
from genkit.pipelines.crystal_tree_search.pipeline import CrystalTreeSearchPipeline
from genkit.pipelines.crystal_tree_search.state import fit_codec
from tests.toy_crystals import alkali_halides


@pytest.fixture(scope="session", params=["matter", "diffcsp"])
def toy_pipe(request):
    codec = fit_codec(alkali_halides(256), request.param)
    shared = {n: codec.config[n] for n in ("density", "lattice_std", "family", "sigma_min", "sigma_max")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CrystalTransformer(
            num_elements=len(codec.elements), stability_bins=3, width=16, blocks=1, heads=2, expansion=2, pair_width=4,
            **shared,
        )  # fmt: skip
        with torch.no_grad():  # a fresh network ends in zeros, and no condition would matter
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    made = CrystalTreeSearchPipeline(model, codec.scheduler(), codec)
    made.set_progress_bar_config(disable=True)
    return made
