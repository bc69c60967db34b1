"""A 1-D mixture, where everything is known: posterior means by quadrature, exact maps of the ODE, marginals of the SDE.

In one dimension the probability-flow ODE preserves the distribution function: F_t(x_t) is constant along its paths.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

from genkit.samplers import rollout
from genkit.schedulers import GaussianTransition

WEIGHTS, CENTRES, WIDTHS = ((0.35, 0.65), (-1.2, 0.9), (0.35, 0.5))
NAMES = ("flow", "cosine", "linear", "scaled_linear", "edm")
TYPES = ("epsilon", "sample", "v_prediction", "flow")
PAIRS = [(n, p) for n in NAMES for p in TYPES if not (p == "epsilon" and n in ("flow", "cosine"))]
ORDER = {"euler": 1, "heun": 2, "midpoint": 2, "dpmpp_2s": 2, "dpmpp_2m": 2, "unipc": 3}


class Mixture:
    """The noisy marginals of the mixture at one (α, σ), each (B, 1)."""

    def __init__(self, alpha, sigma):
        self.alpha, self.sigma = alpha, sigma
        self.weight = torch.tensor(WEIGHTS, dtype=torch.float64)
        self.centre = torch.tensor(CENTRES, dtype=torch.float64)
        self.width = torch.tensor(WIDTHS, dtype=torch.float64)
        self.mean = alpha * self.centre
        self.std = (alpha**2 * self.width**2 + sigma**2).sqrt()

    def density(self, x):
        z = (x - self.mean) / self.std
        return (self.weight * torch.exp(-0.5 * z**2) / self.std).sum(-1, keepdim=True) / math.sqrt(2 * math.pi)

    def cdf(self, x):
        return (self.weight * torch.special.ndtr((x - self.mean) / self.std)).sum(-1, keepdim=True)

    def quantile(self, u):
        low, high = torch.full_like(u, -60.0), torch.full_like(u, 60.0)
        for _ in range(70):
            middle = 0.5 * (low + high)
            below = self.cdf(middle) < u
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)

    def posterior_mean(self, x):
        z = (x - self.mean) / self.std
        share = (self.weight.log() - self.std.log() - 0.5 * z**2).softmax(-1)
        gain = self.alpha * self.width**2 / self.std**2
        return (share * (self.centre + gain * (x - self.mean))).sum(-1, keepdim=True)


def marginal(scheduler, t):
    alpha, sigma = scheduler.alpha_sigma(torch.as_tensor(t, dtype=torch.float64))
    return Mixture(alpha.reshape(-1, 1), sigma.reshape(-1, 1))


def denoiser_of(scheduler):
    def denoise(x, t, cond=None):
        return scheduler.from_x0(marginal(scheduler, t).posterior_mean(x), t, x)

    return denoise


@pytest.mark.parametrize("t", [0.9, 0.5, 0.1])
def test_the_posterior_mean_is_the_quadratures(make_scheduler, t):
    law = marginal(make_scheduler("flow"), t)
    x = torch.linspace(-3, 3, 7, dtype=torch.float64).reshape(-1, 1)
    x0 = torch.linspace(-5, 5, 20_001, dtype=torch.float64)
    prior = Mixture(torch.ones(1, 1).double(), torch.zeros(1, 1).double()).density(x0.reshape(-1, 1))[:, 0]
    posterior = prior * torch.exp(-0.5 * ((x - law.alpha * x0) / law.sigma) ** 2)
    torch.testing.assert_close(law.posterior_mean(x)[:, 0], (posterior @ x0) / posterior.sum(1), rtol=1e-9, atol=1e-9)


def exact_map(scheduler, t, s, x):
    return marginal(scheduler, s).quantile(marginal(scheduler, t).cdf(x))


@functools.cache
def segment_case(make_scheduler, name):
    scheduler = make_scheduler(name, "v_prediction")
    x = marginal(scheduler, 0.95).quantile(torch.linspace(0.05, 0.95, 7, dtype=torch.float64).reshape(-1, 1))
    return x, exact_map(scheduler, float(torch.tensor(0.95)), float(torch.tensor(0.15)), x)


def walked(scheduler, x, n, solver):
    """A walk on times from 0.95 to 0.15, where λ is finite."""
    return rollout(denoiser_of(scheduler), scheduler, x, times=torch.linspace(0.95, 0.15, n + 1), solver=solver).sample


def check_order(make_scheduler, name, prediction_type, solver):
    scheduler = make_scheduler(name, prediction_type)
    x, exact = segment_case(make_scheduler, name)
    errors = [float((walked(scheduler, x, n, solver) - exact).abs().mean()) for n in (32, 64)]
    slope = math.log2(errors[0] / errors[1])
    assert abs(slope - ORDER[solver]) < 0.3, (errors, slope)


@pytest.mark.parametrize("solver", ORDER)
@pytest.mark.parametrize("name", NAMES)
def test_order_of_convergence(make_scheduler, name, solver):
    check_order(make_scheduler, name, "v_prediction", solver)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ORDER)
@pytest.mark.parametrize(("name", "prediction_type"), PAIRS)
def test_order_of_convergence_under_every_prediction_type(make_scheduler, name, prediction_type, solver):
    check_order(make_scheduler, name, prediction_type, solver)


@pytest.mark.parametrize("solver", ORDER)
@pytest.mark.parametrize("name", NAMES)
def test_walks_are_the_same_under_every_prediction_type(make_scheduler, name, solver):
    """So the order of one is the order of all."""
    x, _ = segment_case(make_scheduler, name)
    ends = [walked(make_scheduler(n, p), x, 6, solver) for n, p in PAIRS if n == name]
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["flow", "cosine"])
def test_averaging_raw_outputs_is_only_first_order(make_scheduler, name):
    """The control: Heun on model outputs in place of velocities, for a prediction that is no velocity."""
    scheduler = make_scheduler(name, "v_prediction")
    denoise = denoiser_of(scheduler)
    x, exact = segment_case(make_scheduler, name)
    errors = []
    for n in (32, 64):
        times, y = torch.linspace(0.95, 0.15, n + 1).double(), x
        for t, s in zip(times[:-1], times[1:], strict=True):
            output = denoise(y, t.expand(len(y)))
            ahead = scheduler.transition(output, t, s, y, eta=0.0).mode
            mixed = 0.5 * (output + denoise(ahead, s.expand(len(y))))
            y = scheduler.transition(mixed, t, s, y, eta=0.0).mode
        errors.append(float((y - exact).abs().mean()))
    assert math.log2(errors[0] / errors[1]) < 1.5, errors


@pytest.mark.parametrize("solver", ORDER)
@pytest.mark.parametrize("name", NAMES)
def test_whole_walks_carry_gaussian_quantiles_to_the_mixtures(make_scheduler, name, solver):
    """x(0) = F_data⁻¹(F_1(x(1))). The last Euler step onto t = 0 costs O(σ²), O(h) for the linear levels."""
    scheduler = make_scheduler(name, "v_prediction")
    start = marginal(scheduler, 1.0)
    u = torch.linspace(0.03, 0.97, 9, dtype=torch.float64).reshape(-1, 1)
    x = start.quantile(u)
    data = Mixture(torch.ones(1, 1).double(), torch.zeros(1, 1).double())
    errors = []
    for n in (12, 24, 96):
        out = rollout(denoiser_of(scheduler), scheduler, x, num_inference_steps=n, solver=solver).sample
        errors.append(float((out - data.quantile(u)).abs().max()))
    assert errors[2] < 0.35 * max(errors[:2]), errors
    assert errors[2] < (0.08 if solver == "euler" or "linear" in name else 0.02), errors


def propagated(scheduler, eta, n, grid, wrong=False):
    """The density after a walk of n steps from t = 1 to 0.1, by quadrature of the scheduler's own kernel."""
    dx = float(grid[1] - grid[0])
    density = marginal(scheduler, 1.0).density(grid)[:, 0]
    times = torch.linspace(1.0, 0.1, n + 1, dtype=torch.float64)
    for t, s in zip(times[:-1], times[1:], strict=True):
        output = denoiser_of(scheduler)(grid, t.expand(len(grid)))
        kernel = scheduler.transition(output, t, s, grid, eta=eta)
        std = scheduler.alpha_sigma(s)[1] * eta if wrong else kernel.std
        density = (GaussianTransition(kernel.mean[None], std).mean[0].T - grid).div(std).square().mul(
            -0.5
        ).exp() @ density
        density = density * dx / (std * math.sqrt(2 * math.pi))
    return density


@pytest.mark.parametrize("name", ["flow", "cosine", "linear"])
@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_the_stochastic_kernel_reaches_the_exact_marginal(make_scheduler, name, eta):
    scheduler = make_scheduler(name, "v_prediction")
    grid = torch.linspace(-6, 6, 601, dtype=torch.float64).reshape(-1, 1)
    exact = marginal(scheduler, 0.1).density(grid)[:, 0]
    dx = float(grid[1] - grid[0])
    errors = [float((propagated(scheduler, eta, n, grid) - exact).abs().sum() * dx) for n in (8, 16, 32)]
    assert errors[1] < 0.65 * errors[0] and errors[2] < 0.65 * errors[1], errors
    assert errors[2] < 0.1, errors
    if eta < 1:
        control = float((propagated(scheduler, eta, 32, grid, wrong=True) - exact).abs().sum() * dx)
        assert control > 4 * errors[2], (control, errors)
