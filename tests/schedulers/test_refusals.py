"""What schedulers and transitions refuse: times that are none, options of another type, tensors that do not fit."""

from __future__ import annotations

import math

import pytest
import torch

from genkit.errors import ConfigError
from genkit.samplers import draw_keys
from genkit.schedulers import CategoricalTransition, FlowScheduler, GaussianTransition, ProductScheduler, VPScheduler

X = torch.zeros(2, 3)
METHODS = {
    "add_noise": lambda s, t, context: s.add_noise(X, X, t, context),
    "to_x0": lambda s, t, context: s.to_x0(X, t, X, context),
    "from_x0": lambda s, t, context: s.from_x0(X, t, X, context),
    "target": lambda s, t, context: s.target(X, X, t, context),
    "velocity": lambda s, t, context: s.velocity(X, t, X, context),
    "transition": lambda s, t, context: s.transition(X, t, torch.tensor(0.0), X, context),
}
SCHEDULERS = [FlowScheduler("v_prediction"), VPScheduler("linear", "epsilon")]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=["flow", "vp"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize("t", [1.5, -0.1, math.nan, "0.5", [0.1, 0.2], None, True])
def test_a_python_time_outside_0_to_1_is_refused(scheduler, method, t):
    with pytest.raises(ConfigError, match=r"t=.*from 0 \(data\) to 1 \(noise\)"):
        method(scheduler, t, None)


def test_a_step_back_to_more_noise_is_refused():
    with pytest.raises(ConfigError, match="s=0.5 is after t=0.2; expected 0 ≤ s ≤ t ≤ 1"):
        FlowScheduler().transition(X, 0.2, 0.5, X)
    FlowScheduler().transition(X, 0.5, 0.5, X)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize(
    ("t", "context", "message"),
    [
        (torch.full((3,), 0.5), None, r"shape \(3,\); expected \(\) or \(2,\)"),
        (torch.full((2, 1), 0.5), None, r"shape \(2, 1\); expected \(\) or \("),
        (0.5, {"scale": torch.ones(3)}, r"context\['scale'\] has shape \(3,\); expected \(2,\)"),
        (torch.full((2,), 0.5), {"scale": torch.ones(3)}, r"context\['scale'\] has shape \(3,\)"),
        (0.5, {"scale": [1.0, 2.0]}, r"context\['scale'\] has type list; expected a tensor"),
        (0.5, {"scale": 2.0}, r"context\['scale'\] has type float; expected a tensor"),
        (0.5, [1.0], "context has type list; expected a mapping"),
    ],
)
def test_times_and_scales_of_another_batch_or_type_are_refused(method, t, context, message):
    with pytest.raises(ConfigError, match=message):
        method(FlowScheduler("v_prediction"), t, context)


@pytest.mark.parametrize(
    ("t", "context", "message"),
    [
        (torch.full((2, 1), 0.5), None, r"t has shape \(2, 1\); expected \(\) or \(B,\)"),
        (
            torch.full((2,), 0.5),
            {"scale": torch.ones(3)},
            r"t has shape \(2,\), but context\['scale'\] has shape \(3,\)",
        ),
        (0.5, {"scale": 2.0}, r"context\['scale'\] has type float; expected a tensor"),
        (math.nan, None, "t=nan"),
    ],
)
def test_levels_of_no_time_or_scale_are_refused(t, context, message):
    with pytest.raises(ConfigError, match=message):
        FlowScheduler().alpha_sigma(t, context)


@pytest.mark.parametrize("prediction_type", ["flow", "sample", "v_prediction"])
@pytest.mark.parametrize("other", [X[:1], X[0], torch.zeros(3, 3), None, [1.0]])
def test_tensors_of_another_shape_are_refused_by_every_method(prediction_type, other):
    scheduler = FlowScheduler(prediction_type)
    for call in (
        lambda: scheduler.add_noise(X, other, 0.5),
        lambda: scheduler.target(X, other, 0.5),
        lambda: scheduler.to_x0(other, 0.5, X),
        lambda: scheduler.from_x0(other, 0.5, X),
        lambda: scheduler.velocity(other, 0.5, X),
        lambda: scheduler.transition(other, 0.5, 0.2, X),
    ):
        with pytest.raises(ConfigError, match=r"(shape|type) .*; expected a tensor of shape \(2, 3\)"):
            call()


def test_a_prior_of_no_shape_or_another_batch_is_refused():
    keys = draw_keys(torch.Generator().manual_seed(0), 2)
    with pytest.raises(ConfigError, match="shape=3; expected the shape of one sample"):
        FlowScheduler().prior(keys, 3)
    with pytest.raises(ConfigError, match=r"context\['scale'\] has shape \(4,\); expected \(2,\)"):
        FlowScheduler().prior(keys, (3,), {"scale": torch.ones(4)})


def test_transitions_refuse_states_keys_and_masks_of_another_shape():
    kernel, keys = GaussianTransition(X, torch.ones(2)), draw_keys(torch.Generator().manual_seed(0), 1)
    with pytest.raises(ConfigError, match=r"x_s has shape \(1, 3\); expected a tensor of shape \(2, 3\)"):
        kernel.log_prob(X[:1])
    with pytest.raises(ConfigError, match=r"keys' noise has shape \(1, 3\)"):
        kernel.sample(keys)
    with pytest.raises(ConfigError, match=r"mask has shape \(2, 4\)"):
        GaussianTransition(X, torch.ones(2), torch.ones(2, 4, dtype=torch.bool)).log_prob(X)
    with pytest.raises(ConfigError, match=r"x_s has shape \(1,\); expected a tensor of shape \(2,\)"):
        CategoricalTransition(X).log_prob(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    "options",
    [{"beta_start": "1e-4"}, {"beta_end": None}, {"sigma_min": [0.1]}, {"sigma_max": True}, {"rho": "7"}],
)
def test_options_of_another_type_are_refused(options):
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name}=.*; expected a number"):
        VPScheduler(**options)


@pytest.mark.parametrize("shift", ["3", None, [1.0], True])
def test_a_shift_of_another_type_is_refused(shift):
    with pytest.raises(ConfigError, match="shift=.*; expected a positive number"):
        FlowScheduler(shift=shift)


@pytest.mark.parametrize("options", [{"sigma_max": math.inf}, {"rho": math.inf}])
def test_infinite_levels_are_refused(options):
    with pytest.raises(ConfigError, match="all finite"):
        VPScheduler("edm", **options)


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear"])
def test_factors_that_cannot_be_continued_are_refused(schedule):
    with pytest.raises(ConfigError, match="num_train_timesteps=1; expected at least 2"):
        VPScheduler(schedule, num_train_timesteps=1)
    with pytest.raises(ConfigError, match="num_train_timesteps='x'"):
        VPScheduler(schedule, num_train_timesteps="x")
    with pytest.raises(ConfigError, match="too widely spaced"):
        VPScheduler(schedule, num_train_timesteps=2, beta_end=0.9)


@pytest.mark.parametrize(
    "scheduler", [VPScheduler("linear"), VPScheduler("scaled_linear"), VPScheduler("edm", rho=0.5)], ids=str
)
def test_an_infinite_velocity_is_refused_and_grows_towards_it(scheduler):
    with pytest.raises(ConfigError, match="not finite at t=0"):
        scheduler.velocity(X, 0.0, X)
    ones = torch.ones(1, 1, dtype=torch.float64)
    near = [float(scheduler.velocity(ones, t, ones).abs()) for t in (1e-10, 1e-8)]
    assert near[0] == pytest.approx(10 * near[1], rel=1e-2)  # as 1/√t
    for finite in (FlowScheduler("v_prediction"), VPScheduler("cosine"), VPScheduler("edm")):
        assert bool(torch.isfinite(finite.velocity(X, 0.0, X)).all())


def test_wrong_arguments_of_diffusers_step_are_named():
    scheduler = VPScheduler()
    scheduler.set_timesteps(4)
    t = scheduler.timesteps[0]
    with pytest.raises(ConfigError, match="generator=0; expected a torch.Generator"):
        scheduler.step(X, t, X, generator=0)
    with pytest.raises(ConfigError, match="timestep='a'"):
        scheduler.step(X, "a", X)
    with pytest.raises(ConfigError, match=r"timestep has shape \(4,\)"):
        scheduler.step(X, scheduler.timesteps, X)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([FlowScheduler()],), "holds a FlowScheduler; expected entries"),
        (([{"class": "FlowScheduler"}],), "expected entries"),
        ((3,), "schedulers has type int; expected a mapping"),
        (({"a": FlowScheduler},), "field 'a'.*no pure transition"),
        (({"a": FlowScheduler()}, "mask"), "masks has type str; expected a mapping"),
    ],
)
def test_products_of_something_else_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ProductScheduler(*arguments)
