"""A training step on [x_t ; x_0] in one pass, beside the same loss in two passes, and beside an autoregressive step.

    OMP_NUM_THREADS=1 python benchmarks/block_training.py [--device cuda]

All are forward and backward of one random Llama on the same tokens (block length 8, λ = 0.5), for every length and
attention backend:

* ``one_pass_vs_two_passes``: the peer reads the clean text causally, then the noisy text with the clean keys and values
  of the first pass behind its own, gradients included. It computes the same loss (checked) with the same tokens through
  the network and three quarters of the attention scores of a dense mask.
* ``one_pass_vs_separate_losses`` (INFO): the peer takes the noisy loss from [x_t ; x_0] and the autoregressive loss
  from a pass of its own, 3L tokens.
* ``one_pass_vs_ar`` (INFO): the peer is transformers' own next-token loss on the L tokens, masked by ``is_causal``.
* ``split_layout_vs_one_pass`` (INFO, sdpa): one pass whose attention is split: clean queries causal over the clean
  keys, noisy queries over all keys. Not in the library; what it would give.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _bench import bench_line, info_line, interleaved, keep_memory, one_thread, ratio
from _blocks import TwoPasses, batch_keys, block_objective, random_batch, random_lm

BACKENDS = ("sdpa", "eager", "flex_attention", "genkit_xformers")


def unavailable(backend: str, device: str) -> str | None:
    """Why a backend cannot be measured here, or None."""
    if backend in ("sdpa", "eager"):
        return None
    if device == "cpu":
        return "its backward pass needs a CUDA device (--device cuda)"
    if backend == "genkit_xformers" and importlib.util.find_spec("xformers") is None:
        return "xformers is not installed"
    return None


def stepped(model: nn.Module, loss: Callable[[], Tensor], device: str) -> Callable[[], None]:
    """Forward, backward, and the gradients thrown away."""

    def run() -> None:
        loss().backward()
        model.zero_grad(set_to_none=True)
        if device != "cpu":
            torch.cuda.synchronize()

    return run


def autoregressive(model: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """The next-token loss as one writes it with transformers."""

    def loss() -> Tensor:
        logits = model(tokens, use_cache=False).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return loss


def split_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention function for [x_t ; x_0] with grouped heads repeated: two calls instead of one."""
    half, groups = query.shape[2] // 2, query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    attend, scale = nn.functional.scaled_dot_product_attention, options.get("scaling")
    noisy = attend(query[:, :, :half], key, value, attn_mask=attention_mask[:, :, :half], scale=scale)
    clean = attend(query[:, :, half:], key[:, :, half:], value[:, :, half:], is_causal=True, scale=scale)
    return torch.cat([noisy, clean], dim=2).transpose(1, 2), None


@contextmanager
def attention_replaced() -> Iterator[None]:
    """``sdpa`` is :func:`split_attention` for a while."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    functions["sdpa"] = split_attention
    try:
        yield
    finally:
        del functions["sdpa"]  # the library's own shows again


def measure(backend: str, length: int, rows: int, repeats: int, device: str) -> Iterator[str]:
    """The lines of one backend at one length."""
    model = random_lm(128, 4, 4, 512, device=device).train()
    if backend == "genkit_xformers":
        from genkit.models.attention import register_xformers

        register_xformers()
    model.set_attn_implementation(backend)
    batch, keys = random_batch(model, rows, length, device), batch_keys(rows, device)
    objective, noisy_only = block_objective(model), block_objective(model, ar_weight=0.0)
    ar = autoregressive(model, batch["tokens"])
    losses: dict[str, Callable[[], Tensor]] = {
        "one_pass": lambda: objective.loss("model", batch, step=0, keys=keys).loss,
        "separate": lambda: noisy_only.loss("model", batch, step=0, keys=keys).loss + ar(),
        "ar": ar,
    }
    if backend in ("sdpa", "eager"):  # the others would need a mask of their own form for the second pass
        two = TwoPasses(objective, batch)
        losses["two_passes"] = lambda: two.loss(batch, keys)
        check_equal(losses["one_pass"], losses["two_passes"], "two passes")
    runs = {name: stepped(model, loss, device) for name, loss in losses.items()}
    if backend == "sdpa":

        def split() -> Tensor:
            with attention_replaced():
                return losses["one_pass"]()

        check_equal(losses["one_pass"], split, "the split layout")
        runs["split"] = stepped(model, split, device)
    seconds = interleaved(runs, repeats, warmup=1)
    yield from lines(seconds, f"{backend}_{length}", f"({rows} x {length} tokens, {device})")


def check_equal(ours: Callable[[], Tensor], peers: Callable[[], Tensor], what: str) -> None:
    """The peer computes the same loss, or the comparison means nothing."""
    with torch.no_grad():
        gap = abs(float(ours()) - float(peers()))
    if not gap < 1e-4:
        raise SystemExit(f"{what} gives another loss: they differ by {gap:.3g}")


def lines(seconds: dict[str, list[float]], name: str, note: str) -> Iterator[str]:
    milliseconds = {kind: 1000 * statistics.median(values) for kind, values in seconds.items()}
    taken = ", ".join(f"{kind} {value:.1f}" for kind, value in milliseconds.items())
    print(f"{name} {note}: milliseconds {taken}", flush=True)
    if "two_passes" in seconds:
        label, measured = f"one_pass_vs_two_passes_{name}", ratio(seconds["one_pass"], seconds["two_passes"])
        enough = milliseconds["two_passes"] >= 50.0
        yield bench_line(label, measured, "<=1.0") if enough else info_line(label, measured, "(step below 50 ms)")
    yield info_line(f"one_pass_vs_separate_losses_{name}", ratio(seconds["one_pass"], seconds["separate"]), note)
    yield info_line(f"one_pass_vs_ar_{name}", ratio(seconds["one_pass"], seconds["ar"]), note)
    if "split" in seconds:
        yield info_line(f"split_layout_vs_one_pass_{name}", ratio(seconds["split"], seconds["one_pass"]), note)


def main() -> None:
    """Measures every backend at every length; the BENCH lines come last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a batch: rows x length")
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    one_thread()
    keep_memory()
    found = []
    for backend in options.backends:
        reason = unavailable(backend, options.device)
        if reason:
            print(f"SKIPPED {backend}: {reason}", flush=True)
            continue
        for length in options.lengths:
            rows = max(options.tokens // length, 1)
            for line in measure(backend, length, rows, options.repeats, options.device):
                print(line, flush=True)
                found.append(line)
    print()
    for line in sorted(found, key=lambda line: line.startswith("BENCH")):
        print(line)


if __name__ == "__main__":
    main()
