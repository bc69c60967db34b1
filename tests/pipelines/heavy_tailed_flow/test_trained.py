"""What training achieves: the tail knob of a trained network, and that independent coupling has none."""

import pytest
import torch

from genkit.metrics import hill
from genkit.pipelines.heavy_tailed_flow.config import Config
from genkit.pipelines.heavy_tailed_flow.evaluate import arm_config, train_arm
from genkit.training import load_config

SAMPLES = 100_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The mixture's rank and independent arms, trained for 4000 steps (about 20 s each)."""
    folder = tmp_path_factory.mktemp("trained")
    config = load_config("configs/heavy_tailed_flow/mixture2d.yaml", ["max_steps=4000"], Config)
    return {arm: train_arm(arm_config(config, arm, 0), folder / arm) for arm in ("rank", "independent")}


def radius(pipe, **options):
    return pipe(SAMPLES, 10, generator=torch.Generator().manual_seed(0), **options).samples.norm(dim=1)


def quantile(x, level):
    return torch.quantile(x, level).item()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_trained_knob_is_monotone_and_leaves_the_bulk(trained):
    base = radius(trained["rank"])
    tails = []
    for index in (1.2, 1.5, 1.8, 3.0):
        turned = radius(trained["rank"], tail_index=index)
        tails.append(hill(turned, fraction=0.005).tail_index)
        for level in (0.5, 0.9):
            assert quantile(turned, level) == pytest.approx(quantile(base, level), rel=0.02)
    assert tails == sorted(tails)
    assert tails[-1] > 1.5 * tails[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_independent_coupling_gives_no_such_control(trained):
    base = radius(trained["independent"])
    for index in (1.2, 3.0):
        turned = radius(trained["independent"], tail_index=index)
        assert quantile(turned, 0.99) == pytest.approx(quantile(base, 0.99), rel=0.10)


@pytest.mark.slow
def test_every_mode_is_found(trained):
    from genkit.data import StableMixture
    from genkit.metrics import mode_coverage

    data = StableMixture(1000)
    samples = trained["rank"](20_000, 10, generator=torch.Generator().manual_seed(1)).samples
    modes = mode_coverage(samples, data.centres, data.weights, radius=0.5)
    assert modes.captured == 9 and modes.total_variation < 0.05
