"""Gradients of a reward through a walk: against a loop written out, and one estimator against the other."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from genkit.errors import ConfigError
from genkit.rewards import FunctionReward
from genkit.samplers.noise import training_keys
from genkit.schedulers import VPScheduler
from genkit.training.objectives import (
    GradientWindow,
    PolicyGradientObjective,
    RewardGradientObjective,
    advantages,
)

N = 6


class Affine(nn.Module):
    """A clean prediction a x + b + c y of a few numbers, with a trained (a, b)."""

    prediction_type = "sample"

    def __init__(self, a: float = 0.4, b: float = 0.3) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(a)), nn.Parameter(torch.tensor(b))

    def forward(self, x, t, cond=None):
        shift = 0.0 if cond is None else 0.2 * cond["label"].to(x.dtype).unsqueeze(-1)
        return self.a * x * (1.0 - t.unsqueeze(-1)) + self.b + shift


def chain() -> VPScheduler:
    return VPScheduler("cosine", "sample")


def quadratic(differentiable: bool = True) -> FunctionReward:
    return FunctionReward(lambda x, context: -((x - 1.0) ** 2).sum(dim=-1), differentiable=differentiable)


def gradients(objective, size: int = 64, step: int = 0, batch=None) -> tuple[float, float, dict]:
    ids = torch.arange(size)
    network = objective.denoiser
    network.zero_grad()
    output = objective.loss(
        "denoiser", {"sample_id": ids, **(batch or {})}, step=step, keys=training_keys(3, step, ids)
    )
    output.loss.backward()
    return float(network.a.grad), float(network.b.grad), dict(output.logs)


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_windows_by_hand():
    draw = lambda kind, k, u=0.0, **options: GradientWindow(kind, k, **options).draw(10, u)  # noqa: E731
    assert draw("last_k", 3).grad_steps == (7, 8, 9) and draw("full", 1).grad_steps == tuple(range(10))
    assert draw("last_k", 99).grad_steps == tuple(range(10))
    assert draw("uniform_k", 3).grad_steps == (2, 5, 9) and draw("uniform_k", 3).input_grad
    assert draw("drtune", 3).grad_steps == (2, 5, 9) and not draw("drtune", 3).input_grad
    assert draw("draft_lv", 1).noises == 2 and draw("draft_lv", 1, noises=5).noises == 5
    late = [draw("refl_x0", 4, u) for u in (0.0, 0.26, 0.99)]
    assert [(w.grad_steps, w.stop_at) for w in late] == [((6,), 6), ((7,), 7), ((9,), 9)]
    lengths = [len(draw("random_k", 3, (i + 0.5) / 500).grad_steps) for i in range(500)]
    assert set(lengths) == {1, 2, 3, 4, 5} and sum(lengths) / 500 == pytest.approx(3.0)


def test_windows_name_what_is_wrong():
    with pytest.raises(ConfigError, match="'last-k'.*Did you mean 'last_k'"):
        GradientWindow("last-k")
    with pytest.raises(ConfigError, match="noises=3 belongs to"):
        GradientWindow("last_k", 1, noises=3)
    with pytest.raises(ConfigError, match="k=0"):
        GradientWindow("last_k", 0)


# ---- back-propagation ------------------------------------------------------------------------------------------------


def by_hand(network, scheduler, x, grad_steps, input_grad=True):
    """The deterministic walk as a loop, with detached outputs outside the window."""
    for i, (t, s) in enumerate(itertools.pairwise(scheduler.times(N).float())):
        t, s = t.expand(len(x)), s.expand(len(x))
        output = network(x if input_grad and i in grad_steps else x.detach(), t)
        output = output if i in grad_steps else output.detach()
        x = scheduler.transition(output, t, s, x, None, 0.0).mean
    return x


@pytest.mark.parametrize(
    ("kind", "k"), [("last_k", 1), ("last_k", 3), ("full", 1), ("uniform_k", 2), ("drtune", 3), ("random_k", 2)]
)
def test_the_gradient_is_that_of_the_loop(kind, k):
    network, scheduler = Affine(), chain()
    objective = RewardGradientObjective(
        network, scheduler, quadratic(), num_inference_steps=N, shape=(2,), window=GradientWindow(kind, k), lam=0.5
    )
    starts = []
    watched = network.register_forward_pre_hook(lambda module, args: starts.append(args[0].detach().clone()))
    a, b, logs = gradients(objective)
    watched.remove()
    # what the objective drew: some window of the kind, the same in every process
    window = objective.window.draw(N, 0.0)
    if kind == "random_k":
        window = GradientWindow("last_k", int(logs["grad_steps"])).draw(N, 0.0)
    network.zero_grad()
    end = by_hand(network, scheduler, starts[0], window.grad_steps, window.input_grad)
    (0.5 * ((end - 1.0) ** 2).sum(-1).mean()).backward()
    assert a == pytest.approx(float(network.a.grad), rel=1e-5) and b == pytest.approx(float(network.b.grad), rel=1e-5)


def test_more_noises_at_the_end_average_the_last_steps_gradient():
    """Each end is a fresh noising of the walk's own sample; the mean over many equals the mean over the noise."""
    network, scheduler = Affine(), chain()
    options = {"num_inference_steps": N, "shape": (2,)}
    window = GradientWindow("draft_lv", noises=200)
    objective = RewardGradientObjective(network, scheduler, quadratic(), window=window, **options)
    a, b, _ = gradients(objective)
    sample = RewardGradientObjective(network, scheduler, quadratic(), window=GradientWindow("last_k"), **options)
    with torch.no_grad():
        end = sample._walk(sample.window.draw(N, 0.0), {}, training_keys(3, 0, torch.arange(64)))[0][0]
    t = scheduler.times(N)[-2].float().expand(64)
    found = []
    for seed in range(200):
        x = scheduler.add_noise(end, torch.randn(64, 2, generator=torch.Generator().manual_seed(seed)), t)
        network.zero_grad()
        ((network(x, t) - 1.0) ** 2).sum(-1).mean().backward()
        found.append((float(network.a.grad), float(network.b.grad)))
    means, spread = torch.tensor(found).mean(0), torch.tensor(found).std(0) / math.sqrt(200)
    assert abs(a - float(means[0])) < 6.0 * float(spread[0]) and abs(b - float(means[1])) < 6.0 * float(spread[1])


def test_refl_ends_with_the_clean_prediction_of_its_step():
    network, scheduler = Affine(), chain()
    objective = RewardGradientObjective(
        network, scheduler, quadratic(), num_inference_steps=N, shape=(2,), window=GradientWindow("refl_x0", 3)
    )
    seen = []
    watched = network.register_forward_pre_hook(lambda module, args: seen.append((args[0].detach(), args[1])))
    a, b, _ = gradients(objective, step=5)
    watched.remove()
    x, t = seen[-1]
    assert 3 <= len(seen) - 1 < N
    network.zero_grad()
    ((network(x, t) - 1.0) ** 2).sum(-1).mean().backward()
    assert a == pytest.approx(float(network.a.grad), rel=1e-5) and b == pytest.approx(float(network.b.grad), rel=1e-5)


def test_the_distance_to_the_reference_is_that_of_clean_predictions_on_the_same_states():
    network, reference, scheduler = Affine(), Affine(0.1, 0.0), chain()
    objective = RewardGradientObjective(
        network, scheduler, quadratic(), num_inference_steps=N, shape=(2,), window=GradientWindow("last_k", 2),
        reg=0.7, reference=reference,
    )  # fmt: skip
    seen = []
    watched = network.register_forward_pre_hook(lambda module, args: seen.append((args[0].detach(), args[1])))
    _, _, logs = gradients(objective)
    watched.remove()
    expected = torch.stack([(network(x, t) - reference(x, t)).square().mean() for x, t in seen[-2:]]).mean()
    assert float(logs["reference_distance"]) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert all(parameter.grad is None for parameter in reference.parameters())


# ---- densities -------------------------------------------------------------------------------------------------------


def test_both_estimators_have_one_mean():
    """E[A Σ ∇ log p] of the stochastic walk is the gradient of E[r], which the full window follows pathwise."""
    options = {"num_inference_steps": 4, "shape": (1,), "eta": 1.0}
    path = RewardGradientObjective(
        Affine(), chain(), quadratic(), window=GradientWindow("full"), solver="ancestral", **options
    )
    policy = PolicyGradientObjective(Affine(), chain(), quadratic(False), group_size=8, **options)
    pathwise = torch.tensor([gradients(path, 2000, step)[:2] for step in range(20)])
    scored = torch.tensor([gradients(policy, 2000, step)[:2] for step in range(40)])
    # the step onto t = 0 is deterministic: its parameters get no gradient from densities, so the walk's last network
    # call is differentiated by the first estimator only
    inner = RewardGradientObjective(
        Affine(), chain(), quadratic(), window=GradientWindow("last_k", 1), solver="ancestral", **options
    )
    last = torch.tensor([gradients(inner, 2000, step)[:2] for step in range(20)])
    expected = pathwise.mean(0) - last.mean(0)
    noise = (pathwise - last).var(0) / 20 + scored.var(0) / 40
    assert ((scored.mean(0) - expected).abs() < 4.5 * noise.sqrt()).all()
    assert (expected.abs() > 8.0 * noise.sqrt()).all()  # the test can tell it from nothing


def test_a_constant_added_to_the_reward_changes_nothing():
    def policy(shift):
        reward = FunctionReward(lambda x, context: shift - ((x - 1.0) ** 2).sum(dim=-1))
        options = {"num_inference_steps": 4, "shape": (1,), "group_size": 4}
        return gradients(PolicyGradientObjective(Affine(), chain(), reward, **options))[:2]

    assert policy(0.0) == pytest.approx(policy(100.0), rel=1e-3)


def test_advantages_by_hand():
    values, valid = torch.tensor([[1.0, 2.0, 6.0], [5.0, math.nan, 1.0], [3.0, math.nan, math.nan]]), None
    valid = torch.isfinite(values)
    found = advantages(values, valid)
    expected = [[1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5], [4.0, 0.0, -4.0], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    scaled = advantages(10.0 * values, valid, "group")
    torch.testing.assert_close(scaled, advantages(values, valid, "group"), rtol=1e-3, atol=1e-3)
    assert float(scaled[0].sum()) == pytest.approx(0.0, abs=1e-9)


def test_the_divergence_from_the_reference_is_the_gaussian_one():
    network, reference, scheduler = Affine(), Affine(0.1, 0.0), chain()
    objective = PolicyGradientObjective(
        network, scheduler, quadratic(False), num_inference_steps=4, shape=(2,), group_size=2, reg=1.0,
        reference=reference,
    )  # fmt: skip
    keys = training_keys(3, 0, torch.arange(8))
    walk = objective._walk({}, keys)
    _, divergence = objective._densities(walk, {})
    expected = torch.zeros(16)
    times = scheduler.times(4).float()
    for i in range(3):
        t, s = times[i].expand(16), times[i + 1].expand(16)
        one, two = (scheduler.transition(net(walk[i], t), t, s, walk[i], None, 1.0) for net in (network, reference))
        p, q = (torch.distributions.Normal(k.mean, k.std.reshape(-1, 1).expand_as(k.mean)) for k in (one, two))
        expected = expected + torch.distributions.kl_divergence(p, q).sum(-1)
    torch.testing.assert_close(divergence.detach(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_conditions_reach_network_and_reward():
    labels = torch.arange(8) % 3

    def told(x, context):
        return -((x.squeeze(-1) - context["label"]) ** 2)

    options = {"num_inference_steps": 3, "shape": (1,), "condition_names": ["label"]}
    one = RewardGradientObjective(Affine(), chain(), FunctionReward(told, differentiable=True), **options)
    two = PolicyGradientObjective(Affine(), chain(), FunctionReward(told), group_size=2, **options)
    for objective, size in ((one, 1), (two, 2)):
        seen = []
        watched = objective.denoiser.register_forward_pre_hook(lambda module, args, s=seen: s.append(args[2]["label"]))
        first = gradients(objective, 8, batch={"label": labels})  # the reward fails without its label
        watched.remove()
        assert len(seen) >= 3 and all(torch.equal(one, labels.repeat_interleave(size)) for one in seen)
        assert first[:2] != gradients(objective, 8, batch={"label": labels.flip(0)})[:2]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (RewardGradientObjective, {"reward": quadratic(False)}, "PolicyGradientObjective, which needs values only"),
        (RewardGradientObjective, {"reg": 0.1}, "reg=0.1 needs a reference"),
        (PolicyGradientObjective, {"eta": 0.0}, "eta=0.0.*deterministic"),
        (PolicyGradientObjective, {"group_size": 1}, "group_size=1.*at least 2"),
        (PolicyGradientObjective, {"advantage": "grp"}, "advantage='grp'.*Did you mean 'group'"),
        (PolicyGradientObjective, {"lam": 0.0}, "lam=0"),
    ],
)
def test_options_are_checked(kind, options, message):
    chosen = {"reward": quadratic(), "num_inference_steps": 3, "shape": (1,)} | options
    with pytest.raises(ConfigError, match=message):
        kind(Affine(), chain(), chosen.pop("reward"), **chosen)
