"""Rewards: closed-form gradients, linearity, masks that never fake a zero, and a check that finds cut gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.rewards import (
    FunctionReward,
    GaussianMixtureLogDensity,
    LinearFunctional,
    QuadraticTarget,
    Reward,
    SquaredExceedance,
    WeightedSum,
    check_differentiable,
    reward_output,
)

MEANS = torch.tensor([[0.0, 0.0, 1.0], [2.0, -1.0, 0.5]], dtype=torch.float64)
STDS = torch.tensor([0.7, 1.3], dtype=torch.float64)
WEIGHTS = torch.tensor([3.0, 1.0], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X = normal(6, 3)
A = normal(3, seed=1)
REWARDS = {
    "quadratic": QuadraticTarget(A, weight=2.5),
    "linear": LinearFunctional(A),
    "exceedance": SquaredExceedance(-0.2, direction=A),
    "exceedance of the mean": SquaredExceedance(0.0, sign=1),
    "mixture": GaussianMixtureLogDensity(MEANS, STDS, WEIGHTS),
    "sum": WeightedSum({"a": QuadraticTarget(0.0), "b": LinearFunctional(A)}, {"a": 0.5, "b": -2.0}),
}


def finite_differences(reward: Reward, x: Tensor, h: float = 1e-6) -> Tensor:
    columns = []
    for i in range(x.shape[1]):
        e = torch.zeros_like(x)
        e[:, i] = h
        columns.append((reward(x + e).values - reward(x - e).values) / (2 * h))
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("name", REWARDS)
def test_gradients_equal_finite_differences_and_batch_mates_do_not_matter(name: str) -> None:
    reward = REWARDS[name]
    output, gradient = reward.value_and_grad(X)
    torch.testing.assert_close(gradient, finite_differences(reward, X), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(output.values, reward(X).values)
    assert not output.values.requires_grad
    single, single_gradient = reward.value_and_grad(X[2:3])
    torch.testing.assert_close(single.values[0], output.values[2])
    torch.testing.assert_close(single_gradient[0], gradient[2])
    check = check_differentiable(reward, X)
    assert check.ratio == pytest.approx(1, abs=0.1)
    assert check.gradient_norm == pytest.approx(gradient.norm().item())


def test_closed_forms() -> None:
    torch.testing.assert_close(REWARDS["quadratic"].value_and_grad(X)[1], -2.5 * (X - A))
    torch.testing.assert_close(REWARDS["linear"].value_and_grad(X)[1], A.expand(6, 3))
    excess = (X @ A + 0.2).clamp(min=0)
    torch.testing.assert_close(REWARDS["exceedance"](X).values, -(excess**2))
    torch.testing.assert_close(REWARDS["exceedance"].value_and_grad(X)[1], -2 * excess[:, None] * A)
    components = torch.distributions.MultivariateNormal(MEANS, (STDS**2)[:, None, None] * torch.eye(3).double())
    mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(WEIGHTS), components)
    torch.testing.assert_close(REWARDS["mixture"](X).values, mixture.log_prob(X))
    one = GaussianMixtureLogDensity(torch.zeros(1, 1), 1.0)(torch.zeros(1, 1)).values
    assert one.item() == pytest.approx(-0.5 * math.log(2 * math.pi), rel=1e-6)


def test_targets_come_from_the_context_and_images_are_flattened() -> None:
    x, y = normal(4, 2, 3, seed=3), normal(4, 2, 3, seed=4)
    reward = QuadraticTarget()
    torch.testing.assert_close(reward(x, {"target": y}).values, -0.5 * ((x - y) ** 2).sum(dim=(1, 2)))
    with pytest.raises(ConfigError, match=r"needs context\['target'\], got \['targets'\]\. Did you mean 'targets'"):
        reward(x, {"targets": y})
    with pytest.raises(ConfigError, match="expected 4 entries"):
        reward(x, {"target": y[:3]})
    with pytest.raises(ConfigError, match="does not fit a sample"):
        LinearFunctional(A)(normal(4, 5))
    with pytest.raises(ConfigError, match="4 elements, the mixture's means have 3"):
        REWARDS["mixture"](normal(4, 4))


def test_samples_with_parts() -> None:
    sample = {"x": X, "label": torch.arange(6)}
    reward = QuadraticTarget(A, weight=2.5, field="x")
    output, gradient = reward.value_and_grad(sample)
    torch.testing.assert_close(gradient["x"], -2.5 * (X - A))
    assert gradient["label"].tolist() == [0] * 6
    assert check_differentiable(reward, sample).ratio == pytest.approx(1, abs=0.1)
    with pytest.raises(ConfigError, match=r"field='y', but the sample is \['x', 'label'\]"):
        QuadraticTarget(A, field="y")(sample)
    with pytest.raises(ConfigError, match=r"one batch size, got \{'x': 6, 'label': 2\}"):
        reward({"x": X, "label": torch.arange(2)})


# --- masks ------------------------------------------------------------------------------------------------------------


def test_nan_is_masked_and_counted_and_never_a_zero() -> None:
    reward = FunctionReward(lambda x, context: x[:, 0].log(), differentiable=True, name="log")
    x = torch.tensor([[1.0], [-1.0], [math.e], [0.0]])
    output, gradient = reward.value_and_grad(x)
    assert output.valid.tolist() == [True, False, True, False]
    assert output.invalid_count == 2
    assert torch.isnan(output.values[[1, 3]]).all()
    assert output.mean().item() == pytest.approx(0.5)
    assert output.filled(-9.0).tolist() == pytest.approx([0, -9, 1, -9])
    assert gradient[:, 0].tolist() == pytest.approx([1, 0, 1 / math.e, 0])
    assert torch.isnan(reward(torch.tensor([[-1.0]])).mean())


def test_gradient_that_is_not_finite_makes_its_sample_invalid() -> None:
    reward = FunctionReward(lambda x, context: x[:, 0].sqrt(), differentiable=True)
    output, gradient = reward.value_and_grad(torch.tensor([[4.0], [0.0]]))
    assert output.valid.tolist() == [True, False]
    assert gradient[:, 0].tolist() == [0.25, 0.0]


def test_several_objectives() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, float("nan")], [5.0, 6.0]])
    output = reward_output(values, torch.tensor([True, True, True]))
    assert output.valid.tolist() == [True, False, True]
    assert output.mean().tolist() == [3, 4]
    reward = FunctionReward(lambda x, context: x, differentiable=True, name="two")
    with pytest.raises(ConfigError, match="2 objectives"):
        reward.value_and_grad(torch.ones(2, 2))
    with pytest.raises(ConfigError, match=r"shape \(2, 2, 2\)"):
        reward_output(torch.ones(2, 2, 2))
    with pytest.raises(ConfigError, match="1 values for 2 samples"):
        FunctionReward(lambda x, context: x.sum().reshape(1))(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, c: 1.0, r"judge\): reward values are float, expected a tensor"),
        (lambda x, c: None, r"judge\): reward values are NoneType, expected a tensor"),
        (lambda x, c: (x > 0).sum(dim=1), r"judge\): reward values are torch.int64, .*add \.float\(\)"),
        (lambda x, c: x[:, 0] > 0, r"judge\): reward values are torch.bool, expected floating point"),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(function, message) -> None:
    with pytest.raises(ConfigError, match=message):
        FunctionReward(function, name="judge")(X)


@pytest.mark.parametrize(
    ("target", "context"),
    [(normal(4), None), (normal(6, 3), None), (normal(2, 1, 3), None), (None, normal(6)), (None, normal(6, 1))],
)
def test_targets_of_another_shape_are_refused(target, context) -> None:
    with pytest.raises(ConfigError, match=r"QuadraticTarget.*the target has shape \(.*expected"):
        QuadraticTarget(target)(X, {"target": context})


# --- sums -------------------------------------------------------------------------------------------------------------


def test_weighted_sum_is_linear_in_values_and_gradients() -> None:
    parts = {name: REWARDS[name] for name in ("quadratic", "linear", "mixture")}
    weights = {"quadratic": 0.3, "linear": -1.5, "mixture": 2.0}
    output, gradient = WeightedSum(parts, weights).value_and_grad(X)
    separate = {name: part.value_and_grad(X) for name, part in parts.items()}
    torch.testing.assert_close(output.values, sum(w * separate[n][0].values for n, w in weights.items()))
    torch.testing.assert_close(gradient, sum(w * separate[n][1] for n, w in weights.items()))
    norms = {n: (w * separate[n][1]).norm(dim=1).mean().item() for n, w in weights.items()}
    for name, norm in norms.items():
        assert output.logs[name].item() == pytest.approx(separate[name][0].values.mean().item())
        assert output.logs[f"{name}/grad_norm"].item() == pytest.approx(norm, rel=1e-6)
        assert output.logs[f"{name}/grad_ratio"].item() == pytest.approx(norm / sum(norms.values()), rel=1e-6)


def test_sum_is_valid_where_every_weighted_part_is() -> None:
    log = FunctionReward(lambda x, context: x[:, 0].log(), differentiable=True)
    count = FunctionReward(lambda x, context: (x > 0).sum(dim=1).to(x))
    x = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    reward = WeightedSum(
        {"log": log, "linear": LinearFunctional([1.0, 0.0]), "count": count}, {"log": 1, "linear": 1, "count": 0}
    )
    output, gradient = reward.value_and_grad(x)
    assert output.valid.tolist() == [True, False]
    assert gradient.tolist() == [[2, 0], [0, 0]]
    assert output.logs["log/invalid"] == 0.5
    assert output.logs["count"].item() == 1.5
    assert reward.differentiable
    assert not WeightedSum({"count": count}).differentiable
    with pytest.raises(ConfigError, match="count not differentiable; give weight 0"):
        WeightedSum({"linear": LinearFunctional([1.0, 0.0]), "count": count}).value_and_grad(x)
    with pytest.raises(ConfigError, match="one weight a reward"):
        WeightedSum({"count": count}, {"cuont": 1.0})
    with pytest.raises(ConfigError, match="'count' is nan"):
        WeightedSum({"count": count}, {"count": float("nan")})


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ({"a": QuadraticTarget(0.0)}, {"a": "1"}, "weight of 'a' is '1', expected a finite number"),
        ({"a": QuadraticTarget(0.0)}, [1.0], "weights are a list, expected a mapping"),
        ({"a": lambda x, c: x}, None, "'a' is a function, expected a Reward; FunctionReward wraps"),
        ([QuadraticTarget(0.0)], None, "rewards are a list, expected a mapping"),
    ],
)
def test_sums_of_other_things_are_refused(rewards, weights, message) -> None:
    with pytest.raises(ConfigError, match=message):
        WeightedSum(rewards, weights)


# --- the start-up check -----------------------------------------------------------------------------------------------


def detached(x: Tensor, context: object) -> Tensor:
    return -x.detach().square().sum(dim=1)


def detached_with_a_thread(x: Tensor, context: object) -> Tensor:
    return -x.detach().square().sum(dim=1) + 0 * x.sum(dim=1)


def rounded(x: Tensor, context: object) -> Tensor:
    return -x.round().square().sum(dim=1)


def wrong_sign(x: Tensor, context: object) -> Tensor:
    return -x.square().sum(dim=1).detach() + (x.square() - x.square().detach()).sum(dim=1)


def half_cut(x: Tensor, context: object) -> Tensor:
    return -10 * x.detach().square().sum(dim=1) + x.square().sum(dim=1)


def product_half_cut(x: Tensor, context: object) -> Tensor:
    return -(x.detach() * x).sum(dim=1)


def product_half_cut_far_from_the_origin(x: Tensor, context: object) -> Tensor:
    """Its optimum is so near that the curvature of a large step hides the cut: 2 − 0.1 ‖x‖/‖x − y‖ is 1."""
    difference = x - 0.9 * X
    return -(difference.detach() * difference).sum(dim=1)


def too_steep(x: Tensor, context: object) -> Tensor:
    value = -x.square().sum(dim=1)
    return 3 * value - 2 * value.detach()


CONTROLS = {
    product_half_cut: "rises 2 times",
    product_half_cut_far_from_the_origin: "rises 2 times",
    too_steep: "rises 0.333 times",
    detached: "carry no gradient",
    detached_with_a_thread: "the gradient is 0 on all 6",
    rounded: "the gradient is 0",
    wrong_sign: "does not rise",
    half_cut: "does not rise",
}


@pytest.mark.parametrize("control", CONTROLS)
def test_cut_gradients_are_found_and_the_culprit_is_named(control) -> None:
    reward = FunctionReward(control, differentiable=True)
    with pytest.raises(ConfigError, match=f"{control.__name__}.*{CONTROLS[control]}"):
        check_differentiable(reward, X)
    with pytest.raises(ConfigError, match=f"{control.__name__}|'bad' of WeightedSum"):
        check_differentiable(WeightedSum({"good": QuadraticTarget(A), "bad": reward}), X)


def test_check_refuses_what_cannot_be_trained() -> None:
    with pytest.raises(ConfigError, match="not differentiable"):
        check_differentiable(FunctionReward(detached), X)
    with pytest.raises(ConfigError, match="none of 2 samples could be judged"):
        check_differentiable(FunctionReward(lambda x, c: x[:, 0].log(), differentiable=True), -torch.ones(2, 1))
    x32 = X.float() * 100
    assert check_differentiable(QuadraticTarget(A.float()), x32).ratio == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_check_passes_exact_gradients_whatever_the_precision(dtype, offset) -> None:
    reward = FunctionReward(lambda x, c: offset - 3 * (x - 1).square().sum(dim=1), differentiable=True)
    assert check_differentiable(reward, normal(64, 8, seed=5).to(dtype)).ratio == pytest.approx(1, abs=0.3)
