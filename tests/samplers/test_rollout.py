"""The straight walk: keys, trajectories, densities, callbacks, precision, states with parts, and wrong arguments."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from genkit.errors import ConfigError
from genkit.samplers import RolloutOutput, Solver, draw_keys, rollout, training_keys
from genkit.samplers.solvers import SOLVERS, SolverState
from genkit.schedulers import FlowScheduler, ProductScheduler, VPScheduler

SOLVER_NAMES = tuple(SOLVERS)
ONE_STEP = ("euler", "ancestral", "dpmpp_2m", "unipc")


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def generators(seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


class Network(torch.nn.Module):
    """A small nonlinear network with matrix products, in float64."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(a, b).double() for a, b in ((4, width), (width, 3)))
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(0.5 * draw(i, *p.shape))
        self.calls: list[tuple[float, bool]] = []

    def forward(self, x, t, cond=None):
        assert t.dtype == torch.float32 and t.shape == (len(x),)
        self.calls.append((float(t[0]) if len(t) else math.nan, torch.is_grad_enabled()))
        shifted = x if cond is None else x + cond["shift"]
        inputs = torch.cat((shifted.double(), t[:, None].double()), 1)
        return self.second(torch.tanh(self.first(inputs))).to(x.dtype)


# ---- the same seed is the same sample -------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVER_NAMES)
@pytest.mark.parametrize("scheduler", [FlowScheduler(eta=0.6), VPScheduler("cosine")], ids=["flow", "vp"])
def test_a_sample_does_not_depend_on_its_batch(solver, scheduler):
    network, seeds = Network(), (11, 12, 13, 14, 15)

    def walk(chosen):
        options = {"shape": (len(chosen), 3), "num_inference_steps": 5, "solver": solver}
        return rollout(network, scheduler, generator=generators(chosen), **options).sample.double()

    def start(chosen):
        return draw_keys(generators(chosen), len(chosen)).at(purpose="latents").normal((3,))

    whole = walk(seeds)
    for chunks in ((1, 1, 1, 1, 1), (2, 2, 1), (1, 4)):
        cuts = [seeds[sum(chunks[:i]) : sum(chunks[: i + 1])] for i in range(len(chunks))]
        # the float32 state makes the noise's own bits visible; matrix kernels may round the rest differently
        torch.testing.assert_close(torch.cat([walk(c) for c in cuts]), whole, rtol=1e-5, atol=1e-6)
        assert torch.equal(torch.cat([start(c) for c in cuts]), start(seeds))
    reordered = (14, 11, 15)
    torch.testing.assert_close(walk(reordered), whole[[3, 0, 4]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_a_sample_does_not_depend_on_its_batch_to_1e_12_in_float64(solver):
    network, scheduler, x = Network(), VPScheduler("cosine"), draw(0, 5, 3)

    def walk(chosen):
        chosen = list(chosen)
        return rollout(
            network, scheduler, x[chosen], num_inference_steps=6, solver=solver, generator=generators(chosen)
        ).sample

    whole = walk(range(5))
    for chunks in (([0], [1], [2], [3], [4]), ([0, 1], [2, 3], [4]), ([4, 2], [0, 3, 1])):
        for part in chunks:
            torch.testing.assert_close(walk(part), whole[part], rtol=0, atol=1e-12)


def test_the_transition_noise_is_bit_equal_in_every_batch():
    """A network that is elementwise rounds the same in every batch, so the whole samples are bit-equal."""
    scheduler = VPScheduler("cosine")

    def walk(seeds):
        return rollout(
            lambda x, t, cond=None: 0.3 * x,
            scheduler,
            shape=(len(seeds), 7),
            num_inference_steps=9,
            solver="ancestral",
            generator=generators(seeds),
        ).sample

    whole = walk((1, 2, 3, 4, 5))
    assert torch.equal(torch.cat((walk((1, 2)), walk((3,)), walk((4, 5)))), whole)
    assert torch.equal(walk((5, 3)), whole[[4, 2]])


def test_one_generator_gives_b_keys_in_order_and_the_global_generator_is_untouched():
    scheduler, network = FlowScheduler(), Network()
    before = torch.random.get_rng_state()
    one = rollout(network, scheduler, shape=(3, 3), num_inference_steps=2, generator=torch.Generator().manual_seed(4))
    assert torch.equal(before, torch.random.get_rng_state())
    keys = draw_keys(torch.Generator().manual_seed(4), 3)
    start = keys.at(purpose="latents").normal((3,))
    again = rollout(network, scheduler, start, num_inference_steps=2)
    assert torch.equal(one.sample, again.sample)


def test_training_keys_serve_a_walk():
    scheduler, network, ids = VPScheduler("cosine"), Network(), torch.tensor([5, 9, 7])
    options = {"num_inference_steps": 3, "solver": "ancestral"}
    whole = rollout(network, scheduler, shape=(3, 3), generator=training_keys(1, 10, ids), **options).sample
    part = rollout(network, scheduler, shape=(1, 3), generator=training_keys(1, 10, ids[1:2]), **options).sample
    torch.testing.assert_close(whole[1:2], part, rtol=1e-5, atol=1e-6)
    other = rollout(network, scheduler, shape=(3, 3), generator=training_keys(1, 11, ids), **options).sample
    assert float((whole - other).abs().max()) > 1e-2


def test_ancestral_noise_is_fresh_at_every_step_and_apart_from_the_latents():
    scheduler = VPScheduler("cosine")
    seen = []

    class Spy:
        evaluations, stochastic = 1, True

        def init(self, x):
            return SolverState()

        def step(self, denoiser, scheduler, x, t, s, state, cond, context, noise):
            seen.append(noise.normal((50,)))
            return x, SolverState((denoiser(x, t, cond), t, x))

    spy: Solver = Spy()
    start = rollout(
        Network(), scheduler, shape=(4, 3), num_inference_steps=3, solver=spy, generator=generators(range(4))
    )
    flat = torch.stack([*seen, draw_keys(generators(range(4)), 4).at(purpose="latents").normal((50,))]).reshape(4, -1)
    correlation = torch.corrcoef(flat) - torch.eye(4)
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(200)
    assert torch.equal(start.sample, draw_keys(generators(range(4)), 4).at(purpose="latents").normal((3,)))


# ---- what a walk calls and returns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_network_calls_per_walk(solver):
    network, n = Network(), 5
    rollout(
        network, VPScheduler("cosine"), shape=(2, 3), num_inference_steps=n, solver=solver, generator=generators([0, 1])
    )
    assert len(network.calls) == (n if solver in ONE_STEP else 2 * (n - 1) + 1)
    assert all(not graph for _, graph in network.calls)
    if solver in ONE_STEP:
        torch.testing.assert_close([t for t, _ in network.calls], VPScheduler().times(n)[:-1].tolist())


@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_multi_stage_walks_that_end_before_0_have_no_euler_step(solver):
    network = Network()
    rollout(network, FlowScheduler(), draw(0, 2, 3), times=[0.9, 0.5, 0.2], solver=solver, generator=generators([0, 1]))
    assert len(network.calls) == (2 if solver in ONE_STEP else 4)


def test_the_trajectory_holds_the_states_of_all_times_and_is_a_walk_itself():
    scheduler, network, x = VPScheduler("cosine"), Network(), draw(0, 2, 3)
    options = {"solver": "ancestral", "generator": generators([3, 4]), "return_trajectory": True}
    out = rollout(network, scheduler, x, num_inference_steps=4, **options)
    assert isinstance(out, RolloutOutput) and out.trajectory.shape == (5, 2, 3)
    assert torch.equal(out.trajectory[0], x) and torch.equal(out.trajectory[-1], out.sample)
    times, keys = scheduler.times(4), draw_keys(generators([3, 4]), 2)
    for i in range(4):
        t = times[i].expand(2)
        kernel = scheduler.transition(network(out.trajectory[i], t.float()), t, times[i + 1], out.trajectory[i])
        expected = kernel.sample(keys.at(step=i, purpose="transition"))
        torch.testing.assert_close(out.trajectory[i + 1], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        out.x0, out.sample, rtol=1e-12, atol=1e-12
    )  # the last step lands on the clean prediction


def test_log_probs_are_the_densities_of_the_steps_and_nan_where_deterministic():
    scheduler, network, x = VPScheduler("cosine", eta=0.7), Network(), draw(0, 2, 3)
    out = rollout(
        network,
        scheduler,
        x,
        num_inference_steps=4,
        solver="ancestral",
        generator=generators([3, 4]),
        return_trajectory=True,
        return_log_probs=True,
    )
    assert out.log_probs.shape == (2, 4) and bool(out.log_probs[:, -1].isnan().all())
    times = scheduler.times(4)
    for i in range(3):
        t = times[i].expand(2)
        kernel = scheduler.transition(network(out.trajectory[i], t.float()), t, times[i + 1], out.trajectory[i])
        expected = Normal(kernel.mean, kernel.std[:, None]).log_prob(out.trajectory[i + 1]).sum(1)
        torch.testing.assert_close(out.log_probs[:, i], expected, rtol=1e-10, atol=1e-10)
    flat = rollout(network, scheduler, x, num_inference_steps=4, return_log_probs=True)
    assert bool(flat.log_probs.isnan().all())


def test_a_log_prob_has_the_gradient_of_the_policy():
    """Score function: E[∂ log p] = 0, and the gradient of one step is (x_s − mean)/std² · ∂mean."""
    scheduler, x = VPScheduler("cosine", "sample"), draw(0, 1, 3)
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    walk = {"times": [0.8, 0.4], "solver": "ancestral", "generator": generators([3]), "grad_steps": 1}
    out = rollout(lambda x, t, cond=None: 0.2 * x + shift, scheduler, x, return_log_probs=True, **walk)
    kernel = scheduler.transition(0.2 * x, torch.tensor(0.8), torch.tensor(0.4), x)
    fixed = out.sample.detach()
    detached = torch.autograd.grad(out.log_probs.sum(), shift)[0]
    # x_s moves with the mean, so the density of the sample itself does not depend on the shift
    assert abs(float(detached)) < 1e-9
    assert float(((fixed - kernel.mean) / kernel.std**2).abs().max()) > 0.1


def test_a_callback_sees_every_step_and_may_replace_the_sample():
    scheduler, network, x = FlowScheduler(), Network(), draw(0, 2, 3)
    seen = []

    def watch(step, t, values):
        seen.append((step, t, values["sample"].clone(), values["x0"].clone()))

    plain = rollout(network, scheduler, x, num_inference_steps=4, return_trajectory=True)
    watched = rollout(network, scheduler, x, num_inference_steps=4, callback_on_step_end=watch)
    assert torch.equal(plain.sample, watched.sample) and [s for s, *_ in seen] == [0, 1, 2, 3]
    for step, t, sample, clean in seen:
        assert t == float(scheduler.times(4)[step]) and torch.equal(sample, plain.trajectory[step + 1])
        output = network(plain.trajectory[step], torch.full((2,), t))
        torch.testing.assert_close(clean, plain.trajectory[step] - t * output)

    def project(step, t, values):
        return {"sample": torch.zeros_like(values["sample"])} if step == 1 else None

    replaced = rollout(
        network, scheduler, x, num_inference_steps=4, callback_on_step_end=project, return_trajectory=True
    )
    assert float(replaced.trajectory[2].abs().max()) == 0.0
    tail = rollout(network, scheduler, torch.zeros_like(x), times=scheduler.times(4)[2:])
    torch.testing.assert_close(replaced.sample, tail.sample)


@pytest.mark.parametrize("solver", ["dpmpp_2m", "unipc"])
def test_what_a_callback_adds_stays_in_multistep_walks(solver):
    """With a constant clean prediction an added δ decays as σ; UniPC's corrector must not undo it."""
    scheduler, x = VPScheduler("cosine", "sample"), draw(0, 2, 3)

    def add(step, t, values):
        return {"sample": values["sample"] + 1.0} if step == 2 else None

    walk = {"times": [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], "solver": solver}
    constant = torch.ones_like(x)
    plain = rollout(lambda x, t, c=None: constant, scheduler, x, **walk).sample
    edited = rollout(lambda x, t, c=None: constant, scheduler, x, callback_on_step_end=add, **walk).sample
    ratio = float(scheduler.alpha_sigma(0.4)[1] / scheduler.alpha_sigma(0.6)[1])
    torch.testing.assert_close(edited - plain, torch.full_like(x, ratio), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_stop_at_ends_with_the_clean_prediction_of_that_step(solver):
    scheduler, network, x = VPScheduler("cosine", eta=0.0), Network(), draw(0, 2, 3)
    whole = rollout(network, scheduler, x, num_inference_steps=6, solver=solver, return_trajectory=True)
    for stop in (0, 2, 5):
        out = rollout(network, scheduler, x, num_inference_steps=6, solver=solver, stop_at=stop, return_trajectory=True)
        assert len(out.trajectory) == stop + 2
        t, state = scheduler.times(6)[stop].expand(2), whole.trajectory[stop]
        clean = scheduler.to_x0(network(state, t.float()), t, state)
        torch.testing.assert_close(out.sample, clean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(out.x0, out.sample, rtol=1e-10, atol=1e-10)


def test_conditions_reach_the_network():
    network, x = Network(), draw(0, 3, 3)
    cond = {"shift": draw(1, 3, 3)}
    together = rollout(network, FlowScheduler(), x, num_inference_steps=3, cond=cond).sample
    alone = rollout(network, FlowScheduler(), x[1:2], num_inference_steps=3, cond={"shift": cond["shift"][1:2]}).sample
    torch.testing.assert_close(together[1:2], alone)
    assert float((together - rollout(network, FlowScheduler(), x, num_inference_steps=3).sample).abs().max()) > 1e-3


@pytest.mark.parametrize("solver", SOLVER_NAMES)
@pytest.mark.parametrize("batch", [0, 1])
def test_an_empty_batch_and_a_single_sample_walk(solver, batch):
    out = rollout(
        Network(),
        FlowScheduler(),
        shape=(batch, 3),
        num_inference_steps=3,
        solver=solver,
        generator=generators(range(batch)),
        return_trajectory=True,
        context={"scale": torch.ones(batch)},
    )
    assert out.sample.shape == (batch, 3) and out.trajectory.shape == (4, batch, 3)


def test_the_prior_has_the_contexts_scale():
    scale, gens = torch.tensor([0.1, 1.0, 50.0]), (1, 2, 3)
    unit = rollout(
        Network(), FlowScheduler(), shape=(3, 3), times=[1.0, 0.999], generator=generators(gens), return_trajectory=True
    )
    scaled = rollout(
        Network(),
        FlowScheduler(),
        shape=(3, 3),
        times=[1.0, 0.999],
        generator=generators(gens),
        context={"scale": scale},
        return_trajectory=True,
    )
    torch.testing.assert_close(scaled.trajectory[0], scale[:, None] * unit.trajectory[0])


# ---- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_walks_integrate_in_float32(dtype):
    """1000 Euler steps of a constant velocity: the state must not be rounded to half precision on the way."""
    seen = set()

    def constant(x, t, cond=None):
        seen.add((x.dtype, t.dtype))
        return torch.full_like(x, 0.7)

    x = torch.full((2, 4), 1.0, dtype=dtype)
    out = rollout(constant, FlowScheduler(), x, num_inference_steps=1000, return_trajectory=True)
    assert seen == {(dtype, torch.float32)} and out.sample.dtype == dtype
    velocity = float(torch.tensor(0.7, dtype=dtype))
    assert out.trajectory.dtype == torch.float32
    assert float((out.trajectory[-1] - (1.0 - velocity)).abs().max()) < 1e-3
    # the control: the same sum in half precision is off
    y = x.clone()
    for _ in range(1000):
        y = y - (torch.full_like(y, 0.7) / 1000)
    assert float((y.float() - (1.0 - velocity)).abs().max()) > 2e-3


@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_float32_walks_stay_float32(solver):
    out = rollout(
        Network(), VPScheduler("linear", "epsilon"), draw(0, 2, 3).float(), num_inference_steps=3, solver=solver
    )
    assert out.sample.dtype == torch.float32 and out.x0.dtype == torch.float32


# ---- states with parts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["euler", "ancestral"])
def test_a_state_with_parts_walks_as_its_parts(solver):
    lattice, coords = VPScheduler("cosine", "sample"), FlowScheduler("sample", eta=0.5)
    scheduler = ProductScheduler({"lattice": lattice, "coords": coords}, {"coords": "mask"})
    x = {"lattice": draw(0, 2, 3, 3), "coords": draw(1, 2, 4, 3), "mask": torch.tensor([[True] * 4, [True, False] * 2])}

    def denoise(x, t, cond=None):
        return {"lattice": 0.4 * x["lattice"], "coords": torch.sin(x["coords"])}

    options = {"num_inference_steps": 4, "solver": solver, "return_trajectory": True}
    out = rollout(denoise, scheduler, x, generator=generators([5, 6]), return_log_probs=True, **options)
    assert torch.equal(out.sample["mask"], x["mask"]) and out.trajectory["coords"].shape == (5, 2, 4, 3)
    assert out.log_probs.shape == (2, 4)
    state, keys, times = x, draw_keys(generators([5, 6]), 2), scheduler.times(4)
    for i in range(4):
        state = dict(state)
        for name, part, field in (
            ("lattice", lattice, 0.4 * state["lattice"]),
            ("coords", coords, torch.sin(state["coords"])),
        ):
            eta = 0.0 if solver == "euler" else None
            kernel = part.transition(field, times[i], times[i + 1], state[name], eta=eta)
            state[name] = kernel.sample(keys.at(step=i, purpose=f"transition/{name}"))
        torch.testing.assert_close(out.trajectory["lattice"][i + 1], state["lattice"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out.trajectory["coords"][i + 1], state["coords"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.x0["coords"], out.sample["coords"], rtol=1e-10, atol=1e-10)


def test_a_state_with_parts_can_be_drawn():
    scheduler = ProductScheduler({"a": FlowScheduler("sample"), "b": VPScheduler("cosine", "sample")})
    shapes = {"a": (3, 2), "b": (3, 4, 4)}
    out = rollout(
        lambda x, t, c=None: x, scheduler, shape=shapes, num_inference_steps=2, generator=generators(range(3))
    )
    assert out.sample["a"].shape == (3, 2) and out.sample["b"].shape == (3, 4, 4)
    with pytest.raises(ConfigError, match="expected a dict with the field 'a'"):
        rollout(lambda x, t, c=None: x, scheduler, shape=(3, 2), num_inference_steps=2)


# ---- wrong arguments ------------------------------------------------------------------------------------------------

X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no length: give num_inference_steps or times"),
        ({"num_inference_steps": 0}, "positive integer"),
        ({"num_inference_steps": 3, "times": [1.0, 0.5, 0.0]}, "2 steps, but num_inference_steps=3"),
        ({"times": [0.0, 0.5, 1.0]}, "decrease strictly"),
        ({"times": [1.0, 1.0, 0.0]}, "decrease strictly"),
        ({"times": [1.5, 0.5]}, r"lie in \[0, 1\]"),
        ({"times": [1.0, float("nan"), 0.0]}, "decrease strictly"),
        ({"times": [1.0]}, r"expected \(n \+ 1,\)"),
        ({"times": [[1.0, 0.0]]}, r"expected \(n \+ 1,\)"),
        ({"num_inference_steps": 3, "solver": "huen"}, "'huen' is unknown.*Did you mean 'heun'"),
        ({"num_inference_steps": 3, "eta": 0.5}, "eta=0.5 acts only in the solver 'ancestral'"),
        ({"num_inference_steps": 3, "eta": 0.5, "solver": "heun"}, "acts only in the solver 'ancestral'"),
        ({"num_inference_steps": 3, "eta": 1.5, "solver": "ancestral"}, "eta=1.5; expected a number from 0"),
        ({"num_inference_steps": 3, "return_log_probs": True, "solver": "heun"}, "HeunSolver has no density"),
        ({"num_inference_steps": 3, "return_log_probs": True, "solver": "dpmpp_2m"}, "has no density"),
        ({"num_inference_steps": 3, "grad_steps": 4}, "grad_steps=4; expected 0 to 3"),
        ({"num_inference_steps": 3, "grad_steps": -1}, "grad_steps=-1; expected 0 to 3"),
        ({"num_inference_steps": 3, "grad_steps": [0, 3]}, r"grad_steps holds \[3\].*0 to 2"),
        ({"num_inference_steps": 3, "stop_at": 3}, "stop_at=3; expected a step from 0 to 2"),
        ({"num_inference_steps": 3, "stop_at": -1}, "stop_at=-1"),
        ({"num_inference_steps": 3, "shape": (2, 3)}, "either x .* got both"),
        ({"num_inference_steps": 3, "x": None}, "either x .* got neither"),
        (
            {"num_inference_steps": 3, "context": {"scale": torch.ones(3)}},
            r"context\['scale'\] has shape \(3,\).*batch size 2",
        ),
        (
            {"num_inference_steps": 3, "cond": {"label": torch.ones(5, 1)}},
            r"cond\['label'\] has shape \(5, 1\).*batch size 2",
        ),
        (
            {"num_inference_steps": 3, "generator": [torch.Generator()] * 3},
            "list of 3 generators, but there are 2 samples",
        ),
        ({"num_inference_steps": 3, "generator": training_keys(0, 0, torch.arange(3))}, "3 keys, but the batch has 2"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    arguments = {"x": X, **options}
    with pytest.raises(ValueError, match=message):
        rollout(lambda x, t, cond=None: x, FlowScheduler(), arguments.pop("x"), **arguments)


def test_a_denoiser_of_another_prediction_type_is_refused():
    network = Network()
    network.prediction_type = "v_prediction"
    with pytest.raises(ConfigError, match="predicts 'v_prediction', but the scheduler expects 'flow'"):
        rollout(network, FlowScheduler(), X, num_inference_steps=2)
    rollout(network, FlowScheduler("v_prediction"), X, num_inference_steps=2)


@pytest.mark.parametrize("solver", [s for s in SOLVER_NAMES if s not in ("euler", "ancestral")])
def test_solvers_that_need_arithmetic_refuse_states_with_parts(solver):
    scheduler = ProductScheduler({"a": FlowScheduler()})
    with pytest.raises(ConfigError, match="use the solver 'euler' or 'ancestral'"):
        rollout(lambda x, t, c=None: x, scheduler, {"a": X}, num_inference_steps=2, solver=solver)
