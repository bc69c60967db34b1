"""Prediction types say the same thing in different words: conversions, targets and velocities agree."""

from __future__ import annotations

import pytest
import torch

from genkit.schedulers import FlowScheduler, VPScheduler

NAMES = ("flow", "cosine", "linear", "scaled_linear", "edm")
TYPES = ("epsilon", "sample", "v_prediction", "flow")
PAIRS = [(n, p) for n in NAMES for p in TYPES if not (p == "epsilon" and n in ("flow", "cosine"))]
B, SHAPE = 6, (6, 3, 2, 2)
SCALES = {"none": None, "per sample": (B,), "per channel": (B, 1, 1, 2)}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(scale_shape):
    """x_0, unit noise, times strictly inside, context."""
    t = torch.tensor([0.93, 0.7, 0.5, 0.31, 0.12, 0.8], dtype=torch.float64)
    context = None if scale_shape is None else {"scale": draw(9, *scale_shape).exp()}
    return draw(1, *SHAPE), draw(2, *SHAPE), t, context


def close(a, b, tolerance=1e-11):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("name", "prediction_type"), PAIRS)
def test_the_target_of_a_pair_reads_back_as_that_pair(make_scheduler, name, prediction_type, scale):
    scheduler = make_scheduler(name, prediction_type)
    x0, noise, t, context = case(SCALES[scale])
    x_t = scheduler.add_noise(x0, noise, t, context)
    target = scheduler.target(x0, noise, t, context)
    close(scheduler.to_x0(target, t, x_t, context), x0)
    close(scheduler.from_x0(x0, t, x_t, context), target)
    alpha, sigma = scheduler.alpha_sigma(t, context)
    alpha, sigma = (c.reshape(c.shape + (1,) * (4 - c.ndim)) for c in (alpha, sigma))
    close(x_t, alpha * x0 + sigma * noise)
    scale_of = 1.0 if context is None else context["scale"].reshape(sigma.shape)
    written = {
        "epsilon": noise,
        "sample": x0,
        "v_prediction": alpha * noise - sigma * x0,
        "flow": (scale_of if name == "flow" else 1.0) * noise - x0,  # FlowScheduler's f is dx/dt
    }
    close(target, written[prediction_type])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("name", "prediction_type"), PAIRS)
def test_to_x0_and_from_x0_are_inverse(make_scheduler, name, prediction_type, scale):
    scheduler = make_scheduler(name, prediction_type)
    x_t, output, t, context = case(SCALES[scale])
    close(scheduler.from_x0(scheduler.to_x0(output, t, x_t, context), t, x_t, context), output)
    close(scheduler.to_x0(scheduler.from_x0(output, t, x_t, context), t, x_t, context), output)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("name", "prediction_type"), PAIRS)
def test_the_velocity_is_the_time_derivative_of_add_noise(make_scheduler, name, prediction_type, scale):
    scheduler = make_scheduler(name, prediction_type)
    x0, noise, t, context = case(SCALES[scale])
    target = scheduler.target(x0, noise, t, context)
    velocity = scheduler.velocity(target, t, scheduler.add_noise(x0, noise, t, context), context)
    h = 1e-5
    ahead, behind = (scheduler.add_noise(x0, noise, t + d, context) for d in (h, -h))
    close(velocity, (ahead - behind) / (2 * h), 1e-5)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_does_not_depend_on_the_prediction_type(make_scheduler, name, scale):
    x0, x_t, t, context = case(SCALES[scale])
    s = 0.4 * t
    steps = []
    for prediction_type in [p for n, p in PAIRS if n == name]:
        scheduler = make_scheduler(name, prediction_type)
        output = scheduler.from_x0(x0, t, x_t, context)
        steps.append(
            (scheduler.transition(output, t, s, x_t, context, eta=0.7), scheduler.velocity(output, t, x_t, context))
        )
    for transition, velocity in steps[1:]:
        close(transition.mean, steps[0][0].mean)
        close(transition.std, steps[0][0].std)
        close(velocity, steps[0][1], 1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_deterministic_step_keeps_clean_sample_and_noise(make_scheduler, name):
    x0, noise, t, context = case((B,))
    scheduler = make_scheduler(name, "v_prediction")
    x_t, target = scheduler.add_noise(x0, noise, t, context), scheduler.target(x0, noise, t, context)
    for share in (0.6, 0.0):
        step = scheduler.transition(target, t, share * t, x_t, context, eta=0.0)
        close(step.mean, scheduler.add_noise(x0, noise, share * t, context))
        assert float(step.std.abs().max()) == 0.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_the_kernel_keeps_the_marginal_of_a_point(make_scheduler, name, eta):
    """With the exact x_0 the step's law integrates to N(α_s x_0, σ_s²): direction² + γ² = σ_s², γ ≤ σ_s."""
    x0, noise, t, context = case((B,))
    scheduler, s = make_scheduler(name, "v_prediction"), 0.5 * case(None)[2]
    still = scheduler.add_noise(x0, 0 * noise, t, context)
    moved = scheduler.add_noise(x0, 0 * noise + 1, t, context)
    means = [
        scheduler.transition(scheduler.target(x0, e, t, context), t, s, x, context, eta=eta)
        for x, e in ((still, 0 * noise), (moved, 0 * noise + 1))
    ]
    alpha, sigma = scheduler.alpha_sigma(s, context)
    close(means[0].mean, alpha.reshape(-1, 1, 1, 1) * x0)
    gain = (means[1].mean - means[0].mean)[:, 0, 0, 0]
    close(gain**2 + means[0].std ** 2, sigma**2)
    alpha_t, sigma_t = scheduler.alpha_sigma(t, context)
    gamma = eta * sigma / sigma_t * (sigma_t**2 - (alpha_t / alpha) ** 2 * sigma**2).sqrt()
    close(means[0].std, gamma)


def test_the_clock_scale_example_of_the_flow():
    """μ = 1.5, s = 0.7, A = 9: the field at t = 0.4 has slope +2.0453 and residual variance 2.7283."""
    scheduler, context = FlowScheduler(), {"scale": torch.tensor([3.0, 3.0], dtype=torch.float64)}
    mu, width, t = 1.5, 0.7, torch.tensor([0.4, 0.4], dtype=torch.float64)
    alpha, sigma = scheduler.alpha_sigma(t, context)
    x = torch.tensor([[0.3], [1.3]], dtype=torch.float64)
    gain = alpha[0] * width**2 / (alpha[0] ** 2 * width**2 + sigma[0] ** 2)
    clean = mu + gain * (x - alpha[0] * mu)
    flow = scheduler.from_x0(clean, t, x, context)
    assert abs(float(flow[1] - flow[0]) - 2.0453) < 5e-5
    var = 9 * width**2 / (alpha[0] ** 2 * width**2 + sigma[0] ** 2)  # Var(√A ε − x_0 | x) = A s²/D
    assert abs(float(var) - 2.7283) < 5e-5
    close(scheduler.velocity(flow, t, x, context), flow)


def test_half_precision_inputs_are_computed_in_float32():
    scheduler = VPScheduler("linear", "epsilon")
    x0, noise = torch.zeros(4, 1000), torch.ones(4, 1000)
    small = torch.full((4,), 1e-3)  # the first entry of the table: σ = 0.01
    noisy = scheduler.add_noise(x0.bfloat16(), noise.bfloat16(), small)
    assert noisy.dtype == torch.bfloat16
    torch.testing.assert_close(noisy.float(), torch.full_like(x0, 0.01), rtol=4e-3, atol=0)
    step = scheduler.transition(noise.bfloat16(), torch.full((4,), 0.5), torch.full((4,), 0.25), x0.bfloat16())
    assert step.mean.dtype == torch.float32 and step.std.dtype == torch.float64
    assert scheduler.to_x0(noise.half(), 0.5, x0.half()).dtype == torch.float32


def test_float32_states_stay_float32(make_scheduler):
    for name, prediction_type in PAIRS:
        scheduler = make_scheduler(name, prediction_type)
        x, t = torch.ones(2, 3), torch.tensor([0.5, 0.25])
        step = scheduler.transition(x, t, 0.5 * t, x, eta=0.5)
        for value in (step.mean, scheduler.to_x0(x, t, x), scheduler.velocity(x, t, x), scheduler.from_x0(x, t, x)):
            assert value.dtype == torch.float32
