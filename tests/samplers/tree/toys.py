"""Chains whose every kernel, density and soft value is known in closed form; what the search of a tree is tested on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from genkit.rewards import FunctionReward

STEPS = 8


def alpha_bar(t):
    """cos²(0.49 π t / 8) for t = 0 … 8."""
    return torch.cos(0.49 * math.pi * torch.as_tensor(t, dtype=torch.float64) / STEPS) ** 2


@dataclass(frozen=True)
class Mixture:
    """The 1-D mixture of the reference table, its exact reverse kernels, and the reward -(x - c)² / 2."""

    weights: tuple = (0.7, 0.3)
    means: tuple = (-1.5, 1.5)
    variance: float = 0.09
    centre: float = 1.0
    lam: float = 2.0

    def components(self, t):
        """Means (.., 2) and variance (.., 1) of x_t given the component."""
        ab = alpha_bar(t).unsqueeze(-1)
        return ab.sqrt() * torch.tensor(self.means, dtype=torch.float64), ab * self.variance + 1.0 - ab

    def posterior(self, x, t, s):
        """p(x_s | x_t) for s < t, x (B,): log weights (B, 2), means (B, 2), variance (B, 1)."""
        mean_t, var_t = self.components(t)
        mean_s, var_s = self.components(s)
        gap = x.unsqueeze(-1) - mean_t
        logits = torch.tensor(self.weights, dtype=torch.float64).log() - gap**2 / (2.0 * var_t)
        a = (alpha_bar(t) / alpha_bar(s)).sqrt().unsqueeze(-1)
        return logits.log_softmax(-1), mean_s + a * var_s / var_t * gap, var_s - (a * var_s) ** 2 / var_t

    def prior(self, keys, t=STEPS):
        """Draws of x_8 (B,)."""
        mean, var = self.components(torch.full((len(keys),), t))
        first = keys.uniform() < self.weights[0]
        return torch.where(first, mean[:, 0], mean[:, 1]) + var[:, 0].sqrt() * keys.at(purpose="n").normal().double()

    def value(self, x, t):
        """V at x_t in closed form, (B,)."""
        t = torch.as_tensor(t).expand(x.shape)
        log_w, mean, var = self.posterior(x, t, torch.zeros_like(t))
        return (log_w + self._tilt(mean, var)).logsumexp(-1) / self.lam

    def root_value(self):
        weights = torch.tensor(self.weights, dtype=torch.float64).log()
        tilt = self._tilt(torch.tensor(self.means, dtype=torch.float64), torch.tensor(self.variance))
        return float((weights + tilt).logsumexp(-1) / self.lam)

    def tilted_negative(self):
        """P(x < 0) of the tilted mixture (both components are on one side of 0, up to 1e-6)."""
        tilt = self._tilt(torch.tensor(self.means, dtype=torch.float64), torch.tensor(self.variance))
        weights = (torch.tensor(self.weights, dtype=torch.float64).log() + tilt).softmax(-1)
        var = self.variance / (1.0 + self.lam * self.variance)
        mean = (torch.tensor(self.means) / self.variance + self.lam * self.centre) * var
        return float((weights * 0.5 * torch.erfc(mean / math.sqrt(2.0 * var))).sum())

    def _tilt(self, mean, var):
        """log E exp(-lam (x - c)² / 2) of a normal x."""
        return -0.5 * torch.log1p(self.lam * var) - 0.5 * self.lam * (mean - self.centre) ** 2 / (1.0 + self.lam * var)

    @property
    def reward(self):
        return FunctionReward(lambda x, context: -((x - self.centre) ** 2) / 2.0)


class ToyChain:
    """The interface of a chain: one stage of prior, then macro-edges that end after the micro-steps ``levels``."""

    num_stages = 1
    calls_per_step = 1

    def __init__(self, num_steps, levels=None, base_probability=0.0):
        self.num_steps, self.levels = num_steps, tuple(levels or range(1, num_steps + 1))
        self.leaf_depth, self.base_probability = 1 + len(self.levels), base_probability
        self.calls = 0

    def first_step(self, depth):
        return (0, *self.levels)[depth - 1]

    def depth_after(self, step):
        table = torch.zeros(self.num_steps, dtype=torch.int64)
        table[torch.tensor(self.levels) - 1] = torch.arange(len(self.levels)) + 2
        return table[step]

    def stage_log_weight(self, depth, state, context=None):
        return torch.zeros(len(state), dtype=torch.float64)

    def draw_branch(self, keys, depth):
        return keys.at(step=depth, purpose="branch").uniform() >= self.base_probability

    def edge_log_weight(self, log_ratio):
        base = self.base_probability
        return -torch.log(base + (1.0 - base) * torch.exp(-log_ratio))


class MixtureChain(ToyChain):
    """Exact reverse kernels of a `Mixture`; the proposal is the base kernel shifted by ``shift``."""

    def __init__(self, mixture=None, shift=0.0, levels=None, base_probability=0.0, batch_size=None):
        super().__init__(STEPS, levels, base_probability)
        self.mixture, self.shift, self.batch_size = mixture or Mixture(), shift, batch_size

    def draw_stage(self, depth, state, keys, context=None):
        return self.mixture.prior(keys.at(step=0, purpose="prior"))

    def step(self, state, step, guided, keys, cond=None, context=None):
        size = self.batch_size or len(state)
        rows = [slice(i, i + size) for i in range(0, len(state), size)]
        parts = [self._step(state[r], step[r], guided[r], keys[r].at(step=step[r])) for r in rows]
        self.calls += len(state)
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _step(self, x, step, guided, keys):
        t = STEPS - step
        log_w, mean, var = self.mixture.posterior(x, t, t - 1)
        first = keys.at(purpose="component").uniform() < log_w[:, 0].exp()
        new = torch.where(first, mean[:, 0], mean[:, 1]) + var[:, 0].sqrt() * keys.at(purpose="n").normal().double()
        new = new + torch.where(guided, self.shift, 0.0)
        log_p, log_q = (_mixture_log_prob(y, log_w, mean, var) for y in (new, new - self.shift))
        return new, log_p - log_q


def _mixture_log_prob(x, log_w, mean, var):
    return (log_w - (x.unsqueeze(-1) - mean) ** 2 / (2.0 * var)).logsumexp(-1)


@dataclass
class FiniteChain(ToyChain):
    """States 0 … n - 1: prior (n,), base and proposal kernels (T, n, n) by tables; reward by a table."""

    prior: torch.Tensor
    base: torch.Tensor
    proposal: torch.Tensor
    values: torch.Tensor
    lam: float = 1.0
    levels: tuple = field(init=False)

    def __post_init__(self):
        ToyChain.__init__(self, len(self.base))

    def draw_stage(self, depth, state, keys, context=None):
        return self._draw(self.prior.expand(len(keys), -1), keys.at(step=0, purpose="prior"))

    def step(self, state, step, guided, keys, cond=None, context=None):
        chance = torch.where(guided.unsqueeze(1), self.proposal[step, state], self.base[step, state])
        new = self._draw(chance, keys.at(step=step, purpose="move"))
        return new, (self.base[step, state, new] / self.proposal[step, state, new]).log()

    @staticmethod
    def _draw(chance, keys):
        below = (chance.cumsum(-1) < keys.uniform().unsqueeze(1)).sum(-1)
        return below.clamp(max=chance.shape[1] - 1)

    def exact(self):
        """Z (T + 1, n) = exp(lam V) of every state at every step, and Z of the root."""
        found = [torch.exp(self.lam * self.values)]
        for kernel in reversed(self.base):
            found.append(kernel @ found[-1])
        found.reverse()
        return torch.stack(found), float(self.prior @ found[0])

    @property
    def reward(self):
        return FunctionReward(lambda x, context: self.values[x])


def finite_chain(seed=0, states=5, steps=3, lam=1.3):
    """A random `FiniteChain` whose proposal differs from its base."""
    generator = np.random.default_rng(seed)

    def rows(*shape):
        return torch.from_numpy(generator.dirichlet(np.ones(states), size=shape))

    values = torch.from_numpy(generator.normal(size=states))
    return FiniteChain(rows()[None][0], rows(steps, states), rows(steps, states), values, lam)
