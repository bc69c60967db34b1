"""Noise on the torus: the score beside brute force, the kernel beside closed-form marginals."""

from __future__ import annotations

import json
import math

import pytest
import torch

from genkit.errors import ConfigError
from genkit.samplers import draw_keys, rollout
from genkit.schedulers import ProductScheduler, VPScheduler, WrappedNormalTransition, WrappedScheduler
from genkit.schedulers.wrapped import score_size, wrapped_normal_score

DOUBLE = torch.float64


def keys_of(count: int, seed: int = 0):
    return draw_keys(torch.Generator().manual_seed(seed), count)


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def grid(n: int = 4096) -> torch.Tensor:
    """Midpoints of the period, float64: the quadrature is exact to rounding for smooth periodic functions."""
    return (torch.arange(n, dtype=DOUBLE) + 0.5) / n


# ---- the score ------------------------------------------------------------------------------------------------------


def brute_score(offset: torch.Tensor, std: float, images: int = 400) -> torch.Tensor:
    k = torch.arange(-images, images + 1, dtype=DOUBLE)
    y = offset.unsqueeze(-1) + k
    return ((-0.5 * (y / std).square()).softmax(-1) * -y / std**2).sum(-1)


def test_known_values():
    """Computed once with 401 images."""
    score = wrapped_normal_score(torch.tensor([0.1, 0.25], dtype=DOUBLE), torch.tensor([0.2, 0.5], dtype=DOUBLE))
    close(score, torch.tensor([-2.4988727, -0.0903759], dtype=DOUBLE), 5e-8)
    law = WrappedNormalTransition(torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([0.2], dtype=DOUBLE))
    assert abs(float(law.log_prob(torch.tensor([[0.1]], dtype=DOUBLE))) - 0.5655451) < 5e-8


@pytest.mark.parametrize("std", [0.02, 0.2, 0.499, 0.501, 1.0, 2.0])
def test_the_score_is_the_sum_over_images_and_the_slope_of_the_density(std):
    x = grid(64) * 3.0 - 1.5
    score = wrapped_normal_score(x, torch.tensor(std, dtype=DOUBLE))
    close(score, brute_score(torch.remainder(x + 0.5, 1.0) - 0.5, std), 1e-10)
    point = x.clone().requires_grad_()
    law = WrappedNormalTransition(torch.zeros(64, 1, dtype=DOUBLE), torch.full((64,), std, dtype=DOUBLE))
    close(score, torch.autograd.grad(law.log_prob(point.unsqueeze(-1)).sum(), point)[0], 1e-9)


@pytest.mark.parametrize(("std", "error"), [(1.0, 3.1e-3), (2.0, 4.1e-2)])
def test_too_few_images_are_seen(std, error):
    """The truncation at ±3 images that crystal codes use, where ours is exact."""
    x = grid(200) - 0.5
    truncated, exact = brute_score(x, std, 3), wrapped_normal_score(x, torch.tensor(std, dtype=DOUBLE))
    assert 0.8 * error < float((truncated - exact).abs().max()) < 1.2 * error


def test_the_score_in_float32_and_its_widths_per_sample():
    x, std = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0.005, 0.1, 0.4, 0.6, 1.5])
    score = wrapped_normal_score(x, std)
    for row in range(5):
        close(
            score[row].double(), brute_score(torch.remainder(x[row].double() + 0.5, 1.0) - 0.5, float(std[row])), 2e-5
        )


def test_the_size_of_the_score():
    widths = torch.tensor([0.003, 0.05, 0.2, 0.45, 0.55, 1.0], dtype=DOUBLE)
    x = grid(40_000) - 0.5
    for width, size in zip(widths, score_size(widths), strict=True):
        law = WrappedNormalTransition(torch.zeros(len(x), 1, dtype=DOUBLE), width.expand(len(x)))
        moment = (law.log_prob(x.unsqueeze(-1)).exp() * wrapped_normal_score(x, width).square()).mean()
        assert abs(float(size / (width * moment.sqrt())) - 1.0) < 1e-9
    assert abs(float(score_size(widths)[0]) - 1.0) < 1e-9
    # far out only the first harmonic is left: a sine of amplitude 4π exp(−2π²σ²)
    first = 4.0 * math.pi * math.exp(-2.0 * math.pi**2) / math.sqrt(2.0)
    assert abs(float(score_size(widths)[-1]) / first - 1.0) < 1e-6


# ---- noising --------------------------------------------------------------------------------------------------------


def test_noise_levels():
    scheduler = WrappedScheduler(0.01, 0.5)
    t = torch.tensor([0.0, 1e-9, 0.5, 1.0], dtype=DOUBLE)
    alpha, sigma = scheduler.alpha_sigma(t)
    close(sigma, torch.tensor([0.0, 0.01, math.sqrt(0.005), 0.5], dtype=DOUBLE), 1e-7)
    assert bool((alpha == 1.0).all())
    times = scheduler.times(10)
    assert float(times[0]) == 1.0 and float(times[-1]) == 0.0 and bool((times[1:] < times[:-1]).all())


def test_noised_points_have_the_closed_moments():
    """E exp(2πik x_t) = exp(2πik x_0 − 2π²k²σ²)."""
    scheduler, n = WrappedScheduler(), 40_000
    keys, t = keys_of(n), torch.full((n,), 0.8)
    x0 = torch.full((n, 1), 0.93)
    x = scheduler.add_noise(x0, keys.normal((1,)), t)
    assert bool(((x >= 0) & (x < 1)).all()) and torch.equal(scheduler.add_noise(x0, keys.normal((1,)), 0.0), x0)
    sigma = float(scheduler.alpha_sigma(0.8)[1])
    for k in (1, 2, 3):
        expected = math.exp(-2.0 * (math.pi * k * sigma) ** 2)
        angle = 2.0 * math.pi * k * (x.double() - 0.93)
        assert abs(float(angle.cos().mean()) - expected) < 4.5 / math.sqrt(n)
        assert abs(float(angle.sin().mean())) < 4.5 / math.sqrt(n)


def test_the_target_is_the_scaled_score_of_what_was_noised():
    scheduler = WrappedScheduler()
    keys, t = keys_of(50), torch.linspace(0.0, 1.0, 50)
    x0, noise = keys.uniform((4, 3), torch.float32), keys.at(purpose="noise").normal((4, 3))
    target = scheduler.target(x0, noise, t)
    x = scheduler.add_noise(x0, noise, t)
    sigma = scheduler.alpha_sigma(t)[1].float()[:, None, None]
    close(target[1:], (-sigma * scheduler.score(x, x0, t))[1:], 2e-3)  # x has lost digits by wrapping
    narrow = sigma.squeeze() < 0.05
    close(target[narrow][1:], noise[narrow][1:], 1e-4)  # the noise itself where no image is near


def test_pure_noise_is_uniform():
    x = WrappedScheduler().prior(keys_of(20_000), (2,))
    assert x.dtype == torch.float32 and bool(((x >= 0) & (x < 1)).all())
    for k in (1, 2, 3):
        assert float(torch.exp(2j * math.pi * k * x.double()).mean().abs()) < 4.5 / math.sqrt(40_000)


# ---- the kernel -----------------------------------------------------------------------------------------------------


def test_the_kernel_is_the_ancestral_one_and_the_ode_step():
    scheduler = WrappedScheduler()
    x, f = torch.rand(3, 4, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE), torch.ones(3, 4, 3).double()
    t, s = torch.tensor([0.9, 0.5, 0.3]), torch.tensor([0.8, 0.1, 0.0])
    sigma_t, sigma_s = (scheduler.alpha_sigma(v)[1][:, None, None] for v in (t, s))
    kernel = scheduler.transition(f, t, s, x)
    score = -f / sigma_t
    close(kernel.mean, x + (sigma_t**2 - sigma_s**2) * score)
    close(kernel.std, (sigma_s * (sigma_t**2 - sigma_s**2).sqrt() / sigma_t).flatten())
    assert float(kernel.std[2]) == 0.0
    close(kernel.mode[2], scheduler.to_x0(f, t, x)[2])
    still = scheduler.transition(f, t, s, x, eta=0.0)
    close(still.mean, x - (sigma_t - sigma_s) * f)
    assert not bool(still.std.any())
    for row in range(3):
        alone = scheduler.transition(f[row : row + 1], float(t[row]), float(s[row]), x[row : row + 1])
        close(alone.mean[0], kernel.mean[row], 1e-7)
    stays = scheduler.transition(f, t, t, x)
    assert torch.equal(stays.mean, x) and not bool(stays.std.any())
    assert torch.equal(scheduler.transition(f, 0.0, 0.0, x).mode, x)


CENTRES, SPREADS = torch.tensor([0.1, 0.55], dtype=DOUBLE), torch.tensor([0.05, 0.12], dtype=DOUBLE)
SHARES = torch.tensor([0.7, 0.3], dtype=DOUBLE)


def mixture(x: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Density and score at x (n,) of a mixture of two wrapped normals, noised by σ ()."""
    widths = (SPREADS.square() + sigma.square()).sqrt()
    offset = x.unsqueeze(-1) - CENTRES
    laws = [WrappedNormalTransition(torch.zeros(len(x), 1, dtype=DOUBLE), width.expand(len(x))) for width in widths]
    log_parts = torch.stack([law.log_prob(offset[:, i : i + 1]) for i, law in enumerate(laws)], dim=-1)
    weighted = SHARES * log_parts.exp()
    scores = wrapped_normal_score(offset, widths.expand_as(offset))
    density = weighted.sum(-1)
    return density, (weighted * scores).sum(-1) / density


def moment(k: int, sigma: torch.Tensor) -> complex:
    """E exp(2πikx) of the mixture noised by σ, in closed form."""
    decay = torch.exp(-2.0 * (math.pi * k) ** 2 * (SPREADS.square() + sigma.square()))
    return complex((SHARES * decay * torch.exp(2j * math.pi * k * CENTRES)).sum())


def one_step_error(h: float, sign: float = 1.0) -> float:
    """Largest error of the first three moments after one ancestral step from t = .7, by quadrature over x_t."""
    scheduler, x = WrappedScheduler(), grid()
    sigma_t, sigma_s = (scheduler.alpha_sigma(v)[1] for v in (0.7, 0.7 - h))
    density, score = mixture(x, sigma_t)
    kernel = scheduler.transition((-sign * sigma_t * score)[:, None], 0.7, 0.7 - h, x[:, None])
    errors = []
    for k in (1, 2, 3):
        decay = torch.exp(-2.0 * (math.pi * k * kernel.std) ** 2)
        found = (density * decay * torch.exp(2j * math.pi * k * kernel.mean[:, 0])).mean()
        errors.append(abs(complex(found) - moment(k, sigma_s)))
    return max(errors)


def test_a_step_with_the_exact_score_has_the_closed_marginal_to_second_order():
    errors = [one_step_error(h) for h in (0.01, 0.005, 0.0025)]
    for coarse, fine in zip(errors, errors[1:], strict=False):
        assert 3.4 < coarse / fine < 4.6
    assert errors[-1] < 2e-4
    wrong = [one_step_error(h, sign=-1.0) for h in (0.005, 0.0025)]
    assert wrong[0] / wrong[1] < 2.3 and wrong[1] > 20 * errors[-1]  # a wrong score is wrong to first order


def test_a_walk_with_the_exact_score_ends_in_the_data():
    scheduler, n = WrappedScheduler(), 4000

    def denoiser(x, t, cond=None):
        sigma = scheduler.alpha_sigma(t[:1])[1][0]
        return (-sigma * mixture(x[:, 0].double(), sigma)[1])[:, None].float()

    walk = rollout(denoiser, scheduler, shape=(n, 1), num_inference_steps=60, solver="ancestral",
                   generator=torch.Generator().manual_seed(0), return_log_probs=True)  # fmt: skip
    for k in (1, 2, 3):
        found = complex(torch.exp(2j * math.pi * k * walk.sample.double()).mean())
        assert abs(found - moment(k, torch.zeros((), dtype=DOUBLE))) < 4.5 / math.sqrt(n) + 0.01
    assert bool(torch.isfinite(walk.log_probs[:, :-1]).all()) and bool(walk.log_probs[:, -1].isnan().all())


# ---- context, products, refusals ------------------------------------------------------------------------------------


def test_widths_that_follow_the_number_of_atoms():
    scheduler = WrappedScheduler(scale_by_num_atoms=True)
    context = {"num_atoms": torch.tensor([1, 8])}
    close(scheduler.alpha_sigma(1.0, context)[1], torch.tensor([0.5, 0.25], dtype=DOUBLE))
    kernel = scheduler.transition(torch.zeros(2, 3, 3), 0.5, 0.4, torch.zeros(2, 3, 3), context)
    close(float(kernel.std[0] / kernel.std[1]), 2.0)
    with pytest.raises(ConfigError, match="num_atoms"):
        scheduler.alpha_sigma(torch.ones(2))
    with pytest.raises(ConfigError, match="one count per sample"):
        scheduler.alpha_sigma(torch.ones(3), context)


def test_inside_a_product_with_its_mask_and_context():
    product = ProductScheduler(
        {"cell": VPScheduler(), "coordinates": WrappedScheduler(scale_by_num_atoms=True)}, masks={"coordinates": "mask"}
    )
    again = ProductScheduler.from_config(json.loads(json.dumps(dict(product.config))))
    assert again.schedulers["coordinates"].scale_by_num_atoms and again.context_names == ["num_atoms", "scale"]
    mask = torch.tensor([[True, False], [True, True]])
    context = {"num_atoms": mask.sum(1)}
    x = {**again.prior(keys_of(2), {"cell": (6,), "coordinates": (2, 3)}, context), "mask": mask}
    kernel = again.transition({"cell": x["cell"], "coordinates": x["coordinates"]}, 0.5, 0.4, x, context)
    drawn = kernel.sample(keys_of(2, 1))
    wrapped = kernel.parts["coordinates"]
    alone = WrappedNormalTransition(wrapped.mean[:1, :1], wrapped.std[:1]).log_prob(drawn["coordinates"][:1, :1])
    close(wrapped.log_prob(drawn["coordinates"])[:1], alone)
    output = rollout(lambda x, t, cond: {k: 0.0 * v for k, v in x.items()}, again, x, num_inference_steps=3,
                     context=context, solver="ancestral", generator=torch.Generator().manual_seed(0))  # fmt: skip
    assert torch.equal(output.sample["mask"], mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma_min": 0.0}, "0 < sigma_min"),
        ({"sigma_min": 0.6}, "sigma_min < sigma_max"),
        ({"eta": 2.0}, "eta=2.0"),
        ({"scale_by_num_atoms": 1}, "scale_by_num_atoms=1"),
        ({"sigma_max": "big"}, "sigma_max='big'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        WrappedScheduler(**options)


def test_tensors_that_do_not_fit_are_refused():
    scheduler, x = WrappedScheduler(), torch.zeros(2, 3)
    with pytest.raises(ConfigError, match="model_output"):
        scheduler.transition(x[:1], 0.5, 0.4, x)
    with pytest.raises(ConfigError, match="after t"):
        scheduler.transition(x, 0.4, 0.5, x)
    with pytest.raises(ConfigError, match="t=1.5"):
        scheduler.alpha_sigma(1.5)
