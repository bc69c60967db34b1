"""Rewards of how images look: values by hand, gradients, what they must not see, and no dependence on the size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.rewards import (
    GreyScale,
    Ink,
    LaplacianSmoothness,
    Reward,
    Symmetry,
    WeightedSum,
    check_differentiable,
)

REWARDS: dict[str, Reward] = {
    "grey": GreyScale(),
    "smooth": LaplacianSmoothness(),
    "width": Symmetry("width"),
    "height": Symmetry(axis="height"),
    "ink": Ink(),
}
SHAPES = [(4, 3, 5, 6), (3, 2, 2, 3), (2, 3, 4, 3, 5)]  # the last: video (B, C, T, H, W)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X = normal(4, 3, 5, 6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", REWARDS)
def test_gradients_are_finite_differences_and_samples_do_not_mix(name: str, shape: tuple[int, ...]) -> None:
    reward, x = REWARDS[name], normal(*shape)
    assert torch.autograd.gradcheck(lambda y: reward(y).values, (x.clone().requires_grad_(),))
    output, gradient = reward.value_and_grad(x)
    alone, slope = reward.value_and_grad(x[1:2])
    torch.testing.assert_close(output.values[1:2], alone.values, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient[1:2], slope, rtol=1e-14, atol=0)
    assert check_differentiable(reward, x).ratio == pytest.approx(1, abs=0.1)
    assert check_differentiable(reward, x.float()).rise > 0
    assert output.valid.all() and (name == "ink" or float(output.values.max()) < 0)


def test_grey_scale_is_minus_the_variance_over_the_channels() -> None:
    torch.testing.assert_close(GreyScale()(X).values, -X.var(dim=1, correction=0).mean(dim=(1, 2)))
    _, gradient = GreyScale().value_and_grad(X)
    torch.testing.assert_close(gradient, -2 * (X - X.mean(dim=1, keepdim=True)) / X[0].numel())
    grey = normal(4, 1, 5, 6, seed=1)
    assert float(GreyScale()(grey.expand(4, 3, 5, 6)).values.abs().max()) < 1e-30
    torch.testing.assert_close(GreyScale()(X + grey).values, GreyScale()(X).values)
    red = torch.tensor([1.0, -1.0, -1.0]).reshape(1, 3, 1, 1).expand(1, 3, 4, 4)
    assert GreyScale()(red).values.item() == pytest.approx(-8 / 9)
    # control: colour that is not the same in all channels is seen
    assert not torch.allclose(GreyScale()(X + normal(4, 3, 1, 1, seed=1)).values, GreyScale()(X).values)


def checkerboard(height: int, width: int) -> Tensor:
    return ((torch.arange(height)[:, None] + torch.arange(width)) % 2 * 2.0 - 1.0).reshape(1, 1, height, width)


def test_laplacian_smoothness_by_hand() -> None:
    reward = LaplacianSmoothness()
    for size in ((2, 2), (5, 6), (8, 8)):
        assert reward(checkerboard(*size)).values.item() == pytest.approx(-4.0, rel=1e-6)
        assert reward(torch.full((1, 3, *size), 0.7)).values.item() == 0.0
    image = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).reshape(1, 1, 2, 3)
    # 2 neighbours in a corner, 3 at an edge: the pixel itself differs by 1, those beside it by 1/3 and 1/2
    assert reward(image).values.item() == pytest.approx(-(1 + 1 / 9 + 1 / 4) / 6)
    padded = torch.nn.functional.pad(X, (1, 1, 1, 1), value=float("nan"))
    shifts = [padded[..., 1 + i : 6 + i, 1 + j : 7 + j] for i, j in ((0, 1), (0, -1), (1, 0), (-1, 0))]
    expected = -(X - torch.stack(shifts).nanmean(dim=0)).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(reward(X).values, expected)


def test_a_ramp_costs_nothing_inside() -> None:
    """∂r/∂x of a ramp is 0 wherever the neighbours' neighbours are inside; what is left is of the edges."""
    ramp = torch.linspace(-1, 1, 12, dtype=torch.float64).expand(1, 1, 9, 12)
    output, gradient = LaplacianSmoothness().value_and_grad(ramp)
    assert float(gradient[..., 2:-2].abs().max()) < 1e-15 and float(gradient.abs().max()) > 1e-4
    step = 2 / 11
    # corners: (step/2)², 4 of them; left and right edges: (step/3)², 2 · 7 of them
    assert output.values.item() == pytest.approx(-(4 * (step / 2) ** 2 + 14 * (step / 3) ** 2) / (9 * 12))
    bent = ramp.square()
    assert float(LaplacianSmoothness().value_and_grad(bent)[1][..., 2:-2].abs().max()) > 1e-5  # control


def test_symmetry_by_hand() -> None:
    width, height = REWARDS["width"], REWARDS["height"]
    even = X + X.flip(-1)
    assert width(even).values.tolist() == [0.0] * 4 and float(height(even).values.max()) < -0.1
    assert not width.value_and_grad(even)[1].any()
    torch.testing.assert_close(width(X - X.flip(-1)).values, -4 * (X - X.flip(-1)).square().mean(dim=(1, 2, 3)))
    image = torch.tensor([[1.0, 5.0, -2.0]]).reshape(1, 1, 1, 3)  # the pixel on the mirror line counts with 0
    assert width(image).values.item() == pytest.approx(-(9 + 0 + 9) / 3)
    torch.testing.assert_close(width(X.mT).values, height(X).values)


@pytest.mark.parametrize("name", REWARDS)
def test_mirror_images_and_repeated_images_have_equal_values(name: str) -> None:
    reward = REWARDS[name]
    for axes in ((-1,), (-2,), (-1, -2)):
        torch.testing.assert_close(reward(X.flip(axes)).values, reward(X).values)
    twice = torch.cat((X, X.flip(-1)), dim=-1)  # a reflected copy: as many pixels of each kind again
    if name in ("grey", "ink"):
        torch.testing.assert_close(reward(twice).values, reward(X).values)
    noise = normal(1, 3, 300, 300, seed=5), normal(1, 3, 600, 150, seed=6)
    # two independent large images of one law: means over pixels agree whatever the shape
    values = [float(reward(image).values) for image in noise]
    assert values[0] == pytest.approx(values[1], abs=0.03)


def test_ink() -> None:
    torch.testing.assert_close(Ink()(X).values, X.mean(dim=(1, 2, 3)))
    assert Ink()(torch.ones(2, 7)).values.tolist() == [1.0, 1.0]
    assert Ink().value_and_grad(X)[1].flatten().tolist() == pytest.approx([1 / 90] * X.numel())


def test_nan_low_precision_parts_and_sums() -> None:
    broken = X.clone()
    broken[2, 0, 1, 1] = float("nan")
    for reward in REWARDS.values():
        output, gradient = reward.value_and_grad(broken)
        assert output.valid.tolist() == [True, True, False, True] and not gradient[2].any()
        assert torch.equal(output.values[[0, 1, 3]], reward(X).values[[0, 1, 3]])
        half = reward(X.bfloat16())
        assert half.values.dtype == torch.float32
        torch.testing.assert_close(half.values.double(), reward(X).values, rtol=0.02, atol=2e-3)
        kind = type(reward)
        named = kind(field="image") if kind is not Symmetry else Symmetry(reward.axis, field="image")
        assert torch.equal(named({"image": X, "label": torch.arange(4)}).values, reward(X).values)
    parts = {"grey": GreyScale(), "even": Symmetry()}
    total, _ = WeightedSum(parts, {"grey": 0.5, "even": 2.0}).value_and_grad(X)
    torch.testing.assert_close(total.values, 0.5 * GreyScale()(X).values + 2 * Symmetry()(X).values)


REFUSED = {
    "one channel": (lambda: GreyScale()(X[:, :1]), "has one channel, so it is always grey"),
    "no pixels": (lambda: GreyScale()(X[..., :0]), "expected"),
    "not an image": (lambda: GreyScale()(X[:, :, 0, 0]), r"shape \(4, 3\).*expected \(B, C, \*\)"),
    "bytes": (lambda: LaplacianSmoothness()(X.to(torch.uint8)), "torch.uint8; expected .*floating point"),
    "one row": (lambda: LaplacianSmoothness()(X[:, :, :1]), "at least 2, for neighbours"),
    "one column": (lambda: Symmetry()(X[..., :1]), "a width of at least 2"),
    "one row mirrored": (lambda: Symmetry("height")(X[:, :, :1]), "a height of at least 2"),
    "axis": (lambda: Symmetry("wdith"), "axis='wdith'.*Did you mean 'width'"),
    "part": (lambda: Ink(field="image")(X), "field='image'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_is_wrong(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        call()
