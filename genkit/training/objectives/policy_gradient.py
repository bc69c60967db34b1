"""Policy gradients of a reward that needs no gradient: each step of a stochastic walk is an action with a density.

    ∇ E[r(x_0)] = E[ A Σ_i ∇ log p(x_{i+1} | x_i) ] ,   A = r − (a baseline from the other samples of the group) .

Walks are drawn from the network itself and used for one update (DDPO, Black et al., arXiv 2305.13301; groups as in
Flow-GRPO, arXiv 2505.05470), so that the ratio of new to old densities is 1 and needs no clipping. With a reference,
the exact KL divergence of each step's Gaussian kernel from the reference's is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from genkit._checks import checked_count, checked_number
from genkit.errors import ConfigError, nearest
from genkit.rewards import Reward
from genkit.samplers import rollout
from genkit.samplers.noise import Keys
from genkit.training.objective import LossOutput
from genkit.training.objectives.base import RewardObjective

__all__ = ["Advantage", "PolicyGradientObjective", "advantages"]

Advantage = Literal["leave_one_out", "group"]


def advantages(values: Tensor, valid: Tensor, kind: Advantage = "leave_one_out") -> Tensor:
    """Rewards against those of the same group, (C, G) float64; 0 where invalid, and where no other one is valid.

    Args:
        values: rewards (C, G) of C conditions with G samples each.
        valid: bool (C, G).
        kind: ``"leave_one_out"``, r_i − mean of the others, which leaves the gradient unbiased; ``"group"``,
            (r_i − mean)/(std + 1e-4), GRPO's, whose scale is free of the reward's and which is biased.

    Raises:
        ConfigError: an unknown kind.
    """
    if kind not in get_args(Advantage):
        known = get_args(Advantage)
        raise ConfigError(f"advantage={kind!r}; expected one of {', '.join(known)}.{nearest(str(kind), known)}")
    kept = torch.where(valid, values.detach(), 0.0).to(torch.float64)
    count = valid.sum(dim=1, keepdim=True)
    mean = kept.sum(dim=1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(valid & (count > 1), kept - mean, 0.0)
    if kind == "leave_one_out":
        return centred * count / (count - 1).clamp(min=1)
    return centred / ((centred.square().sum(dim=1, keepdim=True) / count.clamp(min=1)).sqrt() + 1e-4)


class PolicyGradientObjective(RewardObjective):
    """Maximises any reward of the samples of a stochastic K-step walk.

    The loss is −λ E[A Σ_i log p(x_{i+1} | x_i)]/d + ρ E Σ_i KL(p_i ‖ p_i^ref)/d over the stochastic steps i, with d the
    elements of a sample: the policy gradient of λ E[r]/d − ρ KL/d. Its value says nothing; watch the reward.

    Args:
        denoiser: (x_t, t, cond) → model output; what is trained.
        scheduler: a chain whose transitions have a Gaussian density.
        reward: of clean samples; its gradient is not asked for.
        num_inference_steps: K, steps of the walk.
        shape: of one sample.
        group_size: G, samples of each condition that a batch holds, at least 2.
        advantage: see :func:`advantages`.
        lam: weight of the reward.
        reg: weight ρ of the KL divergence from the reference, 0 without one.
        reference: a frozen network of the same kind.
        eta: stochasticity of the walk, above 0 (the scheduler's ``transition``).
        condition_names: entries of a batch that the denoiser (and the reward) is told.

    Raises:
        ConfigError: ``eta`` of 0, a group of one, a weight out of range, or ``reg`` without a reference.

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
        group_size: int = 8,
        advantage: Advantage = "leave_one_out",
        lam: float = 1.0,
        reg: float = 0.0,
        reference: nn.Module | None = None,
        eta: float = 1.0,
        condition_names: Sequence[str] = (),
    ) -> None:
        super().__init__(
            denoiser, scheduler, reward, num_inference_steps=num_inference_steps, shape=shape, lam=lam, reg=reg,
            reference=reference, condition_names=condition_names,
        )  # fmt: skip
        self.eta = checked_number(
            "eta", eta, "above 0, to 1: a deterministic walk has no density", lambda v: 0.0 < v <= 1.0
        )
        if checked_count("group_size", group_size) < 2:
            raise ConfigError(f"group_size={group_size}; expected at least 2, since a sample is judged against others")
        advantages(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), advantage)
        self.group_size, self.advantage = group_size, advantage

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys: Keys) -> LossOutput:
        told = {name: batch[name].repeat_interleave(self.group_size, dim=0) for name in self.condition_names}
        walk = self._walk(told, keys)
        output = self.reward(walk[-1], told or None)
        groups = (-1, self.group_size)
        weight = advantages(output.values.reshape(groups), output.valid.reshape(groups), self.advantage).flatten()
        score, divergence = self._densities(walk, told)
        size = math.prod(self.shape)
        loss = -self.lam * (weight.to(score) * score).mean() / size
        logs: dict[str, Tensor | float] = {"reward": output.mean().detach()}
        logs["reward_invalid"] = output.invalid_count / len(output.valid)
        if divergence is not None:
            loss = loss + self.reg * divergence.mean() / size
            logs["reference_kl"] = divergence.detach().mean()
        return LossOutput(loss, logs)

    @torch.no_grad()
    def _walk(self, told: Mapping[str, Tensor], keys: Keys) -> Tensor:
        """All states of the walks, (K + 1, B·G, \\*); the samples of a group stand next to one another."""
        size = self.group_size
        sample = (keys.sample.unsqueeze(1) * size + torch.arange(size, device=keys.sample.device)).flatten()
        own = Keys(keys.key.repeat_interleave(size), sample, keys.step, "walk")
        walk = rollout(
            self.denoiser, self.scheduler, None, shape=(len(own), *self.shape), generator=own, cond=told or None,
            num_inference_steps=self.num_inference_steps, solver="ancestral", eta=self.eta, return_trajectory=True,
        )  # fmt: skip
        states: Tensor = walk.trajectory
        return states

    def _densities(self, walk: Tensor, told: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Σ_i log p(x_{i+1} | x_i) and Σ_i KL(p_i ‖ p_i^ref), (B·G,) each, over the steps that have a density."""
        times = self.scheduler.times(self.num_inference_steps).to(torch.float32)
        network = self.net("denoiser")
        score = torch.zeros(walk.shape[1], device=walk.device)
        divergence = torch.zeros_like(score) if self.reg > 0.0 else None
        for i in range(self.num_inference_steps):
            t, s = (times[j].to(walk.device).expand(walk.shape[1]) for j in (i, i + 1))
            x = walk[i]
            kernel = self.scheduler.transition(network(x, t, told or None), t, s, x, None, self.eta)
            if not bool((kernel.std > 0.0).all()):
                continue  # the step onto t = 0 lands on its mean
            score = score + kernel.log_prob(walk[i + 1])
            if divergence is not None and self.reference is not None:
                with torch.no_grad():
                    theirs = self.scheduler.transition(self.reference(x, t, told or None), t, s, x, None, self.eta)
                apart = ((kernel.mean - theirs.mean).flatten(1) / kernel.std.reshape(-1, 1)).square().sum(dim=1)
                divergence = divergence + 0.5 * apart
        return score, divergence
