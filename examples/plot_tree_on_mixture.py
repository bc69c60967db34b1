"""
A tree search on the plane
==========================

The search knows nothing of crystals: it takes a denoiser, a scheduler and a reward. On the plane everything can be
known exactly. Nine Gaussian modes have an exact denoiser, and a quadratic reward tilts them to nine other Gaussians,
so that the search can be compared with the truth. Then the same search steers a trained flow with heavy tails.

Run it as ``python examples/plot_tree_on_mixture.py --out out/tree_on_mixture``.
"""

# %%
# A mixture, its denoiser and its tilted law
# ------------------------------------------
# The mode in the corner has one sample in a hundred. The reward asks for it: r(x) = -½ |x - a|². With λ = 6 a mode
# (μ, s²) keeps the weight w (1 + λ s²)⁻¹ exp(-½ λ |μ - a|² / (1 + λ s²)).
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import genkit
from genkit.plotting import COLOURS, figure_style, save_figure
from genkit.rewards import FunctionReward
from genkit.samplers import TreeSearch, draw_keys
from genkit.samplers.tree import Chain, best_of_n, self_normalised, smc
from genkit.schedulers import VPScheduler

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=None, help="folder for the pictures (default: none are written)")
out = parser.parse_known_args()[0].out
torch.set_num_threads(1)
seed = 0


def show(figure, name: str, note: str) -> None:
    if out is not None:
        print(save_figure(figure, out / name, seed=seed, note=note))


centres = torch.cartesian_prod(torch.arange(-1.0, 2.0), torch.arange(-1.0, 2.0))
weights = torch.tensor([0.01, 0.10, 0.30, 0.02, 0.30, 0.05, 0.15, 0.02, 0.05])
width, lam, corner = 0.1, 6.0, centres[0]
scheduler = VPScheduler(prediction_type="sample")


def denoiser(x, t, cond=None):
    """E[x_0 | x_t] of the mixture."""
    alpha, sigma = (level.reshape(-1, 1, 1).to(x) for level in scheduler.alpha_sigma(t))
    variance = (alpha * width) ** 2 + sigma**2
    away = x.unsqueeze(1) - alpha * centres
    share = (weights.log() - 0.5 * (away**2).sum(-1) / variance.squeeze(-1)).softmax(-1).unsqueeze(-1)
    return (share * (centres + alpha * width**2 / variance * away)).sum(1)


reward = FunctionReward(lambda x, context: -0.5 * (x - corner).square().sum(-1))
shrunk = 1.0 + lam * width**2
exact = weights * torch.exp(-0.5 * lam * (centres - corner).square().sum(-1) / shrunk) / shrunk
log_z = float(exact.sum().log())
exact = exact / exact.sum()


def mode_weights(x, weight):
    """Shares of the nine modes among weighted samples."""
    nearest = (x.unsqueeze(1) - centres).square().sum(-1).argmin(1)
    found = torch.zeros(9, dtype=torch.float64).index_add_(0, nearest, weight.double())
    return (found / found.sum()).float()


# %%
# One search and two populations from the same network calls
# ----------------------------------------------------------
# 16 steps in 4 macro-edges; 1024 walks of the populations cost 16,384 calls, and the search has no more. The distance
# is half the sum of the differences of the nine weights (0: equal, 1: disjoint). All arms walk the same 16 steps, whose
# discretisation the exact values do not have.
steps, levels, walks = 16, 4, 1024
chain = Chain(denoiser, scheduler, num_inference_steps=steps, levels=levels, shape=(2,))
search = TreeSearch(
    denoiser, scheduler, reward, lam=lam, num_inference_steps=steps, levels=levels, shape=(2,), slots=32,
    max_network_calls=walks * steps,
)  # fmt: skip
rows = {name: [] for name in ("dts", "smc", "snis", "base")}
estimates = {name: [] for name in ("dts", "smc", "snis")}
for number in range(5):
    generator = torch.Generator().manual_seed(seed + number)
    tree = search.run(8 * walks, generator)
    rows["dts"].append(mode_weights(tree.leaves.states, tree.probabilities()))
    estimates["dts"].append(float(tree.log_z_tree[0, 0]))
    for name, found in (
        ("smc", smc(chain, reward, walks, lam=lam, generator=generator)),
        ("snis", self_normalised(chain, reward, walks, lam=lam, generator=generator)),
    ):
        rows[name].append(mode_weights(found.samples, found.log_weights.softmax(0)))
        estimates[name].append(found.log_z)
    plain = best_of_n(chain, reward, walks, generator=generator)
    rows["base"].append(mode_weights(plain.samples, torch.ones(walks)))
print(f"exact: corner {exact[0]:.3f}, log Z {log_z:.3f}; means over 5 seeds")
for name, found in rows.items():
    table = torch.stack(found)
    distance = 0.5 * (table - exact).abs().sum(1)
    z = f", log Z {torch.tensor(estimates[name]).mean():.3f}" if name in estimates else ""
    print(f"{name:5s} corner {table[:, 0].mean():.3f} ± {table[:, 0].std():.3f}, distance {distance.mean():.3f}{z}")
print(f"leaves of the last search: {len(tree.leaves)} from {tree.network_calls} calls")

# %%
# Where the leaves are
# --------------------
# All leaves that the last search judged; dark ones are drawn often by ``tree.sample``.
with figure_style():
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 4.0))
    axes[0].scatter(*plain.samples.T, s=5, alpha=0.4, color=COLOURS["data"], linewidths=0)
    axes[0].set_title("the base")
    leaves, chance = tree.leaves.states, tree.probabilities()
    shade = (chance / chance.max()).clamp(0.02, 1.0)
    axes[1].scatter(*leaves.T, s=6, alpha=shade.numpy(), color=COLOURS["ours"], linewidths=0)
    axes[1].set_title(f"leaves of the search, λ = {lam:g}")
    for axis in axes:
        axis.set_aspect("equal")
        axis.set_xlim(-1.6, 1.6)
        axis.set_ylim(-1.6, 1.6)
show(figure, "leaves.png", f"{len(leaves)} leaves")

# %%
# The same search on a trained flow
# ---------------------------------
# The zoo's flow draws heavy-tailed samples, each given its clock. Here eight clocks have a tree each: conditions and
# the kernel's context are rows by tree. η = 1 makes the flow's kernel stochastic, which a search needs.
pipe = genkit.load("zoo:mixture2d-flow")
network, trees = pipe.denoiser, 8
keys = draw_keys(torch.Generator().manual_seed(seed), trees)
path = network.clock.path(keys.at(purpose="clock"), network.features.grid)
cond = {"clock": path[:, -1], "features": network.features(path)}
radius = FunctionReward(lambda x, context: network.transform.restore(x).norm(dim=-1).clamp(max=3.0))
settings = {"num_inference_steps": 16, "levels": 4, "shape": (2,), "eta": 1.0}
heavy = TreeSearch(network, pipe.scheduler, radius, lam=4.0, trees=trees, slots=32, **settings)
found = heavy.run(1024, torch.Generator().manual_seed(seed), cond, context={"scale": path[:, -1].sqrt()})
plain = best_of_n(
    Chain(network, pipe.scheduler, **settings), radius, 1024, 8, generator=torch.Generator().manual_seed(seed),
    cond=cond, context={"scale": path[:, -1].sqrt()},
)  # fmt: skip
plain_radius = plain.population.rewards[:, 0].reshape(trees, -1).mean(1)
leaves, tilted = found.leaves, found.expectation(found.leaves.rewards[:, 0])
for tree_number in range(trees):
    print(
        f"clock {float(path[tree_number, -1]):8.3f}: mean of min(|x|, 3) {plain_radius[tree_number]:.3f} as sampled, "
        f"{tilted[tree_number]:.3f} tilted, {int((leaves.tree == tree_number).sum())} leaves"
    )
with figure_style():
    figure, axis = plt.subplots(figsize=(4.6, 4.2))
    everything = network.transform.restore(plain.population.samples)
    axis.scatter(*everything.T, s=4, alpha=0.4, color=COLOURS["data"], linewidths=0, label="as sampled")
    drawn = network.transform.restore(found.sample(1024, torch.Generator().manual_seed(seed)).states)
    axis.scatter(*drawn.T, s=4, alpha=0.4, color=COLOURS["ours"], linewidths=0, label="tilted to large radii")
    axis.set_xlim(-4, 4)
    axis.set_ylim(-4, 4)
    axis.set_aspect("equal")
    axis.legend()
show(figure, "flow.png", f"{trees} clocks, η = 1")
