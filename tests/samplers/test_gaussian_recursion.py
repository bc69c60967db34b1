"""Gaussian data: every walk is an affine map of its start and its noise, and its coefficients are known exactly."""

from __future__ import annotations

import math

import pytest
import torch

from genkit.samplers import draw_keys, rollout
from genkit.schedulers import GaussianTransition

NAMES = ("flow", "cosine", "linear", "scaled_linear", "edm")
TYPE_OF = {"flow": "flow", "cosine": "v_prediction", "linear": "epsilon", "scaled_linear": "sample", "edm": "epsilon"}
DETERMINISTIC = ("euler", "heun", "midpoint", "dpmpp_2s", "dpmpp_2m", "unipc")
STEPS = (1, 2, 3, 5, 9, 27, 50)
MEAN, VAR = 1.3, 0.49


def denoiser_of(scheduler, context=None):
    """The exact denoiser of N(MEAN, VAR): E[x_0 | x_t] is affine in x_t."""

    def denoise(x, t, cond=None):
        alpha, sigma = (c.reshape(-1, 1) for c in scheduler.alpha_sigma(t, context))
        clean = MEAN + alpha * VAR / (alpha**2 * VAR + sigma**2) * (x - alpha * MEAN)
        return scheduler.from_x0(clean, t, x, context)

    return denoise


class ByHand:
    """The same walks in Python floats, written from the papers for one scalar x."""

    def __init__(self, scheduler, scale=1.0):
        self.scheduler, self.scale = scheduler, scale
        self._levels, self._rates = {}, {}

    def levels(self, t):
        if t not in self._levels:
            alpha, sigma = self.scheduler.alpha_sigma(torch.tensor(t, dtype=torch.float64))
            self._levels[t] = float(alpha), float(sigma) * self.scale
        return self._levels[t]

    def rates(self, t):
        if t not in self._rates:
            alpha_rate, sigma_rate = self.scheduler._rates(torch.tensor(t, dtype=torch.float64), None)
            self._rates[t] = float(alpha_rate), float(sigma_rate) * self.scale
        return self._rates[t]

    def lam(self, t):
        alpha, sigma = self.levels(t)
        return (math.log(alpha) if alpha > 0 else -math.inf) - (math.log(sigma) if sigma > 0 else -math.inf)

    def clean(self, x, t):
        alpha, sigma = self.levels(t)
        return MEAN + alpha * VAR / (alpha**2 * VAR + sigma**2) * (x - alpha * MEAN)

    def slope(self, x, t):
        alpha, sigma = self.levels(t)
        alpha_rate, sigma_rate = self.rates(t)
        clean = self.clean(x, t)
        return alpha_rate * clean + sigma_rate * (x - alpha * clean) / sigma

    def kernel(self, x, t, s, eta):
        """Mean and width of p(x_s | x_t)."""
        (alpha_t, sigma_t), (alpha_s, sigma_s) = self.levels(t), self.levels(s)
        gamma = eta * sigma_s / sigma_t * math.sqrt(max(sigma_t**2 - (alpha_t / alpha_s) ** 2 * sigma_s**2, 0.0))
        clean = self.clean(x, t)
        noise = (x - alpha_t * clean) / sigma_t
        return alpha_s * clean + math.sqrt(max(sigma_s**2 - gamma**2, 0.0)) * noise, gamma

    def to(self, x, clean, t, s):
        """DPM-Solver++: the exact solution for a constant clean prediction."""
        (alpha_t, sigma_t), (alpha_s, sigma_s) = self.levels(t), self.levels(s)
        return sigma_s / sigma_t * x + (alpha_s - alpha_t * sigma_s / sigma_t) * clean

    def walk(self, solver, x, times):
        self.past = []
        for t, s in zip(times[:-1], times[1:], strict=True):
            last = s == 0.0 and solver in ("heun", "midpoint", "dpmpp_2s")
            x = getattr(self, "euler" if last else solver)(x, t, s)
        return x

    def euler(self, x, t, s):
        return self.kernel(x, t, s, 0.0)[0]

    def heun(self, x, t, s):
        slope = self.slope(x, t)
        return x + (s - t) * 0.5 * (slope + self.slope(x + (s - t) * slope, s))

    @staticmethod
    def middle(t, s):
        return float(torch.tensor(0.5 * (t + s)).float())

    def midpoint(self, x, t, s):
        m = self.middle(t, s)
        return x + (s - t) * self.slope(x + (m - t) * self.slope(x, t), m)

    def dpmpp_2s(self, x, t, s):
        m, clean = self.middle(t, s), self.clean(x, t)
        clean_m = self.clean(self.to(x, clean, t, m), m)
        if math.isinf(self.lam(t)):
            return self.to(x, 0.5 * (clean + clean_m), t, s)
        r = (self.lam(m) - self.lam(t)) / (self.lam(s) - self.lam(t))
        return self.to(x, (1 - 1 / (2 * r)) * clean + 1 / (2 * r) * clean_m, t, s)

    def _predict(self, x, clean, t, s):
        if self.past and math.isfinite(self.lam(s)) and math.isfinite(self.lam(self.past[-1][1])):
            old, t_old, _ = self.past[-1]
            r = (self.lam(t) - self.lam(t_old)) / (self.lam(s) - self.lam(t))
            clean = (1 + 1 / (2 * r)) * clean - 1 / (2 * r) * old
        return self.to(x, clean, t, s)

    def dpmpp_2m(self, x, t, s):
        clean = self.clean(x, t)
        x_s = self._predict(x, clean, t, s)
        self.past.append((clean, t, x))
        return x_s

    def unipc(self, x, t, s):
        """Corrects x_t (from the corrected x_{t'}), then predicts; the corrector solves the 2x2 system of eq. 8."""
        clean = self.clean(x, t)
        if self.past:
            old, t_old, x_old = self.past[-1]
            h = self.lam(t) - self.lam(t_old)
            blended = old + 0.5 * (clean - old)
            if len(self.past) > 1 and math.isfinite(h) and math.isfinite(self.lam(self.past[-2][1])):
                older, t_older, _ = self.past[-2]
                r = (self.lam(t_older) - self.lam(t_old)) / h
                big = math.expm1(-h)
                phi_1 = big / -h
                phi_2 = (phi_1 - 1) / -h
                b = torch.tensor([(phi_1 - 1) / big, 2 * (phi_2 - 0.5) / big], dtype=torch.float64)
                matrix = torch.tensor([[1.0, 1.0], [r, 1.0]], dtype=torch.float64)
                rho = torch.linalg.solve(matrix, b)
                blended = old + float(rho[0]) / r * (older - old) + float(rho[1]) * (clean - old)
            x = self.to(x_old, blended, t_old, t)
        x_s = self._predict(x, clean, t, s)
        self.past.append((clean, t, x))
        return x_s


@pytest.mark.parametrize("solver", DETERMINISTIC)
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_walks_are_the_exact_affine_map(make_scheduler, name, solver):
    scheduler = make_scheduler(name, TYPE_OF[name])
    x, hand = torch.tensor([[0.0], [1.0], [-2.5]], dtype=torch.float64), ByHand(scheduler)
    for n in STEPS:
        ours = rollout(denoiser_of(scheduler), scheduler, x, num_inference_steps=n, solver=solver).sample[:, 0]
        times = scheduler.times(n).tolist()
        exact = torch.tensor([hand.walk(solver, float(v), times) for v in x], dtype=torch.float64)
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10, msg=lambda m, n=n: f"n={n}: {m}")
        assert abs(float(ours[2] - ours[0] + 2.5 * (ours[1] - ours[0]))) < 1e-10  # affine


def affine_map(scheduler, n, eta, draws=8):
    """a, the noise gains b_i and c of x_n = a x_0 + Σ b_i z_i + c, solved from a walk's samples; and the misfit."""
    batch = n + 2 + draws
    keys = draw_keys(torch.Generator().manual_seed(n), batch)
    generators = [torch.Generator().manual_seed(1000 + i) for i in range(batch)]
    x = torch.linspace(-2, 2, batch, dtype=torch.float64).reshape(-1, 1)
    out = rollout(
        denoiser_of(scheduler), scheduler, x, num_inference_steps=n, solver="ancestral", eta=eta, generator=generators
    )
    keys = draw_keys([torch.Generator().manual_seed(1000 + i) for i in range(batch)], batch)
    noise = [keys.at(step=i, purpose="transition").normal((), torch.float64) for i in range(n)]
    design = torch.stack((x[:, 0], *noise, torch.ones(batch, dtype=torch.float64)), dim=1)
    used = torch.cat((design[:, :1], design[:, 1:n], design[:, -1:]), 1)  # the last step onto 0 is deterministic
    solution = torch.linalg.lstsq(used, out.sample, driver="gelsd").solution[:, 0]
    misfit = float((used @ solution - out.sample[:, 0]).abs().max())
    return solution[0], solution[1:-1], solution[-1], misfit


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_stochastic_walks_follow_the_recursion_of_mean_and_variance(make_scheduler, name, eta):
    scheduler = make_scheduler(name, TYPE_OF[name])
    for n in STEPS:
        a, gains, c, misfit = affine_map(scheduler, n, eta)
        assert misfit < 1e-10
        hand, times = ByHand(scheduler), scheduler.times(n).tolist()
        mean, variance = 0.0, 1.0  # from x ~ N(0, 1)
        for t, s in zip(times[:-1], times[1:], strict=True):
            at_0, gamma = hand.kernel(0.0, t, s, eta)
            slope = hand.kernel(1.0, t, s, eta)[0] - at_0
            mean, variance = slope * mean + at_0, slope**2 * variance + gamma**2
        assert abs(float(c) - mean) < 1e-9
        assert abs(float(a**2 + gains.square().sum()) - variance) < 1e-9, (n, eta)


def test_a_kernel_of_width_eta_sigma_fails_the_variance_test(make_scheduler, monkeypatch):
    """The control: noise of width η σ_s, with the direction left as it is."""
    scheduler = make_scheduler("cosine", "v_prediction")
    right = scheduler.transition

    def wrong(model_output, t, s, sample, context=None, eta=None):
        kernel = right(model_output, t, s, sample, context, eta)
        return GaussianTransition(kernel.mean, scheduler.alpha_sigma(s)[1] * eta)

    monkeypatch.setattr(scheduler, "transition", wrong)
    a, gains, _, _ = affine_map(scheduler, 50, 0.5)
    assert abs(float(a**2 + gains.square().sum()) - VAR) > 0.1
    monkeypatch.undo()
    a, gains, _, _ = affine_map(scheduler, 50, 0.5)
    assert abs(float(a**2 + gains.square().sum()) - VAR) < 0.06


def start_moments(scheduler):
    alpha, sigma = (float(v) for v in scheduler.alpha_sigma(1.0))
    return alpha * MEAN, alpha**2 * VAR + sigma**2


@pytest.mark.parametrize("solver", DETERMINISTIC)
@pytest.mark.parametrize("name", NAMES)
def test_deterministic_walks_reach_the_moments_of_the_data(make_scheduler, name, solver):
    scheduler = make_scheduler(name, TYPE_OF[name])
    mean, variance = start_moments(scheduler)
    errors = []
    for n in (8, 16, 96):
        x = torch.tensor([[mean], [mean + math.sqrt(variance)]], dtype=torch.float64)
        out = rollout(denoiser_of(scheduler), scheduler, x, num_inference_steps=n, solver=solver).sample[:, 0]
        errors.append(max(abs(float(out[0]) - MEAN), abs(float(out[1] - out[0]) - math.sqrt(VAR))))
    assert errors[2] < 0.25 * max(errors[:2]) and errors[2] < 0.03, errors  # (a coarse walk may be right by accident)


@pytest.mark.parametrize("eta", [0.5, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_stochastic_walks_reach_the_moments_of_the_data(make_scheduler, name, eta):
    scheduler = make_scheduler(name, TYPE_OF[name])
    start_mean, start_variance = start_moments(scheduler)
    errors = []
    for n in (32, 64, 128):
        a, gains, c, _ = affine_map(scheduler, n, eta)
        variance = a**2 * start_variance + gains.square().sum()
        errors.append(max(abs(float(c + a * start_mean) - MEAN), abs(float(variance) - VAR)))
    assert errors[1] < 0.6 * errors[0] + 2e-6 and errors[2] < 0.6 * errors[1] + 2e-6, errors
    assert errors[2] < 0.05, errors


@pytest.mark.parametrize("name", ["flow", "cosine", "edm"])
def test_a_clock_scale_gives_the_recursion_of_its_sample(make_scheduler, name):
    scheduler, scales = make_scheduler(name, "v_prediction"), (0.3, 1.0, 20.0)
    context = {"scale": torch.tensor(scales, dtype=torch.float64)}
    x = torch.tensor([[0.4], [-1.0], [25.0]], dtype=torch.float64)
    for solver in DETERMINISTIC:
        ours = rollout(
            denoiser_of(scheduler, context), scheduler, x, num_inference_steps=9, solver=solver, context=context
        ).sample[:, 0]
        for i, scale in enumerate(scales):
            exact = ByHand(scheduler, scale).walk(solver, float(x[i]), scheduler.times(9).tolist())
            assert abs(float(ours[i]) - exact) < 1e-9 * max(1.0, abs(exact)), (solver, scale)


def test_the_printed_euler_values_of_the_clock_example(make_scheduler):
    """μ = 1.5, s = 0.7, A = 9, from x = 3: exact end 2.2; Euler with 4, 8, 20, 50 steps as published."""
    scheduler, context = make_scheduler("flow"), {"scale": torch.tensor([3.0], dtype=torch.float64)}

    def denoise(x, t, cond=None):
        alpha, sigma = (c.reshape(-1, 1) for c in scheduler.alpha_sigma(t, context))
        clean = 1.5 + alpha * 0.49 / (alpha**2 * 0.49 + sigma**2) * (x - alpha * 1.5)
        return scheduler.from_x0(clean, t, x, context)

    start = torch.tensor([[3.0]], dtype=torch.float64)
    for n, value in ((4, 1.8672), (8, 2.0224), (20, 2.1244), (50, 2.1688)):
        end = rollout(denoise, scheduler, start, num_inference_steps=n, context=context).sample
        assert abs(float(end) - value) < 6e-5
    fine = rollout(denoise, scheduler, start, num_inference_steps=400, context=context, solver="heun").sample
    assert abs(float(fine) - 2.2) < 1e-4
