"""Clock features: their normalisation, their meaning under other laws, and what a state dict pins."""

from __future__ import annotations

import json
import math

import pytest
import torch

from genkit.errors import CheckpointError, ConfigError
from genkit.pipelines.heavy_tailed_flow.clocks import Clock, GaussianClock, StableClock, StudentTClock
from genkit.pipelines.heavy_tailed_flow.features import ClockFeatures
from genkit.samplers.noise import Keys, training_keys

STABLE = StableClock(1.5)


@pytest.fixture(scope="module")
def keys() -> Keys:
    return training_keys(11, 0, torch.arange(20_000)).at(purpose="clock")


@pytest.mark.parametrize("clock", [STABLE, StudentTClock(3.0)], ids=str)
def test_features_are_standardised_under_the_training_law(keys: Keys, clock: Clock) -> None:
    features = ClockFeatures(clock)
    values = features(clock.path(keys, 16))
    assert values.dtype == torch.float32 and values.shape == (20_000, 5) == (len(values), features.channels)
    # fresh keys: the mean of n values of variance about 1, and the 65,536 paths of the normaliser
    assert float(values.mean(0).abs().max()) < 4.5 * math.sqrt(1 / 20_000 + 1 / 65_536)
    # the variance of a sample deviation follows from the fourth moment, which these features have much of
    kurtosis = (values - values.mean(0)).pow(4).mean(0) / values.var(0).square()
    bound = 4.5 * torch.sqrt((kurtosis - 1) / 4 * (1 / 20_000 + 1 / 65_536))
    assert bool(((values.std(0) - 1).abs() < bound).all()) and float(bound.max()) < 0.2
    assert features.clipped_share(features(clock.path(keys, 16))) < 0.002


def test_the_first_and_last_feature_are_the_compressed_and_the_plain_terminal_value(keys: Keys) -> None:
    features = ClockFeatures(STABLE)
    path = STABLE.path(keys[:500], 16)
    compressed = torch.log1p(path[:, -1] / STABLE.median)
    first = (compressed - features.mean[0]) / features.std[0]
    last = (path[:, -1].log() - features.mean[-1]) / features.std[-1]
    values = features(path).double()
    torch.testing.assert_close(values[:, 0], first.clamp(-8, 8), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values[:, -1], last.clamp(-8, 8), rtol=1e-5, atol=1e-6)


def test_middle_features_say_when_the_clock_jumped() -> None:
    """One jump at u: the Lévy area is J (u - ½), so the second feature increases with the time of the jump."""
    features = ClockFeatures(STABLE)
    path = torch.zeros(16, 17, dtype=torch.float64)
    for cell in range(16):
        path[cell, cell + 1 :] = 5.0
    values = features(path)
    assert torch.all(values[:, 1].diff() > 0)
    assert float(values[:, [0, -1]].std(0).max()) < 1e-6  # the terminal value is the same


def test_terminal_features_depend_on_the_terminal_value_only(keys: Keys) -> None:
    features = ClockFeatures(STABLE, path_feature="terminal")
    path = STABLE.path(keys[:100], 16)
    straight = path[:, -1:] * torch.linspace(0, 1, 17, dtype=torch.float64)
    assert features.channels == 2
    torch.testing.assert_close(features(path), features(straight))
    full = ClockFeatures(STABLE)
    assert float((full(path) - full(straight)).abs().max()) > 0.5  # the control: the log-signature does see the path


def test_one_cell_leaves_only_the_terminal_value(keys: Keys) -> None:
    """A scalar clock: the path is a straight line, whose higher words vanish."""
    values = ClockFeatures(STABLE, grid=1)(STABLE.path(keys[:200], 1))
    assert float(values[:, 1:-1].abs().max()) < 1e-4
    torch.testing.assert_close(
        values[:, [0, -1]], ClockFeatures(STABLE, 1, path_feature="terminal")(STABLE.path(keys[:200], 1))
    )


@pytest.mark.parametrize("law", [StableClock(0.8), StudentTClock(0.6), GaussianClock()], ids=str)
def test_other_sampling_laws_stay_finite_and_are_counted(keys: Keys, law: Clock) -> None:
    features = ClockFeatures(STABLE)
    path = law.path(keys[:2000], 16)
    values = features(path)
    assert torch.isfinite(values).all() and float(values.abs().max()) <= 8
    assert features.clipped_share(features(path)) == pytest.approx(float((values.abs() == 8).float().mean()))
    if law == StableClock(0.8):
        assert features.clipped_share(features(path)) > 0.005


def test_constant_law_and_degenerate_paths() -> None:
    features = ClockFeatures(GaussianClock())
    keys = training_keys(0, 0, torch.arange(4))
    assert float(features(GaussianClock().path(keys, 16)).abs().max()) < 1e-6
    jump = torch.zeros(1, 17, dtype=torch.float64)
    jump[:, 9:] = 1e24  # all mass in one cell, equal values elsewhere
    assert torch.isfinite(features(jump)).all()
    assert features(jump[:0]).shape == (0, 5) and features.clipped_share(features(jump[:0])) == 0.0


def test_backends_agree(keys: Keys) -> None:
    pytest.importorskip("pysiglib")
    path = STABLE.path(keys[:100], 16)
    torch.testing.assert_close(ClockFeatures(STABLE)(path), ClockFeatures(STABLE, backend="pysiglib")(path))


def test_a_features_value_depends_on_its_own_path_only(keys: Keys) -> None:
    features, path = ClockFeatures(STABLE), STABLE.path(keys[:64], 16)
    torch.testing.assert_close(features(path)[[3, 40]], features(path[[3, 40]]), rtol=1e-6, atol=1e-6)


def test_state_dict_round_trip_and_half_precision(keys: Keys) -> None:
    features = ClockFeatures(STABLE)
    empty = ClockFeatures(STABLE, calibrate=False)
    assert not torch.equal(empty.mean, features.mean)
    empty.load_state_dict(features.state_dict())
    path = STABLE.path(keys[:50], 16)
    assert torch.equal(empty(path), features(path))
    assert all(isinstance(v, torch.Tensor) for v in features.state_dict().values())
    assert json.loads(bytes(features.config_json.tolist())) == features.to_dict()
    outer = torch.nn.Sequential(features, torch.nn.Linear(5, 2)).to(torch.bfloat16)
    assert outer[1].weight.dtype == torch.bfloat16 and features.mean.dtype == torch.float32
    assert torch.equal(features(path), empty(path))


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (lambda: ClockFeatures(StableClock(1.4), calibrate=False), "clock"),
        (lambda: ClockFeatures(STABLE, grid=8, calibrate=False), "grid"),
        (lambda: ClockFeatures(STABLE, depth=4, calibrate=False), "depth"),
        (lambda: ClockFeatures(STABLE, path_feature="terminal", calibrate=False), "path_feature"),
    ],
)
def test_a_checkpoint_of_another_configuration_is_refused(other, name: str) -> None:
    state = ClockFeatures(STABLE, calibrate=False).state_dict()
    target = other()
    before = {k: v.clone() for k, v in target.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"{name} = .*build it with"):
        target.load_state_dict(state)
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())


def test_a_damaged_configuration_is_refused() -> None:
    state = ClockFeatures(STABLE, calibrate=False).state_dict()
    state["config_json"] = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="not JSON"):
        ClockFeatures(STABLE, calibrate=False).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ClockFeatures(STABLE, basis="brackets"), "basis is 'brackets'"),
        (lambda: ClockFeatures(STABLE, backend="builtn"), "Did you mean 'builtin'"),
        (lambda: ClockFeatures(STABLE, path_feature="path"), "path_feature is 'path'"),
        (lambda: ClockFeatures(STABLE, grid=0), "grid is 0"),
        (lambda: ClockFeatures(STABLE, depth=0), "depth is 0"),
        (lambda: ClockFeatures(STABLE, calibrate=False)(torch.zeros(3, 9)), "got \\(3, 9\\)"),
    ],
)
def test_errors(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
