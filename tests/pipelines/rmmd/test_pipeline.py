"""The pipeline: the common promises, what a student refuses, and training through it."""

import copy
import math

import pytest
import torch
from diffusers import UNet2DModel
from pipeline_tester import PipelineTesterMixin

import genkit
from genkit.errors import CheckpointError, ConfigError
from genkit.pipelines.rmmd.networks import MLPDenoiser, as_denoiser
from genkit.pipelines.rmmd.pipeline import RMMDPipeline, weights_hash
from genkit.rewards import FunctionReward, LinearFunctional
from genkit.samplers import rollout
from genkit.schedulers import VPScheduler


def network(seed=0, classes=0, cond=0, shape=(1, 4, 4)):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = MLPDenoiser(list(shape), num_classes=classes, cond_channels=cond, width=16, blocks=1)
        torch.nn.init.normal_(net.mlp.output.weight, std=0.1)
        torch.nn.init.normal_(net.mlp.blocks[0].modulation.weight, std=0.3)  # else labels have no effect
    return net.eval()


def untrained(seed=0, classes=0, teacher=True, **options):
    options = {"num_inference_steps": 3, "eta": 0.7} | options
    pipe = RMMDPipeline.from_teacher(network(seed, classes), VPScheduler(), **options)
    if not teacher:
        pipe.teacher = pipe.auxiliary = None
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class TestRMMDPipeline(PipelineTesterMixin):
    def make_pipeline(self):
        return untrained()

    def replacement(self):
        return "student", network(1)


class Rows:
    """Rows of a normal law, in memory."""

    def __init__(self, count=4096, mean=0.5, std=0.5, shape=(1,), **more):
        self.sample = mean + std * torch.randn(count, *shape, generator=seeded(1))
        self.more = more

    def __len__(self):
        return len(self.sample)

    def __getitem__(self, index):
        return {"sample": self.sample[index]} | {k: v[index] for k, v in self.more.items()}


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_a_student_walks_its_own_grid_with_its_own_kernel():
    pipe = untrained()
    ours = pipe(5, generator=seeded()).samples
    told = rollout(
        pipe.student, pipe.scheduler, shape=(5, 1, 4, 4), generator=seeded(), num_inference_steps=3,
        solver="ancestral", eta=0.7,
    ).sample  # fmt: skip
    assert torch.equal(ours, told)


@pytest.mark.parametrize(
    "options",
    [{"num_inference_steps": 4}, {"times": [1.0, 0.4, 0.0]}, {"solver": "heun"}, {"guidance_scale": 2.0}],
    ids=lambda o: next(iter(o)),
)
def test_a_student_refuses_what_it_was_not_distilled_for_and_a_teacher_does_not(options):
    pipe = untrained(classes=2 if "guidance_scale" in options else 0)
    told = {"class_labels": [0, 1]} if "guidance_scale" in options else {}
    with pytest.raises(ConfigError, match=f"{next(iter(options))}.*distilled for 3 steps"):
        pipe(2, **told, **options)
    assert torch.isfinite(pipe(2, network="teacher", generator=seeded(), **told, **options).samples).all()


def test_another_stochasticity_is_said_to_be_another():
    with pytest.warns(UserWarning, match=r"distilled with eta=0\.7"):
        untrained()(2, eta=0.2)


def test_guidance_extrapolates_from_the_null_class():
    """With outputs linear in the label's weight the guided walk of one step is the combination of two walks."""
    pipe = untrained(classes=2, teacher_steps=1)
    latents = torch.randn(3, 1, 4, 4, generator=seeded())
    labels = torch.tensor([0, 1, 0])
    options = {"network": "teacher", "latents": latents, "eta": 0.0}
    conditional = pipe(3, class_labels=labels, guidance_scale=1.0, **options).samples
    guided = pipe(3, class_labels=labels, guidance_scale=3.0, **options).samples
    with torch.no_grad():
        plain = pipe.scheduler.to_x0(pipe.teacher(latents, torch.ones(3)), torch.ones(3), latents)
    torch.testing.assert_close(guided, plain + 3.0 * (conditional - plain), rtol=1e-4, atol=1e-5)
    assert (guided - conditional).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "techer"}, "Did you mean 'teacher'"),
        ({"class_labels": [0, 1]}, "without labels"),
        ({"latents": torch.zeros(2, 3)}, r"latents has shape \(2, 3\); expected \(2, 1, 4, 4\)"),
        ({"latents": torch.full((2, 1, 4, 4), math.nan)}, "latents holds NaN"),
        ({"condition": torch.zeros(3, 2)}, "condition has 3 rows for num_samples=2"),
        ({"condition": torch.zeros(2, 2)}, "is told nothing, and got"),
        ({"output_type": "pil"}, "output_type='pil'"),
        ({"network": "teacher", "guidance_scale": 2.0}, "nothing to guide by"),
    ],
)
def test_impossible_calls_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        untrained()(2, **options)


def test_no_samples_and_one_sample():
    assert untrained()(0).samples.shape == (0, 1, 4, 4)
    assert untrained()(1).samples.shape == (1, 1, 4, 4)


def test_a_pipeline_without_its_teacher_is_saved_and_says_so_when_it_is_asked(tmp_path):
    untrained(teacher=False).save_pretrained(tmp_path / "small")
    pipe = genkit.load(tmp_path / "small")
    pipe.set_progress_bar_config(disable=True)
    assert torch.equal(pipe(2, generator=seeded()).samples, untrained()(2, generator=seeded()).samples)
    with pytest.raises(ConfigError, match="no teacher"):
        pipe(2, network="teacher")
    with pytest.raises(ConfigError, match="teacher and auxiliary"):
        pipe.distill(Rows(shape=(1, 4, 4)), {"output_dir": str(tmp_path / "run"), "max_steps": 2})


# ---- files -----------------------------------------------------------------------------------------------------------


def test_another_teacher_is_refused_at_load(tmp_path):
    untrained().save_pretrained(tmp_path / "pipe")
    assert genkit.load(tmp_path / "pipe").config["reference_hash"] == weights_hash(network())
    with pytest.raises(CheckpointError, match="another student"):
        RMMDPipeline.from_pretrained(tmp_path / "pipe", teacher=network(1))


def test_storage_in_half_precision_is_the_same_teacher(tmp_path):
    untrained().save_pretrained(tmp_path / "half", dtype=torch.float16)
    genkit.load(tmp_path / "half").save_pretrained(tmp_path / "again", dtype=torch.float16)
    assert genkit.load(tmp_path / "again").config["reference_hash"] == weights_hash(network())


def test_grid_stochasticity_and_parametrisation_are_part_of_the_file(tmp_path):
    untrained(num_inference_steps=5, eta=0.3).save_pretrained(tmp_path / "pipe")
    pipe = genkit.load(tmp_path / "pipe")
    assert (pipe.config["num_inference_steps"], pipe.config["eta"]) == (5, 0.3)
    assert pipe.scheduler.prediction_type == "v_prediction"
    with pytest.raises(ConfigError, match="eta"):
        RMMDPipeline.from_pretrained(tmp_path / "pipe", eta=0.0)


# ---- networks of diffusers -------------------------------------------------------------------------------------------


def unet(channels=1, extra=0, classes=None):
    return UNet2DModel(
        sample_size=8, in_channels=channels + extra, out_channels=channels, block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1, norm_num_groups=4, num_class_embeds=classes,
    )  # fmt: skip


def test_a_network_of_diffusers_is_a_teacher(tmp_path):
    pipe = RMMDPipeline.from_teacher(unet(classes=3), num_inference_steps=2)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.config["sample_shape"] == [1, 8, 8] and pipe.config["num_classes"] == 2
    data = Rows(32, shape=(1, 8, 8), class_labels=torch.arange(32) % 2)
    logs = pipe.distill(data, {"output_dir": str(tmp_path / "run"), "max_steps": 4, "batch_size": 8})
    assert [log.turn for log in logs] == ["auxiliary", "student"] * 2
    again = genkit.load(tmp_path / "run" / "pipeline")
    again.set_progress_bar_config(disable=True)
    options = {"class_labels": [0, 1], "generator": seeded()}
    torch.testing.assert_close(again(2, **options).samples, pipe(2, **options | {"generator": seeded()}).samples)


def test_a_condition_is_put_beside_the_channels():
    net = as_denoiser(unet(extra=2), "v_prediction")
    x, t = torch.randn(2, 1, 8, 8, generator=seeded()), torch.tensor([0.3, 0.8])
    condition = torch.randn(2, 2, 8, 8, generator=seeded(2))
    with torch.no_grad():
        ours = net(x, t, {"condition": condition})
        theirs = net.model(torch.cat((x, condition), 1), 1000 * t).sample
    assert torch.equal(ours, theirs)
    with pytest.raises(ConfigError, match="needs the condition"):
        net(x, t, {})


# ---- training --------------------------------------------------------------------------------------------------------


def gaussian_teacher(mean=0.5, std=0.5):
    """The exact denoiser of N(mean, std²) with some capacity to move: v = α ε̂ − σ x̂ plus a zero network."""

    class Exact(MLPDenoiser):
        def forward(self, x, t, cond=None):
            alpha, sigma = (c.to(x.dtype).unsqueeze(1) for c in VPScheduler().alpha_sigma(t))
            x0 = mean + alpha * std**2 * (x - alpha * mean) / (alpha**2 * std**2 + sigma**2)
            noise = (x - alpha * x0) / sigma.clamp(min=1e-6)
            return alpha * noise - sigma * x0 + super().forward(x, t, cond)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Exact([1], width=32, blocks=1)


def test_distillation_and_reward_move_a_gaussian_as_they_should(tmp_path):
    """One exact teacher in one dimension: the one-step student has no spread before and the teacher's after; a linear
    reward then moves its mean up and leaves the spread."""
    pipe = RMMDPipeline.from_teacher(gaussian_teacher(), VPScheduler(), num_inference_steps=1)
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained = lambda folder: folder  # a class of this file cannot be saved
    settings = {"max_steps": 300, "batch_size": 256, "learning_rate": 5e-3, "lr_scheduler": "linear"}
    settings |= {"adam_beta1": 0.0, "adam_beta2": 0.99}
    before = pipe(20_000, generator=seeded()).samples
    pipe.distill(Rows(), settings | {"output_dir": str(tmp_path / "distil")}, time_law="grid")
    after = pipe(20_000, generator=seeded()).samples
    assert before.std() < 0.01 and after.std() == pytest.approx(0.5, abs=0.08)
    assert after.mean() == pytest.approx(0.5, abs=0.05)
    reward = LinearFunctional([1.0])
    logs = pipe.finetune(reward, Rows(), settings | {"output_dir": str(tmp_path / "reward")}, lam=0.1, time_law="grid")
    moved = pipe(20_000, generator=seeded()).samples
    # closed form of one step with τ = 1 and the tie: m + λ / (κK + λ), κ = 1/2, K = 2/3
    shift = 0.1 / (0.5 * 2 / 3 + 0.1)
    assert 0.6 * shift < float(moved.mean() - after.mean()) < 1.6 * shift
    assert moved.std() == pytest.approx(float(after.std()), abs=0.08)
    assert {"reward", "moment_gap", "reward_gradient_ratio"} <= logs[1].logs.keys()


def test_a_reward_without_gradient_is_refused_before_training(tmp_path):
    pipe, settings = untrained(), {"output_dir": str(tmp_path / "run"), "max_steps": 2}
    flat = FunctionReward(lambda x, c: 0.0 * x.flatten(1).sum(1), differentiable=True, name="flat")
    cut = FunctionReward(lambda x, c: x.detach().flatten(1).sum(1), differentiable=True, name="cut")
    data = Rows(64, shape=(1, 4, 4))
    for reward, message in ((flat, "gradient is 0"), (cut, "no gradient")):
        with pytest.raises(ConfigError, match=message):
            pipe.finetune(reward, data, settings)
    assert not (tmp_path / "run").exists()


def test_teacher_and_student_of_another_parametrisation_are_refused(tmp_path):
    pipe = untrained()
    pipe.auxiliary = copy.deepcopy(network())
    pipe.auxiliary.prediction_type = "epsilon"
    with pytest.raises(ConfigError, match="one prediction type"):
        pipe.distill(Rows(64, shape=(1, 4, 4)), {"output_dir": str(tmp_path / "run"), "max_steps": 2})


def test_a_reward_is_weighed_by_what_holds_the_student(tmp_path):
    """λ from a ratio is linear in it, and inverse to the reward's scale."""
    pipe, data = untrained(), Rows(64, shape=(1, 4, 4))
    with pytest.raises(ConfigError, match="distil first"):
        pipe.lam_for_ratio(0.3, data, {"reward": LinearFunctional([[[1.0]]])})
    pipe.auxiliary = network(3)
    one = pipe.lam_for_ratio(0.3, data, {"reward": LinearFunctional([[[1.0]]])})
    assert pipe.lam_for_ratio(0.6, data, {"reward": LinearFunctional([[[1.0]]])}) == pytest.approx(2 * one, rel=1e-5)
    assert pipe.lam_for_ratio(0.3, data, {"reward": LinearFunctional([[[5.0]]])}) == pytest.approx(one / 5, rel=1e-5)
    settings = {"output_dir": str(tmp_path / "run"), "max_steps": 2, "batch_size": 16}
    logs = pipe.finetune(LinearFunctional([[[1.0]]]), data, settings, lam="auto:0.3", reduction="sum")
    assert 0.0 < logs[1].logs["effective_lambda"]
    for wrong in ("auto", "auto:x", "auto:-1", "half"):
        with pytest.raises(ConfigError, match="such as 'auto:0.3'"):
            pipe.finetune(LinearFunctional([[[1.0]]]), data, settings, lam=wrong)
