"""The pipeline: the common promises, the tail knob, and what it says to impossible arguments."""

import math
import warnings

import numpy as np
import pytest
import torch
from pipeline_tester import PipelineTesterMixin

import genkit
from genkit.errors import ConfigError
from genkit.metrics import hill
from genkit.pipelines import HeavyTailedFlowPipeline
from genkit.pipelines.heavy_tailed_flow.clocks import GaussianClock, StableClock, StudentTClock
from genkit.pipelines.heavy_tailed_flow.denoiser import ClockDenoiser
from genkit.schedulers import FlowScheduler

LAWS = (GaussianClock(), StableClock(2.0), StableClock(1.9))


def untrained(coupling="rank", seed=0, num_classes=0, clock=None):
    """A pipeline fitted to Student-t data whose network has a random head instead of the zero one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        denoiser = ClockDenoiser(
            2, (clock or StudentTClock(3.0)).to_dict(), width=16, blocks=1, coupling=coupling, num_classes=num_classes
        )
        torch.nn.init.normal_(denoiser.network.output.weight, std=0.02)
        data = torch.randn(20_000, 2) / torch._standard_gamma(torch.full((20_000, 1), 1.5)).div(1.5).sqrt()
    denoiser.fit(data, "mad")
    pipe = HeavyTailedFlowPipeline(denoiser.eval(), FlowScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class TestHeavyTailedFlowPipeline(PipelineTesterMixin):
    def make_pipeline(self):
        return untrained()

    def replacement(self):
        return "denoiser", untrained(seed=1).denoiser


def test_tail_knob_moves_the_tail_and_leaves_the_bulk():
    pipe = untrained()
    base = pipe(100_000, 5, generator=seeded()).samples.norm(dim=1)
    tails = []
    for index in (1.5, 3.0, 6.0):
        radius = pipe(100_000, 5, generator=seeded(), tail_index=index).samples.norm(dim=1)
        tails.append(hill(radius, fraction=0.005).tail_index)
        for q in (0.5, 0.9):
            assert torch.quantile(radius, q).item() == pytest.approx(torch.quantile(base, q).item(), rel=0.02)
    assert tails[0] < tails[1] < tails[2]
    assert tails[0] == pytest.approx(1.5, rel=0.2) and tails[1] == pytest.approx(3.0, rel=0.2)


def test_tail_knob_of_an_independent_network_is_announced_to_do_nothing():
    pipe = untrained("independent")
    with pytest.warns(UserWarning, match="independent coupling"):
        changed = pipe(50_000, 10, generator=seeded(), tail_index=1.5).samples.norm(dim=1)
    base = pipe(50_000, 10, generator=seeded()).samples.norm(dim=1)
    # in the limit of many steps every clock ends in the same law; ten Heun steps leave a few per cent
    for q in (0.5, 0.9, 0.99):
        assert torch.quantile(changed, q).item() == pytest.approx(torch.quantile(base, q).item(), rel=0.05), q
    # control: with rank coupling the same request moves the 99 % quantile
    moved = untrained("rank")(50_000, 10, generator=seeded(), tail_index=1.5).samples.norm(dim=1)
    kept = untrained("rank")(50_000, 10, generator=seeded()).samples.norm(dim=1)
    assert torch.quantile(moved, 0.99).item() > 1.2 * torch.quantile(kept, 0.99).item()


def test_alpha_two_gives_the_samples_of_a_gaussian_flow_bit_for_bit():
    """One network under the stable law at α = 2 and under the Gaussian law: one noise, one clock, equal samples."""
    samples = [untrained("independent", clock=clock)(64, 5, generator=seeded()).samples for clock in LAWS]
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])  # control


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_of_another_precision_samples_what_the_float32_one_does(dtype):
    """Only c_in x is cast: times, clocks, scale and state stay float32 or float64."""
    pipe = untrained()
    expected = pipe(256, 5, generator=seeded()).samples
    cast = untrained()
    cast.denoiser.to(dtype)
    got = cast(256, 5, generator=seeded()).samples
    size = expected.norm(dim=1, keepdim=True).clamp(min=1.0)
    assert got.dtype == torch.float32
    assert float(((got - expected) / size).abs().max()) < (1e-5 if dtype == torch.float64 else 0.02)


def test_a_heavier_clock_is_finite_warned_about_and_counted():
    pipe = untrained()
    with pytest.warns(UserWarning, match="lie outside"):
        out = pipe(5000, 5, generator=seeded(), clock=StableClock(0.8))
    assert torch.isfinite(out.samples).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        far = pipe(5000, 5, generator=seeded(), clock={"law": "stable", "alpha": 0.3})
    assert out.clipped_share < far.clipped_share and torch.isfinite(far.samples).all()


def test_samples_beyond_the_range_of_floats_are_counted():
    with pytest.warns(UserWarning, match=r"\d+ of 2000 samples are not finite.*larger tail index"):
        out = untrained()(2000, 2, generator=seeded(), tail_index=0.02)
    assert not torch.isfinite(out.samples).all()


def test_one_step_is_x_plus_velocity():
    """num_inference_steps=1 with Euler: x(0) = x(1) − v(x(1), 1)."""
    pipe = untrained()
    latents = torch.randn(4, 2, generator=seeded())
    out = pipe(4, 1, solver="euler", generator=seeded(), latents=latents)
    x = out.clocks.sqrt().float().unsqueeze(1) * latents
    # the clocks are those of the walk's keys; the features are functions of the same paths
    from genkit.samplers import draw_keys

    path = pipe.denoiser.clock.path(draw_keys(seeded(), 4).at(purpose="clock"), pipe.denoiser.features.grid)
    cond = {"clock": path[:, -1], "features": pipe.denoiser.features(path)}
    with torch.no_grad():
        expected = pipe.denoiser.transform.restore(x - pipe.denoiser(x, torch.ones(4), cond))
    assert torch.equal(path[:, -1], out.clocks)
    torch.testing.assert_close(out.samples, expected)


def test_two_calls_with_one_generator_differ_and_numpy_output_agrees():
    pipe, generator = untrained(), seeded()
    first, second = pipe(3, 2, generator=generator).samples, pipe(3, 2, generator=generator).samples
    assert not torch.equal(first, second)
    out = pipe(3, 2, generator=seeded(), output_type="np")
    assert isinstance(out.samples, np.ndarray)
    assert np.array_equal(out.samples, first.numpy())


def test_no_samples_is_an_empty_result():
    out = untrained()(0, 2)
    assert out.samples.shape == (0, 2) and out.clocks.shape == (0,) and out.clipped_share == 0.0


def test_class_labels_reach_the_network():
    pipe = untrained(num_classes=3)
    with torch.no_grad():
        torch.nn.init.normal_(pipe.denoiser.network.blocks[0].modulation.weight, generator=seeded(3))
    samples = [pipe(4, 2, generator=seeded(), class_labels=[k] * 4).samples for k in (0, 2)]
    assert not torch.equal(*samples)
    for wrong in (None, [0, 1], [0, 1, 2, 3], [0.0, 1.0, 2.0, 0.0]):
        with pytest.raises(ConfigError, match="class"):
            pipe(4, 2, class_labels=wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": -1}, "num_samples=-1"),
        ({"num_samples": 2.5}, "num_samples=2.5"),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
        ({"output_type": "pil"}, "expected 'pt' or 'np'"),
        ({"latents": torch.zeros(2, 3)}, r"expected \(2, 2\)"),
        ({"latents": np.zeros((2, 2))}, "type ndarray"),
        ({"latents": torch.full((2, 2), math.nan)}, "NaN"),
        ({"callback_on_step_end_tensor_inputs": ("latent",)}, "Did you mean|latents"),
        ({"class_labels": [0, 1]}, "trained without labels"),
        ({"tail_index": 0.0}, "tail_index"),
        ({"tail_index": math.nan}, "tail_index"),
        ({"splice_at": 0.9}, "splice_at=0.9 acts only with tail_index"),
        ({"solver": "ancestral", "eta": "abc"}, "eta='abc'; expected a number from 0"),
        ({"generator": 0}, "generator=0; expected a torch.Generator"),
        ({"callback_on_step_end": lambda *a: torch.zeros(2, 2)}, "returned type Tensor"),
        ({"callback_on_step_end": lambda *a: {"latnets": torch.zeros(2, 2)}}, "Did you mean 'latents'"),
        ({"callback_on_step_end": lambda *a: {"latents": torch.zeros(1, 2)}}, r"has shape \(1, 2\)"),
        ({"clock": {"law": "studnt_t", "nu": 3.0}}, "Did you mean 'student_t'"),
        ({"clock": {"law": "stable", "alpha": 2.1}}, "alpha"),
        ({"generator": [torch.Generator()]}, "list of 1 generators"),
        ({"times": [1.0, 0.5, 0.7, 0.0]}, "decrease strictly"),
        ({"solver": "eulr"}, "Did you mean 'euler'"),
        ({"solver": "heun", "eta": 0.5}, "ancestral"),
    ],
)
def test_impossible_arguments_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        untrained()(**{"num_samples": 2, **({} if "times" in options else {"num_inference_steps": 2}), **options})


def test_wrong_clock_in_a_saved_denoiser_is_refused(tmp_path):
    """A checkpoint trained with one depth or law is not loaded into another: no silent padding."""
    import json

    untrained().save_pretrained(tmp_path / "pipe")
    file = tmp_path / "pipe" / "denoiser" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "depth": 4}))
    with pytest.raises(genkit.errors.CheckpointError):
        genkit.load(tmp_path / "pipe")
    with pytest.raises((genkit.errors.CheckpointError, RuntimeError), match="depth"):
        ClockDenoiser(2, config["clock"], depth=4, width=16, blocks=1).load_state_dict(
            untrained().denoiser.state_dict()
        )


def test_a_pipeline_saved_by_an_earlier_version_still_loads_and_gives_its_samples():
    """Module paths, file names and the noise are a file format; see tests/fixtures/make_pipeline_fixture.py."""
    from pathlib import Path

    from genkit.serialization import load_tensors

    fixtures = Path(__file__).resolve().parents[2] / "fixtures"
    pipe = genkit.load(fixtures / "heavy_tailed_flow")
    pipe.set_progress_bar_config(disable=True)
    output = pipe(8, 4, solver="heun", generator=seeded())
    stored = load_tensors(fixtures / "heavy_tailed_flow_samples.safetensors")
    torch.testing.assert_close(output.samples, stored["samples"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.clocks, stored["clocks"], rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": [1.0, 0.5]}, "expected from 1 .noise. to 0"),
        ({"times": [0.9, 0.5, 0.0]}, "expected from 1 .noise. to 0"),
        ({"times": []}, "expected from 1 .noise. to 0"),
        ({"times": [1.0, 0.0], "num_inference_steps": 20}, "give one of the two"),
    ],
)
def test_a_pipeline_walks_from_noise_to_data_or_says_why_not(options, message):
    with pytest.raises(ConfigError, match=message):
        untrained()(2, **options)


def test_custom_times_are_the_walk():
    pipe = untrained()
    grid = [1.0, 0.75, 0.5, 0.25, 0.0]
    assert torch.equal(pipe(4, times=grid, generator=seeded()).samples, pipe(4, 4, generator=seeded()).samples)
