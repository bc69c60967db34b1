"""Back-propagation of a reward through the last steps of a walk: DRaFT, AlignProp, DRTune and ReFL are its windows.

A walk of the network that is trained starts from noise; the steps before the window build no graph. The loss is

    −λ E[r(x_0)] + ρ E |x̂_0 − x̂_0^ref|² ,

the second term over the differentiated steps, where the frozen network sees the same states (no second walk): with
``reference=None`` there is none, and nothing but a small learning rate keeps the network near its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from genkit.errors import ConfigError
from genkit.rewards import Reward
from genkit.samplers import rollout
from genkit.samplers.noise import Keys
from genkit.training.objective import LossOutput
from genkit.training.objectives.base import RewardObjective
from genkit.training.objectives.windows import GradientWindow, WindowDraw

__all__ = ["RewardGradientObjective"]


class RewardGradientObjective(RewardObjective):
    """Maximises a differentiable reward of the samples of a K-step walk.

    Args:
        denoiser: (x_t, t, cond) → model output; what is trained.
        scheduler: the chain.
        reward: differentiable, of clean samples.
        num_inference_steps: K, steps of the walk.
        shape: of one sample.
        window: which steps are differentiated.
        lam: weight of the reward.
        reg: weight ρ of the distance to the reference, 0 without one.
        reference: a frozen network of the same kind; None: no such term.
        solver: of the walk, and its stochasticity ``eta``.
        eta: of the solver ``"ancestral"``.
        condition_names: entries of a batch that the denoiser (and the reward) is told.
        checkpoint: recompute the network's activations in the backward pass.

    Raises:
        ConfigError: a reward without gradient, a weight out of range, or ``reg`` without a reference.

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
        window: GradientWindow | None = None,
        lam: float = 1.0,
        reg: float = 0.0,
        reference: nn.Module | None = None,
        solver: str = "euler",
        eta: float | None = None,
        condition_names: Sequence[str] = (),
        checkpoint: bool = False,
    ) -> None:
        if not reward.differentiable:
            raise ConfigError(f"{reward!r} is not differentiable; use PolicyGradientObjective, which needs values only")
        super().__init__(
            denoiser, scheduler, reward, num_inference_steps=num_inference_steps, shape=shape, lam=lam, reg=reg,
            reference=reference, condition_names=condition_names,
        )  # fmt: skip
        self.window, self.checkpoint = window or GradientWindow(), checkpoint
        self.solver, self.eta = solver, eta

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        told = {name: batch[name] for name in self.condition_names}
        # one window for the whole step, whatever the batch: all processes differentiate the same steps
        first = Keys(keys.key[:1], torch.zeros_like(keys.key[:1]), keys.step, "window")
        window = self.window.draw(self.num_inference_steps, float(first.uniform()))
        ends, distance = self._walk(window, told, keys)
        outputs = [self.reward(end, told or None) for end in ends]
        value = torch.stack([output.mean() for output in outputs]).mean()
        logs: dict[str, Tensor | float] = {
            "reward": value.detach(),
            "reward_invalid": float(sum(output.invalid_count for output in outputs)) / (len(ends) * len(ends[0])),
            "grad_steps": float(len(window.grad_steps)),
        }
        total = -self.lam * value
        if distance is not None:
            total, logs["reference_distance"] = total + self.reg * distance, distance.detach()
        return LossOutput(total, logs)

    def _walk(self, window: WindowDraw, told: Mapping[str, Tensor], keys: Keys) -> tuple[list[Tensor], Tensor | None]:
        """The clean ends, and the mean squared distance of clean predictions to the reference's, of the window."""
        watched = _Watched(self.net("denoiser"), self.reference if self.reg > 0.0 else None, self.scheduler)
        options: dict[str, Any] = {"cond": told or None, "solver": self.solver, "eta": self.eta}
        walk = rollout(
            watched, self.scheduler, None, shape=(len(keys), *self.shape), generator=keys.at(purpose="walk"),
            num_inference_steps=self.num_inference_steps, stop_at=window.stop_at, checkpoint=self.checkpoint,
            grad_steps=window.grad_steps, input_grad=window.input_grad, **options,
        )  # fmt: skip
        ends, last = [walk.sample], self.scheduler.times(self.num_inference_steps)[-2:]
        for number in range(1, window.noises):  # the walk's own end is the first
            noise = keys.at(purpose=f"noise {number}").normal(self.shape)
            x = self.scheduler.add_noise(walk.sample.detach(), noise, last[0].expand(len(keys)))
            again = rollout(
                watched, self.scheduler, x, times=last, generator=keys.at(purpose=f"end {number}"), grad_steps=1,
                checkpoint=self.checkpoint, **options,
            )  # fmt: skip
            ends.append(again.sample)
        return ends, watched.distance()


class _Watched:
    """A network that compares its clean predictions with a reference's wherever they carry a gradient."""

    def __init__(self, network: nn.Module, reference: nn.Module | None, scheduler: Any) -> None:
        self.network, self.reference, self.scheduler = network, reference, scheduler
        self.distances: list[Tensor] = []

    def __call__(self, x: Tensor, t: Tensor, cond: Any = None) -> Tensor:
        output: Tensor = self.network(x, t, cond)
        if self.reference is not None and torch.is_grad_enabled() and output.requires_grad:
            with torch.no_grad():
                theirs = self.scheduler.to_x0(self.reference(x, t, cond), t, x)
            ours = self.scheduler.to_x0(output, t, x.detach())
            self.distances.append((ours - theirs).float().square().mean())
        return output

    def distance(self) -> Tensor | None:
        """Mean over the differentiated calls; None without any."""
        return torch.stack(self.distances).mean() if self.distances else None
