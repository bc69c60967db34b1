"""A chain whose every law is known: Gaussian data, a linear denoiser, a condition that shifts the mean.

At a finite number of steps the ancestral walk does not end in the data's law, but its mean and variance follow from
the kernel by a recursion in Python floats.
"""

from __future__ import annotations

import math

import torch

from genkit.rewards import FunctionReward
from genkit.samplers.tree.chain import Chain
from genkit.samplers.tree.proposals import GuidedProposal
from genkit.schedulers import VPScheduler

MEAN, VAR, CENTRE, LAM, STEPS = 0.5, 0.49, 1.5, 2.0, 8


class Denoiser:
    """E[x_0 | x_t] for N(MEAN + shift, VAR) as v, and how many rows it was asked for in each call."""

    def __init__(self, scheduler):
        self.scheduler, self.calls = scheduler, []

    def __call__(self, x, t, cond=None):
        self.calls.append(len(x))
        alpha, sigma = (c.reshape(-1, 1).to(x.dtype) for c in self.scheduler.alpha_sigma(t))
        shift = 0.0 if cond is None or "shift" not in cond else cond["shift"].reshape(-1, 1).to(x.dtype)
        mean = MEAN + shift
        clean = mean + alpha * VAR / (alpha**2 * VAR + sigma**2) * (x - alpha * mean)
        return self.scheduler.from_x0(clean, t.double(), x)


def float64_prior(keys, state, context):
    return keys.normal((1,), torch.float64)


def gaussian_chain(steps=STEPS, levels=4, shift=None, scale=1.0, base_probability=0.3, **options):
    scheduler = VPScheduler("cosine")
    proposal = None
    if shift is not None:
        proposal = GuidedProposal(
            {"shift": torch.tensor([shift])}, guidance_scale=scale, base_probability=base_probability
        )
    options.setdefault("stages", [float64_prior])
    return Chain(Denoiser(scheduler), scheduler, num_inference_steps=steps, levels=levels, proposal=proposal, **options)


def kernels(chain):
    """Of each micro-step x' = a x + b (1 + shift / MEAN) + std z, as floats (a, b, std) from the papers' formula."""
    found = []
    for t, s in zip(chain.times[:-1].tolist(), chain.times[1:].tolist(), strict=True):
        (at, st), (as_, ss) = ((math.cos(math.pi * u / 2) if u < 1 else 0.0, math.sin(math.pi * u / 2)) for u in (t, s))
        gamma = ss * math.sqrt(max(1 - (at * ss / (as_ * st)) ** 2, 0.0))
        direction = math.sqrt(max(ss**2 - gamma**2, 0.0))
        gain = at * VAR / (at**2 * VAR + st**2)
        constant = MEAN * (1 - gain * at)
        # x̂_0 = gain x + constant, ε̂ = (x − α x̂_0)/σ
        a = as_ * gain + direction * (1 - at * gain) / st
        b = as_ * constant - direction * at * constant / st
        found.append((a, b, gamma))
    return found


def base_law(chain, shift=0.0):
    """Mean and variance of the walk's end."""
    mean, var = 0.0, 1.0
    for a, b, std in kernels(chain):
        mean, var = a * mean + b * (1 + shift / MEAN), a * a * var + std * std
    return mean, var


def separations(chain, shift):
    """(mean of q − mean of p) / std of each micro-step but the last."""
    return [b * shift / MEAN / std for _, b, std in kernels(chain)[:-1]]


def tilted(chain, lam=LAM, centre=CENTRE):
    """log Z, mean and variance of the base's law tilted by exp(−λ (x − centre)²/2)."""
    mean, var = base_law(chain)
    log_z = -0.5 * math.log1p(lam * var) - 0.5 * lam * (mean - centre) ** 2 / (1 + lam * var)
    return log_z, (mean + lam * var * centre) / (1 + lam * var), var / (1 + lam * var)


def quadratic(centre=CENTRE):
    return FunctionReward(lambda x, context: -0.5 * (x[:, 0] - centre).square(), name="quadratic")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)
