"""
Writing several tokens at a time
================================

A block-diffusion model of toy size (it solves small sums, sorts digits, copies and reverses words, closes brackets)
writes its answers in blocks of 8. Which tokens a pass makes known is the strategy's choice, and what it costs can be
measured, because every answer can be checked. The same weights at block length 1 are an ordinary autoregressive model:
that is the reference.

Run it as ``python examples/plot_block_decoding.py --out out/block_decoding``.
"""

# %%
# Problems and a model
# --------------------
# The zoo's model was trained on problems of the same kind; one problem in eight is held out for all seeds.
import argparse
from pathlib import Path

import torch

import genkit
from genkit.data import VerifiableTasks
from genkit.data.tasks import check_answer
from genkit.metrics.text import wilson_interval
from genkit.pipelines.block_diffusion.evaluate import answer_problems
from genkit.pipelines.block_diffusion.plots import RevealRecorder, TradeoffPoint, draw_timeline, draw_tradeoff
from genkit.plotting import figure_style, save_figure

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=None, help="folder for the pictures (default: none are written)")
out = parser.parse_known_args()[0].out

pipe = genkit.load("zoo:tasks-block")
pipe.set_progress_bar_config(disable=True)
block_length = pipe.config["block_length"]
held_out = VerifiableTasks(num_samples=600, split="test")
problems = [held_out.problem(i) for i in range(len(held_out))]
seed = 0


def show(figure, name: str, note: str) -> None:
    if out is not None:
        print(save_figure(figure, out / name, seed=seed, note=note))


# %%
# Which token becomes known when
# ------------------------------
# A recorder listens to the decoder. Each line of the picture is one network call: the prompt's pass gives the first
# token; each ``denoise`` pass reveals the tokens it is sure of, wherever they stand; a ``commit`` stores a finished
# block and gives the next one's first token. ¶ ends the answer.
for task in ("addition", "sort"):
    prompt, answer = problems[held_out.tasks.index(task)]
    recorder = RevealRecorder(pipe.config["mask_token_id"])
    output = pipe(
        prompt,
        max_new_tokens=2 * block_length,
        threshold=0.9,
        callback_on_step_end=recorder.on_step_end,
        callback_on_step_end_tensor_inputs=("block", "done"),
    )
    written = len(output.tokens[0])
    print(f"{prompt} {output.text[0]} ({answer} is right), {written} tokens in {int(output.calls[0])} calls")
    text = pipe.tokenizer.convert_ids_to_tokens(output.tokens[0].tolist())
    text = ["¶" if token == pipe.tokenizer.eos_token else token for token in text]
    with figure_style():
        timeline = draw_timeline(
            recorder.known[0, :written], text, kinds=recorder.kinds, block_length=block_length, title=prompt
        )
    show(timeline, f"timeline_{task}.png", "threshold 0.9")

# %%
# Exact match against tokens per call
# -----------------------------------
# A lower threshold reveals more tokens per call, at the risk of errors. Every row answers the same problems, so rows
# differ by less than their intervals (Wilson's) suggest.


def measure(arm: str, label: str, length: int, strategy: str, **options) -> TradeoffPoint:
    texts, per_call = answer_problems(pipe, problems, block_length=length, strategy=strategy, **options)
    right = sum(check_answer(prompt, text) for (prompt, _), text in zip(problems, texts, strict=True))
    return TradeoffPoint(arm, label, right, len(problems), float(per_call.mean()))


def print_points(points: list[TradeoffPoint]) -> None:
    print(f"{'strategy':21s} {'setting':>8s} {'exact match (95 %)':>21s} {'tokens per call':>16s}  n = {len(problems)}")
    for point in points:
        share = wilson_interval(point.right, point.problems)
        interval = f"{share.value:.3f} [{share.low:.3f}, {share.high:.3f}]"
        print(f"{point.arm:21s} {point.label:>8s} {interval:>21s} {point.tokens_per_call:16.2f}")


points = [measure("ar", "", 1, "sequential")]
for threshold in (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5):
    points.append(measure("threshold", f"{threshold:g}", block_length, "threshold", threshold=threshold))
print_points(points)
with figure_style():
    tradeoff = draw_tradeoff(points)
show(tradeoff, "tradeoff.png", f"block {block_length}")

# %%
# Strategies at equal steps
# -------------------------
# With a fixed number of passes for each block, what is left to choose is the order: the most confident tokens first,
# or any. Passes that only reveal tokens behind an answer's end count as calls, but those tokens do not count: so many
# steps can cost more than one call a token.
equal = points[:1]
for name, strategy in (("most confident first", "fixed_steps"), ("random order", "random")):
    for steps in (block_length - 1, 4, 2, 1):
        setting = f"{steps} step{'s' * (steps > 1)}"
        options = {"num_inference_steps": steps, "generator": torch.Generator().manual_seed(seed)}
        equal.append(measure(name, setting, block_length, strategy, **options))
print_points(equal)
with figure_style():
    strategies = draw_tradeoff(equal)
show(strategies, "strategies.png", f"block {block_length}")
