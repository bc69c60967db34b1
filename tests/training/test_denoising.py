"""The denoising objective: its optimum is the exact denoiser, and conditions are dropped as asked."""

import math

import pytest
import torch
from torch import nn

from genkit.errors import ConfigError
from genkit.samplers.noise import training_keys
from genkit.schedulers import VPScheduler
from genkit.training.objectives import DenoisingObjective

MEAN, STD = 0.5, 0.5


class Affine(nn.Module):
    """The exact v of N(m, c), times and plus what is trained."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))

    def forward(self, x, t, cond=None):
        alpha, sigma = (c.to(x.dtype).unsqueeze(1) for c in VPScheduler().alpha_sigma(t))
        x0 = MEAN + alpha * STD**2 * (x - alpha * MEAN) / (alpha**2 * STD**2 + sigma**2)
        v = alpha * (x - alpha * x0) / sigma - sigma * x0
        return self.scale * v + self.shift


def batch(count=200_000):
    x0 = MEAN + STD * torch.randn(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"sample": x0, "sample_id": torch.arange(count)}


def test_the_exact_denoiser_is_the_optimum_and_its_loss_the_conditional_variance():
    """E|v − E[v|x]|² = Var[x_0|x_t] (α²/σ + σ)² = c σ² / (α²c + σ²) · 1/σ² at each t; averaged over the quarter circle
    ∫ c / (c cos² + sin²) = √c. The gradient is 0 within its Monte Carlo error, and is not a little beside it."""
    net = Affine().double()
    objective = DenoisingObjective(net, VPScheduler())
    data = batch()
    keys = training_keys(0, 0, data["sample_id"])
    loss = objective.loss("denoiser", data, step=0, keys=keys).loss
    assert loss.item() == pytest.approx(math.sqrt(STD**2), rel=0.02)
    gradient = torch.autograd.grad(loss, list(net.parameters()))
    assert max(abs(float(g)) for g in gradient) < 0.01
    with torch.no_grad():
        net.shift += 0.1
    off = torch.autograd.grad(objective.loss("denoiser", data, step=0, keys=keys).loss, list(net.parameters()))
    assert float(off[1]) == pytest.approx(0.2, abs=0.01)


class Told(nn.Module):
    """Remembers what it is told."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x, t, cond=None):
        self.seen = cond
        return x * self.weight


def test_conditions_are_dropped_at_the_rate_asked_and_the_same_for_the_same_keys():
    net, data = Told(), batch(20_000)
    data["class_labels"] = torch.zeros(20_000, dtype=torch.int64)
    data["condition"] = torch.ones(20_000, 2)
    names = ("class_labels", "condition")
    objective = DenoisingObjective(net, VPScheduler(), condition_names=names, drop=0.2, null={"class_labels": 7})
    objective.loss("denoiser", data, step=0, keys=training_keys(0, 0, data["sample_id"]))
    first = net.seen["class_labels"]
    assert set(first.tolist()) == {0, 7}
    assert float((first == 7).float().mean()) == pytest.approx(0.2, abs=0.01)
    assert bool((net.seen["condition"] == 1).all())
    objective.loss("denoiser", data, step=0, keys=training_keys(0, 0, data["sample_id"]))
    assert torch.equal(first, net.seen["class_labels"])
    assert int((data["class_labels"] == 7).sum()) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": 1.0}, "drop=1.0"),
        ({"drop": 0.1}, "needs null"),
        ({"null": {"clas": 1}, "condition_names": ["class"], "drop": 0.1}, "Did you mean 'class'"),
    ],
)
def test_impossible_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        DenoisingObjective(Told(), VPScheduler(), **options)
