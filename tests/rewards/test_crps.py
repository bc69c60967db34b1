"""The CRPS as a reward: its value and gradient by condition, missing cells, and no dependence on how many cells."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.metrics import crps, latitude_weights
from genkit.rewards import CRPSReward, LinearFunctional, WeightedSum, check_differentiable

KINDS = ("fair", "biased", "almost_fair")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


SAMPLE, TARGET = normal(3, 4, 2, 5), normal(3, 2, 5, seed=1)  # 3 conditions, 4 members, 2 variables on 5 latitudes
AREA = latitude_weights(torch.tensor([-60.0, -30.0, 0.0, 30.0, 60.0], dtype=torch.float64))
SCALE = torch.tensor([[2.0], [0.1]], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_the_value_is_minus_the_weighted_mean_of_scaled_scores(kind: str) -> None:
    output = CRPSReward(kind=kind, alpha=0.8, weights=AREA, scale=SCALE)(SAMPLE, {"observation": TARGET})
    for b in range(3):
        score = crps(SAMPLE[b], TARGET[b], kind=kind, alpha=0.8)
        torch.testing.assert_close(output.values[b], -(AREA * score / SCALE).sum() / (2 * AREA.sum()))
    assert output.valid.all() and output.values.max() < 0


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_differences_and_conditions_do_not_mix(kind: str) -> None:
    reward = CRPSReward(kind=kind, weights=AREA, scale=SCALE)
    context = {"observation": TARGET}
    leaf = SAMPLE.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: reward(x, context).values, (leaf,))
    alone, gradient = reward.value_and_grad(SAMPLE[:1], {"observation": TARGET[:1]})
    output, gradients = reward.value_and_grad(SAMPLE, context)
    assert torch.equal(output.values[:1], alone.values) and torch.equal(gradients[:1], gradient)
    assert check_differentiable(reward, SAMPLE, context).rise > 0


def test_ties_have_a_finite_gradient() -> None:
    for kind in KINDS:
        output, gradient = CRPSReward(kind=kind).value_and_grad(
            torch.zeros(2, 3, 4), {"observation": torch.zeros(2, 4)}
        )
        assert output.valid.all() and torch.isfinite(gradient).all()


def test_a_missing_target_has_gradient_zero_and_the_rest_is_as_without_it() -> None:
    x, y = normal(2, 4, 8), normal(2, 8, seed=1)
    y[:, 7] = math.nan
    spoilt = x.clone()
    spoilt[:, :, 7] = math.nan
    weights = torch.tensor([1.0, 2.0, 4.0, 1.0, 0.5, 1.0, 2.0, 8.0], dtype=torch.float64)
    expected, slope = CRPSReward(weights=weights[:7]).value_and_grad(x[..., :7], {"observation": y[:, :7]})
    for sample in (x, spoilt):
        output, gradient = CRPSReward(weights=weights).value_and_grad(sample, {"observation": y})
        torch.testing.assert_close(output.values, expected.values, rtol=1e-14, atol=0)
        assert output.valid.all() and not gradient[..., 7].any()
        assert torch.equal(gradient[..., :7], slope)


def test_what_cannot_be_judged_is_invalid_and_others_stay() -> None:
    x, y = normal(3, 4, 8), normal(3, 8, seed=1)
    whole, slope = CRPSReward().value_and_grad(x, {"observation": y})
    broken, gaps = x.clone(), y.clone()
    broken[1, 2, 3] = math.nan  # a member where there is an observation
    gaps[0] = math.nan  # nothing observed
    output, gradient = CRPSReward().value_and_grad(broken, {"observation": gaps})
    assert output.valid.tolist() == [False, False, True] and output.values.isnan().tolist() == [True, True, False]
    assert not gradient[:2].any() and torch.equal(gradient[2], slope[2])
    assert torch.equal(output.values[2], whole.values[2])


def test_more_cells_of_the_same_kind_change_nothing() -> None:
    once = CRPSReward(weights=AREA, scale=SCALE)(SAMPLE, {"observation": TARGET})
    twice = CRPSReward(weights=torch.cat([AREA, AREA]), scale=SCALE)(
        torch.cat([SAMPLE, SAMPLE], dim=-1), {"observation": torch.cat([TARGET, TARGET], dim=-1)}
    )
    torch.testing.assert_close(once.values, twice.values, rtol=1e-13, atol=0)
    scaled = CRPSReward(weights=7.0 * AREA, scale=SCALE)(SAMPLE, {"observation": TARGET})
    torch.testing.assert_close(once.values, scaled.values, rtol=1e-13, atol=0)


def test_the_reward_is_highest_at_the_right_spread() -> None:
    y = normal(20_000, 1)
    spreads = (0.5, 0.8, 1.0, 1.25, 2.0)
    means = [float(CRPSReward()(s * normal(20_000, 4, 1, seed=1), {"observation": y}).mean()) for s in spreads]
    assert max(means) == means[2]
    for s, mean in zip(spreads, means, strict=True):  # E CRPS of N(0, s²) against N(0, 1)
        assert mean == pytest.approx(s / math.sqrt(math.pi) - math.sqrt(2 * (1 + s * s) / math.pi), abs=0.012)


def test_low_precision_parts_and_sums() -> None:
    context = {"observation": TARGET.float()}
    sample = SAMPLE.bfloat16()
    output, gradient = CRPSReward(kind="almost_fair", scale=SCALE).value_and_grad(sample, context)
    assert output.values.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    parts = {"wind": SAMPLE, "rain": 2 * SAMPLE}
    named = CRPSReward(field="wind")(parts, {"observation": TARGET})
    assert torch.equal(named.values, CRPSReward()(SAMPLE, {"observation": TARGET}).values)
    both = WeightedSum({"crps": CRPSReward(), "sum": LinearFunctional(torch.ones(1))}, {"crps": 1.0, "sum": 0.1})
    total, _ = both.value_and_grad(SAMPLE, {"observation": TARGET})
    torch.testing.assert_close(total.values, named.values + 0.1 * SAMPLE.flatten(1).sum(dim=1))


REFUSED = {
    "kind": (lambda: CRPSReward(kind="fare"), "Did you mean 'fair'"),
    "alpha": (lambda: CRPSReward(alpha=-0.1), "from 0"),
    "weights": (lambda: CRPSReward(weights=torch.tensor([1.0, -1.0])), "weights must be finite"),
    "no weight": (lambda: CRPSReward(weights=0.0), "somewhere positive"),
    "scale": (lambda: CRPSReward(scale=0.0), "scale must be positive"),
    "no observation": (lambda: CRPSReward()(SAMPLE, {"observed": TARGET}), "Did you mean 'observed'"),
    "one member": (lambda: CRPSReward()(SAMPLE[:, :1], {"observation": TARGET}), "M >= 2"),
    "rows of members": (lambda: CRPSReward()(SAMPLE[:, 0], {"observation": TARGET}), "unflatten"),
    "fit of the weights": (
        lambda: CRPSReward(weights=torch.ones(4))(SAMPLE, {"observation": TARGET}),
        r"cells \(2, 5\)",
    ),
    "scale by condition": (lambda: CRPSReward(scale=torch.ones(3, 1, 1))(SAMPLE, {"observation": TARGET}), "scale has"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        call()
