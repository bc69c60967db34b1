"""Trained Gaussians end where the closed forms say, and controls with one thing wrong end elsewhere."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from scipy.optimize import fsolve
from torch import nn

from genkit.pipelines.rmmd import MomentMatchingObjective
from genkit.pipelines.rmmd.gaussian import (
    AffineDenoiser,
    collapse_threshold,
    crps_reward_std,
    linear_reward_mean,
    moment_constant,
    quadratic_reward,
)
from genkit.rewards import CRPSReward, FunctionReward
from genkit.rewards.analytic import LinearFunctional, QuadraticTarget
from genkit.samplers import rollout, training_keys
from genkit.schedulers import VPScheduler
from genkit.training import Phase
from genkit.training.objectives import GradientWindow, RewardGradientObjective

CHAIN = VPScheduler("cosine", "sample")
MEAN, STD = 1.0, 0.5
LINEAR = LinearFunctional([1.0])


def affine(kind: str = "posterior", mean: float = MEAN, std: float = STD) -> AffineDenoiser:
    return AffineDenoiser(torch.tensor([mean]), torch.tensor([[std]]), CHAIN, kind)


class Oracle(MomentMatchingObjective):
    """A perfect auxiliary: the exact moment of the one-step student's current law, drawn to the reference by τ."""

    def student_moment(self, x_s, s, cond):
        exact = AffineDenoiser(self.student.mean.detach(), self.student.factor.detach(), CHAIN).clean(x_s, s)
        reference = self.reference_moment("reward", x_s, s, cond)
        return (exact + self.teacher_weight * reference) / (1.0 + self.teacher_weight)


def one_step(kind=Oracle, mean=MEAN, std=STD, teacher=(MEAN, STD), **options):
    """A one-step affine student in the phase of rewards, t = 1 and s ~ U(0, 1)."""
    plain = {"num_inference_steps": 1, "phases": [Phase("reward", 10**6)], "on_policy": "discrete", "shape": (1,)}
    plain |= {"reference": "teacher", "teacher_weight": 0.0, "reward": LINEAR}
    student = affine("generator", mean, std)
    objective = kind(student, affine(), affine("posterior", *teacher), CHAIN, **(plain | options))
    objective.start_phase("reward")
    return objective


def gradient(objective, batch: int = 4096) -> tuple[float, float]:
    ids = torch.arange(batch)
    output = objective.loss("student", {"sample_id": ids}, step=0, keys=training_keys(1, 0, ids))
    found = torch.autograd.grad(output.loss, [objective.student.mean, objective.student.factor])
    return float(found[0]), float(found[1])


def settle(objective, steps: int = 120, rate: float = 0.5, size: int = 1024, turns=False, data=None, record=None):
    """Plain gradient descent; returns the student's (mean, std) averaged over the second half of its steps."""
    networks = objective.networks()
    ids, path = torch.arange(size), []
    for step in range(steps):
        turn = objective.turn(step) if turns else "student"
        batch = {"sample_id": ids, **(data(step) if data else {})}
        loss = objective.loss(turn, batch, step=step, keys=training_keys(0, step, ids)).loss
        parameters = list(networks[turn].parameters())
        with torch.no_grad():
            for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter -= rate * slope
        path.append(torch.cat([p.detach().flatten().clone() for p in objective.student.parameters()]))
    if record is not None:
        record.extend(path)
    return torch.stack(path[steps // 2 :]).mean(dim=0)


# ---- the forms themselves --------------------------------------------------------------------------------------------


def test_the_constant_is_the_integral_over_the_noise_levels():
    s = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    alpha, sigma = CHAIN.alpha_sigma(s)
    for c in (0.01, 0.25, 1.0, 4.0):
        assert float((sigma**2 / (alpha**2 * c + sigma**2)).mean()) == pytest.approx(moment_constant(c), rel=1e-4)


def test_the_roots_are_the_numbers_that_were_worked_out():
    assert linear_reward_mean(1, 0.25, 1, 0.1) == pytest.approx(1.15)
    assert linear_reward_mean(1, 0.25, 1, 0.3, lam_reg=0.15) == pytest.approx(1.3103, abs=1e-4)
    assert quadratic_reward(1, 0.25, 3, 1, 0.3) == pytest.approx((1.6207, 0.0012), abs=1e-4)
    assert quadratic_reward(1, 0.25, 3, 1, 0.4)[1] == 0.0 < quadratic_reward(1, 0.25, 3, 1, 0.33)[1]
    assert collapse_threshold(0.25, 1.0) == pytest.approx(1 / 3)
    roots = [crps_reward_std(0.7, lam) for lam in (0.0, 0.1, 0.3, 1.0, 3.0)]
    assert roots == pytest.approx([0.7, 0.7365, 0.7836, 0.8607, 0.9278], abs=1e-4)
    summed = [crps_reward_std(0.7, lam / 2) for lam in (0.1, 0.3, 1.0, 3.0)]  # regularisers summed over two members
    assert summed == pytest.approx([0.7199, 0.7507, 0.8143, 0.8875], abs=1e-4)


@pytest.mark.parametrize("prediction", ["sample", "v_prediction", "flow"])
def test_the_posterior_mean_is_that_of_samples(prediction):
    """E[x_0 | x_t] minimises the squared error: the residual is uncorrelated with x_t and has mean 0."""
    chain = VPScheduler("cosine", prediction)
    factor = torch.tensor([[0.5, 0.0], [0.3, 0.8]])
    network = AffineDenoiser(torch.tensor([1.0, -2.0]), factor, chain)
    generator = torch.Generator().manual_seed(0)
    x0 = network.mean.detach() + torch.randn(20000, 2, generator=generator) @ factor.T
    t = torch.full((20000,), 0.4)
    x = chain.add_noise(x0, torch.randn(20000, 2, generator=generator), t)
    residual = x0 - chain.to_x0(network(x, t).detach(), t, x)
    assert float(residual.mean(dim=0).abs().max()) < 0.02
    assert float((residual.T @ (x - x.mean(dim=0)) / 20000).abs().max()) < 0.03


# ---- E1: sign and scale ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.5, 0.9])
def test_the_gradient_has_the_sign_and_size_of_the_gap(std):
    objective = one_step(mean=1.4, std=std, lam=0.0)
    in_mean, in_std = gradient(objective)
    assert in_mean == pytest.approx(0.4 * moment_constant(STD**2), rel=0.05)
    expected = std * (moment_constant(STD**2) - moment_constant(std**2))
    assert in_std == pytest.approx(expected, rel=0.15, abs=0.02)


def test_with_the_sign_swapped_the_student_runs_away():
    class Swapped(Oracle):
        def student_moment(self, x_s, s, cond):
            return 2.0 * self.reference_moment("reward", x_s, s, cond) - super().student_moment(x_s, s, cond)

    assert gradient(one_step(Swapped, mean=1.4, lam=0.0))[0] < -0.2
    assert abs(float(settle(one_step(mean=1.4, lam=0.0), 40)[0]) - 1.0) < 0.01
    assert float(settle(one_step(Swapped, mean=1.4, lam=0.0), 10)[0]) > 2.0


# ---- E2 … E4: rewards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lam", "tied"), [(0.1, False), (0.3, False), (0.1, True), (0.3, True)])
def test_a_linear_reward_shifts_the_mean_as_the_closed_form_says(lam, tied):
    found = settle(one_step(lam=lam, lam_reg=None if tied else 0.0))
    expected = linear_reward_mean(MEAN, STD**2, 1.0, lam, lam_reg=lam / 2 if tied else 0.0)
    assert float(found[0]) == pytest.approx(expected, abs=0.004)
    assert float(found[1]) == pytest.approx(STD, abs=0.005)
    other = linear_reward_mean(MEAN, STD**2, 1.0, lam, lam_reg=0.0 if tied else lam / 2)
    assert abs(float(found[0]) - other) > 0.015  # the two forms can be told apart


def test_the_integral_kl_weight_gives_another_trade_off():
    """w = SNR: K is the mean of α²/(α²c + σ²), 1/(√c + c)."""
    found = settle(one_step(lam=0.1, lam_reg=0.0, weight="ikl"))
    assert float(found[0]) == pytest.approx(1.0 + 0.1 * (STD + STD**2), abs=0.004)


@pytest.mark.parametrize("lam", [0.1, 0.6])
def test_a_quadratic_reward_shrinks_the_variance_and_beyond_the_threshold_collapses_it(lam):
    objective = one_step(lam=lam, lam_reg=0.0, reward=QuadraticTarget(3.0))
    found = settle(objective, 160, size=2048) if lam < 0.3 else settle(objective, 60, rate=1.0)
    mean, variance = quadratic_reward(MEAN, STD**2, 3.0, 1.0, lam)
    assert float(found[0]) == pytest.approx(mean, abs=0.01)
    assert float(found[1]) == pytest.approx(math.sqrt(variance), abs=0.006)
    assert (variance == 0.0) == (lam > collapse_threshold(STD**2, 1.0)) == (abs(float(found[1])) < 1e-2)


def test_without_bound_the_tied_student_makes_a_proximal_step():
    lam, rate = 1000.0, 0.5e-3
    shifted = settle(one_step(lam=lam), 60, rate=rate)
    assert torch.allclose(shifted, torch.tensor([MEAN + 1.0, STD]), atol=0.01)
    near = settle(one_step(lam=lam, reward=QuadraticTarget(3.0)), 60, rate=rate)
    assert torch.allclose(near, torch.tensor([(MEAN + 3.0) / 2, STD / 2]), atol=0.01)
    untied = settle(one_step(lam=lam, lam_reg=0.0, reward=QuadraticTarget(3.0)), 60, rate=rate)
    assert torch.allclose(untied, torch.tensor([3.0, 0.0]), atol=0.01)  # the control: it maximises the reward


# ---- E5, E6: what the auxiliary does ---------------------------------------------------------------------------------


def test_with_a_frozen_auxiliary_the_student_drifts_for_ever_and_with_a_trained_one_it_stops():
    options = {"lam": 0.1, "lam_reg": 0.0, "reference": "auxiliary"}
    path: list[torch.Tensor] = []
    settle(one_step(MomentMatchingObjective, **options), 80, record=path, size=256)
    shift = [float(path[n - 1][0]) - MEAN for n in (20, 40, 80)]
    assert shift == pytest.approx([0.05 * n for n in (20, 40, 80)], rel=1e-3)  # rate · λ · steps
    found = settle(one_step(MomentMatchingObjective, **options), 240, turns=True)
    assert float(found[0]) == pytest.approx(1.15, abs=0.006)


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_the_teachers_weight_in_the_auxiliary_divides_the_regulariser(tau):
    """A trained auxiliary of the right form; at τ = 1 the shift doubles."""
    objective = one_step(MomentMatchingObjective, lam=0.1, lam_reg=0.0, teacher_weight=tau)
    found = settle(objective, 300, rate=0.4, turns=True)
    assert float(found[0]) - MEAN == pytest.approx(0.15 * (1.0 + tau), rel=0.04)
    assert float(found[1]) == pytest.approx(STD, abs=0.01)
    ids = torch.arange(8)
    logs = objective.loss("student", {"sample_id": ids}, step=1, keys=training_keys(0, 1, ids)).logs
    assert logs["effective_lambda"] == pytest.approx(0.1 * (1.0 + tau))


# ---- E7: several steps -----------------------------------------------------------------------------------------------


class Stepwise(nn.Module):
    """An affine clean prediction at each of the K times of a walk."""

    prediction_type = "sample"

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        t = CHAIN.times(steps)[:-1]
        alpha, sigma = CHAIN.alpha_sigma(t)
        gain = alpha * STD**2 / (alpha**2 * STD**2 + sigma**2)  # starts as the teacher
        self.gain = nn.Parameter(gain.float())
        self.mean = nn.Parameter((MEAN - gain * alpha * MEAN).float())

    def at(self, t):
        return ((1.0 - t) * self.steps).round().long()

    def forward(self, x, t, cond=None):
        step = self.at(t)
        return self.mean[step].unsqueeze(-1) + self.gain[step].unsqueeze(-1) * x


class StepwiseOracle(MomentMatchingObjective):
    """The exact moment, from the joint Gaussian law of x̂ and x_s, where x_t is noised data."""

    def student_moment(self, x_s, s, cond):
        student, steps = self.student, self.num_inference_steps
        number = (steps - (s * steps).ceil()).long()
        t = CHAIN.times(steps)[number].float()
        alpha, sigma = (v.float() for v in CHAIN.alpha_sigma(t))
        mean_t, var_t = alpha * MEAN, alpha**2 * STD**2 + sigma**2
        a, b = student.mean.detach()[number], student.gain.detach()[number]
        x = torch.stack((mean_t, mean_t + 1.0), dim=0).unsqueeze(-1)  # the kernel's mean is affine in x_t
        kernel = [CHAIN.transition((a + b * v.squeeze(-1)).unsqueeze(-1), t, s, v, None, self.eta) for v in x]
        centre, slope = kernel[0].mean[:, 0], kernel[1].mean[:, 0] - kernel[0].mean[:, 0]
        spread = slope**2 * var_t + kernel[0].std.float() ** 2
        return ((a + b * mean_t) + b * slope * var_t / spread * (x_s[:, 0] - centre)).unsqueeze(-1)


def affine_steps(a: float, b: float, t, s) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x_s = (value at x_t = 0) + slope · x_t + std · z of the prediction a + b x_t, for times t and s, float64."""
    outputs = [torch.full_like(s, a + b * x).unsqueeze(-1) for x in (0.0, 1.0)]
    states = [torch.full_like(s, x).unsqueeze(-1) for x in (0.0, 1.0)]
    none, one = (CHAIN.transition(o, t, s, x, None, 1.0) for o, x in zip(outputs, states, strict=True))
    return none.mean[:, 0], one.mean[:, 0] - none.mean[:, 0], one.std


def exact_variance(steps: int) -> float:
    """Variance of the walk of the student at which the expected gradient vanishes, by quadrature over s."""
    grid = CHAIN.times(steps)
    middle, variance = (torch.arange(400, dtype=torch.float64) + 0.5) / 400, 1.0
    for number in range(steps):
        t = grid[number]
        s = torch.lerp(grid[number + 1], t, middle)
        alpha, sigma = (float(v) for v in CHAIN.alpha_sigma(t))
        (alpha_s, sigma_s), var_t, mean_t = CHAIN.alpha_sigma(s), alpha**2 * STD**2 + sigma**2, alpha * MEAN
        gain = alpha_s * STD**2 / (alpha_s**2 * STD**2 + sigma_s**2)

        def slopes(ab, t=t, s=s, alpha_s=alpha_s, var_t=var_t, mean_t=mean_t, gain=gain):
            a, b = ab
            start, slope, std = affine_steps(a, b, t, s)
            own = b * slope * var_t / (slope**2 * var_t + std**2)
            level = a + b * mean_t - MEAN - gain * (start + slope * mean_t - alpha_s * MEAN)
            return [float(level.mean()), float(((own - gain) * slope).mean())]

        first = alpha * STD**2 / var_t
        a, b = fsolve(slopes, [MEAN - first * alpha * MEAN, first + 0.3])
        start, slope, std = affine_steps(a, b, t, grid[number + 1].reshape(1))
        variance = float(slope**2 * variance + std**2)
    return variance


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "measured"), [(1, 0.251), (2, 0.168), (4, 0.193)])
def test_an_affine_student_of_several_steps_keeps_the_variance_that_was_measured(steps, measured):
    student = Stepwise(steps)
    start = walk_of(student, steps)
    objective = StepwiseOracle(
        student, copy.deepcopy(student), affine(), CHAIN, num_inference_steps=steps, phases=[Phase("distil", 10**6)],
        time_law="grid", teacher_weight=0.0,
    )  # fmt: skip

    def data(step):
        return {"sample": MEAN + STD * torch.randn(2048, 1, generator=torch.Generator().manual_seed(step))}

    averaged = settle(objective, 400 * steps, rate=2.0, size=2048, data=data)
    with torch.no_grad():
        for parameter, value in zip(student.parameters(), averaged.split(steps), strict=True):
            parameter.copy_(value)
    end = walk_of(student, steps)
    assert float(start.var()) < 0.11  # the teacher walked in as few steps
    assert float(end.mean()) == pytest.approx(MEAN, abs=0.02)
    assert float(end.var()) == pytest.approx(measured, abs=0.03)
    assert float(end.var()) == pytest.approx(exact_variance(steps), abs=0.006)


def walk_of(student, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        walk = rollout(
            student, CHAIN, shape=(40000, 1), num_inference_steps=steps, solver="ancestral", eta=1.0,
            generator=generator,
        )  # fmt: skip
    return walk.sample


# ---- E10: calibration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lam", [0.3, pytest.param(1.0, marks=pytest.mark.slow), pytest.param(3.0, marks=pytest.mark.slow)]
)
def test_the_score_of_two_members_calibrates_an_overconfident_teacher(lam):
    """The teacher's standard deviation is .7, the truth's 1; regularisers are averaged over the members."""
    objective = one_step(
        mean=0.0, std=0.7, teacher=(0.0, 0.7), lam=lam, lam_reg=0.0, members=2, reward=CRPSReward(kind="fair")
    )

    def data(step):
        return {"observation": torch.randn(2048, 1, generator=torch.Generator().manual_seed(step))}

    found = settle(objective, 160, rate=1.0 / (0.5 + lam), size=2048, data=data)
    assert float(found[1]) == pytest.approx(crps_reward_std(0.7, lam), abs=0.01)
    assert abs(float(found[1]) - crps_reward_std(0.7, lam / 2)) > 0.02  # what summing them would give
    assert abs(float(found[0])) < 0.02


# ---- E12: two modes --------------------------------------------------------------------------------------------------


class TwoModes(nn.Module):
    """The exact posterior mean of ½N(−1.5, .3²) + ½N(1.5, .3²)."""

    prediction_type = "sample"
    places, std = torch.tensor([-1.5, 1.5]), 0.3

    def forward(self, x, t, cond=None):
        alpha, sigma = (v.to(x.dtype).unsqueeze(-1) for v in CHAIN.alpha_sigma(t))
        variance = alpha**2 * self.std**2 + sigma**2
        weights = (-0.5 * (x - alpha * self.places) ** 2 / variance).softmax(dim=-1)
        own = self.places + alpha * self.std**2 / variance * (x - alpha * self.places)
        return (weights * own).sum(dim=-1, keepdim=True)


class Curve(nn.Module):
    """A small network of (x, t)."""

    prediction_type = "sample"

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x, t, cond=None):
        angle = 0.5 * math.pi * t.unsqueeze(-1)
        told = torch.cat((x, angle.sin(), angle.cos(), x * angle.cos(), (2 * angle).sin(), (4 * angle).sin()), dim=-1)
        return self.net(told)


def adam(objective, steps: range, data, rate: float = 1e-3) -> None:
    optimizers = {n: torch.optim.Adam(m.parameters(), rate, (0.0, 0.99)) for n, m in objective.networks().items()}
    ids = torch.arange(512)
    for step in steps:
        turn, batch = objective.turn(step), {"sample_id": ids, "sample": data(step)}
        loss = objective.loss(turn, batch, step=step, keys=training_keys(0, step, ids)).loss
        optimizers[turn].zero_grad()
        loss.backward()
        optimizers[turn].param_groups[0]["lr"] = rate * (1.0 - (step - steps.start) / len(steps))
        optimizers[turn].step()


def energy_distance(x: torch.Tensor, y: torch.Tensor) -> float:
    def apart(a, b):
        return float((a - b.T).abs().mean())

    return 2 * apart(x, y) - apart(x, x) - apart(y, y)


@pytest.mark.slow
def test_a_small_reward_moves_weight_between_modes_and_keeps_both():
    def data(step):
        generator = torch.Generator().manual_seed(step)
        side = torch.randint(0, 2, (512, 1), generator=generator)
        return TwoModes.places[side] + 0.3 * torch.randn(512, 1, generator=generator)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        student = Curve()
    teacher, ids = TwoModes(), torch.arange(512)
    optimizer = torch.optim.Adam(student.parameters(), 3e-3)
    for step in range(1500):  # starts as the teacher
        keys = training_keys(5, step, ids)
        t = keys.at(purpose="time").uniform().float()
        x = CHAIN.add_noise(data(step), keys.normal((1,)), t)
        optimizer.zero_grad()
        (student(x, t) - teacher(x, t)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = 3e-3 * (1.0 - step / 1500)
        optimizer.step()
    start = walk_of(student, 4)[:4000]
    reward = FunctionReward(lambda x, context: torch.sigmoid(2.0 * x[:, 0]), differentiable=True)
    objective = MomentMatchingObjective(
        student, copy.deepcopy(student), teacher, CHAIN, num_inference_steps=4, reward=reward, lam=0.3,
        phases=[Phase("distil", 3000), Phase("reward", 800)],
    )  # fmt: skip
    adam(objective, range(3000), data)
    distilled = walk_of(student, 4)[:4000]
    objective.start_phase("reward")
    adam(objective, range(3000, 3800), data)
    rewarded = walk_of(student, 4)[:4000]
    truth = torch.cat([data(10**6 + k) for k in range(8)])
    before, after = float((distilled > 0).float().mean()), float((rewarded > 0).float().mean())
    pushed = walk_of(pushed_to_the_end(copy.deepcopy(objective.frozen()["first_student"]), reward), 4)[:4000]
    numbers = {
        "right": (before, after, float((pushed > 0).float().mean())),
        "distance": [energy_distance(x, truth) for x in (start, distilled, rewarded, pushed)],
        "reward": [float(reward(x).mean()) for x in (distilled, rewarded, pushed)],
    }
    assert 0.4 < before < 0.6 and before + 0.03 < after < 0.95, numbers
    assert numbers["distance"][1] < min(0.02, 0.5 * numbers["distance"][0]), numbers
    assert numbers["distance"][2] < 0.2 < numbers["distance"][3], numbers
    for samples in (distilled, rewarded):
        for place in (-1.5, 1.5):
            assert float(((samples - place).abs() < 0.75).float().mean()) > 0.05, numbers
    assert float((pushed < 0).float().mean()) < 0.01, numbers


def pushed_to_the_end(student, reward):
    """The control: the reward's gradient through the whole walk, and nothing that holds the student."""
    objective = RewardGradientObjective(
        student.requires_grad_(True), CHAIN, reward, num_inference_steps=4, shape=(1,), window=GradientWindow("full"),
        solver="ancestral", eta=1.0,
    )  # fmt: skip
    optimizer, ids = torch.optim.Adam(student.parameters(), 1e-3), torch.arange(512)
    for step in range(400):
        loss = objective.loss("denoiser", {"sample_id": ids}, step=step, keys=training_keys(0, step, ids)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student
