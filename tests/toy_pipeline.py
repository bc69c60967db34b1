"""A pipeline small enough for tests, from stock diffusers components: DDIM-like steps with keyed noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.utils import BaseOutput

from genkit.pipeline import GenkitPipeline
from genkit.samplers.noise import draw_keys

__all__ = ["ToyOutput", "ToyPipeline", "tiny_unet", "toy_pipeline"]


@dataclass
class ToyOutput(BaseOutput):
    samples: torch.Tensor
    scales: torch.Tensor


class ToyPipeline(GenkitPipeline):
    """Walks ``num_inference_steps`` Euler steps of the network's output; ``offset`` is a plain stored value."""

    _callback_tensor_inputs = ["latents"]

    def __init__(self, unet: UNet2DModel, scheduler: DDPMScheduler, offset: float = 0.0, levels: tuple = (0.5, 1.0)):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)
        self.register_to_config(offset=offset, levels=levels)

    def model_card(self) -> dict:
        return {"description": "A toy.", "seed": 0, "toy_scale": True, **super().model_card()}

    @torch.no_grad()
    def __call__(
        self,
        num_samples: int = 1,
        *,
        num_inference_steps: int = 2,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: tuple[str, ...] = ("latents",),
    ):
        self.check_callback_inputs(callback_on_step_end_tensor_inputs)
        size = self.unet.config.sample_size
        keys = draw_keys(generator, num_samples)
        latents = keys.at(purpose="latents").normal((1, size, size), dtype=self.unet.dtype)
        with self.progress_bar(total=num_inference_steps) as bar:
            for i in range(num_inference_steps):
                t = torch.full((num_samples,), 1000.0 * (1 - i / num_inference_steps))
                latents = latents - self.unet(latents, t).sample / num_inference_steps
                if callback_on_step_end is not None:
                    tensors = dict.fromkeys(callback_on_step_end_tensor_inputs, latents)
                    latents = callback_on_step_end(self, i, t, tensors).pop("latents", latents)
                bar.update()
        output = ToyOutput(samples=latents + self.config.offset, scales=latents.flatten(1).std(dim=1))
        return output if return_dict else output.to_tuple()


def tiny_unet(seed: int = 0) -> UNet2DModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 8),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        ).eval()


def toy_pipeline(seed: int = 0, offset: float = 0.25) -> ToyPipeline:
    pipe = ToyPipeline(tiny_unet(seed), DDPMScheduler(num_train_timesteps=100), offset=offset)
    pipe.set_progress_bar_config(disable=True)
    return pipe
