"""What a walk refuses: each wrong argument, denoiser and callback is named, compared with what was expected."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import DDIMScheduler

from genkit.errors import ConfigError
from genkit.samplers import draw_keys, rollout
from genkit.samplers.solvers import SOLVERS, AncestralSolver, HeunSolver, make_solver
from genkit.schedulers import DiffusersScheduler, FlowScheduler, ProductScheduler, VPScheduler

X = torch.zeros(2, 3)


def walk(**options):
    arguments = {"denoiser": lambda x, t, cond=None: x, "scheduler": FlowScheduler(), "x": X, **options}
    if "times" not in options:
        arguments.setdefault("num_inference_steps", 3)
    return rollout(**arguments)


@pytest.mark.parametrize("generator", [0, "ab", [0, 1], [torch.Generator(), None], 2.5])
def test_what_is_no_generator_is_refused(generator):
    with pytest.raises(ConfigError, match=r"expected a torch.Generator, a list .*manual_seed"):
        draw_keys(generator, 2)


@pytest.mark.parametrize("batch_size", [-1, 2.0, "2"])
def test_a_batch_of_no_size_is_refused(batch_size):
    with pytest.raises(ConfigError, match="batch_size=.*at least 0"):
        draw_keys(None, batch_size)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("eta", ["abc", -0.5, 1.5, math.nan, True, [0.5]])
def test_eta_outside_0_to_1_is_refused_by_every_solver(solver, eta):
    with pytest.raises(ConfigError, match="eta=.*expected a number from 0"):
        make_solver(solver, eta)
    with pytest.raises(ConfigError, match="eta=.*expected a number from 0"):
        AncestralSolver(eta)
    assert make_solver(solver, 0.0) is not None


@pytest.mark.parametrize("solver", [["euler"], None, HeunSolver, 3])
def test_what_is_no_solver_is_refused(solver):
    with pytest.raises(ConfigError, match="solver is .*expected a Solver object or one of euler, heun"):
        make_solver(solver)
    with pytest.raises(ConfigError, match="not in HeunSolver"):
        make_solver(HeunSolver(), 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": ["a", 0]}, r"times=\['a', 0\] are not numbers"),
        ({"times": [1.0, None]}, "are not numbers"),
        ({"times": math.nan}, r"shape \(\); expected \(n \+ 1,\)"),
        ({"num_inference_steps": "3"}, "num_inference_steps='3'; expected a positive integer"),
        ({"times": [1.0, 0.0], "num_inference_steps": 1.0}, "num_inference_steps=1.0"),
        ({"x": None, "shape": ()}, r"shape=\(\); expected \(B, \*\)"),
        ({"x": None, "shape": 3}, r"shape=3; expected \(B, \*\)"),
        ({"x": None, "shape": (2, 3.0)}, r"shape\[1\]=3.0"),
        ({"x": None, "shape": (-2, 3)}, r"shape\[0\]=-2"),
        ({"x": None, "shape": {}}, "expected one batch size"),
        ({"x": torch.tensor(1.0)}, r"x has shape \(\)"),
        ({"x": [[1.0, 2.0]]}, "x has type list"),
        ({"x": {"a": X}}, "sample has type dict"),
        ({"grad_steps": 1.5}, "grad_steps=1.5; expected how many"),
        ({"grad_steps": "all"}, "grad_steps='all'; expected how many"),
        ({"grad_steps": True}, "grad_steps=True; expected how many"),
        ({"grad_steps": [0.5]}, r"grad_steps holds \[0.5\]"),
        ({"stop_at": 0.5}, "stop_at=0.5; expected a step from 0 to 2"),
        ({"stop_at": True}, "stop_at=True"),
        ({"cond": [1]}, "cond has type list; expected a mapping"),
        ({"cond": {"label": [0, 1]}}, r"cond\['label'\] has type list; expected a tensor"),
        ({"context": torch.ones(2)}, r"context has shape \(2,\); expected a mapping"),
        ({"context": {"scale": 2.0}}, r"context\['scale'\] has type float; expected a tensor"),
        ({"context": {"scale": torch.ones(2, 4)}}, r"context\['scale'\] has shape \(2, 4\)"),
        ({"context": {"scale": torch.tensor([1.0, -1.0])}}, "negative or non-finite"),
        ({"context": {"scale": torch.tensor([1.0, math.nan])}}, "negative or non-finite"),
        ({"context": {"scales": torch.ones(2)}}, "reads no context 'scales'; it reads scale. Did you mean 'scale'"),
        ({"denoiser": 3}, "denoiser has type int"),
        ({"callback_on_step_end": 3}, "callback_on_step_end has type int"),
        ({"scheduler": FlowScheduler}, "scheduler is the class FlowScheduler"),
        ({"scheduler": DDIMScheduler()}, r"scheduler is a DDIMScheduler; .*DiffusersScheduler\("),
    ],
)
def test_wrong_arguments_of_a_walk_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        walk(**options)


def test_unknown_context_is_what_no_part_of_the_kernel_reads():
    class Torus(FlowScheduler):
        context_names = ("period",)

    class Unsaid(FlowScheduler):
        context_names = None

    two = {"a": X, "b": X}
    both = {"scale": torch.ones(2), "period": torch.ones(2)}
    mixed = ProductScheduler({"a": FlowScheduler(), "b": Torus()})
    assert mixed.context_names == ["period", "scale"]
    walk(scheduler=mixed, x=two, context=both)
    with pytest.raises(ConfigError, match="reads no context 'perid'; it reads period, scale. Did you mean 'period'"):
        walk(scheduler=mixed, x=two, context={"perid": torch.ones(2)})
    open_ended = ProductScheduler({"a": FlowScheduler(), "b": Unsaid()})
    walk(scheduler=open_ended, x=two, context={"anything": torch.ones(2)})
    with pytest.raises(ConfigError, match="reads no context 'scale'; it reads none"):
        walk(scheduler=DiffusersScheduler(DDIMScheduler()), context={"scale": torch.ones(2)})


def test_parts_of_different_batches_are_refused():
    scheduler = ProductScheduler({"a": FlowScheduler(), "b": FlowScheduler()})
    with pytest.raises(ConfigError, match="one batch size"):
        walk(scheduler=scheduler, x={"a": X, "b": X[:1]})
    with pytest.raises(ConfigError, match="one batch size"):
        walk(scheduler=scheduler, x=None, shape={"a": (2, 3), "b": (3, 3)})


OUTPUTS = {"None": lambda x: None, "(1, d)": lambda x: x[:1], "(d,)": lambda x: x[0], "a tuple": lambda x: (x,)}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS.keys())
@pytest.mark.parametrize("prediction_type", ["flow", "sample", "v_prediction"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_denoiser_that_returns_another_shape_is_refused(output, prediction_type, solver):
    with pytest.raises(ConfigError, match=r"model_output has .*expected a tensor of shape \(2, 3\)"):
        walk(
            denoiser=lambda x, t, cond=None: output(x),
            scheduler=FlowScheduler(prediction_type),
            solver=solver,
        )


def test_a_wrong_denoiser_is_named_in_stateful_and_compiled_walks_too():
    def first_only(x, t, cond=None):
        return x[:1]

    with pytest.raises(ConfigError, match=r"model_output has shape \(1, 3\)"):
        walk(denoiser=first_only, scheduler=DiffusersScheduler(DDIMScheduler()))
    with pytest.raises(ConfigError, match=r"model_output has shape \(1, 3\); expected a tensor of shape \(2, 3\)"):
        walk(denoiser=first_only, compile=True)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (X, "returned type Tensor; expected None or a mapping"),
        ({"smaple": X}, "returned 'smaple'.*Did you mean 'sample'"),
        ({"sample": 3}, r"sample has type int; expected a tensor of shape \(2, 3\)"),
        ({"sample": X[:1]}, r"sample has shape \(1, 3\); expected a tensor of shape \(2, 3\)"),
        ({"sample": X.double()}, "torch.float64 on cpu; expected torch.float32"),
    ],
)
def test_a_callback_that_returns_something_else_is_refused(returned, message):
    with pytest.raises(ConfigError, match=message):
        walk(callback_on_step_end=lambda step, t, tensors: returned)


def test_a_callback_may_return_what_it_was_given_and_must_keep_the_parts():
    out = walk(callback_on_step_end=lambda step, t, tensors: tensors)
    assert torch.equal(out.sample, walk().sample)
    parts = {"scheduler": ProductScheduler({"a": VPScheduler("cosine", "sample")}), "x": {"a": X}}
    for wrong in (X, {"b": X}):
        with pytest.raises(ConfigError, match="expected a mapping with the fields a"):
            walk(callback_on_step_end=lambda step, t, tensors, wrong=wrong: {"sample": wrong}, **parts)
    with pytest.raises(ConfigError, match=r"sample has shape \(2, 1\)"):
        walk(callback_on_step_end=lambda step, t, tensors: {"sample": {"a": X[:, :1]}}, **parts)
