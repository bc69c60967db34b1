"""The same algorithms in diffusers give the same numbers; and diffusers' schedulers serve genkit's straight walks."""

from __future__ import annotations

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from genkit.errors import ConfigError
from genkit.samplers import Keys, draw_keys, rollout
from genkit.schedulers import DiffusersScheduler, FlowScheduler, VPScheduler

TRAILING = {"timestep_spacing": "trailing", "clip_sample": False}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(x, t, cond=None):
    """Any smooth function of the state and of time in [0, 1]."""
    return torch.tanh(0.8 * x + t.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1)))


def close(ours, theirs, tolerance=1e-9):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def in_float64(scheduler):
    """diffusers keeps its table in float32; the same products in float64, so that equality can be exact."""
    n, config = scheduler.config.num_train_timesteps, scheduler.config
    if config.beta_schedule == "scaled_linear":
        betas = torch.linspace(config.beta_start**0.5, config.beta_end**0.5, n, dtype=torch.float64) ** 2
    else:
        betas = torch.linspace(config.beta_start, config.beta_end, n, dtype=torch.float64)
    scheduler.alphas_cumprod = torch.cumprod(1 - betas, 0)
    scheduler.one = scheduler.final_alpha_cumprod = torch.tensor(1.0, dtype=torch.float64)
    return scheduler


class Injected:
    """Stands for Keys in ``Transition.sample``: hands out noise drawn elsewhere."""

    def __init__(self, noise):
        self.noise = noise

    def normal(self, shape, dtype):
        return self.noise.to(dtype)


def table_times(timesteps):
    """diffusers' index i holds i + 1 factors: t = (i + 1)/1000; after the last comes the clean sample."""
    return torch.cat((torch.as_tensor(timesteps, dtype=torch.float64) + 1, torch.zeros(1))) / 1000


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("schedule", ["linear", "scaled_linear"])
def test_ddim(schedule, prediction_type, eta):
    theirs = in_float64(DDIMScheduler(beta_schedule=schedule, prediction_type=prediction_type, **TRAILING))
    ours = VPScheduler(schedule, prediction_type)
    for n in (1, 4, 50):
        theirs.set_timesteps(n)
        times = table_times(theirs.timesteps)
        torch.testing.assert_close(times, ours.times(n), rtol=1e-6, atol=1e-7)  # trailing spacing is our grid
        x = y = draw(0, 3, 4)
        for i, step in enumerate(theirs.timesteps):
            noise = draw(i + 1, 3, 4)
            output = network(x, times[i].expand(3))
            x = theirs.step(output, step, x, eta=eta, variance_noise=noise if eta else None).prev_sample
            kernel = ours.transition(network(y, times[i].expand(3)), times[i], times[i + 1], y, eta=eta)
            y = kernel.sample(Injected(noise))
            close(y, x)


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_ddpm_with_the_same_injected_noise(prediction_type):
    theirs = in_float64(DDPMScheduler(prediction_type=prediction_type, **TRAILING))
    ours = VPScheduler("linear", prediction_type, eta=1.0)
    for n in (4, 50, 1000):
        theirs.set_timesteps(n)
        times = table_times(theirs.timesteps)
        gen, noise_gen = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
        x = y = draw(0, 3, 4)
        for i, step in enumerate(theirs.timesteps):
            x = theirs.step(network(x, times[i].expand(3)), step, x, generator=gen).prev_sample
            noise = torch.randn(3, 4, generator=noise_gen, dtype=torch.float64)
            kernel = ours.transition(network(y, times[i].expand(3)), times[i], times[i + 1], y)
            y = kernel.sample(Injected(noise))
        close(y, x, 1e-7)  # diffusers adds a width of 1e-10 at the last step


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_match_euler(shift):
    theirs = FlowMatchEulerDiscreteScheduler(shift=shift)
    theirs.set_timesteps(9)
    x = start = draw(0, 3, 4)
    for i, step in enumerate(theirs.timesteps):
        x = theirs.step(network(x, theirs.sigmas[i].expand(3)), step, x.double(), return_dict=False)[0].double()
    ours = rollout(network, FlowScheduler(), start, times=theirs.sigmas).sample
    close(ours, x, 2e-6)  # diffusers steps in float32


@pytest.mark.parametrize("prediction_type", ["flow_prediction", "sample", "epsilon"])
@pytest.mark.parametrize("kind", [DPMSolverMultistepScheduler, UniPCMultistepScheduler])
def test_multistep_solvers_on_flow_levels(kind, prediction_type):
    if prediction_type == "epsilon":
        pytest.skip("refused: α(1) = 0")
    options = {"solver_type": "midpoint"} if kind is DPMSolverMultistepScheduler else {"solver_type": "bh2"}
    theirs = kind(solver_order=2, prediction_type=prediction_type, use_flow_sigmas=True, **options)
    solver = "dpmpp_2m" if kind is DPMSolverMultistepScheduler else "unipc"
    ours = FlowScheduler({"flow_prediction": "flow"}.get(prediction_type, prediction_type))
    for n in (1, 2, 3, 10, 20):
        theirs.set_timesteps(n)
        x = start = draw(0, 3, 4)
        for i, step in enumerate(theirs.timesteps):
            x = theirs.step(network(x, theirs.sigmas[i].double().expand(3)), step, x, return_dict=False)[0]
        end = rollout(network, ours, start, times=theirs.sigmas, solver=solver).sample
        close(end, x, 5e-5)  # diffusers' sigmas and λ are float32


# ---- our schedulers in loops written for diffusers ------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [FlowScheduler(), VPScheduler("linear", "epsilon", eta=0.0)], ids=["flow", "vp"])
def test_a_diffusers_loop_over_our_scheduler_is_our_walk(scheduler):
    start = draw(0, 3, 4)
    for n in (1, 7, 50):
        x = start
        scheduler.set_timesteps(n)
        for t in scheduler.timesteps:
            x = scheduler.step(network(x, (t / 1000).expand(3)), t, scheduler.scale_model_input(x, t)).prev_sample
        close(x, rollout(network, scheduler, start, num_inference_steps=n).sample, 1e-6)


def test_our_stochastic_step_reads_diffusers_generators():
    scheduler, x = VPScheduler("cosine", eta=1.0), draw(0, 3, 4)
    scheduler.set_timesteps(5)
    t, s = scheduler.times(5)[1], scheduler.times(5)[2]
    output = network(x, t.expand(3))
    kernel = scheduler.transition(output, t, s, x)
    for generator in (torch.Generator().manual_seed(3), [torch.Generator().manual_seed(i) for i in range(3)]):
        state = [g.get_state() for g in (generator if isinstance(generator, list) else [generator])]
        out = scheduler.step(output, scheduler.timesteps[1], x, generator=generator)
        fresh = [torch.Generator() for _ in state]
        for g, saved in zip(fresh, state, strict=True):
            g.set_state(saved)
        noise = [torch.randn(3 if len(fresh) == 1 else 1, 4, generator=g, dtype=torch.float64) for g in fresh]
        close(out.prev_sample, kernel.mean + kernel.std * torch.cat(noise))
        close(out.pred_original_sample, scheduler.to_x0(output, t, x))
    assert torch.equal(
        scheduler.step(output, scheduler.timesteps[1], x, torch.Generator().manual_seed(1), return_dict=False)[0],
        scheduler.step(output, scheduler.timesteps[1], x, torch.Generator().manual_seed(1)).prev_sample,
    )


# ---- diffusers' schedulers in our walks -----------------------------------------------------------------------------


def stock_loop(scheduler, n, x, generators_of=None, **options):
    scheduler.set_timesteps(n)
    x = x * getattr(scheduler, "init_noise_sigma", 1.0)
    for i, step in enumerate(scheduler.timesteps):
        scaled = scheduler.scale_model_input(x, step) if hasattr(scheduler, "scale_model_input") else x
        output = network(scaled, (step / 1000).double().expand(len(x)))
        drawing = {} if generators_of is None else {"generator": generators_of(i)}
        x = scheduler.step(output, step, x, return_dict=False, **drawing, **options)[0]
    return x


@pytest.mark.parametrize(
    "scheduler",
    [
        DDIMScheduler(**TRAILING),
        DDIMScheduler(prediction_type="v_prediction"),
        FlowMatchEulerDiscreteScheduler(shift=2.0),
        EulerDiscreteScheduler(),
        EulerDiscreteScheduler(use_karras_sigmas=True, timestep_spacing="trailing"),
        DPMSolverMultistepScheduler(),
        UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
    ],
    ids=lambda s: type(s).__name__,
)
def test_a_deterministic_diffusers_scheduler_walks_as_in_its_own_loop(scheduler):
    x = draw(0, 3, 4)
    for n in (1, 2, 10):
        wrapped = DiffusersScheduler(scheduler)
        wrapped.times(n)
        start = x * getattr(wrapped.scheduler, "init_noise_sigma", 1.0)
        out = rollout(network, wrapped, start, num_inference_steps=n, return_trajectory=True)
        close(out.sample.double(), stock_loop(scheduler, n, x).double(), 1e-6)
        assert out.x0 is None and len(out.trajectory) == n + 1
        again = rollout(network, wrapped, start, num_inference_steps=n).sample  # a walk starts afresh
        assert torch.equal(again, out.sample)


@pytest.mark.parametrize(
    ("scheduler", "eta"),
    [(DDPMScheduler(**TRAILING), None), (DDIMScheduler(**TRAILING), 0.6), (EulerAncestralDiscreteScheduler(), None)],
    ids=["DDPM", "DDIM", "EulerAncestral"],
)
def test_a_stochastic_diffusers_scheduler_draws_from_the_samples_keys(scheduler, eta):
    x, seeds, n = draw(0, 3, 4), (7, 8, 9), 6
    before = torch.random.get_rng_state()

    def generators_of(keys: Keys, step: int):
        words = keys.at(step=step, purpose="diffusers").words(2).tolist()
        return [torch.Generator().manual_seed(high << 31 | low >> 1) for high, low in words]

    def walk(chosen):
        wrapped = DiffusersScheduler(scheduler)
        wrapped.times(n)
        start = x[[seeds.index(s) for s in chosen]] * wrapped.scheduler.init_noise_sigma
        gens = [torch.Generator().manual_seed(s) for s in chosen]
        return rollout(
            network, wrapped, start, num_inference_steps=n, solver="ancestral", eta=eta, generator=gens
        ).sample

    keys = draw_keys([torch.Generator().manual_seed(s) for s in seeds], 3)
    options = {} if eta is None else {"eta": eta}
    expected = stock_loop(scheduler, n, x, lambda i: generators_of(keys, i), **options)
    whole = walk(seeds)
    close(whole.double(), expected.double(), 1e-6)
    close(walk((9, 7)).double(), whole[[2, 0]].double(), 1e-6)  # and a sample does not depend on its batch
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_adapter_refuses_what_a_stateful_scheduler_cannot_do():
    wrapped, x = DiffusersScheduler(DDIMScheduler()), draw(0, 2, 3)
    for options, message in (
        ({"num_inference_steps": 4, "solver": "heun"}, "HeunSolver needs a scheduler with known noise levels"),
        ({"num_inference_steps": 4, "stop_at": 2}, "give num_inference_steps, not times or stop_at"),
        ({"times": [1.0, 0.5, 0.0]}, "give num_inference_steps, not times or stop_at"),
        ({"num_inference_steps": 4, "return_log_probs": True}, "no density"),
    ):
        with pytest.raises(ConfigError, match=message):
            rollout(network, wrapped, x, **options)
    with pytest.raises(ConfigError, match="draws noise in its steps; use the solver 'ancestral'"):
        rollout(network, DiffusersScheduler(DDPMScheduler()), x, num_inference_steps=3)
    with pytest.raises(ConfigError, match="step of FlowMatchEulerDiscreteScheduler has no eta"):
        flow = DiffusersScheduler(FlowMatchEulerDiscreteScheduler())
        rollout(network, flow, x, num_inference_steps=3, solver="ancestral", eta=0.5)
    with pytest.raises(ConfigError, match="different times"):
        wrapped.transition(x, torch.tensor([0.5, 0.4]), torch.tensor([0.3, 0.2]), x)
    with pytest.raises(ConfigError, match="expected a diffusers scheduler"):
        DiffusersScheduler(object())
    with pytest.raises(ConfigError, match="no pure to_x0"):
        wrapped.to_x0(x, 0.5, x)


def test_the_adapter_knows_the_prediction_type():
    class Predicts:
        prediction_type = "flow"

        def __call__(self, x, t, cond=None):
            return x

    x = draw(0, 2, 3)
    rollout(Predicts(), DiffusersScheduler(FlowMatchEulerDiscreteScheduler()), x, num_inference_steps=2)
    with pytest.raises(ConfigError, match="predicts 'flow', but the scheduler expects 'epsilon'"):
        rollout(Predicts(), DiffusersScheduler(DDIMScheduler()), x, num_inference_steps=2)
