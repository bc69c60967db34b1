"""A trained start of a frozen generator's walk (noise hypernetworks).

    x_1' = x_1 + f(x_1, c),   L(f) = −λ E[R(g(x_1', c))] + (ρ/2) E|f(x_1, c)|² ,

with g the whole walk of the frozen generator: the gradient flows through all its steps to the noise it starts from.

Reference: Eyring et al., "Noise hypernetworks", arXiv 2508.09968.

Differs from the paper in: only a summary and its public options were at hand. Any few-step walk can be the generator,
a stochastic one too (its other noises are keyed); the low-rank form of f is optional; |f|² is averaged over elements,
or summed, by choice; a reward that is not finite counts as a constant, where the whole batch was left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from genkit._checks import checked_count
from genkit.errors import ConfigError, MissingExtraError, nearest
from genkit.pipelines.rmmd.objective import Cond, Reduction, _frozen_copy
from genkit.pipelines.rmmd.weights import checked_choice
from genkit.rewards import Reward
from genkit.samplers import rollout
from genkit.samplers.noise import Keys
from genkit.training.objective import LossOutput
from genkit.training.objectives.base import RewardObjective

__all__ = ["HyperNoiseObjective", "NoisyStart", "hypernoise_latents", "noise_network"]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class HyperNoiseObjective(RewardObjective):
    """Maximises a differentiable reward of a frozen generator's samples by moving the noise they start from.

    The loss is that of the module's docstring. For a walk that is linear in its start, g(x) = A x + a, and R = bᵀx it
    is least at f = (λ/ρ) Aᵀb where |f|² is a sum, and at d times that where it is a mean over d elements. With η = 1
    and α(1) = 0 the first step's kernel forgets x_1, which then acts through the network's first prediction alone.

    Args:
        denoiser: the generator's network, (x_t, t, cond) → model output; a frozen copy of it is walked.
        scheduler: the chain.
        reward: R, differentiable, of clean samples.
        num_inference_steps: K, steps of the walk.
        shape: of one sample.
        noise: f, (x_1, t = 1, cond) → the shift of x_1; None: ``noise_network(denoiser)``.
        lam: λ.
        reg: ρ; 0 leaves the noise's law free.
        reduction: ``"mean"`` or ``"sum"`` of f² over a sample's elements.
        solver: of the walk, and its stochasticity ``eta``.
        eta: of the solver ``"ancestral"``.
        condition_names: entries of a batch that the networks (and the reward) are told.
        checkpoint: recompute the generator's activations in the backward pass.

    Raises:
        ConfigError: a reward without gradient, a number out of range, an unknown reduction.

    A batch holds ``sample_id`` and the condition's entries; the samples themselves are not looked at.
    """

    def __init__(
        self,
        denoiser: nn.Module,
        scheduler: Any,
        reward: Reward,
        *,
        num_inference_steps: int,
        shape: Sequence[int],
        noise: nn.Module | None = None,
        lam: float = 1.0,
        reg: float = 1.0,
        reduction: Reduction = "mean",
        solver: str = "euler",
        eta: float | None = None,
        condition_names: Sequence[str] = (),
        checkpoint: bool = False,
    ) -> None:
        if not reward.differentiable:
            raise ConfigError(f"{reward!r} is not differentiable; the noise can only be moved along a gradient")
        generator = _frozen_copy(denoiser)
        super().__init__(
            generator, scheduler, reward, num_inference_steps=num_inference_steps, shape=shape, lam=lam, reg=reg,
            reference=generator, condition_names=condition_names,
        )  # fmt: skip
        self.noise = noise_network(denoiser) if noise is None else noise
        self.reduction: Reduction = checked_choice("reduction", reduction, get_args(Reduction))
        self.solver, self.eta, self.checkpoint = solver, eta, checkpoint

    def networks(self) -> Mapping[str, nn.Module]:
        return {"noise": self.noise}

    def frozen(self) -> Mapping[str, nn.Module]:
        return {"denoiser": self.denoiser}

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        cond = {name: batch[name] for name in self.condition_names} or None
        noise = self.scheduler.prior(keys.at(purpose="latents"), self.shape)
        shift = _shift(self.net("noise"), noise, cond)
        end = self._walk(noise + shift, cond, keys)
        output, slope = self.reward.value_and_grad(end.detach(), cond)
        value = (output.filled().sum() + ((end - end.detach()) * slope).sum()) / len(end)
        square = shift.float().square().flatten(1)
        size = (square.mean(dim=1) if self.reduction == "mean" else square.sum(dim=1)).mean()
        logs: dict[str, Tensor | float] = {
            "reward": output.mean().detach(),
            "reward_invalid": 1.0 - output.valid.to(torch.float32).mean(),
            "noise_shift": square.detach().mean().sqrt(),
        }
        return LossOutput(0.5 * self.reg * size - self.lam * value, logs)

    def _walk(self, x: Tensor, cond: Cond, keys: Keys) -> Tensor:
        """The clean end of the frozen generator's walk from x (B, \\*), differentiable with respect to x."""
        walk = rollout(
            self.denoiser, self.scheduler, x, num_inference_steps=self.num_inference_steps, cond=cond,
            generator=keys.at(purpose="walk"), solver=self.solver, eta=self.eta, grad_steps=self.num_inference_steps,
            checkpoint=self.checkpoint,
        )  # fmt: skip
        end: Tensor = walk.sample
        return end


def noise_network(denoiser: nn.Module, *, last: str | None = None, rank: int | None = None, seed: int = 0) -> nn.Module:
    """A copy of a generator's network whose last layer is zero, so that f = 0 where training starts.

    A network that adds its input to the last layer's output does not start at 0: give another f for it.

    Args:
        denoiser: (x_t, t, cond) → output.
        last: name of its last layer; None: the last linear or convolutional one, in the order of its modules.
        rank: of low-rank adapters (LoRA, by peft) on all other such layers; they and the last layer are then trained
            alone. None: the whole copy is trained.
        seed: of the adapters' start.

    Raises:
        ConfigError: no such layer, or none left for the adapters.
        MissingExtraError: ``rank`` is given and peft is not installed.
    """
    network = copy.deepcopy(denoiser).requires_grad_(True)
    layers = {name: module for name, module in network.named_modules() if isinstance(module, _LAYERS)}
    last = next(reversed(layers), "") if last is None else last
    if last not in layers:
        known = ", ".join(list(layers)[-4:]) or "none"
        raise ConfigError(
            f"last={last!r} is no linear or convolutional layer of {type(denoiser).__name__}; it has {known} (at most "
            f"four shown).{nearest(last, layers)} Name its last layer, or make f yourself"
        )
    if rank is not None:
        _add_adapters(network, [name for name in layers if name != last], checked_count("rank", rank), seed)
    for parameter in layers[last].parameters():
        nn.init.zeros_(parameter).requires_grad_(True)
    return network


def _add_adapters(network: nn.Module, names: list[str], rank: int, seed: int) -> None:
    if not names:
        raise ConfigError(f"rank={rank}, but the network has no layer but its last one; leave the rank out")
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("rank= needs LoRA adapters: install genkit-diffusion[video]") from error
    devices: list[int] = []  # peft initialises the new layers from the global generator, which must stay untouched
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names), network)


def hypernoise_latents(noise: Callable[..., Tensor], latents: Tensor, cond: Cond = None) -> Tensor:
    """x_1 + f(x_1, c), (B, \\*): where the walk of a generator starts with a trained f.

    Args:
        noise: f, (x_1, t = 1, cond) → shift.
        latents: x_1, (B, \\*), a draw of the scheduler's prior.
        cond: what f is told, tensors with batch size B.
    """
    return latents + _shift(noise, latents, cond)


def _shift(noise: Callable[..., Tensor], latents: Tensor, cond: Cond) -> Tensor:
    return noise(latents, torch.ones(len(latents), device=latents.device), cond).to(latents.dtype)


class NoisyStart:
    """A scheduler whose prior is x_1 + f(x_1, c); everything else is that of the scheduler it holds.

    ``rollout(denoiser, NoisyStart(scheduler, f, cond), shape=…, cond=cond, generator=…)`` walks with the same noises as
    without f, except for its start.

    Args:
        scheduler: the chain.
        noise: f, (x_1, t = 1, cond) → shift.
        cond: what f is told, tensors with the walk's batch size.
    """

    def __init__(self, scheduler: Any, noise: Callable[..., Tensor], cond: Cond = None) -> None:
        self.scheduler, self.noise, self.cond = scheduler, noise, cond

    def prior(self, keys: Any, shape: Sequence[int], context: Any = None, device: Any = None) -> Tensor:
        """x_1 + f(x_1, c), (B, \\*shape)."""
        return hypernoise_latents(self.noise, self.scheduler.prior(keys, shape, context, device), self.cond)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # asked for before it is set, as copies do
            raise AttributeError(name)
        return getattr(self.scheduler, name)
