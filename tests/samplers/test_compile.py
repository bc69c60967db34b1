"""The compiled step: one graph, few compilations, the eager numbers."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from genkit.samplers import rollout, walk
from genkit.samplers.solvers import SOLVERS
from genkit.schedulers import FlowScheduler, VPScheduler

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 3, 7, 11, 13, 17)  # 20 calls
STAGED = ("heun", "midpoint", "dpmpp_2s")


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(0.4 * torch.randn(4, 3, generator=generator))

    def forward(self, x, t, cond=None):
        return torch.tanh(torch.cat((x, t[:, None].to(x.dtype)), 1) @ self.weight.to(x.dtype))


@pytest.fixture
def compile_counter(monkeypatch):
    """Compiles the walk's step with a backend that counts, and forgets earlier compilations."""

    def install(backend: str):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(walk._advance, fullgraph=True, backend=counter)
        monkeypatch.setattr(walk, "_compiled_advance", lambda: compiled)
        return counter

    yield install
    torch._dynamo.reset()


def run(scheduler, solver, n, compiled, network, x):
    return rollout(
        network,
        scheduler,
        x,
        num_inference_steps=n,
        solver=solver,
        generator=torch.Generator().manual_seed(n),
        compile=compiled,
    ).sample


def test_a_compiled_euler_walk_is_one_graph_for_all_step_counts(compile_counter):
    counter, network, x = compile_counter("eager"), Network(), torch.linspace(-1, 1, 12).reshape(4, 3)
    for n in COUNTS:
        compiled, plain = (run(FlowScheduler(), "euler", n, flag, network, x) for flag in (True, False))
        torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-6)
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [FlowScheduler(eta=0.5), VPScheduler("cosine"), VPScheduler("linear", "epsilon")])
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_step_compiles_at_most_twice(compile_counter, scheduler, solver):
    counter, network, x = compile_counter("aot_eager"), Network(), torch.linspace(-1, 1, 12).reshape(4, 3)
    for n in COUNTS:
        compiled, plain = (run(scheduler, solver, n, flag, network, x) for flag in (True, False))
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
    # staged solvers have a second graph, the last Euler step
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["euler", "ancestral", "unipc"])
def test_inductor_gives_the_eager_numbers(solver):
    torch._dynamo.reset()
    network, x = Network(), torch.linspace(-1, 1, 12).reshape(4, 3)
    for n in (3, 5):
        compiled, plain = (run(VPScheduler("cosine"), solver, n, flag, network, x) for flag in (True, False))
        torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_walk_has_the_gradient_of_the_plain_one():
    torch._dynamo.reset()
    network, x = Network(), torch.linspace(-1, 1, 12).reshape(4, 3)
    gradients = []
    for flag in (True, False):
        out = rollout(network, FlowScheduler(), x, num_inference_steps=4, grad_steps=2, compile=flag).sample
        gradients.append(torch.autograd.grad(out.square().sum(), network.weight)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)
