"""The gradient window: explicit Jacobians, finite differences, constant outputs, checkpointing, no graph before it."""

from __future__ import annotations

import weakref

import pytest
import torch

from genkit.samplers import rollout
from genkit.samplers.solvers import SOLVERS
from genkit.schedulers import FlowScheduler, VPScheduler

N = 5
WINDOWS = {
    "last 1": 1,
    "last 3": 3,
    "all": N,
    "first": [0],
    "middle": [1, 2],
    "apart": [0, 2, 4],
    "none at the end": [1, 3],
}
SOLVER_NAMES = tuple(SOLVERS)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def indices(window):
    return list(range(N - window, N)) if isinstance(window, int) else list(window)


class Linear:
    """f(x, t) = w t x + b, with scalar parameters."""

    def __init__(self, w=0.7, b=-0.3):
        self.w = torch.tensor(w, dtype=torch.float64, requires_grad=True)
        self.b = torch.tensor(b, dtype=torch.float64, requires_grad=True)
        self.recording: list[bool] = []

    def __call__(self, x, t, cond=None):
        self.recording.append(torch.is_grad_enabled())
        return self.w * t.double()[:, None] * x + self.b

    def gradient(self, loss):
        return torch.stack(torch.autograd.grad(loss, (self.w, self.b)))


def explicit_gradient(x, window, input_grad):
    """d x_N / d(w, b) of Euler on the flow by the chain rule: x_{i+1} = x_i + h_i f(x_i), f = w t x + b.

    Inside the window  J_{i+1} = J_i + h (∂f/∂θ + [input] w t J_i), outside it J_{i+1} = J_i.
    """
    times, w, b = FlowScheduler().times(N).tolist(), 0.7, -0.3
    jacobian = torch.zeros(2, *x.shape, dtype=torch.float64)
    for i in range(N):
        h = times[i + 1] - times[i]
        if i in window:
            direct = torch.stack((times[i] * x, torch.ones_like(x)))
            jacobian = jacobian + h * (direct + (w * times[i] * jacobian if input_grad else 0.0))
        x = x + h * (w * times[i] * x + b)
    return jacobian.sum((1, 2)), x


@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
def test_the_gradient_is_the_explicit_jacobian(window, checkpoint, input_grad):
    network, x = Linear(), draw(0, 2, 3)
    out = rollout(
        network,
        FlowScheduler(),
        x,
        num_inference_steps=N,
        grad_steps=window,
        checkpoint=checkpoint,
        input_grad=input_grad,
    ).sample
    expected, end = explicit_gradient(x, indices(window), input_grad)
    torch.testing.assert_close(out, end)
    torch.testing.assert_close(network.gradient(out.sum()), expected, rtol=1e-12, atol=1e-12)


def frozen_walk(solver, scheduler, window, outputs, theta, x, generator_seed):
    """The walk with free parameter theta in the window's calls and recorded outputs elsewhere."""
    position, step_of = [0], []
    evaluations = 1 if solver in ("euler", "ancestral", "dpmpp_2m", "unipc") else 2
    for step in range(N):
        step_of += [step] * (1 if step == N - 1 else evaluations)

    def network(x, t, cond=None):
        call = position[0]
        position[0] += 1
        if step_of[call] not in window and outputs is not None:
            return outputs[call]
        return torch.tanh(theta * x + t.double()[:, None])

    return rollout(
        network,
        scheduler,
        x,
        num_inference_steps=N,
        solver=solver,
        grad_steps=window,
        generator=torch.Generator().manual_seed(generator_seed),
    ).sample


@pytest.mark.parametrize("window", [[3, 4], [0, 1, 2, 3, 4], [1, 3]], ids=["last", "all", "apart"])
@pytest.mark.parametrize("solver", SOLVER_NAMES)
@pytest.mark.parametrize("scheduler", [FlowScheduler(eta=0.5), VPScheduler("cosine")], ids=["flow", "vp"])
def test_the_gradient_equals_finite_differences(scheduler, solver, window):
    x, value, h = draw(0, 2, 3), 0.8, 1e-5
    recorded = []

    def record(x, t, cond=None):
        recorded.append(torch.tanh(value * x + t.double()[:, None]))
        return recorded[-1]

    rollout(
        record,
        scheduler,
        x,
        num_inference_steps=N,
        solver=solver,
        generator=torch.Generator().manual_seed(7),
    )
    theta = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    out = frozen_walk(solver, scheduler, window, None, theta, x, 7)
    gradient = float(torch.autograd.grad(out.square().sum(), theta)[0])
    up, down = (frozen_walk(solver, scheduler, window, recorded, value + d, x, 7).square().sum() for d in (h, -h))
    assert abs(gradient - float(up - down) / (2 * h)) < 1e-6 * max(1.0, abs(gradient))


def test_the_gradient_of_the_start_flows_only_if_step_0_is_in_the_window():
    x = draw(0, 2, 3).requires_grad_()
    whole = rollout(Linear(), FlowScheduler(), x, num_inference_steps=N, grad_steps=N).sample
    gradient = torch.autograd.grad(whole.sum(), x)[0]
    times, factor = FlowScheduler().times(N).tolist(), 1.0
    for t, s in zip(times[:-1], times[1:], strict=True):
        factor *= 1 + (s - t) * 0.7 * t
    torch.testing.assert_close(gradient, torch.full_like(gradient, factor))
    direct = rollout(Linear(), FlowScheduler(), x, num_inference_steps=N, grad_steps=N, input_grad=False).sample
    torch.testing.assert_close(torch.autograd.grad(direct.sum(), x)[0], torch.ones_like(x))
    later = rollout(Linear(), FlowScheduler(), x, num_inference_steps=N, grad_steps=2).sample
    assert torch.autograd.grad(later.sum(), x, allow_unused=True)[0] is None


@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_no_graph_is_built_before_the_window(solver):
    network = Linear()
    options = {"num_inference_steps": N, "solver": solver, "generator": torch.Generator().manual_seed(0)}
    out = rollout(network, FlowScheduler(), draw(0, 2, 3), grad_steps=2, **options)
    per_step = 1 if solver in ("euler", "ancestral", "dpmpp_2m", "unipc") else 2
    calls = per_step * (N - 1) + 1
    inside = per_step + 1 if per_step > 1 else 2
    assert network.recording == [False] * (calls - inside) + [True] * inside
    assert out.sample.requires_grad and out.x0.requires_grad
    plain = rollout(network, FlowScheduler(), draw(0, 2, 3), **options)
    assert not plain.sample.requires_grad and not plain.x0.requires_grad


def graph_size(tensor):
    seen, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return len(seen)


def test_the_graph_grows_with_the_window_not_with_the_walk():
    sizes = {
        (n, k): graph_size(
            rollout(Linear(), FlowScheduler(), draw(0, 2, 3), num_inference_steps=n, grad_steps=k).sample
        )
        for n, k in ((5, 2), (50, 2), (50, 4))
    }
    assert sizes[5, 2] == sizes[50, 2] < sizes[50, 4]


class Saved(torch.autograd.Function):
    """Keeps a fresh tensor for the backward pass; ``alive`` counts those not yet freed."""

    alive: list[weakref.ref] = []

    @staticmethod
    def forward(ctx, x):
        kept = torch.ones(1000)
        Saved.alive.append(weakref.ref(kept))
        ctx.save_for_backward(kept)
        return 2.0 * x

    @staticmethod
    def backward(ctx, grad):
        return 2.0 * grad


@pytest.mark.parametrize(("checkpoint", "kept"), [(False, 4), (True, 0)])
def test_checkpointing_keeps_no_activations_and_calls_again(checkpoint, kept):
    w = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    calls = []

    def network(x, t, cond=None):
        calls.append(float(t[0]))
        return Saved.apply(w * x) - x

    Saved.alive.clear()
    out = rollout(network, FlowScheduler(), draw(0, 2, 3), num_inference_steps=N, grad_steps=4, checkpoint=checkpoint)
    assert sum(r() is not None for r in Saved.alive) == kept and len(calls) == N
    gradient = torch.autograd.grad(out.sample.sum(), w)[0]
    assert len(calls) == N + (4 if checkpoint else 0)
    plain = rollout(network, FlowScheduler(), draw(0, 2, 3), num_inference_steps=N, grad_steps=4).sample
    torch.testing.assert_close(gradient, torch.autograd.grad(plain.sum(), w)[0], rtol=1e-13, atol=0)


def test_the_callers_no_grad_is_respected():
    with torch.no_grad():
        out = rollout(Linear(), FlowScheduler(), draw(0, 2, 3), num_inference_steps=N, grad_steps=2)
    assert not out.sample.requires_grad


@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_the_window_does_not_change_the_sample(solver):
    options = {"num_inference_steps": N, "solver": solver}
    scheduler = VPScheduler("cosine")
    walks = [
        rollout(
            Linear(), scheduler, draw(0, 2, 3), generator=torch.Generator().manual_seed(0), **window, **options
        ).sample
        for window in ({}, {"grad_steps": 2}, {"grad_steps": [0, 3]}, {"grad_steps": N, "checkpoint": True})
    ]
    for other in walks[1:]:
        torch.testing.assert_close(other, walks[0], rtol=1e-13, atol=1e-14)


def test_stop_at_with_a_window_is_the_gradient_of_the_clean_prediction():
    """DRaFT's one-step estimate: the window counts the steps of the shortened walk."""
    network, x = Linear(), draw(0, 2, 3)
    out = rollout(network, FlowScheduler(), x, num_inference_steps=N, stop_at=2, grad_steps=1).sample
    before = rollout(network, FlowScheduler(), x, times=FlowScheduler().times(N)[:3]).sample
    t = float(FlowScheduler().times(N)[2])
    expected = torch.stack((-t * t * before.sum(), torch.tensor(-6 * t, dtype=torch.float64)))
    torch.testing.assert_close(network.gradient(out.sum()), expected)


def test_the_density_of_a_step_has_a_gradient_inside_the_window_only():
    network = Linear()
    out = rollout(
        network,
        VPScheduler("cosine"),
        draw(0, 2, 3),
        num_inference_steps=N,
        solver="ancestral",
        grad_steps=[2],
        return_log_probs=True,
        generator=torch.Generator().manual_seed(0),
    )
    # a walk's own sample moves with the mean, so what remains is the chain after the window: constant outputs there
    gradients = [
        torch.autograd.grad(out.log_probs[:, i].sum(), network.w, retain_graph=True, allow_unused=True)[0]
        for i in range(2, 4)
    ]
    assert abs(float(gradients[0])) < 1e-9
    assert not out.log_probs[:, :2].detach().isnan().any()
