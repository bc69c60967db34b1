"""Noise levels and grids: closed forms, tables, monotonicity at every step count, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler

from genkit.errors import ConfigError
from genkit.schedulers import FlowScheduler, ProductScheduler, VPScheduler

NAMES = ("flow", "shifted_flow", "cosine", "linear", "scaled_linear", "edm")
VP = ("cosine", "linear", "scaled_linear", "edm")
STEPS = (1, 2, 3, 5, 9, 27, 50, 999, 1000)
TYPES = ("epsilon", "sample", "v_prediction", "flow")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", STEPS)
def test_times_are_finite_and_strictly_monotone(make_scheduler, name, n):
    scheduler = make_scheduler(name)
    times = scheduler.times(n)
    assert times.shape == (n + 1,) and times.dtype == torch.float64
    assert float(times[0]) == 1.0 and float(times[-1]) == 0.0
    assert bool((times[1:] < times[:-1]).all())
    assert torch.equal(times, times.float().double())  # the network is told the very time the kernel uses
    alpha, sigma = scheduler.alpha_sigma(times)
    assert bool(torch.isfinite(alpha).all() and torch.isfinite(sigma).all())
    assert bool((sigma[1:] < sigma[:-1]).all()) and bool((alpha[1:] > alpha[:-1]).all())
    assert float(sigma[-1]) == 0.0 and float(alpha[-1]) == 1.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", STEPS)
def test_timesteps_of_diffusers_loops_are_float32_and_strictly_monotone(make_scheduler, name, n):
    scheduler = make_scheduler(name)
    scheduler.set_timesteps(n, device="cpu")
    timesteps = scheduler.timesteps
    assert timesteps.shape == (n,) and timesteps.dtype == torch.float32
    assert bool((timesteps[1:] < timesteps[:-1]).all()) and float(timesteps[-1]) > 0
    torch.testing.assert_close(timesteps.double(), scheduler.times(n)[:-1] * 1000, rtol=1e-6, atol=0)
    x = torch.ones(2, 3)
    for t in timesteps[[0, n // 2, n - 1]]:  # finite steps at the start, in the middle and onto t = 0
        x = scheduler.step(0.3 * x, t, x, generator=torch.Generator().manual_seed(0)).prev_sample
    assert x.dtype == torch.float32 and bool(torch.isfinite(x).all())


@pytest.mark.parametrize("name", NAMES)
def test_times_is_pure(make_scheduler, name):
    scheduler = make_scheduler(name)
    before = dict(vars(scheduler))
    assert torch.equal(scheduler.times(7), scheduler.times(7))
    assert vars(scheduler) == before


@pytest.mark.parametrize("name", NAMES)
def test_levels_do_not_depend_on_how_the_times_are_held(make_scheduler, name):
    scheduler = make_scheduler(name)
    for t in (1.0, 0.3, 0.0):
        alpha, sigma = scheduler.alpha_sigma(t)
        for held in (torch.tensor(t), torch.full((5,), t).double(), torch.tensor(t, dtype=torch.float64).expand(5)):
            a, s = scheduler.alpha_sigma(held)
            assert a.shape == s.shape == held.shape and a.dtype == torch.float64
            torch.testing.assert_close(a, alpha.expand(held.shape), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(s, sigma.expand(held.shape), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", VP)
def test_variance_is_preserved(make_scheduler, name):
    t = torch.linspace(0, 1, 1001, dtype=torch.float64)
    alpha, sigma = make_scheduler(name).alpha_sigma(t)
    assert float((alpha**2 + sigma**2 - 1).abs().max()) < 1e-14


def product_table(name: str, n: int, start: float, end: float) -> torch.Tensor:
    if name == "linear":
        betas = torch.linspace(start, end, n, dtype=torch.float64)
    else:
        betas = torch.linspace(start**0.5, end**0.5, n, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, 0)


@pytest.mark.parametrize("name", ["linear", "scaled_linear"])
@pytest.mark.parametrize(("n", "start", "end"), [(1000, 1e-4, 0.02), (1000, 0.00085, 0.012), (250, 4e-4, 0.08)])
def test_linear_levels_are_the_cumulative_products_at_every_k(name, n, start, end):
    scheduler = VPScheduler(name, "epsilon", num_train_timesteps=n, beta_start=start, beta_end=end)
    alpha, sigma = scheduler.alpha_sigma(torch.arange(1, n + 1, dtype=torch.float64) / n)
    table = product_table(name, n, start, end)
    tolerance = 1e-10 if n == 1000 else 1e-8  # the expansion's next term is of order (dβ/dk)³
    torch.testing.assert_close(alpha**2, table, rtol=tolerance, atol=0)
    torch.testing.assert_close(sigma**2, 1 - table, rtol=tolerance, atol=1e-13)
    assert float(scheduler.alpha_sigma(0.0)[1]) == 0.0


@pytest.mark.parametrize("name", ["linear", "scaled_linear"])
@pytest.mark.parametrize(
    ("n", "start", "end"), [(2, 1e-4, 0.02), (10, 1e-4, 0.02), (50, 0.002, 0.4), (100, 1e-4, 0.02)]
)
def test_few_factors_have_monotone_levels_before_the_first_one_too(name, n, start, end):
    scheduler = VPScheduler(name, "epsilon", num_train_timesteps=n, beta_start=start, beta_end=end)
    sigma = scheduler.alpha_sigma(torch.linspace(0.1 / n, 1, 5001, dtype=torch.float64))[1]
    assert bool((sigma.diff() > 0).all()) and float(scheduler.alpha_sigma(0.0)[1]) == 0.0
    table = product_table(name, n, start, end)
    at_factors = scheduler.alpha_sigma(torch.arange(1, n + 1, dtype=torch.float64) / n)[0] ** 2
    torch.testing.assert_close(at_factors, table, rtol=1e-4, atol=0)
    h = 1e-7 / n  # value and slope meet at the first factor
    before, at, after = (float(scheduler.alpha_sigma(1 / n + shift)[0].log()) for shift in (-h, 0.0, h))
    assert (after - at) == pytest.approx(at - before, rel=1e-4)


@pytest.mark.parametrize("name", ["linear", "scaled_linear"])
def test_linear_levels_are_smooth_between_the_entries_of_the_table(name):
    scheduler = VPScheduler(name, "epsilon")
    t = torch.linspace(0.1, 0.9, 8001, dtype=torch.float64)
    log_alpha = scheduler.alpha_sigma(t)[0].log()
    second = (log_alpha[2:] - 2 * log_alpha[1:-1] + log_alpha[:-2]) / (t[1] - t[0]) ** 2
    assert float(second.diff().abs().max()) < 0.02 * float(second.abs().mean())
    # the control: linear interpolation of the table has kinks
    table = torch.cat((torch.ones(1), product_table(name, 1000, 1e-4, 0.02))).log().double() / 2
    k = t * 1000
    low = k.floor().long()
    interpolated = table[low] + (k - low) * (table[low + 1] - table[low])
    kinked = (interpolated[2:] - 2 * interpolated[1:-1] + interpolated[:-2]) / (t[1] - t[0]) ** 2
    assert float(kinked.diff().abs().max()) > float(second.abs().mean())


def test_linear_levels_agree_with_diffusers():
    theirs = DDPMScheduler(beta_schedule="linear").alphas_cumprod
    ours = VPScheduler("linear", "epsilon").alpha_sigma(torch.arange(1, 1001).double() / 1000)[0] ** 2
    torch.testing.assert_close(ours.float(), theirs, rtol=2e-5, atol=0)


@pytest.mark.parametrize("n", [2, 5, 18, 40])
def test_the_edm_walk_visits_the_karras_levels(n):
    scheduler = VPScheduler("edm", "epsilon", sigma_min=0.01, sigma_max=50.0, rho=5.0)
    alpha, sigma = scheduler.alpha_sigma(scheduler.times(n))
    i = torch.arange(n, dtype=torch.float64)
    karras = (50.0 ** (1 / 5) + i / (n - 1) * (0.01 ** (1 / 5) - 50.0 ** (1 / 5))) ** 5
    torch.testing.assert_close((sigma / alpha)[:-1], karras, rtol=5e-6, atol=0)  # times are rounded to float32


def test_the_shifted_grid_is_diffusers():
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs.set_timesteps(sigmas=[1 - i / 8 for i in range(8)])
    torch.testing.assert_close(FlowScheduler(shift=3.0).times(8).float(), theirs.sigmas, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_level_rates_are_the_derivatives(make_scheduler, name):
    scheduler = make_scheduler(name)
    t, h = torch.linspace(0.05, 0.95, 19, dtype=torch.float64), 1e-5
    after, before = scheduler.alpha_sigma(t + h), scheduler.alpha_sigma(t - h)
    for exact, plus, minus in zip(scheduler._rates(t, None), after, before, strict=True):
        torch.testing.assert_close(exact, (plus - minus) / (2 * h), rtol=2e-6, atol=1e-6)


def test_a_context_scale_multiplies_sigma(make_scheduler):
    scale = torch.tensor([0.5, 2.0, 30.0])
    for name in NAMES:
        scheduler = make_scheduler(name)
        for t in (torch.tensor(0.4), torch.tensor([0.4, 0.1, 0.9]), torch.tensor(0.4).expand(3)):
            alpha, sigma = scheduler.alpha_sigma(t)
            scaled_alpha, scaled_sigma = scheduler.alpha_sigma(t, {"scale": scale})
            torch.testing.assert_close(scaled_sigma, sigma * scale.double())
            torch.testing.assert_close(scaled_alpha.expand(3), alpha.expand(3))
        per_channel = torch.rand(3, 1, 1, 2)
        _, sigma = scheduler.alpha_sigma(torch.tensor([0.4, 0.1, 0.9]), {"scale": per_channel})
        assert sigma.shape == (3, 1, 1, 2)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_epsilon_is_refused_exactly_where_alpha_of_1_is_0(make_scheduler):
    for name in ("flow", "shifted_flow", "cosine"):
        with pytest.raises(ConfigError, match=r"α\(1\) = 0.*'v_prediction'"):
            make_scheduler(name, "epsilon")
    for name in ("linear", "scaled_linear", "edm"):
        assert float(make_scheduler(name, "epsilon").alpha_sigma(1.0)[0]) > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prediction_type", TYPES)
def test_every_accepted_prediction_type_is_finite_at_both_ends(make_scheduler, name, prediction_type):
    if prediction_type == "epsilon" and name in ("flow", "shifted_flow", "cosine"):
        pytest.skip("refused at construction")
    scheduler = make_scheduler(name, prediction_type)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    for t in (1.0, 0.0):
        assert bool(torch.isfinite(scheduler.to_x0(0.5 * x, t, x)).all())
        assert bool(torch.isfinite(scheduler.target(x, 2 * x, t)).all())
        if prediction_type != "epsilon":
            assert bool(torch.isfinite(scheduler.from_x0(0.5 * x, t, x)).all())
    for eta in (0.0, 0.5, 1.0):
        for t, s in ((1.0, 0.5), (1.0, 0.0), (0.5, 0.0), (1.0, 1.0), (0.0, 0.0)):
            step = scheduler.transition(0.5 * x, t, s, x, eta=eta)
            assert bool(torch.isfinite(step.mean).all() and torch.isfinite(step.std).all()), (t, s, eta)


@pytest.mark.parametrize("eta", [-0.1, 1.5, float("nan"), float("inf"), "1", None, [0.5]])
def test_eta_outside_0_to_1_is_refused(eta):
    with pytest.raises(ConfigError, match="expected a number from 0"):
        FlowScheduler(eta=eta)
    if eta is not None:
        with pytest.raises(ConfigError, match="expected a number from 0"):
            FlowScheduler().transition(torch.ones(1, 2), 0.5, 0.2, torch.ones(1, 2), eta=eta)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"prediction_type": "v-prediction"}, "Did you mean 'v_prediction'"),
        ({"beta_start": 0.0}, "0 < beta_start < beta_end < 1"),
        ({"beta_start": 0.3, "beta_end": 0.2}, "0 < beta_start < beta_end < 1"),
        ({"beta_end": float("nan")}, "0 < beta_start < beta_end < 1"),
        ({"sigma_min": 90.0}, "0 < sigma_min < sigma_max"),
        ({"rho": 0.0}, "rho > 0"),
        ({"num_train_timesteps": 0}, "positive integer"),
        ({"num_train_timesteps": 10.5}, "positive integer"),
        ({"num_train_timesteps": True}, "positive integer"),
    ],
)
def test_impossible_levels_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        VPScheduler(**options)


@pytest.mark.parametrize("shift", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_shift_is_refused(shift):
    with pytest.raises(ConfigError, match="positive"):
        FlowScheduler(shift=shift)


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "5"])
def test_impossible_step_counts_are_refused(n):
    with pytest.raises(ConfigError, match="positive integer"):
        FlowScheduler().times(n)


def test_integer_times_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"torch.int64.*divide by scheduler.num_train_timesteps"):
        FlowScheduler().alpha_sigma(torch.tensor([500]))


def test_timesteps_before_set_timesteps_and_foreign_timesteps_are_refused():
    scheduler = VPScheduler()
    with pytest.raises(ConfigError, match="before set_timesteps"):
        _ = scheduler.timesteps
    scheduler.set_timesteps(10)
    x = torch.zeros(1, 2)
    with pytest.raises(ConfigError, match="not one of the 10 timesteps"):
        scheduler.step(x, 333.0, x)


# ---- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    [
        FlowScheduler("v_prediction", eta=0.25, shift=3.0, num_train_timesteps=500),
        VPScheduler("linear", "epsilon", eta=0.5, beta_end=0.012),
        VPScheduler("edm", "sample", rho=5.0, sigma_max=40.0),
    ],
)
def test_configurations_survive_a_json_round_trip(scheduler, tmp_path):
    scheduler.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "scheduler_config.json").read_text())
    assert written["_class_name"] == type(scheduler).__name__
    loaded = type(scheduler).from_pretrained(tmp_path)
    again = type(scheduler).from_config(scheduler.config)
    for other in (loaded, again):
        assert {k: v for k, v in other.config.items() if not k.startswith("_")} == {
            k: v for k, v in scheduler.config.items() if not k.startswith("_")
        }
        assert torch.equal(other.alpha_sigma(other.times(9))[1], scheduler.alpha_sigma(scheduler.times(9))[1])
        assert other.eta == scheduler.eta and other.prediction_type == scheduler.prediction_type


def test_product_configuration_survives_a_json_round_trip(tmp_path):
    scheduler = ProductScheduler(
        {"lattice": VPScheduler("cosine", eta=0.5), "coords": FlowScheduler(shift=2.0)}, masks={"coords": "mask"}
    )
    scheduler.save_pretrained(tmp_path)
    loaded = ProductScheduler.from_pretrained(tmp_path)
    assert list(loaded.schedulers) == ["lattice", "coords"] and loaded.masks == {"coords": "mask"}
    assert loaded.schedulers["lattice"].eta == 0.5 and loaded.schedulers["coords"].shift == 2.0
    assert type(loaded.schedulers["coords"]) is FlowScheduler
    assert torch.equal(loaded.times(5), scheduler.times(5))


def test_unknown_options_name_the_nearest_key():
    with pytest.raises(ConfigError, match="'shfit'.*Did you mean 'shift'"):
        FlowScheduler.from_config({"shfit": 3.0})
    with pytest.raises(ConfigError, match="'scheduel'.*Did you mean 'schedule'"):
        VPScheduler.from_config({"schedule": "linear"}, scheduel="cosine")
    with pytest.raises(TypeError, match="shfit"):
        FlowScheduler(shfit=3.0)


def test_a_file_with_an_unknown_option_is_refused(tmp_path):
    FlowScheduler().save_pretrained(tmp_path)
    path = tmp_path / "scheduler_config.json"
    config = json.loads(path.read_text())
    config["et"] = config.pop("eta")
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'et'.*Did you mean 'eta'"):
        FlowScheduler.from_pretrained(tmp_path)


def test_a_foreign_configuration_carries_the_shared_keys_over():
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0, num_train_timesteps=500)
    ours = FlowScheduler.from_config(theirs.config)
    assert ours.shift == 3.0 and ours.num_train_timesteps == 500
    assert VPScheduler.from_config(DDPMScheduler(prediction_type="sample").config).prediction_type == "sample"


def test_cosine_levels_are_exact():
    alpha, sigma = VPScheduler("cosine").alpha_sigma(torch.tensor([1.0, 0.5, 0.0]))
    assert alpha.tolist() == [0.0, math.cos(math.pi / 4), 1.0] and float(sigma[0]) == 1.0
