"""Clock laws against closed forms, an independent quadrature, published quantiles, and controls that must fail."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from genkit.errors import ConfigError
from genkit.pipelines.heavy_tailed_flow.clocks import (
    Clock,
    GaussianClock,
    SplicedClock,
    StableClock,
    StudentTClock,
    count_replaced,
)
from genkit.samplers.noise import Keys, training_keys

N = 100_000
KS_5_PERCENT = 1.358

STABLE_QUANTILES = {  # of a symmetric alpha-stable variable with c = 1, at .75, .95, .99, .999
    1.0: (1.0, 6.3138, 31.821, 318.31),
    1.2: (0.9815, 4.3687, 16.1601, 108.94),
    1.5: (0.9689, 3.0519, 7.7364, 34.3208),
    1.7: (0.9627, 2.6373, 5.1519, 17.8531),
    1.8: (0.9598, 2.5049, 4.2768, 12.588),
    1.9: (0.9568, 2.4043, 3.6691, 8.0839),
}
STUDENT_QUANTILES = {3.0: (0.7649, 2.3534, 4.5407, 10.2145), 5.0: (0.7267, 2.0150, 3.3649, 5.8934)}
LEVELS = (0.75, 0.95, 0.99, 0.999)
CLOCKS = (
    GaussianClock(),
    StableClock(1.5),
    StableClock(1.2, "stable", 0.7),
    StableClock(2.0),
    StudentTClock(3.0),
    StudentTClock(1.0, bridge=0.2),
    StableClock(1.5).splice(tail_index=1.2),
    StudentTClock(3.0).splice(0.9, tail_index=2.0),
)


@pytest.fixture(scope="module")
def keys() -> Keys:
    return training_keys(7, 0, torch.arange(N)).at(purpose="clock")


def ks_distance(clock: Clock, a: torch.Tensor) -> float:
    """sqrt(n) times the Kolmogorov-Smirnov distance of draws from the clock's own distribution function."""
    return float(stats.kstest(clock.cdf(a).numpy(), "uniform").statistic) * math.sqrt(len(a))


def mixture_sf(clock: Clock, x: float) -> float:
    """P(√A Z > x) by the trapezoidal rule over the logit of the clock's quantile."""
    logit = np.arange(-40.0, 40.0, 0.05)
    a = clock._invert(special.expit(logit), special.expit(-logit))
    weight = special.expit(logit) * special.expit(-logit)
    return float(np.sum(special.ndtr(-x / np.sqrt(a)) * weight) * 0.05)


# ---- the laws -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.8, 1.0, 1.5, 1.9, 2.0])
def test_stable_source_has_its_characteristic_function(keys: Keys, alpha: float) -> None:
    clock = StableClock(alpha, "stable", 1.0)
    x = clock.terminal(keys).sqrt() * keys.at(purpose="latents").normal(dtype=torch.float64)
    for k in (0.25, 0.5, 1.0, 2.0):
        exact = math.exp(-(k**alpha))
        assert abs(float(torch.cos(k * x).mean()) - exact) < 4 / math.sqrt(N)
        assert float(torch.exp(clock.log_laplace(torch.tensor(k * k / 2)))) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("alpha", [0.8, 1.2, 1.9])
def test_positive_stable_has_laplace_transform_exp_minus_one_at_one(keys: Keys, alpha: float) -> None:
    assert float(torch.exp(-StableClock(alpha).terminal(keys)).mean()) == pytest.approx(math.exp(-1), abs=1.5e-3)


def test_alpha_two_is_one_bit_for_bit_and_the_stable_convention_is_twice_c_squared(keys: Keys) -> None:
    assert torch.equal(StableClock(2.0).terminal(keys), GaussianClock().terminal(keys))
    assert torch.equal(StableClock(2.0).path(keys[:9], 16), GaussianClock().path(keys[:9], 16))
    assert float(StableClock(2.0, "stable", 3.0).terminal(keys[:1])) == 18.0
    # continuity: near 2 the law contracts to the constant
    assert float(StableClock(1.9999).quantile(0.5)) == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize(
    "clock",
    [StableClock(0.8), StableClock(1.2), StableClock(1.5), StableClock(1.9), StableClock(1.99)]
    + [StudentTClock(nu) for nu in (1.0, 2.0, 3.0, 5.0)]
    + [StableClock(1.5).splice(tail_index=1.2), StudentTClock(3.0).splice(0.9, tail_index=2.0)],
    ids=str,
)
def test_draws_pass_kolmogorov_smirnov(keys: Keys, clock: Clock) -> None:
    assert ks_distance(clock, clock.terminal(keys[:50_000])) < KS_5_PERCENT


def test_student_t_source_is_student_t(keys: Keys) -> None:
    z = keys.at(purpose="latents").normal(dtype=torch.float64)
    for nu in (1.0, 3.0):
        x = StudentTClock(nu).terminal(keys).sqrt() * z
        assert stats.kstest(x.numpy(), stats.t(nu).cdf).statistic < KS_5_PERCENT / math.sqrt(N)


@pytest.mark.parametrize(
    ("clock", "quantiles"),
    [(StableClock(alpha, "stable"), q) for alpha, q in STABLE_QUANTILES.items()]
    + [(StudentTClock(nu), q) for nu, q in STUDENT_QUANTILES.items()],
    ids=str,
)
def test_source_has_the_tabulated_quantiles(keys: Keys, clock: Clock, quantiles: tuple[float, ...]) -> None:
    for level, x in zip(LEVELS, quantiles, strict=True):
        assert mixture_sf(clock, x) == pytest.approx(1 - level, rel=3e-4)
    x = clock.terminal(keys).sqrt() * keys.at(purpose="latents").normal(dtype=torch.float64)
    for level, q in zip(LEVELS, quantiles, strict=True):
        p = 2 * (1 - level)  # both tails
        assert abs(float((x.abs() > q).double().mean()) - p) < 4 * math.sqrt(p * (1 - p) / N)


def test_a_clamped_sampler_fails_the_tail_test(keys: Keys) -> None:
    """The control: an atom at a cap of 20, which keeps the bulk and loses the tail."""
    clock = StableClock(1.2, "stable")
    clamped = clock.terminal(keys).clamp(max=20.0)
    x = clamped.sqrt() * keys.at(purpose="latents").normal(dtype=torch.float64)
    p = 2 * (1 - 0.999)
    assert abs(float((x.abs() > STABLE_QUANTILES[1.2][3]).double().mean()) - p) > 4 * math.sqrt(p * (1 - p) / N)
    assert ks_distance(clock, clamped) > KS_5_PERCENT


@pytest.mark.parametrize(("alpha", "constant"), [(1.2, 0.55592), (1.5, 0.39894), (1.7, 0.26261), (1.8, 0.18323)])
def test_stable_tail_constant(alpha: float, constant: float) -> None:
    x = 1e6
    assert 2 * mixture_sf(StableClock(alpha, "stable"), x) * x**alpha == pytest.approx(constant, rel=1e-3)
    a = alpha / 2
    far = StableClock(alpha).sf(1e40)
    assert float(far) == pytest.approx(1e40**-a / math.gamma(1 - a), rel=1e-10)


def test_alpha_one_is_levy_and_equals_one_degree_of_freedom(keys: Keys) -> None:
    a = torch.logspace(-2, 30, 200, dtype=torch.float64)
    stable, student = StableClock(1.0, "stable", 1.0), StudentTClock(1.0)
    levy = special.erfc(1 / np.sqrt(2 * a.numpy()))
    np.testing.assert_allclose(stable.cdf(a), levy, rtol=1e-10)
    np.testing.assert_allclose(student.cdf(a), levy, rtol=1e-10)
    np.testing.assert_allclose(stable.sf(a), special.erf(1 / np.sqrt(2 * a.numpy())), rtol=1e-12)
    np.testing.assert_allclose(
        stable.quantile(torch.tensor(LEVELS)), student.quantile(torch.tensor(LEVELS)), rtol=1e-10
    )
    half = N // 2
    two_sample = stats.ks_2samp(stable.terminal(keys[:half]).numpy(), student.terminal(keys[half:]).numpy()).statistic
    assert two_sample < KS_5_PERCENT * math.sqrt(2 / half)


@pytest.mark.parametrize("alpha", [0.6, 1.2, 1.7, 1.95])
def test_stable_distribution_function_equals_zolotarevs_integral(alpha: float) -> None:
    """An adaptive quadrature of (1/π) ∫ exp(-x^(-a/b) K(u)) du, written out independently."""
    a, b = alpha / 2, 1 - alpha / 2

    def log_k(u: float) -> float:
        return (a * math.log(math.sin(a * u)) + b * math.log(math.sin(b * u)) - math.log(math.sin(u))) / b

    for x in (0.5, 0.95, 1.1, 1.4, 4.0, 300.0):
        power = x ** (-a / b)
        edges = np.concatenate([[1e-9], np.pi - np.logspace(np.log10(3.0), -9, 60)])
        pieces = zip(edges[:-1], edges[1:], strict=True)
        f = lambda u, y=power: math.exp(-min(y * math.exp(min(log_k(u), 700.0)), 745.0))  # noqa: E731
        integral = sum(integrate.quad(f, lo, hi, epsabs=1e-13, epsrel=1e-11)[0] for lo, hi in pieces)
        assert float(StableClock(alpha).cdf(x)) == pytest.approx(integral / math.pi, abs=2e-9)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5, 1.9, 1.99, 1.9999])
def test_stable_tails_join_smoothly_and_invert(alpha: float) -> None:
    clock = StableClock(alpha)
    joint = 0.8 ** (-2 / alpha)  # where the integral hands over to the series
    below, above = clock.sf(torch.tensor([joint * (1 - 1e-13), joint * (1 + 1e-13)], dtype=torch.float64))
    assert float(below) == pytest.approx(float(above), rel=1e-9)
    u = torch.tensor([1e-12, 1e-3, 0.3, 0.5, 0.8, 0.999], dtype=torch.float64)
    np.testing.assert_allclose(clock.cdf(clock.quantile(u)), u, rtol=1e-9)
    q = torch.tensor([1e-40, 1e-12, 1e-3, 0.4], dtype=torch.float64)
    np.testing.assert_allclose(clock.sf(clock.upper_quantile(q)), q, rtol=1e-9)


@pytest.mark.parametrize("clock", CLOCKS, ids=str)
def test_distribution_functions_are_consistent(clock: Clock) -> None:
    a = torch.tensor([-1.0, 0.0, 0.1, 0.7, 1.0, 5.0, 1e3, math.inf], dtype=torch.float64)
    cdf, sf = clock.cdf(a), clock.sf(a)
    torch.testing.assert_close(cdf + sf, torch.ones_like(a), rtol=0, atol=1e-12)
    assert torch.all(cdf.diff() >= 0)
    assert cdf[0] == 0 and cdf[1] == 0 and sf[-1] == 0
    assert clock.median == float(clock.quantile(0.5))
    if math.isfinite(clock.tail_index):
        u = torch.tensor([0.01, 0.5, 0.93, 0.97, 0.9999], dtype=torch.float64)
        torch.testing.assert_close(clock.cdf(clock.quantile(u)), u, rtol=0, atol=1e-12)
        ratio = clock.upper_quantile(1e-30) / clock.upper_quantile(1e-32)
        assert float(2 * math.log(100) / -ratio.log()) == pytest.approx(clock.tail_index, rel=1e-4)


@pytest.mark.parametrize(
    ("clock", "values"),
    [
        (StudentTClock(3.0), {0.25: 0.653703, 0.5: 0.483358, 1.0: 0.297821, 2.0: 0.139731}),
        (StudentTClock(5.0), {0.25: 0.702496, 0.5: 0.523994, 1.0: 0.317283, 2.0: 0.138660}),
        (StableClock(1.0, "stable"), {0.5: 0.367879}),
        (GaussianClock(), {0.5: math.exp(-0.5), 0.0: 1.0}),
    ],
    ids=str,
)
def test_laplace_transforms(clock: Clock, values: dict[float, float]) -> None:
    l = torch.tensor(list(values), dtype=torch.float64)
    np.testing.assert_allclose(torch.exp(clock.log_laplace(l)), list(values.values()), rtol=0, atol=5.1e-7)


@pytest.mark.parametrize(
    "clock",
    [StudentTClock(60.0), StudentTClock(3.0).splice(0.9, tail_index=2.0), StableClock(1.5).splice(tail_index=1.2)],
)
def test_laplace_transform_equals_quadrature_over_the_quantile(clock: Clock) -> None:
    logit = np.arange(-40.0, 40.0, 0.01)
    a = clock._invert(special.expit(logit), special.expit(-logit))
    weight = special.expit(logit) * special.expit(-logit) * 0.01
    for l in (0.1, 1.0, 4.0):
        exact = float(torch.exp(clock.log_laplace(torch.tensor(l))))
        assert exact == pytest.approx(float(np.sum(np.exp(-l * a) * weight)), abs=1e-6)


def test_medians_and_the_gaussian_limit() -> None:
    assert StudentTClock(1.0).median == pytest.approx(1 / (2 * special.erfinv(0.5) ** 2), rel=1e-12)
    assert [round(StudentTClock(nu).median, 3) for nu in (1.0, 3.0, 5.0)] == [2.198, 1.268, 1.149]
    limit = StudentTClock(1e6)
    assert float(limit.quantile(0.999)) == pytest.approx(1.0, abs=1e-2)
    assert float(limit.log_laplace(torch.tensor(2.0))) == pytest.approx(-2.0, abs=1e-5)


def test_half_precision_cannot_hold_heavy_clocks() -> None:
    """Why A stays in float64: float16 ends at 65504."""
    assert float(StudentTClock(1.0).sf(65504.0)) == pytest.approx(0.0031, abs=5e-5)
    with pytest.warns(UserWarning, match="nu = 0.4"):
        StudentTClock(0.4)
    assert float(StudentTClock(0.5).sf(65504.0)) == pytest.approx(0.049, abs=5e-4)


# ---- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [1, 4, 16, 64])
def test_stable_increments_sum_to_the_terminal_law(keys: Keys, grid: int) -> None:
    clock, part = StableClock(1.5), keys[:20_000]
    path = clock.path(part, grid)
    assert path.shape == (20_000, grid + 1) and torch.all(path[:, 0] == 0) and torch.all(path.diff(dim=1) >= 0)
    assert ks_distance(clock, path[:, -1]) < KS_5_PERCENT
    if grid == 1:
        assert torch.equal(path[:, -1], clock.terminal(part))
    else:  # self-similar: T_s = s^(1/a) T_1 in law
        assert ks_distance(clock, path[:, grid // 4] * 0.25 ** (-2 / 1.5)) < KS_5_PERCENT


@pytest.mark.parametrize("bridge", [0.05, 1.0, 20.0])
def test_gamma_bridge_has_the_dirichlet_moments_and_ends_at_the_terminal_value(keys: Keys, bridge: float) -> None:
    clock, part = StudentTClock(3.0, bridge=bridge), keys[:20_000]
    path, terminal = clock.path(part, 16), clock.terminal(part)
    assert torch.equal(path[:, -1], terminal) and torch.all(path[:, 0] == 0) and torch.all(path.diff(dim=1) >= 0)
    assert torch.isfinite(path).all()
    share = path[:, 4] / terminal  # Beta(κ/4, 3κ/4)
    assert float(share.mean()) == pytest.approx(0.25, abs=4 * math.sqrt(0.1875 / (1 + bridge) / 20_000))
    assert float(share.var()) == pytest.approx(0.1875 / (1 + bridge), rel=0.05)
    x = np.linspace(0.001, 0.999, 999)  # nearer to 1 than float64 resolves lies an atom when κ is small
    distance = np.abs((share.numpy()[:, None] <= x).mean(0) - stats.beta(bridge / 4, 3 * bridge / 4).cdf(x)).max()
    assert distance < KS_5_PERCENT / math.sqrt(20_000)


def test_gaussian_path_is_time_itself(keys: Keys) -> None:
    assert torch.equal(GaussianClock().path(keys[:2], 4)[1], torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64))


@pytest.mark.parametrize("clock", CLOCKS, ids=str)
def test_a_clock_depends_on_its_own_key_only(keys: Keys, clock: Clock) -> None:
    chosen = torch.tensor([5, 41, 3])
    assert torch.equal(clock.terminal(keys[:64])[chosen], clock.terminal(keys[chosen]))
    assert torch.equal(clock.path(keys[:64], 7)[chosen], clock.path(keys[chosen], 7))
    assert clock.terminal(keys[:0]).shape == (0,) and clock.path(keys[:0], 7).shape == (0, 8)
    assert clock.terminal(keys[:3]).dtype == torch.float64


# ---- the spliced tail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [StableClock(1.5), StudentTClock(3.0)], ids=str)
def test_splicing_keeps_the_bulk_bit_for_bit_and_moves_the_tail_monotonically(keys: Keys, base: Clock) -> None:
    part = keys[:20_000]
    plain, u0 = base.terminal(part), 0.95
    bulk = plain <= base.quantile(u0)
    drawn = [base.splice(u0, tail_index=index).terminal(part) for index in (1.0, 1.5, 2.5)]
    for a in drawn:
        assert torch.equal(a[bulk], plain[bulk])
        assert torch.all(a[~bulk] > float(base.quantile(u0)) * (1 - 1e-12))
        assert torch.equal(a.argsort(), plain.argsort())  # the order of the base draws stays
    assert torch.all(drawn[0][~bulk] > drawn[1][~bulk]) and torch.all(drawn[1][~bulk] > drawn[2][~bulk])
    path, old = base.splice(u0, tail_index=1.0).path(part, 8), base.path(part, 8)
    inside = old[:, -1] <= base.quantile(u0)
    assert torch.equal(path[inside], old[inside]) and torch.all(path.diff(dim=1) >= 0)
    torch.testing.assert_close(path / path[:, -1:], old / old[:, -1:], rtol=1e-12, atol=0)


def test_spliced_student_t_path_ends_at_its_terminal_value(keys: Keys) -> None:
    clock = StudentTClock(3.0).splice(tail_index=1.5)
    assert torch.equal(clock.path(keys[:5000], 8)[:, -1], clock.terminal(keys[:5000]))


def test_spliced_law_is_pareto_above_its_threshold() -> None:
    clock = StableClock(1.5).splice(0.95, tail_index=1.2)
    assert float(clock.cdf(clock.threshold)) == pytest.approx(0.95, rel=1e-12)
    assert float(clock.sf(clock.threshold * 100)) == pytest.approx(0.05 * 100**-0.6, rel=1e-12)
    assert clock.median == StableClock(1.5).median
    again = clock.splice(0.99, tail_index=2.0)  # a spliced clock is a clock
    assert float(again.sf(again.threshold * 100)) == pytest.approx(0.01 * 100**-1.0, rel=1e-9)


@pytest.mark.parametrize("clock", [GaussianClock(), StableClock(2.0)])
def test_a_constant_clock_has_no_tail_to_splice(clock: Clock) -> None:
    with pytest.raises(ConfigError, match="no tail to replace"):
        clock.splice(tail_index=1.5)


# ---- values, errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", CLOCKS, ids=str)
def test_clocks_survive_json(clock: Clock) -> None:
    again = Clock.from_dict(json.loads(json.dumps(clock.to_dict())))
    assert again == clock and hash(again) == hash(clock)


@pytest.mark.parametrize("alpha", [0, -1.0, 2.1, math.nan, math.inf, "1.5", True, None])
def test_impossible_alpha_names_argument_value_and_range(alpha: object) -> None:
    with pytest.raises(ConfigError) as error:
        StableClock(alpha)
    assert "alpha" in str(error.value) and repr(alpha) in str(error.value) and "(0, 2]" in str(error.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StudentTClock(0.0), "nu is 0.0"),
        (lambda: StudentTClock(math.nan), "nu is nan"),
        (lambda: StudentTClock(math.inf), "GaussianClock"),
        (lambda: StudentTClock(3.0, bridge=0.0), "bridge is 0.0"),
        (lambda: StableClock(1.5, "gausian"), "Did you mean 'gaussian'"),
        (lambda: StableClock(1.5, scale=2.0), "use 'stable'"),
        (lambda: StableClock(1.5).splice(1.0, tail_index=2.0), "u0 is 1.0"),
        (lambda: StableClock(1.5).splice(tail_index=0.0), "tail_index is 0.0"),
        (lambda: SplicedClock("stable", tail_index=1.0), "expected a clock"),
        (lambda: StableClock(1.5).path(training_keys(0, 0, torch.arange(2)), 0), "grid is 0"),
        (lambda: StableClock(1.5).quantile(1.5), "lie in \\[0, 1\\]"),
        (lambda: StableClock(1.5).log_laplace(torch.tensor(-1.0)), "l >= 0"),
        (lambda: Clock.from_dict({"law": "stabel", "alpha": 1.5}), "Did you mean 'stable'"),
        (lambda: Clock.from_dict({"law": "stable", "alpah": 1.5}), "Did you mean 'alpha'"),
        (lambda: Clock.from_dict({"law": "stable"}), "needs 'alpha'"),
        (lambda: Clock.from_dict({"alpha": 1.5}), "key 'law'"),
    ],
)
def test_errors_say_what_was_got_and_what_to_do(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_values_beyond_float64_are_replaced_and_counted(keys: Keys) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        a = StableClock(0.02).terminal(keys[:4000])
    small, large = count_replaced(a)
    assert torch.isfinite(a).all() and torch.all(a > 0) and large > 0
    assert any(f"{small} underflowed and {large} overflowed" in str(w.message) for w in caught)
    # the number of replaced draws is the law's own: P(log S > log max)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = float(StableClock(0.02).sf(torch.finfo(torch.float64).max))
    assert abs(large / 4000 - p) < 4 * math.sqrt(p * (1 - p) / 4000)
