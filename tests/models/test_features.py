"""The feature network: shapes, one image at a time, precision, sizes, files, and `frozen`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from genkit.errors import ConfigError
from genkit.models import FeatureNetwork
from genkit.models.features import frozen


def images(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype) - 1.0


def network(seed: int = 0, **options) -> FeatureNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FeatureNetwork(**{"in_channels": 3, "image_size": 9, "widths": [8, 12], "feature_channels": 6} | options)


def test_logits_are_linear_in_the_features() -> None:
    net, x = network(num_classes=4).eval(), images(5, 3, 9, 9)
    features, logits = net.features(x).detach(), net(x).detach()
    assert features.shape == (5, 6) and logits.shape == (5, 4)
    torch.testing.assert_close(logits, features @ net.output.weight.T + net.output.bias)
    assert float(features.min()) >= -0.2785


def test_an_image_is_judged_alone() -> None:
    """No batch statistics, also in training mode (features come before dropout); control: order matters not at all."""
    net, x = network().double().train(), images(6, 3, 9, 9, dtype=torch.float64)
    whole = net.features(x).detach()
    torch.testing.assert_close(net.features(x[2:3])[0], whole[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.features(x.flip(0)), whole.flip(0), rtol=1e-12, atol=1e-12)
    spread = whole.std(dim=0).mean()
    assert float(spread) > 1e-3  # it does tell images apart


def test_gradients_are_exact_and_every_parameter_has_one() -> None:
    net = network(image_size=4, in_channels=1, dropout=0.0).double()
    x = images(2, 1, 4, 4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(net, (x,))
    net(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())


def test_precisions_agree() -> None:
    net, x = network().eval(), images(4, 3, 9, 9)
    expected = net(x).detach()
    fine = network().double().eval()(x)
    assert fine.dtype == torch.float64
    torch.testing.assert_close(fine.float(), expected, rtol=1e-4, atol=1e-5)
    assert network().bfloat16().eval()(x).dtype == torch.bfloat16
    assert torch.equal(net(x.double()), net(x))  # cast to the weights' type


@pytest.mark.parametrize(
    ("options", "limit"),
    [({}, 230_000), ({"in_channels": 1, "image_size": 8, "widths": [24, 48], "feature_channels": 32}, 60_000)],
    ids=["emoji", "digits"],
)
def test_the_default_sizes_are_small(options: dict, limit: int) -> None:
    assert sum(p.numel() for p in FeatureNetwork(**options).parameters()) <= limit


def test_files_hold_the_network(tmp_path) -> None:
    net = network(num_classes=7, dropout=0.25)
    net.save_pretrained(tmp_path / "net")
    assert not list(tmp_path.rglob("*.bin"))
    loaded = FeatureNetwork.from_pretrained(tmp_path / "net")
    assert list(loaded.config.widths) == [8, 12] and loaded.config.dropout == 0.25 and loaded.drop.p == 0.25
    x = images(2, 3, 9, 9)
    assert torch.equal(loaded.eval()(x), net.eval()(x))


def test_frozen_gives_back_what_was_there() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1)).train()
    net[0].eval()
    net[0].bias.requires_grad_(False)
    before = [m.training for m in net.modules()], [p.requires_grad for p in net.parameters()]
    x = torch.ones(2, 3, requires_grad=True)
    with frozen(net):
        assert not any(m.training for m in net.modules()) and not any(p.requires_grad for p in net.parameters())
        with frozen(net):  # of two rewards with one network
            y = net(x)
    assert ([m.training for m in net.modules()], [p.requires_grad for p in net.parameters()]) == before
    y.sum().backward()
    assert x.grad.any() and all(p.grad is None for p in net.parameters())
    with pytest.raises(RuntimeError, match="stop"), frozen(net):
        raise RuntimeError("stop")
    assert ([m.training for m in net.modules()], [p.requires_grad for p in net.parameters()]) == before


REFUSED = {
    "channels": (lambda: network()(images(2, 1, 9, 9)), r"shape \(2, 1, 9, 9\); this network expects \(B, 3, 9, 9\)"),
    "size": (lambda: network()(images(2, 3, 8, 9)), "expects"),
    "one image": (lambda: network()(images(3, 9, 9)), "expects"),
    "list": (lambda: network()([1.0]), "type list"),
    "small": (lambda: network(image_size=3), "image_size=3; expected an integer, at least 4 with 2 widths"),
    "widths": (lambda: network(widths=[]), r"widths=\[\]; expected channels of each block"),
    "width": (lambda: network(widths=[8, 0]), r"widths\[1\]=0"),
    "classes": (lambda: network(num_classes=1), "num_classes=1; expected an integer, at least 2"),
    "dropout": (lambda: network(dropout=1.0), r"dropout=1.0; expected a share in \[0, 1\)"),
    "features": (lambda: network(feature_channels=math.pi), "feature_channels"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_is_wrong(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        call()
