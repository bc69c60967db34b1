"""
Who attends to whom in block diffusion
======================================

A block-diffusion language model is trained on a text twice over: a noisy half, in which tokens are masked, and a clean
half. One attention mask decides what each half may see. This script draws the masks of three recipes and checks, edge
by edge, that none of them gives an answer away.

Run it as ``python examples/plot_block_masks.py --out out/block_masks``.
"""

# %%
# A text in blocks
# ----------------
# ``BlockGrid`` cuts a row of tokens into blocks. Training input is [x_t ; x_0]: the noisy tokens, then the clean ones,
# with the same positions.
import argparse
from pathlib import Path

import torch

from genkit.models.attention import AttentionMask
from genkit.pipelines.block_diffusion import BlockGrid, one_pass_mask, print_mask
from genkit.pipelines.block_diffusion.plots import draw_mask
from genkit.plotting import figure_style, save_figure

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=None, help="folder for the pictures (default: none are written)")
out = parser.parse_known_args()[0].out

text, block_length = "block by block", 4
length = len(text)
grid = BlockGrid.make(length, block_length)
print("blocks:", [text[i : i + block_length] for i in range(0, length, block_length)])


def show(figure, name: str) -> None:
    if out is not None:
        print(save_figure(figure, out / name, seed=0, note="nothing is random here"))


# %%
# The context-causal mask
# -----------------------
# A noisy token sees its own block, masks and all, and the clean tokens of earlier blocks. The clean half is causal: it
# *is* the autoregressive model, so a next-token loss on it keeps what the model knew. In text, a line a query:
context_causal = one_pass_mask(grid)
print_mask(context_causal)

# %%
# The same as a picture. Blue: noisy tokens among themselves; yellow: noisy tokens that read clean ones; dark grey: the
# clean text.
with figure_style():
    picture = draw_mask(context_causal, list(text.replace(" ", "_")), grid=grid)
show(picture, "context_causal.png")

# %%
# Three recipes side by side
# --------------------------
# *Block-causal* lets clean tokens see all of their own block. *Full* is masked diffusion of the whole row: every noisy
# token sees every other, and the clean half is not used.
masks = {
    "context-causal": context_causal,
    "block-causal": one_pass_mask(grid, clean_rule="block"),
    "full": one_pass_mask(grid, noise_rule="full"),
}
with figure_style():
    three = draw_mask(masks, grid=grid)
show(three, "recipes.png")

# %%
# What a prediction can see
# -------------------------
# A network of many layers passes information on: a query sees what its keys have seen. So the check follows all paths.
# With the shift, position i predicts token i + 1; a mask leaks where a path leads from position i to the *clean* token
# i + 1. Where a mask is transitive (a path never leads further than an edge), what one layer hides stays hidden.
#
# A fourth mask is broken on purpose: noisy tokens also see the noisy tokens of the *next* block. No edge leads to an
# answer, but those tokens have read the clean copy of the block before them.
query, key = torch.meshgrid(torch.arange(2 * length), torch.arange(2 * length), indexing="ij")
block = grid.block[0]
look_ahead = (query < length) & (key < length) & (block[key % length] == block[query % length] + 1)
masks["broken on purpose"] = AttentionMask.of((context_causal.dense[0, 0] | look_ahead)[None, None])


def paths(edges: torch.Tensor) -> torch.Tensor:
    """Query → token, over any number of layers: edges, paths of two, of four, …"""
    for _ in range(length.bit_length() + 1):
        edges = edges | ((edges.double() @ edges.double()) > 0)
    return edges


# The first token of a block is predicted by the clean half, all others by the noisy one.
next_tokens = torch.arange(1, length)
within_block = next_tokens[~grid.first[0, 1:]]
print(f"{'mask':17s} {'edges':>5s} {'transitive':>10s}   answers seen by: the noisy half   the next-token loss")
for name, mask in masks.items():
    edges = mask.dense[0, 0]
    seen = paths(edges)
    noisy = seen[within_block - 1, length + within_block].sum()
    clean = seen[length + next_tokens - 1, length + next_tokens].sum()
    transitive = "yes" if bool((seen == edges).all()) else "no"
    counts = f"{noisy:28d}/{len(within_block)} {clean:19d}/{length - 1}"
    print(f"{name:17s} {int(edges.sum()):5d} {transitive:>10s} {counts}")

# %%
# Only the context-causal mask hides every answer *and* links the noisy half to a clean half on which a next-token loss
# is fair. Under the block-causal mask that loss is shown most of its answers, so there it has to be left out.
