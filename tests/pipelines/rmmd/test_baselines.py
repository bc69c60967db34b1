"""The baselines beside their closed forms, with controls that have one thing wrong."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from training import toys

from genkit.errors import ConfigError
from genkit.pipelines.rmmd import MomentMatchingObjective
from genkit.pipelines.rmmd.baselines import (
    DiffInstructObjective,
    DMD2Objective,
    HyperNoiseObjective,
    NoisyStart,
    hypernoise_latents,
    noise_network,
)
from genkit.pipelines.rmmd.gaussian import AffineDenoiser, linear_reward_mean
from genkit.pipelines.rmmd.weights import moment_weight
from genkit.rewards import CRPSReward, FunctionReward
from genkit.rewards.analytic import LinearFunctional, QuadraticTarget
from genkit.samplers import rollout, training_keys
from genkit.schedulers import FlowScheduler, VPScheduler
from genkit.training import Phase, TensorData, Trainer

CHAIN = VPScheduler("cosine", "sample")
MEAN, STD = 1.0, 0.5
LINEAR = LinearFunctional([1.0])
REWARD = [Phase("reward", 10**6)]
DISTIL = [Phase("distil", 10**6)]


def affine(kind="posterior", mean=MEAN, std=STD, chain=CHAIN, size=1) -> AffineDenoiser:
    return AffineDenoiser(torch.full((size,), mean), std * torch.eye(size), chain, kind)


class Exact:
    """A perfect auxiliary: the moment of the one-step student's current law."""

    def student_moment(self, x_s, s, cond):
        student = self.student
        return AffineDenoiser(student.mean.detach(), student.factor.detach(), self.scheduler).clean(x_s, s)


class Swapped(Exact):
    """The gap with the wrong sign."""

    def student_moment(self, x_s, s, cond):
        return 2.0 * self.reference_moment("reward", x_s, s, cond) - super().student_moment(x_s, s, cond)


def with_moment(moment, kind):
    return type(f"{moment.__name__}{kind.__name__}", (moment, kind), {})


def one_step(moment=Exact, mean=MEAN, std=STD, chain=CHAIN, **options):
    kind = with_moment(moment, DiffInstructObjective) if moment else DiffInstructObjective
    plain = {"phases": REWARD, "reward": LINEAR, "shape": (1,)}
    nets = (affine("generator", mean, std, chain), affine(chain=chain), affine(chain=chain))
    objective = kind(*nets, chain, **(plain | options))
    objective.start_phase("reward")
    return objective


def call(objective, turn="student", step=0, size=64, seed=1, **entries):
    ids = torch.arange(size)
    return objective.loss(turn, {"sample_id": ids, **entries}, step=step, keys=training_keys(seed, step, ids))


def slopes(objective, turn="student", **options) -> torch.Tensor:
    parameters = [p for p in objective.networks()[turn].parameters() if p.requires_grad]
    found = torch.autograd.grad(call(objective, turn, **options).loss, parameters)
    return torch.cat([g.flatten() for g in found])


def settle(objective, steps=120, rate=0.3, size=1024, turns=False) -> torch.Tensor:
    """Plain gradient descent; the student's parameters averaged over the second half of the steps."""
    path = []
    for step in range(steps):
        turn = objective.turn(step) if turns else "student"
        parameters = list(objective.networks()[turn].parameters())
        found = torch.autograd.grad(call(objective, turn, step=step, size=size).loss, parameters)
        with torch.no_grad():
            for parameter, slope in zip(parameters, found, strict=True):
                parameter -= rate * slope
        path.append(torch.cat([p.detach().flatten().clone() for p in objective.student.parameters()]))
    return torch.stack(path[steps // 2 :]).mean(dim=0)


def constant(weight, chain=CHAIN, c=STD**2) -> float:
    """K = E_s[w σ²/(α² c + σ²)] by quadrature."""
    s = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    alpha, sigma = chain.alpha_sigma(s)
    return float((moment_weight(weight, chain)(s) * sigma**2 / (alpha**2 * c + sigma**2)).mean())


# ---- Diff-Instruct ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", [CHAIN, FlowScheduler("sample")], ids=["vp", "flow"])
def test_from_pure_noise_it_is_moment_matching_with_the_ancestral_step(chain):
    """α(1) = 0: the posterior from t = 1 with η = 1 is the forward process; with η < 1 or from t < 1 it is not."""

    def other(**options):
        nets = [affine("generator", 1.4, 0.7, chain), affine("posterior", 1.2, 0.8, chain), affine(chain=chain)]
        plain = {"num_inference_steps": 1, "on_policy": "discrete", "teacher_weight": 0.0, "reference": "teacher"}
        plain |= {"phases": REWARD, "reward": LINEAR, "lam": 0.2, "lam_reg": 0.0, "shape": (1,)}
        objective = MomentMatchingObjective(*nets, chain, **(plain | options))
        objective.start_phase("reward")
        return objective

    ours = one_step(None, 1.4, 0.7, chain, weight="mmd", lam=0.2)
    ours.auxiliary.mean.data += 0.2
    ours.auxiliary.factor.data += 0.3
    for turn in ("student", "auxiliary"):
        torch.testing.assert_close(slopes(ours, turn), slopes(other(), turn), rtol=1e-4, atol=1e-6)
        for options in ({"eta": 0.5}, {"num_inference_steps": 2}):
            assert not torch.allclose(slopes(ours, turn), slopes(other(**options), turn), rtol=1e-2)


@pytest.mark.parametrize("weight", ["ikl", "mmd"])
def test_the_expected_gradient_has_the_gaps_sign_and_vanishes_at_the_closed_form(weight):
    """With equal variances the gap is σ²/(α²c + σ²)(μ − m): the gradient is K(μ − m) − λ, in the mean alone."""
    k, lam = constant(weight), 0.3
    for mean in (0.6, 1.4):
        found = slopes(one_step(mean=mean, weight=weight), size=20000)
        assert float(found[0]) == pytest.approx(k * (mean - MEAN), rel=0.01)
        assert float(slopes(one_step(Swapped, mean=mean, weight=weight))[0]) * (mean - MEAN) < 0.0  # the control
    best = MEAN + lam / k
    assert slopes(one_step(mean=best, weight=weight, lam=lam), size=20000).abs().max() < 0.01
    assert slopes(one_step(mean=best + 0.2, weight=weight, lam=lam), size=20000)[0] > 0.1
    if weight == "mmd":
        assert best == pytest.approx(linear_reward_mean(MEAN, STD**2, 1.0, lam), abs=1e-4)
    else:  # E[α²/(α²c + σ²)] = 1/(√c + c), but for the cut of the weight
        assert k == pytest.approx(1.0 / (STD + STD**2), rel=0.02)


@pytest.mark.parametrize("weight", ["ikl", "mmd"])
def test_with_a_reward_it_settles_at_the_closed_form_and_keeps_the_variance(weight):
    found = settle(one_step(mean=0.8, std=0.6, weight=weight, lam=0.2), 100)
    assert float(found[0]) == pytest.approx(MEAN + 0.2 / constant(weight), abs=0.01)
    assert float(found[1]) == pytest.approx(STD, abs=0.015)
    away = settle(one_step(Swapped, mean=1.1, weight=weight, lam=0.2), 10)
    assert float(away[0]) > 1.6


def test_noise_near_zero_recovers_the_exponential_tilt():
    """exp(λ x) N(m, c) has the mean m + λ c: that of the KL divergence of clean samples, not of the integral's."""

    def near_zero(s):
        return 20.0 * (s < 0.05) * moment_weight("ikl", CHAIN)(s)

    tilted = MEAN + 0.3 * STD**2
    assert MEAN + 0.3 / constant(near_zero) == pytest.approx(tilted, abs=0.01)
    assert MEAN + 0.3 / constant("ikl") > tilted + 0.1
    found = slopes(one_step(mean=tilted, weight=near_zero, lam=0.3), size=20000)
    assert abs(float(found[0])) < 0.05 < 0.1 < abs(float(slopes(one_step(mean=tilted, lam=0.3), size=20000)[0]))


def test_the_trained_auxiliary_holds_the_student_and_a_frozen_one_does_not():
    options = {"weight": "mmd", "lam": 0.1}
    assert float(settle(one_step(None, **options), 160, 0.5, turns=True)[0]) == pytest.approx(1.15, abs=0.01)
    frozen = one_step(None, **options)
    settle(frozen, 80, 0.5, size=64)
    assert float(frozen.student.mean.detach()) == pytest.approx(MEAN + 80 * 0.05, rel=1e-3)  # steps · rate · λ


def test_without_a_reward_and_data_it_finds_the_teachers_law_from_the_prior():
    """Also where α(1) > 0; data are not looked at."""
    chain = VPScheduler("linear", "v_prediction")
    options = {"reward": None, "phases": DISTIL, "weight": "mmd", "chain": chain}
    found = settle(one_step(mean=1.4, std=0.8, **options), 100, 0.8)
    assert found.tolist() == pytest.approx([MEAN, STD], abs=0.03)
    objective = one_step(mean=1.4, **options)
    told = [slopes(objective, sample=torch.full((64, 1), value)) for value in (0.0, 5.0)]
    assert torch.equal(*told) and torch.equal(told[0], slopes(objective))


@pytest.mark.parametrize(
    "chain",
    [CHAIN, FlowScheduler("sample", shift=3.0), VPScheduler("linear", "sample"), VPScheduler("edm", "sample")],
    ids=["cosine", "flow", "linear", "edm"],
)
def test_levels_follow_their_law(chain):
    keys = training_keys(0, 0, torch.arange(4000))
    uniform = one_step(chain=chain).levels(keys)
    for q in (0.1, 0.5, 0.9):
        assert float(uniform.quantile(q)) == pytest.approx(q, abs=0.025)
    for options, mean, std in (({}, -1.2, 1.2), ({"p_mean": 0.5, "p_std": 0.7}, 0.5, 0.7)):
        s = one_step(chain=chain, s_law="lognormal", **options).levels(keys)
        alpha, sigma = chain.alpha_sigma(s)
        expected = mean + std * keys.at(purpose="level").normal().double()
        torch.testing.assert_close((sigma / alpha).log(), expected, rtol=1e-3, atol=1e-3)
        assert s.dtype == torch.float32 and bool(((s > 0) & (s < 1)).all())


def test_several_members_are_judged_together():
    objective = one_step(None, members=3, reward=CRPSReward(), lam=0.5)
    output = call(objective, observation=torch.zeros(64, 1))
    assert bool(output.loss.isfinite()) and "reward" in output.logs
    keys = training_keys(1, 0, torch.arange(4))
    rows = training_keys(1, 0, torch.arange(12))
    x, t, s = objective._states("reward", {}, None, keys, rows)
    assert bool((t == 1.0).all()) and bool((s.reshape(4, 3) == s[::3, None]).all()) and len(x.unique()) == 12


# ---- DMD2 ------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A small network of (x, t, label), with layers before its last one."""

    prediction_type = "sample"

    def __init__(self, seed=0, channels=2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(channels + 2, 16), nn.Tanh(), nn.Linear(16, channels))

    def forward(self, x, t, cond=None):
        label = torch.zeros_like(t) if cond is None else cond["label"].to(t)
        return self.net(torch.cat((x, t.unsqueeze(-1), label.unsqueeze(-1)), dim=-1))


def dmd2(kind=DMD2Objective, **options):
    plain = {"num_inference_steps": 4, "phases": DISTIL, "shape": (2,)}
    return kind(Net(0), Net(1), Net(2), CHAIN, **(plain | options))


def test_the_normalised_gradient_is_that_of_the_pseudo_target_and_free_of_the_scale():
    clean, fake, real = torch.randn(3, 64, 2, generator=torch.Generator().manual_seed(0))
    x, s = torch.zeros(64, 2), torch.full((64,), 0.5)

    def gradient(scale_gap=1.0, scale_all=1.0, kind=DMD2Objective, **options):
        class Known(kind):
            def student_moment(self, x_s, s, cond):
                return scale_all * (real + scale_gap * (fake - real))

            def reference_moment(self, phase, x_s, s, cond):
                return scale_all * real

        leaf = (scale_all * clean).requires_grad_()
        loss, _ = dmd2(Known, **options)._moment_loss("distil", leaf, x, s, None)
        return torch.autograd.grad(loss, leaf)[0]

    own = (fake - real) / (clean - real).abs().mean(dim=1, keepdim=True)
    leaf = clean.clone().requires_grad_()
    target = 0.5 * (leaf - (leaf - own).detach()).square()
    for reduction, value in (("sum", target.sum(dim=1)), ("mean", target.mean(dim=1))):
        expected = torch.autograd.grad(value.mean(), leaf, retain_graph=True)[0]
        torch.testing.assert_close(gradient(reduction=reduction), expected)
    for scale in (1e-3, 40.0):
        torch.testing.assert_close(gradient(scale_all=scale), gradient(), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(gradient(scale_gap=scale), scale * gradient())  # the gap itself still counts
        plain = gradient(scale_all=scale, kind=MomentMatchingObjective)
        torch.testing.assert_close(plain, scale * gradient(kind=MomentMatchingObjective))  # the control
        assert not torch.allclose(plain, gradient(kind=MomentMatchingObjective), rtol=0.1)


def test_five_steps_of_the_fake_network_to_one_of_the_student():
    assert "".join(dmd2().turn(step)[0] for step in range(12)) == "aaaaasaaaaas"
    assert "".join(dmd2(aux_steps_per_student=1).turn(step)[0] for step in range(4)) == "asas"


class Spy(DMD2Objective):
    def _states(self, *arguments):
        self.seen = super()._states(*arguments)
        return self.seen

    def student_moment(self, x_s, s, cond):
        self.noised = x_s
        return super().student_moment(x_s, s, cond)


def test_states_are_the_students_own_and_are_noised_by_the_forward_process_at_any_level():
    objective = dmd2(Spy, s_min=0.1, s_max=0.7)
    call(objective, size=2000)
    keys = training_keys(1, 0, torch.arange(2000))
    x, t, s = objective.seen
    grid = CHAIN.times(4)[:-1].float()
    counts = torch.stack([(t == time).sum() for time in grid])
    assert int(counts.sum()) == 2000 and bool(((counts - 500).abs() < 100).all())
    assert float(s.min()) == pytest.approx(0.1, abs=0.01) and float(s.max()) == pytest.approx(0.7, abs=0.01)
    assert float((s > t).float().mean()) > 0.2  # a posterior step could never be noisier
    assert abs(float(torch.corrcoef(torch.stack((s, t)))[0, 1])) < 0.06
    with torch.no_grad():
        walk = rollout(
            objective.student, CHAIN, shape=(2000, 2), generator=keys.at(purpose="chain"), num_inference_steps=4,
            solver="ancestral", eta=1.0, return_trajectory=True,
        )  # fmt: skip
        for number, time in enumerate(grid):
            torch.testing.assert_close(x[t == time], walk.trajectory[number][t == time])
        clean = objective.student(x, t)
    noise = keys.at(purpose="posterior").normal((2,))
    torch.testing.assert_close(objective.noised, CHAIN.add_noise(clean, noise, s))


@pytest.mark.parametrize("phase", ["distil", "reward"])
def test_states_do_not_depend_on_the_values_of_the_data(phase):
    extra = {} if phase == "distil" else {"phases": REWARD, "reward": LinearFunctional([1.0, 0.5]), "lam": 0.1}

    def pair(objective):
        objective.start_phase(phase)
        return [slopes(objective, sample=torch.full((64, 2), value)) for value in (0.0, 5.0)]

    assert torch.equal(*pair(dmd2(**extra, shape=None)))
    assert not torch.equal(*pair(dmd2(MomentMatchingObjective, **(extra | {"lam_reg": 0.0}), on_policy=False)))


@pytest.mark.parametrize("moment", [Exact, Swapped])
def test_the_student_finds_the_teachers_law_and_with_the_other_sign_loses_it(moment):
    nets = (affine("generator", 1.5, 0.8, size=8), affine(size=8), affine(size=8))
    objective = with_moment(moment, DMD2Objective)(*nets, CHAIN, num_inference_steps=1, phases=DISTIL, shape=(8,))
    found = settle(objective, 60, 0.3, size=256)
    away = float((found[:8] - MEAN).abs().max())
    assert away < 0.02 if moment is Exact else not away < 0.6
    assert moment is Swapped or float((found[8:].reshape(8, 8) - STD * torch.eye(8)).abs().max()) < 0.03


def test_a_joint_reward_adds_its_own_gradient():
    both, alone = (dmd2(joint=True, reward=QuadraticTarget(3.0), lam=lam) for lam in (0.5, 0.0))
    x, t, _ = both._states("distil", {}, None, *[training_keys(1, 0, torch.arange(64))] * 2)
    expected = torch.autograd.grad(
        0.25 * (both.student(x, t) - 3.0).square().sum(dim=1).mean(), list(both.student.parameters())
    )
    found = slopes(both) - slopes(alone)
    torch.testing.assert_close(found, torch.cat([g.flatten() for g in expected]), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(slopes(alone), slopes(dmd2()))


# ---- the noise hypernetwork ------------------------------------------------------------------------------------------


class Shift(nn.Module):
    """f = a constant."""

    def __init__(self, size=2) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(size))

    def forward(self, x, t, cond=None):
        return self.value.expand_as(x)


B = torch.tensor([1.0, -0.5])
FACTOR = torch.tensor([[0.5, 0.0], [0.3, 0.8]])


def hyper(denoiser, reward=None, steps=4, **options):
    reward = LinearFunctional(B) if reward is None else reward
    return HyperNoiseObjective(denoiser, CHAIN, reward, num_inference_steps=steps, shape=(2,), **options)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("solver", ["euler", "ancestral"])
def test_training_starts_at_the_generator_itself(rank, solver):
    generator, labels = Net(0), torch.arange(32) % 3
    f = noise_network(generator, rank=rank)
    cond = {"label": labels}
    keys = training_keys(0, 0, torch.arange(32))
    noise = CHAIN.prior(keys.at(purpose="latents"), (2,))
    assert torch.equal(hypernoise_latents(f, noise, cond), noise)
    objective = hyper(generator, noise=f, solver=solver, condition_names=("label",))
    assert torch.equal(call(objective, size=32, label=labels).logs["noise_shift"], torch.zeros(()))

    def samples(scheduler):
        with torch.no_grad():
            walk = rollout(
                generator, scheduler, shape=(32, 2), num_inference_steps=4, solver=solver, cond=cond,
                generator=torch.Generator().manual_seed(3), return_trajectory=True,
            )  # fmt: skip
        return walk.trajectory

    start, plain = NoisyStart(CHAIN, f, cond), samples(CHAIN)
    assert torch.equal(samples(start), plain) and copy.deepcopy(start).prediction_type == "sample"
    slope = slopes(objective, size=32, label=labels, turn="noise")
    assert float(slope.abs().max()) > 0.0 and bool(slope.isfinite().all())
    with torch.no_grad():
        f.net[-1].bias += 0.3
    torch.testing.assert_close(samples(start)[0], plain[0] + 0.3)
    assert not torch.allclose(samples(start)[-1], plain[-1], atol=1e-3)


def test_the_start_of_a_walk_that_forgets_it_acts_through_the_first_prediction_alone():
    """The exact posterior mean at t = 1 is a constant: with η = 1 there is nothing to gain, with η = 0 there is."""
    for eta, acts in ((1.0, False), (0.0, True)):
        objective = hyper(affine(size=2), noise=Shift(), solver="ancestral", eta=eta)
        assert bool((slopes(objective, "noise").abs() > 1e-4).all()) == acts


def test_adapters_are_drawn_from_their_own_seed_and_train_alone():
    before = torch.random.get_rng_state()
    one, same, other = (noise_network(Net(0), rank=2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    trained = {n for n, p in one.named_parameters() if p.requires_grad}
    assert all("lora_" in n or n.startswith("net.2") for n in trained) and len(trained) == 4
    assert toys.same(toys.tensors(one), toys.tensors(same)) and not toys.same(toys.tensors(one), toys.tensors(other))
    whole = noise_network(Net(0).requires_grad_(False))
    assert {n for n, p in whole.named_parameters() if p.requires_grad} == set(Net(0).state_dict())
    with pytest.raises(ConfigError, match="Did you mean 'net.2'"):
        noise_network(Net(0), last="net.3")
    with pytest.raises(ConfigError, match="AffineDenoiser.*none"):
        noise_network(affine())
    with pytest.raises(ConfigError, match="no layer but its last one"):
        noise_network(nn.Linear(2, 2), rank=4)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(("steps", "solver"), [(1, "euler"), (4, "euler"), (4, "ancestral")])
def test_the_optimum_of_a_linear_generator_is_the_scaled_pull_back_of_the_rewards_direction(steps, solver, reduction):
    """−λ bᵀ(A f) + (ρ/2)|f|² is least at f = (λ/ρ) Aᵀb, times d with a mean; A is the whole walk's Jacobian."""
    generator = AffineDenoiser(torch.tensor([1.0, -2.0]), FACTOR, CHAIN, "generator")
    options = {"steps": steps, "solver": solver, "reduction": reduction, "lam": 0.3, "reg": 0.5}
    objective = hyper(generator, noise=Shift(), **options)
    keys = training_keys(1, 0, torch.arange(3))

    def end(x):
        return objective._walk(x.expand(3, 2), None, keys)[0]

    a = torch.autograd.functional.jacobian(end, torch.randn(2, generator=torch.Generator().manual_seed(0)))
    if steps == 1:
        torch.testing.assert_close(a, FACTOR)
    best = 0.3 / 0.5 * (2 if reduction == "mean" else 1) * (a.T @ B)
    objective.noise.value.data.copy_(best)
    assert slopes(objective, "noise").abs().max() < 1e-6
    objective.noise.value.data.copy_(-best)  # the control: the sign
    assert slopes(objective, "noise").norm() > 0.5 * (a.T @ B).norm() * 0.3
    objective.noise.value.data.zero_()
    torch.testing.assert_close(slopes(objective, "noise"), -0.3 * (a.T @ B))
    for _ in range(60):
        objective.noise.value.data -= 0.9 * slopes(objective, "noise")
    torch.testing.assert_close(objective.noise.value.detach(), best, rtol=1e-3, atol=1e-4)


def test_the_gradient_is_that_of_the_loss_written_out_and_leaves_the_generator_alone():
    generator, f = Net(0), Net(5)
    objective = hyper(generator, QuadraticTarget(3.0), noise=f, lam=0.7, solver="ancestral", eta=1.0)
    keys = training_keys(1, 0, torch.arange(64))
    x = CHAIN.prior(keys.at(purpose="latents"), (2,))
    shift = f(x, torch.ones(64))
    walk = rollout(
        generator, CHAIN, x + shift, num_inference_steps=4, generator=keys.at(purpose="walk"), solver="ancestral",
        eta=1.0, grad_steps=4,
    )  # fmt: skip
    loss = 0.35 * (walk.sample - 3.0).square().sum(dim=1).mean() + 0.5 * shift.square().mean()
    expected = torch.autograd.grad(loss, list(f.parameters()))
    torch.testing.assert_close(slopes(objective, "noise"), torch.cat([g.flatten() for g in expected]))
    output = call(objective)
    torch.testing.assert_close(output.loss, loss.detach())
    before = copy.deepcopy(generator.state_dict())
    output.loss.backward()
    frozen = objective.frozen()["denoiser"]
    for network in (generator, frozen):
        assert all(p.grad is None for p in network.parameters())
    assert all(p.grad is not None for p in f.parameters())
    assert not any(p.requires_grad for p in frozen.parameters()) and not frozen.training
    assert all(p.requires_grad for p in generator.parameters()) and toys.same(before, generator.state_dict())


def test_a_loss_depends_on_its_keys_alone():
    objective = hyper(Net(0), noise=Net(5), solver="ancestral")
    assert torch.equal(slopes(objective, "noise"), slopes(objective, "noise"))
    assert not torch.equal(slopes(objective, "noise"), slopes(objective, "noise", seed=2))
    assert not torch.equal(slopes(objective, "noise"), slopes(objective, "noise", step=1))
    whole, first = slopes(objective, "noise"), slopes(objective, "noise", size=16)
    ids = torch.arange(16, 64)
    loss = objective.loss("noise", {"sample_id": ids}, step=0, keys=training_keys(1, 0, ids)).loss
    rest = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(objective.noise.parameters()))])
    torch.testing.assert_close(0.25 * first + 0.75 * rest, whole, rtol=1e-3, atol=1e-6)


def test_an_invalid_reward_is_a_constant():
    def broken(x, context):
        return torch.where(context["label"] > 0, torch.nan, x.sum(-1))

    reward = FunctionReward(broken, differentiable=True)
    objective = hyper(Net(0), reward, noise=Net(5), reg=0.0, condition_names=("label",))
    labels = torch.zeros(64)
    labels[32:] = 1.0
    output = call(objective, label=labels)
    assert bool(output.loss.isfinite()) and float(output.logs["reward_invalid"]) == 0.5
    found, half = slopes(objective, "noise", label=labels), slopes(objective, "noise", label=labels[:32], size=32)
    torch.testing.assert_close(found, 0.5 * half, rtol=1e-4, atol=1e-6)


# ---- with the Trainer, and refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one_step", "dmd2", "noise", "adapters"])
def test_the_trainer_runs_them(name, tmp_path):
    """Its own checks hold: gradients for every trained parameter, and nothing else moves."""
    nets, plain = (Net(0), Net(1), Net(2), CHAIN), {"phases": [Phase("distil", 7)], "shape": (2,)}
    objective = {
        "one_step": lambda: DiffInstructObjective(*nets, **plain),
        "dmd2": lambda: DMD2Objective(*nets, num_inference_steps=2, **plain),
        "noise": lambda: hyper(Net(0)),
        "adapters": lambda: hyper(Net(0), noise=noise_network(Net(0), rank=2)),
    }[name]()
    start = {n: copy.deepcopy(m.state_dict()) for n, m in {**objective.networks(), **objective.frozen()}.items()}
    settings = {"max_steps": 7, "save_steps": 7, "batch_size": 8, "learning_rate": 1e-2}
    entries = list(
        Trainer(objective, toys.config(tmp_path, **settings), TensorData({"sample": torch.zeros(20, 2)})).train()
    )
    assert len(entries) == 7 and all(math.isfinite(entry.loss) for entry in entries)
    for n, module in {**objective.networks(), **objective.frozen()}.items():
        assert toys.same(start[n], module.state_dict()) == (n in objective.frozen())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (one_step, {"s_law": "log-normal"}, "Did you mean 'lognormal'"),
        (one_step, {"p_mean": 0.0}, "p_mean=0.0.*set s_law='lognormal'"),
        (one_step, {"s_law": "lognormal", "p_std": 0.0}, "p_std=0.0"),
        (one_step, {"weight": "kl"}, "Did you mean 'ikl'"),
        (one_step, {"phases": DISTIL}, "never acts"),
        (dmd2, {"s_min": 0.9, "s_max": 0.5}, "expected s_min below s_max"),
        (dmd2, {"s_min": 0.0}, "s_min=0.0"),
        (dmd2, {"s_max": 1.5}, "s_max=1.5"),
        (dmd2, {"eta": 0.0}, "eta=0.0"),
        (dmd2, {"lam": 0.1}, "need a reward"),
        (hyper, {"reward": FunctionReward(lambda x, c: x.sum(-1))}, "not differentiable"),
        (hyper, {"reduction": "avg"}, "'sum', 'mean'"),
        (hyper, {"lam": 0.0}, "lam=0.0"),
        (hyper, {"reg": -1.0}, "reg=-1.0"),
    ],
)
def test_options_are_checked(make, options, message):
    with pytest.raises(ConfigError, match=message):
        make(**(options | ({"denoiser": Net(0)} if make is hyper else {})))
