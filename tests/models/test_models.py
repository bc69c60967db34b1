"""Wrappers that are denoisers, and the vector network."""

import math

import pytest
import torch

from genkit.errors import ConfigError
from genkit.models import (
    ClassifierFreeGuidance,
    ConditionalMLP,
    DiffusersDenoiser,
    FixedPrecision,
    FourierTimeEmbedding,
)
from genkit.samplers import rollout
from genkit.schedulers import FlowScheduler


def classes(x, t, cond):
    """A denoiser that predicts label · x, and nothing for the null label."""
    return cond["label"].to(x.dtype).unsqueeze(1) * x


def test_guidance_extrapolates_from_the_negative_condition():
    x, t, cond = torch.ones(3, 2), torch.ones(3), {"label": torch.tensor([1, 2, 3])}
    for scale in (0.0, 1.0, 2.5):
        guided = ClassifierFreeGuidance(classes, scale, {"label": torch.tensor([10])})
        expected = 10 + scale * (cond["label"].float() - 10)
        torch.testing.assert_close(guided(x, t, cond), expected.unsqueeze(1) * x)
    assert torch.equal(
        ClassifierFreeGuidance(classes, 1.0, {"label": torch.tensor([0])})(x, t, cond), classes(x, t, cond)
    )


def test_guidance_refuses_a_condition_that_is_not_there():
    with pytest.raises(ConfigError, match="labl"):
        ClassifierFreeGuidance(classes, 2.0, {"labl": torch.zeros(1)})(
            torch.ones(1, 1), torch.ones(1), {"label": torch.ones(1)}
        )
    with pytest.raises(ConfigError, match="empty mapping"):
        ClassifierFreeGuidance(classes, 2.0, {})


def test_guidance_keeps_the_prediction_type_so_that_a_mismatch_is_refused():
    classes.prediction_type = "v_prediction"
    guided = ClassifierFreeGuidance(classes, 2.0, {"label": torch.zeros(1)})
    with pytest.raises(ConfigError, match="predicts 'v_prediction'"):
        rollout(guided, FlowScheduler(), torch.ones(1, 1), num_inference_steps=1, cond={"label": torch.ones(1)})


class Recorder(torch.nn.Module):
    """A network with diffusers' signature that returns its input and remembers the timestep."""

    def forward(self, sample, timestep, class_labels=None, return_dict=True):
        self.seen = (timestep, class_labels)
        return (2 * sample,)


def test_diffusers_networks_are_told_thousandfold_times():
    network = Recorder()
    denoiser = DiffusersDenoiser(network, "epsilon")
    x, labels = torch.ones(2, 1, 4, 4), torch.tensor([3, 4])
    assert torch.equal(denoiser(x, torch.tensor([0.25, 1.0]), {"class_labels": labels}), 2 * x)
    assert network.seen[0].tolist() == [250.0, 1000.0] and torch.equal(network.seen[1], labels)
    with pytest.raises(ConfigError, match="Did you mean 'class_labels'"):
        denoiser(x, torch.ones(2), {"class_label": labels})


def test_time_embedding_is_periodic_in_its_frequencies():
    embedding = FourierTimeEmbedding(8, max_frequency=2.0)
    t = torch.linspace(0, 1, 5)
    frequencies = torch.tensor([0.25, 0.5, 1.0, 2.0])
    expected = torch.cat(
        (torch.cos(2 * math.pi * t[:, None] * frequencies), torch.sin(2 * math.pi * t[:, None] * frequencies)), 1
    )
    torch.testing.assert_close(embedding(t), expected, atol=1e-5, rtol=0)


def test_network_starts_at_zero_and_then_uses_every_input():
    torch.manual_seed(0)
    network = ConditionalMLP(3, cond_channels=2, width=32, blocks=2, num_classes=4)
    x, t, c, labels = torch.randn(5, 3), torch.rand(5), torch.randn(5, 2), torch.tensor([0, 1, 2, 3, 4])
    assert network(x, t, c, labels).abs().max() == 0
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    base = network(x, t, c, labels)
    changed = (
        network(x + 1, t, c, labels),
        network(x, 1 - t, c, labels),
        network(x, t, c + 1, labels),
        network(x, t, c, labels.flip(0)),
    )
    assert all((base - other).abs().max() > 1e-3 for other in changed)


def test_fixed_precision_survives_a_cast():
    class Table(FixedPrecision):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.tensor([1.0 + 2**-20], dtype=torch.float64))

    model = torch.nn.Sequential(Table(), torch.nn.Linear(1, 1)).to(torch.bfloat16)
    assert model[0].table.dtype == torch.float64 and model[0].table.item() != 1.0
    assert model[1].weight.dtype == torch.bfloat16


def test_a_diffusers_network_sees_its_own_dtype_and_the_walk_keeps_float32():
    from diffusers import UNet2DModel

    from genkit.schedulers import VPScheduler

    torch.manual_seed(0)
    network = UNet2DModel(
        sample_size=16,
        in_channels=2,
        out_channels=2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    ).eval()
    walks = []
    for dtype in (torch.float32, torch.bfloat16):
        denoiser = DiffusersDenoiser(network.to(dtype), "v_prediction")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            out = rollout(denoiser, VPScheduler(), shape=(2, 2, 16, 24), num_inference_steps=3, generator=generator)
        walks.append(out.sample)
    assert walks[1].dtype == torch.float32
    torch.testing.assert_close(*walks, rtol=0.1, atol=0.1)
