"""Moment matching beside its formulas: what a loss is, what it depends on, whom it moves, and what it refuses."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from training import toys

from genkit.errors import ConfigError
from genkit.pipelines.rmmd import InstantMomentObjective, MomentMatchingObjective
from genkit.pipelines.rmmd.gaussian import AffineDenoiser
from genkit.pipelines.rmmd.weights import MAX_SNR, draw_times, moment_weight
from genkit.rewards import CRPSReward, FunctionReward
from genkit.rewards.analytic import LinearFunctional, QuadraticTarget
from genkit.samplers import training_keys
from genkit.schedulers import FlowScheduler, VPScheduler
from genkit.training import Phase, TensorData, Trainer
from genkit.training.objectives import GradientWindow, RewardGradientObjective

CHAIN = VPScheduler("cosine", "v_prediction")
BOTH = (Phase("distil", 4), Phase("reward", 100))
DATA = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)) * 0.5 + 1.0


class Net(nn.Module):
    """A small network of (x, t, label)."""

    prediction_type = "v_prediction"

    def __init__(self, seed: int = 0, channels: int = 2, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.Linear(channels + 2, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, channels)
            )

    def forward(self, x, t, cond=None):
        label = torch.zeros_like(t) if cond is None else cond["label"].to(t)
        return self.net(torch.cat((x, t.unsqueeze(-1), label.unsqueeze(-1)), dim=-1))


def make(kind=MomentMatchingObjective, dropout: float = 0.0, start: bool = True, **options):
    plain = {"num_inference_steps": 4, "phases": BOTH, "shape": (2,)}
    nets = [Net(seed, dropout=dropout) for seed in (0, 1)] + [Net(2)]
    if "phases" not in options:
        plain |= {"reward": LinearFunctional([1.0, 0.5]), "lam": 0.1}
    objective = kind(*nets, CHAIN, **(plain | options))
    if start and len(objective.phases()) == 2:
        objective.start_phase("reward")
    return objective


def call(objective, turn="student", step=5, rows=slice(None), size=64, **entries):
    ids = torch.arange(size)[rows]
    batch = {"sample_id": ids, "sample": DATA[rows]} | {k: v[rows] for k, v in entries.items()}
    return objective.loss(turn, batch, step=step, keys=training_keys(3, step, ids))


def slopes(objective, turn="student", **options) -> torch.Tensor:
    network = objective.networks()[turn]
    loss = call(objective, turn, **options).loss
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))])


# ---- the kernel and the times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [VPScheduler("cosine", "sample"), FlowScheduler("sample")], ids=["vp", "flow"])
def test_the_posterior_step_is_the_ancestral_one_and_keeps_the_marginals(scheduler):
    """η = 1: 1/γ² = 1/σ_s² + α_{t|s}²/σ_{t|s}² (Salimans et al.); with the true x_0, x_s ~ q for every η."""
    t, s = torch.tensor(0.5), torch.tensor(0.25)
    (alpha_t, sigma_t), (alpha_s, sigma_s) = scheduler.alpha_sigma(t), scheduler.alpha_sigma(s)
    x0, x = torch.zeros(1, 1), torch.ones(1, 1)
    ratio = alpha_t / alpha_s
    own = sigma_t**2 - ratio**2 * sigma_s**2
    expected = (1.0 / sigma_s**2 + ratio**2 / own) ** -0.5
    assert float(scheduler.transition(x0, t, s, x, None, 1.0).std) == pytest.approx(float(expected), rel=1e-9)
    for eta in (0.25, 0.5, 1.0):  # x_t = α_t x_0 + σ_t ε, both of variance 1 and .3
        by_noise = scheduler.transition(x0, t, s, x * sigma_t, None, eta)
        by_data = scheduler.transition(x, t, s, x * alpha_t, None, eta)
        variance = 0.3 * float(by_data.mean) ** 2 + float(by_noise.mean) ** 2 + float(by_noise.std) ** 2
        assert variance == pytest.approx(float(0.3 * alpha_s**2 + sigma_s**2), rel=1e-5)
    width = sigma_s / sigma_t * (1.0 - ratio**2).sqrt()  # the form that holds for α² + σ² = 1 only
    assert (abs(float(width - expected)) < 1e-9) == isinstance(scheduler, VPScheduler)


@pytest.mark.parametrize("scheduler", [CHAIN, FlowScheduler(shift=3.0)], ids=["even", "shifted"])
def test_times_are_at_most_a_step_apart(scheduler):
    keys, n = training_keys(0, 0, torch.arange(4000)), 4
    grid = scheduler.times(n)
    t, s, step = draw_times(keys, scheduler, n, "continuous")
    assert bool((s < t).all()) and float(t.max()) == 1.0 and float(s.min()) > 0.0
    assert float((t == 1.0).float().mean()) == pytest.approx(1 / (2 * n), abs=0.02)
    assert bool(((t <= grid[step]) & (t >= grid[step + 1] - 1e-6)).all())
    assert bool((s >= grid[(step + 2).clamp(max=n)] - 1e-6).all())
    t, s, step = draw_times(keys, scheduler, n, "grid")
    assert torch.equal(t, grid[step].float()) and bool(((s < t) & (s >= grid[step + 1])).all())
    assert torch.bincount(step, minlength=n).float().sub(1000).abs().max() < 120


def test_the_named_weights():
    s = torch.tensor([1e-4, 0.2, 0.5, 0.9])
    assert torch.equal(moment_weight("mmd", CHAIN)(s), torch.ones(4))
    alpha, sigma = CHAIN.alpha_sigma(s)
    assert torch.allclose(moment_weight("ikl", CHAIN)(s), (alpha / sigma).square().clamp(max=MAX_SNR).float())
    assert float(moment_weight(lambda s: 2.0 * s, CHAIN)(s)[2]) == 1.0


# ---- the losses ------------------------------------------------------------------------------------------------------


def by_hand(objective, step: int):
    """x_t, x̂, x_s of noised data, and what the networks say there, written out."""
    keys = training_keys(3, step, torch.arange(64))
    t, s, _ = draw_times(keys, CHAIN, 4, "continuous")
    alpha, sigma = (v.float().unsqueeze(-1) for v in CHAIN.alpha_sigma(t))
    x_t = alpha * DATA + sigma * keys.at(purpose="noise").normal((2,))
    clean = alpha * x_t - sigma * objective.student(x_t, t)
    alpha_s, sigma_s = (v.float().unsqueeze(-1) for v in CHAIN.alpha_sigma(s))
    gamma = sigma_s / sigma * (1.0 - (alpha / alpha_s) ** 2).sqrt()
    noise = (x_t - alpha * clean) / sigma
    x_s = alpha_s * clean + (sigma_s**2 - gamma**2).clamp(min=0.0).sqrt() * noise
    x_s = (x_s + gamma * keys.at(purpose="posterior").normal((2,))).detach()
    ours, teachers = (
        alpha_s * x_s - sigma_s * net(x_s, s) for net in (objective.auxiliary, objective.frozen()["teacher"])
    )
    return clean, ours, teachers


def test_both_losses_of_distillation_and_their_gradients_are_the_formulas():
    objective = make(phases=[Phase("distil", 10)], teacher_weight=0.7)
    clean, ours, teachers = by_hand(objective, 5)
    expected = (clean * (ours - teachers).detach()).sum(dim=1).mean()
    torch.testing.assert_close(call(objective).loss, expected, rtol=1e-4, atol=1e-6)
    found = slopes(objective)
    by_formula = torch.autograd.grad(expected, list(objective.student.parameters()))
    torch.testing.assert_close(found, torch.cat([g.flatten() for g in by_formula]), rtol=1e-3, atol=1e-5)
    clean, ours, teachers = by_hand(objective, 4)
    error = (ours - clean.detach()).square() + 0.7 * (ours - teachers.detach()).square()
    output = call(objective, "auxiliary", step=4)
    torch.testing.assert_close(output.loss, error.sum(dim=1).mean(), rtol=1e-4, atol=1e-6)
    assert float(output.logs["auxiliary_error"]) == pytest.approx(
        float((ours - clean).detach().square().mean().sqrt()), rel=1e-4
    )


def test_reward_and_tie_add_their_own_gradients():
    """−λ R + ρ |x̂ − x̂_θ0|² on top of the moments: gradients are linear in λ and ρ."""
    parts = {(lam, reg): make(lam=lam, lam_reg=reg, reward=QuadraticTarget(3.0)) for lam in (0, 1) for reg in (0, 1)}
    with torch.no_grad():
        for objective in parts.values():
            objective.student.net[0].weight.add_(0.2)
    found = {key: slopes(objective) for key, objective in parts.items()}
    torch.testing.assert_close(found[1, 1] - found[0, 1], found[1, 0] - found[0, 0], rtol=1e-3, atol=1e-5)
    objective = parts[1, 1]
    with torch.enable_grad():
        keys = training_keys(3, 5, torch.arange(64))
        x_t, t, _ = objective._states("reward", {}, None, keys, keys)
        clean = CHAIN.to_x0(objective.student(x_t, t), t, x_t)
        first = CHAIN.to_x0(objective.frozen()["first_student"](x_t, t), t, x_t)
        extra = 0.5 * (clean - 3.0).square().sum(dim=1) + (clean - first).square().sum(dim=1)
        expected = torch.autograd.grad(extra.mean(), list(objective.student.parameters()))
    torch.testing.assert_close(
        found[1, 1] - found[0, 0], torch.cat([g.flatten() for g in expected]), rtol=1e-3, atol=1e-4
    )
    assert make(lam=0.4).lam_reg == 0.2
    objective = make(lam=0.1, teacher_weight=1.0, lam_reg=0.0)
    objective.auxiliary.net[3].bias.data += 0.1
    logs = call(objective).logs
    assert logs["effective_lambda"] == pytest.approx(0.2) and float(logs["reward_invalid"]) == 0.0
    slope = 0.1 * math.sqrt((1.0 + 0.25) / 2)
    assert float(logs["reward_gradient_ratio"]) == pytest.approx(slope / float(logs["moment_gap"]), rel=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "flow"])
def test_the_losses_do_not_depend_on_the_prediction_type(prediction):
    def losses(kind):
        chain = VPScheduler("linear", kind)
        nets = [
            AffineDenoiser(torch.tensor([m, 0.0]), 0.5 * torch.eye(2) + 0.1, chain, form)
            for m, form in ((1.2, "posterior"), (0.9, "posterior"), (1.0, "posterior"))
        ]
        objective = MomentMatchingObjective(*nets, chain, num_inference_steps=4, phases=[Phase("distil", 10)])
        outputs = [call(objective, turn, step=2) for turn in ("student", "auxiliary")]
        return torch.stack([output.loss.detach() for output in outputs])

    torch.testing.assert_close(losses(prediction), losses("sample"), rtol=2e-3, atol=2e-4)


def test_the_guided_teacher_and_the_normalised_gap():
    labels = torch.arange(64) % 3
    options = {"phases": [Phase("distil", 10)], "condition_names": ("label",)}
    guided = make(guidance_scale=2.0, **options)
    x, s = DATA, torch.linspace(0.1, 0.9, 64)
    teacher = guided.frozen()["teacher"]
    expected = CHAIN.to_x0(2.0 * teacher(x, s, {"label": labels}) - teacher(x, s), s, x)
    torch.testing.assert_close(guided.reference_moment("distil", x, s, {"label": labels}), expected)
    plain, normalised = make(**options), make(normalize="dmd", **options)
    clean, _, teachers = by_hand(plain, 5)
    for row in (0, 3, 6):  # their label is 0, as in by_hand
        found, own = (slopes(o, label=labels, rows=slice(row, row + 1)) for o in (normalised, plain))
        factor = (clean - teachers)[row].detach().abs().mean()
        torch.testing.assert_close(factor * found, own, rtol=1e-3, atol=1e-6)


def test_a_joint_reward_acts_while_distilling():
    options = {"reward": QuadraticTarget(3.0), "phases": [Phase("distil", 10)], "joint": True}
    with_reward, without = make(lam=0.5, **options), make(lam=0.0, **options)
    clean = by_hand(with_reward, 5)[0]
    slope = 0.25 * (clean - 3.0).square().sum(dim=1).mean()
    expected = torch.autograd.grad(slope, list(with_reward.student.parameters()))
    expected = torch.cat([g.flatten() for g in expected])
    torch.testing.assert_close(slopes(with_reward) - slopes(without), expected, rtol=1e-3, atol=1e-4)
    assert "reward" in call(with_reward).logs and "first_student_distance" not in call(with_reward).logs


# ---- whom a turn moves, and what it costs ----------------------------------------------------------------------------


class Spy(MomentMatchingObjective):
    def student_moment(self, x_s, s, cond):
        self.seen = (x_s.requires_grad, torch.is_grad_enabled())
        return super().student_moment(x_s, s, cond)


@pytest.mark.parametrize("step", [1, 5], ids=["distil", "reward"])
def test_a_turn_moves_its_own_network_alone(step):
    objective = make(Spy)
    everything = {**objective.networks(), **objective.frozen()}
    assert set(everything) == {"student", "auxiliary", "teacher", "first_student", "first_auxiliary"}
    for turn in ("student", "auxiliary"):
        for network in everything.values():
            network.requires_grad_(True).zero_grad(set_to_none=True)
        call(objective, turn, step=step).loss.backward()
        moved = {n for n, network in everything.items() if any(p.grad is not None for p in network.parameters())}
        assert moved == {turn}
    assert objective.seen == (False, False)


def saved_bytes(loss) -> int:
    """Bytes of what the graph keeps for the backward pass."""
    kept = []

    def keep(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(kept)


@pytest.mark.parametrize("on_policy", ["continuous", "discrete"])
def test_the_memory_of_a_step_does_not_grow_with_the_walk(on_policy):
    ours = [saved_bytes(lambda n=n: call(make(num_inference_steps=n, on_policy=on_policy))) for n in (2, 8)]
    assert ours[0] == ours[1]

    def through(n):
        objective = RewardGradientObjective(
            Net(), CHAIN, LinearFunctional([1.0, 0.5]), num_inference_steps=n, shape=(2,),
            window=GradientWindow("last_k", k=n), solver="ancestral", eta=1.0,
        )  # fmt: skip
        return saved_bytes(lambda: call(objective, "denoiser"))

    assert 3.0 < through(8) / through(2) < 5.0


def test_dropout_acts_in_the_turns_own_network_alone():
    objective = make(dropout=0.5)
    objective.student.train(), objective.auxiliary.train()
    objective.student.net[0].eval()  # a part that somebody has fixed stays so
    x, s = DATA, torch.full((64,), 0.5)
    with torch.no_grad():
        assert torch.equal(objective.student_moment(x, s, None), objective.student_moment(x, s, None))
        keys = training_keys(0, 0, torch.arange(64))
        assert torch.equal(objective._walk(4, (2,), None, keys), objective._walk(4, (2,), None, keys))
        assert not torch.equal(objective.student(x, s), objective.student(x, s))
        objective.chain_dropout = True
        assert not torch.equal(objective._walk(4, (2,), None, keys), objective._walk(4, (2,), None, keys))
        first = objective.frozen()["first_student"]
        assert torch.equal(first(x, s), first(x, s))
    assert objective.student.net[2].training and not objective.student.net[0].training


# ---- what a loss depends on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_policy", ["continuous", "discrete", False])
def test_states_on_policy_do_not_depend_on_the_values_of_the_data(on_policy):
    objective = make(on_policy=on_policy)
    ids = torch.arange(64)
    losses = [
        objective.loss("student", {"sample_id": ids, "sample": x}, step=5, keys=training_keys(3, 5, ids)).loss
        for x in (DATA, DATA + 1.0)
    ]
    assert torch.equal(*losses) == bool(on_policy)
    if on_policy:  # and need none
        alone = objective.loss("student", {"sample_id": ids}, step=5, keys=training_keys(3, 5, ids)).loss
        assert torch.equal(alone, losses[0])
    objective.student.net[3].bias.data += 1.0
    assert not torch.equal(call(objective).loss, losses[0])


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("on_policy", ["continuous", "discrete", False])
def test_a_batch_may_be_split(members, on_policy):
    reward = CRPSReward() if members > 1 else QuadraticTarget(2.0)
    objective = make(members=members, on_policy=on_policy, reward=reward, shape=None)
    for turn in ("student", "auxiliary"):
        whole = slopes(objective, turn)
        parts = [slopes(objective, turn, rows=slice(a, b)) * (b - a) / 64 for a, b in ((0, 10), (10, 64))]
        torch.testing.assert_close(sum(parts), whole, rtol=1e-3, atol=1e-5)


class Cells(nn.Module):
    """A clean prediction of each cell by itself, with a parameter for each."""

    prediction_type = "sample"

    def __init__(self, cells: int, shift: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(shift + 0.1 * torch.arange(cells) % 0.4)

    def forward(self, x, t, cond=None):
        return 0.5 * x + self.bias


@pytest.mark.parametrize(("reduction", "mean"), [("sum", False), ("mean", True), ("sum", True)])
def test_more_cells_leave_the_gradient_of_a_cell_alone(reduction, mean):
    """The reward and the regularisers are both sums over cells, or both means; mixed, the balance changes."""
    chain = VPScheduler("cosine", "sample")
    reward = FunctionReward(
        lambda x, c: -(x - 3.0).square().mean(-1) if mean else -(x - 3.0).square().sum(-1), differentiable=True
    )

    def gradient(cells):
        objective = MomentMatchingObjective(
            Cells(cells, 0.1), Cells(cells, 0.3), Cells(cells, 0.0), chain, num_inference_steps=2, reward=reward,
            phases=[Phase("reward", 9)], lam=0.5, reference="teacher", reduction=reduction, shape=(cells,),
        )  # fmt: skip
        objective.start_phase("reward")
        objective.student.bias.data += 0.2
        ids = torch.arange(16)
        loss = objective.loss("student", {"sample_id": ids}, step=1, keys=training_keys(0, 1, ids)).loss
        return torch.autograd.grad(loss, objective.student.bias)[0] * (cells if reduction == "mean" else 1)

    same = torch.allclose(gradient(8)[:4], gradient(4), rtol=1e-4, atol=1e-6)
    assert same == ((reduction == "mean") == mean)


def test_members_are_independent_share_their_times_and_their_regularisers_are_averaged():
    objective = make(members=3, lam=0.0, reward=CRPSReward())
    seen = {}

    class Wide(MomentMatchingObjective):
        def student_moment(self, x_s, s, cond):
            seen["x"], seen["s"], seen["cond"] = x_s, s, cond
            return super().student_moment(x_s, s, cond)

    wide = make(Wide, members=3, reward=CRPSReward(), condition_names=("label",))
    call(wide, label=torch.arange(64))
    x, s = seen["x"].unflatten(0, (64, 3)), seen["s"].unflatten(0, (64, 3))
    assert bool((s == s[:, :1]).all()) and bool((x[:, 0] != x[:, 1]).all() and (x[:, 1] != x[:, 2]).all())
    assert torch.equal(seen["cond"]["label"], torch.arange(64).repeat_interleave(3))
    call(objective, step=1)  # without a reward in the first phase there are no members
    single = make(members=1, lam=0.0, lam_reg=0.0)
    for one in (objective, single):
        one.auxiliary.net[3].bias.data += 0.3
    sizes = [torch.stack([slopes(o, step=5 + 2 * k) for k in range(40)]).mean(0) for o in (objective, single)]
    assert float(sizes[0].norm() / sizes[1].norm()) == pytest.approx(1.0, abs=0.15)  # not 3


def test_an_invalid_reward_leaves_the_regularisers_and_the_other_samples():
    def broken(x, context):
        return torch.where(context["bad"], torch.nan, -(x - 2.0).square().sum(-1))

    def with_bad(bad, lam=1.0):
        reward = FunctionReward(broken, differentiable=True)
        return make(reward=reward, lam=lam, lam_reg=0.0), {"bad": bad}

    some = torch.arange(64) < 16
    objective, entries = with_bad(some)
    output = call(objective, **entries)
    assert float(output.logs["reward_invalid"]) == pytest.approx(0.25) and bool(output.loss.isfinite())
    found = slopes(objective, **entries)
    base = slopes(with_bad(some, lam=0.0)[0], **entries)
    good = slopes(objective, rows=slice(16, 64), **entries) - slopes(
        with_bad(some, lam=0.0)[0], rows=slice(16, 64), **entries
    )
    torch.testing.assert_close(found - base, 0.75 * good, rtol=1e-3, atol=1e-4)
    every, entries = with_bad(some | True)
    torch.testing.assert_close(slopes(every, **entries), base, rtol=1e-4, atol=1e-6)


# ---- phases, turns, resuming -----------------------------------------------------------------------------------------


def test_turns_begin_with_the_auxiliary_in_every_phase():
    phases = (Phase("distil", 5), Phase("reward", 7))
    objective = make(phases=phases, reward=LinearFunctional([1.0, 0.5]), aux_steps_per_student=2)
    names = "".join(objective.turn(step)[0] for step in range(12))
    assert names == "aasaa" + "aasaasa"


def test_the_second_phase_freezes_what_it_needs():
    for options, names in (
        ({}, {"first_student", "first_auxiliary"}),
        ({"lam_reg": 0.0}, {"first_auxiliary"}),
        ({"reference": "teacher", "lam_reg": 0.0}, set()),
    ):
        objective = make(dropout=0.3, **options)
        assert set(objective.frozen()) == {"teacher"} | names
        for name in names:
            copied, own = objective.frozen()[name], objective.networks()[name.removeprefix("first_")]
            assert not copied.training and toys.same(toys.tensors(copied), toys.tensors(own))
            assert not any(p.requires_grad for p in copied.parameters())
            own.net[0].weight.data += 1.0
            assert not toys.same(toys.tensors(copied), toys.tensors(own))
    with pytest.raises(ConfigError, match="start_phase"):
        call(make(start=False))


def run(folder, **changes) -> Trainer:
    objective = make(
        start=False, dropout=0.3, shape=None, members=2, reward=CRPSReward(), lam=0.3,
        phases=(Phase("distil", 4), Phase("reward", 9)),
    )  # fmt: skip
    settings = {"max_steps": 13, "save_steps": 7, "batch_size": 8, "ema_decay": {"student": 0.9}, "learning_rate": 1e-2}
    config = toys.config(folder, lr_scheduler="linear", **(settings | changes))
    return Trainer(objective, config, TensorData({"sample": DATA[:20]}))


def test_a_run_killed_between_two_turns_of_the_second_phase_goes_on_exactly(tmp_path):
    whole = run(tmp_path / "whole")
    entries = [(e.step, e.phase, e.turn, e.loss, e.logs) for e in whole.train()]
    assert [e[2] for e in entries[4:8]] == ["auxiliary", "student", "auxiliary", "student"]
    for entry in run(tmp_path / "cut").train():  # checkpoint-7 lies between the turns of a pair
        if entry.step == 9:
            break
    again = run(tmp_path / "cut", resume_from_checkpoint="latest")
    assert [(e.step, e.phase, e.turn, e.loss, e.logs) for e in again.train()] == entries[7:]
    pairs = [(n, m) for n, m in {**whole.objective.networks(), **whole.objective.frozen()}.items()]
    others = {**again.objective.networks(), **again.objective.frozen()}
    assert len(pairs) == 5 and all(toys.same(toys.tensors(m), toys.tensors(others[n])) for n, m in pairs)
    first, ema = others["first_student"].state_dict(), again.networks["student"].ema.shadow
    assert not torch.equal(first["net.0.weight"], others["student"].state_dict()["net.0.weight"])
    assert toys.same(ema, whole.networks["student"].ema.shadow)


# ---- in parameter space ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioned", [False, True])
def test_the_instant_gradient_is_that_of_the_squared_teacher_gradient(preconditioned):
    """Autograd of ½ |E ∇ℓ|²_Λ on one batch; with the other sign the cosine is −1."""
    objective = InstantMomentObjective(Net(0), Net(2), CHAIN, num_inference_steps=4)
    keys, batch = training_keys(0, 0, torch.arange(64)), {"sample": DATA}
    if preconditioned:
        objective.preconditioner = objective.inverse_rms(batch, training_keys(1, 0, torch.arange(64)), draws=3)
    clean, x_s, s, cond = objective._predictions(batch, keys)
    own = {n: p.detach().requires_grad_() for n, p in objective.teacher.named_parameters()}
    error = (clean - objective._moment(own, x_s, s, cond)).square().sum(dim=1).mean()
    found = torch.autograd.grad(error, list(own.values()), create_graph=True)
    scales = objective.preconditioned({n: torch.ones_like(p) for n, p in own.items()})
    exact = 0.5 * sum((scales[n] * g.square()).sum() for n, g in zip(own, found, strict=True))
    parameters = list(objective.student.parameters())
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(exact, parameters, retain_graph=True)])
    nu = objective.preconditioned(objective.teacher_gradient(clean, x_s, s, cond))
    value = objective.surrogate(clean, x_s, s, cond, nu)
    ours = torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(value, exact.detach(), rtol=1e-3, atol=1e-6)
    assert float(nn.functional.cosine_similarity(-ours, expected, dim=0)) == pytest.approx(-1.0, abs=1e-4)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_instant_objective_finds_the_teachers_law_and_with_the_other_sign_loses_it(sign):
    chain = VPScheduler("cosine", "sample")
    student = AffineDenoiser(torch.tensor([1.4]), torch.tensor([[0.7]]), chain, "generator")
    teacher = AffineDenoiser(torch.tensor([1.0]), torch.tensor([[0.5]]), chain)
    objective = InstantMomentObjective(student, teacher, chain, num_inference_steps=1, time_law="grid")
    ids = torch.arange(1024)
    for step in range(80 if sign > 0 else 40):
        batch = {"sample": torch.zeros(1024, 1), "sample_id": ids}  # t = 1: their values do not matter
        loss = objective.loss("student", batch, step=step, keys=training_keys(0, step, ids)).loss
        with torch.no_grad():
            for parameter, slope in zip(
                student.parameters(), torch.autograd.grad(loss, [*student.parameters()]), strict=True
            ):
                parameter -= sign * 0.3 * slope
    away = abs(float(student.mean.detach()) - 1.0)
    assert away < 0.03 if sign > 0 else not away < 0.6
    assert sign < 0 or abs(float(student.factor.detach()) - 0.5) < 0.05


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eta": 0.0}, "eta=0.0.*deterministic function"),
        ({"weight": "mdm"}, "Did you mean 'mmd'"),
        ({"reference": "teachers"}, "Did you mean 'teacher'"),
        ({"on_policy": "continous"}, "Did you mean 'continuous'"),
        ({"on_policy": True}, "on_policy=True"),
        ({"time_law": "grids"}, "Did you mean 'grid'"),
        ({"normalize": "dmd2"}, "Did you mean 'dmd'"),
        ({"reduction": "avg"}, "'sum', 'mean'"),
        ({"phases": [Phase("distill", 3)]}, "Did you mean 'distil'"),
        ({"phases": [Phase("reward", 3), Phase("distil", 3)], "reward": LinearFunctional([1.0])}, "before 'reward'"),
        ({"phases": {"distil": 3}}, "sequence of Phase"),
        ({"phases": BOTH}, "need a reward"),
        ({"phases": [Phase("distil", 3)], "lam": 0.1}, "need a reward"),
        ({"phases": [Phase("distil", 3)], "reward": LinearFunctional([1.0])}, "never acts"),
        ({"reward": FunctionReward(lambda x, c: x.sum(-1))}, "not differentiable"),
        ({"lam": -1.0}, "lam=-1.0"),
        ({"members": 0}, "members=0"),
        ({"guidance_scale": 2.0}, "without condition_names"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        make(start=False, **options)


def test_networks_must_fit_together():
    options = {"num_inference_steps": 4, "phases": [Phase("distil", 3)]}
    other = Net(1)
    other.prediction_type = "sample"
    with pytest.raises(ConfigError, match="the auxiliary predicts 'sample', but the scheduler expects 'v_prediction'"):
        MomentMatchingObjective(Net(0), other, Net(2), CHAIN, **options)
    with pytest.raises(ConfigError, match=r"differ in 'net.0.weight': \(16, 4\) and \(8, 4\)"):
        MomentMatchingObjective(Net(0), Net(1, width=8), Net(2), CHAIN, **options)
    shared = Net(1)
    with pytest.raises(ConfigError, match="auxiliary and teacher share their weights"):
        MomentMatchingObjective(Net(0), shared, shared, CHAIN, **options)
    MomentMatchingObjective(
        Net(0), copy.deepcopy(shared), Net(2, width=64), CHAIN, **options
    )  # a larger teacher may be
    with pytest.raises(ConfigError, match="eta=0"):
        InstantMomentObjective(Net(0), Net(1), CHAIN, num_inference_steps=4, eta=0)
    with pytest.raises(ConfigError, match="lacks the teacher's"):
        InstantMomentObjective(Net(0), Net(1), CHAIN, num_inference_steps=4, preconditioner={})


def test_batches_and_rewards_must_fit():
    with pytest.raises(ConfigError, match=r"expected \(B, M, \*shape\).*members=1"):
        call(make(reward=CRPSReward()))  # a score of an ensemble, without members
    by_row = FunctionReward(lambda x, c: x.flatten(0, -2).sum(-1), differentiable=True)
    with pytest.raises(ConfigError, match="128 values for 64 samples.*members=2"):
        call(make(members=2, reward=by_row))
    ids = torch.arange(4)
    keys = training_keys(0, 0, ids)
    with pytest.raises(ConfigError, match="'sample' is needed.*Did you mean 'samples'"):
        make().loss("student", {"sample_id": ids, "samples": DATA[:4]}, step=1, keys=keys)
    with pytest.raises(ConfigError, match="pass shape="):
        make(shape=None).loss("student", {"sample_id": ids}, step=5, keys=keys)
    with pytest.raises(ConfigError, match="Did you mean 'label'"):
        call(make(condition_names=("labels",)), label=torch.arange(64))
    with pytest.raises(ConfigError, match="turn='teacher'"):
        call(make(), "teacher")


def test_logs_by_half_of_the_noise_levels_add_up_to_the_whole():
    objective = make(reference="teacher")
    logs = call(objective).logs
    keys = training_keys(3, 5, torch.arange(64))
    t, s, _ = draw_times(keys, CHAIN, 4, "continuous")
    shares = {"t<0.5": float((s < 0.5).double().mean()), "t>=0.5": float((s >= 0.5).double().mean())}
    whole = sum(share * float(logs[f"moment_gap/{half}"]) ** 2 for half, share in shares.items())
    assert whole == pytest.approx(float(logs["moment_gap"]) ** 2, rel=1e-4)
    shares = {"t<0.5": float((t < 0.5).double().mean()), "t>=0.5": float((t >= 0.5).double().mean())}
    whole = sum(share * float(logs[f"reward/{half}"]) for half, share in shares.items())
    assert whole == pytest.approx(float(logs["reward"]), rel=1e-4)
    assert float(logs["moment_gap/t<0.5"]) != pytest.approx(float(logs["moment_gap/t>=0.5"]), rel=1e-2)
