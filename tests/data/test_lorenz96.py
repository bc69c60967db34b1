from __future__ import annotations

import math

import pytest
import torch

from genkit.data.lorenz96 import Lorenz96, TwoLevelSystem, advection
from genkit.errors import ConfigError

SMALL = {
    "num_samples": 240,
    "num_fast": 4,
    "forcing": 8.0,
    "num_trajectories": 60,
    "spin_up": 2.0,
    "spacing": 0.6,
    "max_step": 0.02,
}


@pytest.fixture(scope="module")
def test_set() -> Lorenz96:
    return Lorenz96("test", **SMALL)


def keyed(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def states(system: TwoLevelSystem, count: int = 3) -> torch.Tensor:
    """States on the attractor, near enough."""
    return system.integrate(system.start(count, keyed()), 1.0)


def naive_tendency(system: TwoLevelSystem, state: list[float]) -> list[float]:
    """Wilks' equations, index by index."""
    k, j = system.num_slow, system.num_fast
    x, y = state[:k], state[k:]
    c, b, h = system.time_ratio, system.amplitude_ratio, system.coupling
    slow = []
    for i in range(k):
        felt = sum(y[i * j + m] for m in range(j))
        slow.append(-x[i - 1] * (x[i - 2] - x[(i + 1) % k]) - x[i] + system.forcing - h * c / b * felt)
    fast = []
    for i in range(k * j):
        ahead = y[(i + 1) % (k * j)] * (y[(i + 2) % (k * j)] - y[i - 1])
        fast.append(-c * b * ahead - c * y[i] + h * c / b * x[i // j])
    return slow + fast


# the equations


@pytest.mark.parametrize(
    ("slow", "fast", "ratio"), [(8, 32, 4.0), (5, 3, 10.0), (4, 1, 2.0), (40, 0, 1.0)], ids=lambda v: f"{v:g}"
)
def test_the_tendency_is_that_of_a_naive_loop(slow, fast, ratio):
    system = TwoLevelSystem(slow, fast, forcing=18.0, coupling=0.7, time_ratio=ratio)
    state = torch.randn(slow * (1 + fast), 3, generator=keyed(), dtype=torch.float64)
    found = system.tendency(state)
    for p in range(3):
        assert found[:, p].tolist() == pytest.approx(naive_tendency(system, state[:, p].tolist()), abs=1e-11)


@pytest.mark.parametrize("n", [4, 5, 8, 37])
def test_advection_keeps_the_energy(n):
    y = torch.randn(n, 20, generator=keyed(), dtype=torch.float64)
    assert float((y * advection(y)).sum(0).abs().max()) < 1e-12
    shifted = torch.roll(y, 1, 0) * (torch.roll(y, -1, 0) - torch.roll(y, -2, 0))  # the control: one index off
    assert n == 4 or float((y * shifted).sum(0).abs().max()) > 0.1  # a circle of four does not tell


def test_the_levels_exchange_energy_without_loss():
    """d(Σ X² + Σ Y²)/dt = -2 Σ X² - 2 c Σ Y² + 2 F Σ X: the coupling takes from one level what it gives the other."""
    system = TwoLevelSystem()
    state = states(system)
    slow, fast = state[:8], state[8:]
    power = 2 * (state * system.tendency(state)).sum(0)
    expected = -2 * slow.square().sum(0) - 2 * 4.0 * fast.square().sum(0) + 2 * 20.0 * slow.sum(0)
    assert torch.allclose(power, expected, rtol=1e-12)


def test_the_system_looks_alike_from_every_variable():
    system = TwoLevelSystem(8, 4)
    state = states(system)
    turned = torch.cat((state[:8].roll(1, 0), state[8:].roll(4, 0)))
    later, turned_later = system.integrate(state, 0.1), system.integrate(turned, 0.1)
    assert torch.allclose(turned_later[:8], later[:8].roll(1, 0), atol=1e-9)
    assert torch.allclose(turned_later[8:], later[8:].roll(4, 0), atol=1e-9)


@pytest.mark.parametrize("system", [TwoLevelSystem(), TwoLevelSystem(40, 0, forcing=8.0)], ids=["two", "one"])
def test_the_integration_is_of_order_four(system):
    state = states(system)
    exact = system.integrate(state, 0.08, 0.08 / 256)
    errors = [float((system.integrate(state, 0.08, 0.08 / n) - exact).abs().max()) for n in (16, 32)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(4.0, abs=0.35)


def test_without_forcing_and_advection_the_state_decays_exponentially():
    system = TwoLevelSystem(6, 0, forcing=0.0)
    state = torch.full((6, 1), 2.0, dtype=torch.float64)  # equal neighbours: nothing is carried
    assert torch.allclose(system.integrate(state, 1.5), math.exp(-1.5) * state)
    assert float(state[0, 0]) == 2.0  # left as it was


def test_chaos_doubles_small_errors():
    """Lorenz: at F = 8 and K = 40 errors double in 0.42 units of time (2.1 days of 0.2), so grow by e in about 0.6."""
    system = TwoLevelSystem(40, 0, forcing=8.0)
    state = system.integrate(system.start(200, keyed()), 8.0, 0.05)
    other = state + 1e-6 * torch.randn(state.shape, generator=keyed(1), dtype=torch.float64)
    early, later = (system.integrate(s, 2.0, 0.05) for s in (state, other))
    first = (later - early).norm(dim=0).log().mean()
    second = (system.integrate(later, 4.0, 0.05) - system.integrate(early, 4.0, 0.05)).norm(dim=0).log().mean()
    assert float(second - first) / 4.0 == pytest.approx(math.log(2) / 0.42, rel=0.15)


def test_the_noise_has_its_size():
    system = TwoLevelSystem(4, 0, forcing=0.0, noise=1.5)
    later = system.integrate(torch.zeros(4, 4000, dtype=torch.float64), 0.02, 0.005, keyed())
    assert float(later.std()) == pytest.approx(1.5 * math.sqrt(0.02), rel=0.03)
    with pytest.raises(ConfigError, match="needs a generator"):
        system.integrate(torch.zeros(4, 1, dtype=torch.float64), 0.1)


# the data set


def test_equal_seeds_give_equal_sets_and_others_do_not():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again, other = (Lorenz96(seed=seed, **SMALL) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())  # the global generator is left alone
    assert torch.equal(first.states, again.states) and torch.equal(first.targets, again.targets)
    assert torch.equal(first.truth(2, 5), again.truth(2, 5))
    assert not torch.isclose(first.states, other.states).any(dim=1).all()


def test_splits_have_other_trajectories_and_the_same_scale(test_set):
    train = Lorenz96(**{**SMALL, "num_samples": 70})
    assert len(train) == 70
    assert float(torch.cdist(train.states, test_set.states).min()) > 1e-3
    for name in ("mean", "std", "scale"):
        assert torch.equal(getattr(train, name), getattr(test_set, name))


def test_a_target_is_the_state_one_lead_later():
    data = Lorenz96(num_fast=0, num_samples=90, num_trajectories=30, spacing=0.2, lead=0.2)
    assert torch.equal(data.targets[:60], data.states[30:])  # spacing = lead: each target is the next state
    moved = data.system.integrate(data.states[60:].T, 0.2)
    assert torch.allclose(moved.T, data.targets[60:], atol=1e-12)


def test_fast_variables_make_the_transition_random():
    """The slow states alone do not say where the trajectory goes: members with other fast states part."""
    system = TwoLevelSystem()
    state = system.integrate(system.start(40, keyed()), 3.0)
    state[:8] = state[:8, :1].expand(8, 40)
    spreads = []
    for duration in (0.2, 0.6):
        spreads.append(float(system.integrate(state, duration)[:8].std(dim=1).mean()))
    assert 0.0 < spreads[0] < spreads[1]


def test_samples_are_standardised_and_restore_the_target():
    data = Lorenz96(**{**SMALL, "num_samples": 2400, "num_trajectories": 600})
    batch = data[torch.arange(2400)]
    assert float(batch["sample"].square().mean()) == pytest.approx(1.0, abs=0.05)
    assert float(batch["condition"].mean()) == pytest.approx(0.0, abs=0.05)
    assert float(batch["condition"].std()) == pytest.approx(1.0, abs=0.05)
    assert torch.allclose(data.restore(batch["sample"], batch["state"]), batch["target"], atol=1e-5)
    assert torch.equal(batch["observation"], batch["sample"])
    assert torch.allclose(data.condition(batch["state"].expand(3, 2400, 8))[1], batch["condition"], atol=1e-6)


def test_truth_goes_on_where_the_split_ends(test_set):
    data = test_set
    truth = data.truth(4, 10)
    assert truth.shape == (5, 10, 8)
    assert torch.equal(truth[0], data.targets[-60:][:10].float())
    whole = data.system.integrate(data._last[:, :10], 4 * data.lead, 0.02)[:8].T
    assert torch.allclose(truth[4], whole.float(), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "all"}, "split must be one of train, validation, test"),
        ({"num_slow": 3}, "num_slow=3"),
        ({"num_fast": -1}, "num_fast=-1"),
        ({"time_ratio": 0.0}, "time_ratio=0.0"),
        ({"noise": -1.0}, "noise=-1.0"),
        ({"lead": 0.0}, "lead=0.0"),
        ({"spacing": 0.1}, "at least lead=0.2"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"forcing": math.inf}, "forcing=inf"),
        ({"max_step": 0.1, "num_samples": 20}, "smaller max_step"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        Lorenz96(**options)


def test_refusals_of_calls(test_set):
    data = test_set
    with pytest.raises(ConfigError, match="raise num_trajectories"):
        data.truth(1, 61)
    with pytest.raises(ConfigError, match=r"expected \(…, 8\)"):
        data.condition(torch.zeros(2, 7))
    with pytest.raises(ConfigError, match="out of range"):
        data[torch.tensor([240])]
    with pytest.raises(ConfigError, match=r"expected \(40, P\)"):
        data.system.integrate(torch.zeros(8, 2, dtype=torch.float64), 0.1)
