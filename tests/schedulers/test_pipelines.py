"""Our schedulers, unchanged, in diffusers' stock pipelines with tiny random networks."""

from __future__ import annotations

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMPipeline,
    DDPMPipeline,
    DiTPipeline,
    DiTTransformer2DModel,
    UNet2DModel,
    WanPipeline,
    WanTransformer3DModel,
)

from genkit.samplers import rollout
from genkit.schedulers import FlowScheduler, VPScheduler

SCHEDULERS = {
    "flow": lambda: FlowScheduler(),
    "flow, stochastic": lambda: FlowScheduler(eta=0.5, shift=3.0),
    "cosine": lambda: VPScheduler("cosine"),
    "linear": lambda: VPScheduler("linear", "epsilon", eta=0.0),
    "edm": lambda: VPScheduler("edm", "epsilon"),
}


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ).eval()


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_ddpm_pipeline(unet, make):
    pipe = quiet(DDPMPipeline(unet, make()))
    images = pipe(batch_size=2, generator=generator(), num_inference_steps=4, output_type="np").images
    assert images.shape == (2, 8, 8, 3) and images.std() > 0.01
    again = pipe(batch_size=2, generator=generator(), num_inference_steps=4, output_type="np").images
    assert (images == again).all()


@pytest.mark.parametrize("make", [SCHEDULERS["flow"], SCHEDULERS["linear"]], ids=["flow", "linear"])
def test_the_ddpm_pipeline_of_a_deterministic_scheduler_is_our_walk(unet, make):
    scheduler, n = make(), 5
    images = quiet(DDPMPipeline(unet, scheduler))(generator=generator(), num_inference_steps=n, output_type="np").images
    start = torch.randn(1, 3, 8, 8, generator=generator())
    walk = rollout(lambda x, t, cond=None: unet(x, t * 1000).sample, make(), start, num_inference_steps=n).sample
    expected = (walk / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    torch.testing.assert_close(torch.from_numpy(images), expected, rtol=1e-4, atol=1e-5)


def test_ddim_pipeline_replaces_foreign_schedulers_and_ddpm_takes_ours_back(unet, tmp_path):
    """DDIMPipeline rebuilds its scheduler as DDIM; ours carries the keys that both know."""
    pipe = quiet(DDIMPipeline(unet, VPScheduler("linear", "epsilon", num_train_timesteps=500)))
    assert pipe.scheduler.config.num_train_timesteps == 500 and pipe.scheduler.config.prediction_type == "epsilon"
    ours = VPScheduler.from_config(pipe.scheduler.config, schedule="linear")
    assert ours.num_train_timesteps == 500 and ours.prediction_type == "epsilon" and ours.beta_end == 0.02


def test_a_saved_stock_pipeline_loads_our_scheduler(unet, tmp_path):
    DDPMPipeline(unet, VPScheduler("edm", "epsilon", rho=5.0)).save_pretrained(tmp_path)
    loaded = quiet(DDPMPipeline.from_pretrained(tmp_path, use_safetensors=True))
    assert type(loaded.scheduler) is VPScheduler and loaded.scheduler.rho == 5.0
    first = loaded(generator=generator(), num_inference_steps=2, output_type="np").images
    pipe = quiet(DDPMPipeline(unet, VPScheduler("edm", "epsilon", rho=5.0)))
    again = pipe(generator=generator(), num_inference_steps=2, output_type="np").images
    # loaded weights lie elsewhere in memory, for which some processors' convolutions round in another order
    torch.testing.assert_close(torch.from_numpy(first), torch.from_numpy(again), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [SCHEDULERS["cosine"], SCHEDULERS["flow"]], ids=["cosine", "flow"])
def test_dit_pipeline(make):
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        sample_size=4,
        num_layers=1,
        patch_size=2,
        attention_head_dim=4,
        num_attention_heads=2,
        in_channels=4,
        out_channels=4,
        norm_num_groups=4,
        num_embeds_ada_norm=1000,  # the pipeline's null class is number 1000
    )
    vae = AutoencoderKL(block_out_channels=(8,), latent_channels=4, norm_num_groups=4, layers_per_block=1)
    pipe = quiet(DiTPipeline(transformer.eval(), vae.eval(), make(), id2label={0: "cat", 1: "dog"}))
    images = pipe([1, 2], guidance_scale=2.0, generator=generator(), num_inference_steps=3, output_type="np").images
    assert images.shape == (2, 4, 4, 3) and images.std() > 0.001  # (a NaN has no standard deviation)


@pytest.mark.parametrize("make", [SCHEDULERS["flow"], SCHEDULERS["flow, stochastic"]], ids=["flow", "stochastic"])
def test_wan_pipeline(make):
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
        ffn_dim=16,
        num_layers=1,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ).eval()
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ).eval()
    pipe = quiet(WanPipeline(None, None, vae, make(), transformer))
    embeds = torch.randn(1, 6, 8, generator=generator())
    video = pipe(
        prompt_embeds=embeds,
        negative_prompt_embeds=-embeds,
        height=16,
        width=16,
        num_frames=5,
        num_inference_steps=3,
        generator=generator(),
        output_type="latent",
    ).frames
    assert video.shape == (1, 4, 2, 2, 2) and bool(torch.isfinite(video).all())
    if make is SCHEDULERS["flow"]:  # the same walk by hand, with the pipeline's guidance
        scheduler = make()
        latents = torch.randn(1, 4, 2, 2, 2, generator=generator())

        def guided(x, t, cond=None):
            plus, minus = (transformer(x, t * 1000, e, return_dict=False)[0] for e in (embeds, -embeds))
            return minus + 5.0 * (plus - minus)

        ours = rollout(guided, scheduler, latents, num_inference_steps=3).sample
        torch.testing.assert_close(ours, video, rtol=1e-4, atol=1e-4)
