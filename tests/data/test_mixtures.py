from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from genkit.data.mixtures import StableMixture, _keyed_uniforms, _positive_stable_sf
from genkit.data.stable import positive_stable, stable_tail_constant
from genkit.errors import ConfigError
from genkit.metrics.tails import ecf_tail_index, hill


def uniforms(n: int, seed: int = 0) -> torch.Tensor:
    return _keyed_uniforms(seed, 0, n)


@pytest.mark.parametrize("a", [0.4, 0.6, 0.75, 0.9, 0.99])
def test_positive_stable_has_its_laplace_transform(a):
    u = uniforms(200_000)
    s = positive_stable(a, u[:, 0], -u[:, 1].log())
    for x in (0.3, 1.0, 3.0):
        assert float(torch.exp(-x * s).mean()) == pytest.approx(math.exp(-(x**a)), abs=4e-3)


def test_half_stable_law_is_levy_and_one_stable_is_constant():
    u = uniforms(50_000)
    s = positive_stable(0.5, u[:, 0], -u[:, 1].log())
    assert stats.kstest(s.numpy(), stats.levy(scale=0.5).cdf).pvalue > 0.01
    assert torch.equal(positive_stable(1.0, u[:, 0], u[:, 1]), torch.ones(50_000, dtype=torch.float64))


def test_extreme_uniforms_stay_finite_and_positive():
    edge = torch.tensor([1e-300, 2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    u, e = torch.meshgrid(edge, torch.tensor([1e-17, 1.0, 40.0], dtype=torch.float64), indexing="ij")
    for a in (0.25, 0.6, 0.9, 0.9995):
        s = positive_stable(a, u, e)
        assert bool(torch.isfinite(s).all()) and bool((s > 0).all())


@pytest.mark.parametrize("a", [0.0, 1.01, math.nan])
def test_impossible_index_is_refused(a):
    with pytest.raises(ValueError, match="a must lie in"):
        positive_stable(a, torch.ones(1), torch.ones(1))


def test_tail_constants():
    exact = {1.0: 2 / math.pi, 1.2: 0.55592, 1.5: 0.39894, 1.7: 0.26261, 1.8: 0.18323, 1.9: 0.09578}
    assert all(stable_tail_constant(alpha) == pytest.approx(value, abs=1e-5) for alpha, value in exact.items())


def test_survival_function_equals_the_levy_law_and_the_tail_expansion():
    s = torch.tensor([0.1, 0.5, 2.0, 1e3, 1e8], dtype=torch.float64)
    assert torch.allclose(_positive_stable_sf(0.5, s), torch.tensor(stats.levy.sf(s.numpy(), scale=0.5)), rtol=1e-4)
    for a in (0.6, 0.75, 0.9):
        far = torch.tensor(1e6, dtype=torch.float64)
        assert float(_positive_stable_sf(a, far)) == pytest.approx(1e6**-a / math.gamma(1 - a), rel=1e-3)


def test_a_sample_is_a_function_of_seed_and_index():
    short, long = StableMixture(100, seed=3), StableMixture(5000, seed=3)
    assert torch.equal(short.sample, long.sample[:100]) and torch.equal(short.label, long.label[:100])
    part, label = long.draw(10, start=40)
    assert torch.equal(part.float(), long.sample[40:50]) and torch.equal(label, long.label[40:50])
    assert not torch.equal(short.sample, StableMixture(100, seed=4).sample)
    assert torch.equal(long[torch.tensor([7, 7])]["sample"], long.sample[[7, 7]])


def test_labels_follow_the_weights():
    data = StableMixture(100_000)
    expected = data.weights * len(data)
    assert stats.chisquare(torch.bincount(data.label, minlength=9).numpy(), expected.numpy()).pvalue > 1e-3
    assert float(data.weights.sum()) == pytest.approx(1.0) and float(data.weights.max() / data.weights.min()) == 30


@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.8])
def test_noise_is_isotropic_stable(alpha):
    data = StableMixture(9, alpha=alpha, noise_scale=0.1)
    sample, label = data.draw(200_000)
    noise = sample - data.centres[label]
    for direction in ((1.0, 0.0), (0.6, -0.8)):
        along = noise @ torch.tensor(direction, dtype=torch.float64)
        for k in (3.0, 10.0):
            assert float(torch.cos(k * along).mean()) == pytest.approx(math.exp(-((0.1 * k) ** alpha)), abs=5e-3)
    fit = ecf_tail_index(noise[:, 0])
    assert fit.alpha == pytest.approx(alpha, abs=0.02) and fit.scale == pytest.approx(0.1, rel=0.02)


def test_the_tail_of_the_radius_is_a_power_law():
    sample, _ = StableMixture(9, alpha=1.5).draw(1_000_000)
    estimate = hill(sample.norm(dim=1), fraction=0.0005)
    assert abs(estimate.tail_index - 1.5) < 3 * estimate.standard_error
    # the index read at 1 % is biased by the offsets of the modes: a quantile below is no tail
    assert hill(sample.norm(dim=1), fraction=0.01).tail_index > 1.8


def test_true_quantiles_agree_with_a_large_draw():
    data = StableMixture(9, alpha=1.5)
    levels = torch.tensor([0.3, 0.9, 0.99, 0.999], dtype=torch.float64)
    quantiles = data.radius_quantile(levels)
    sample, label = data.draw(1_000_000, start=50)
    above = torch.stack([(sample.norm(dim=1) > q).double().mean() for q in quantiles])
    error = ((1 - levels) * levels / 1e6).sqrt()
    assert bool(((above - (1 - levels)).abs() < 4 * error + 1e-3 * (1 - levels)).all())
    radius = torch.tensor([0.1, 0.3, 1.0], dtype=torch.float64)
    inside = torch.stack([((sample - data.centres[label]).norm(dim=1) > r).double().mean() for r in radius])
    assert torch.allclose(data.noise_radius_sf(radius), inside, atol=2e-3)


def test_far_quantiles_follow_the_tail_expansion():
    # P(|x| > r) ~ (2c²)^a E|Z|^α / Γ(1-a) r^-α with a = α/2 and E|Z|^α = 2^a Γ(1+a) in the plane
    data, r, a = StableMixture(9, alpha=1.5, noise_scale=0.1), 1e5, 0.75
    expected = 0.02**a * 2**a * math.gamma(1 + a) / math.gamma(1 - a) * r**-1.5
    assert float(data.radius_sf(torch.tensor(r))) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": 2.1}, "alpha"),
        ({"noise_scale": 0.0}, "noise_scale"),
        ({"num_samples": 0}, "num_samples"),
        ({"weights": [1.0] * 8}, "weights"),
        ({"weights": [1.0] * 8 + [math.nan]}, "weights"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        StableMixture(**options)
