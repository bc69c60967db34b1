"""The demo: the same weights answer the same problems block by block and token by token, timed side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import genkit
from genkit.data.tasks import VerifiableTasks, check_answer
from genkit.demo import DemoRow
from genkit.pipelines.block_diffusion.masks import BlockGrid, one_pass_mask
from genkit.pipelines.block_diffusion.pipeline import BlockDiffusionPipeline
from genkit.pipelines.block_diffusion.plots import (
    RevealRecorder,
    TradeoffPoint,
    draw_mask,
    draw_timeline,
    draw_tradeoff,
)
from genkit.plotting import figure_style, save_figure
from genkit.samplers.blockwise import decode_blocks
from genkit.samplers.strategies import Threshold

__all__ = ["demo"]

SEED, PROBLEMS, TIMED, BLOCK, THRESHOLD = 0, 600, 60, 8, 0.9
THRESHOLDS = (0.5, 0.7, 0.9, 0.99)


def demo(out: Path, progress: bool = True) -> DemoRow:
    """Decodes held-out problems with the zoo's model, one at a time for the clock, and draws three pictures into
    ``out``.
    """
    pipe = cast(BlockDiffusionPipeline, genkit.load("zoo:tasks-block"))
    pipe.set_progress_bar_config(disable=True)
    held_out = VerifiableTasks(num_samples=PROBLEMS, seed=SEED, split="test")
    problems = held_out.problems(range(PROBLEMS))
    token_by_token = _seconds(pipe, problems[:TIMED], 1)
    in_blocks = _seconds(pipe, problems[:TIMED], BLOCK)
    points = [_answers(pipe, problems, "ar", "", 1, 1.0)]
    points += [_answers(pipe, problems, f"block {BLOCK}, threshold", f"{t:g}", BLOCK, t) for t in THRESHOLDS]
    ours = points[1 + THRESHOLDS.index(THRESHOLD)]
    with figure_style():
        grid = BlockGrid.make(16, 4)
        drawn = {
            "masks.png": draw_mask({"context-causal": one_pass_mask(grid)}, grid=grid),
            "timeline.png": _timeline(pipe, problems[2][0]),
            "tradeoff.png": draw_tradeoff(points),
        }
        notes = {"masks.png": "16 tokens, blocks of 4", "timeline.png": f"one prompt: {problems[2][0]}"}
        pictures = [
            save_figure(figure, out / name, seed=SEED, note=notes.get(name, f"n = {PROBLEMS} problems"))
            for name, figure in drawn.items()
        ]
    return DemoRow(
        name="block_diffusion",
        measured=f"milliseconds an answer, one prompt at a time, {TIMED} held-out problems; block {BLOCK} at "
        f"{ours.tokens_per_call:.2f} tokens per call, exact match {ours.right / PROBLEMS:.3f} of {PROBLEMS}; baseline: "
        f"the same weights token by token, exact match {points[0].right / PROBLEMS:.3f}. Toy scale",
        value=1000.0 * in_blocks,
        baseline=1000.0 * token_by_token,
        ratio=in_blocks / token_by_token,
        pictures=pictures,
    )


def _seconds(pipe: BlockDiffusionPipeline, problems: Sequence[tuple[str, str]], block_length: int) -> float:
    """Mean seconds an answer; the first one warms up."""
    options: dict[str, Any] = {"max_new_tokens": 16, "block_length": block_length, "threshold": THRESHOLD}
    pipe(problems[0][0], **options)
    start = time.perf_counter()
    for prompt, _ in problems:
        pipe(prompt, **options)
    return (time.perf_counter() - start) / len(problems)


def _answers(
    pipe: BlockDiffusionPipeline,
    problems: Sequence[tuple[str, str]],
    arm: str,
    label: str,
    block_length: int,
    threshold: float,
) -> TradeoffPoint:
    prompts = [prompt for prompt, _ in problems]
    texts, _, _, per_call = pipe(prompts, 16, block_length, strategy=Threshold(threshold), return_dict=False)
    right = sum(check_answer(prompt, text) for prompt, text in zip(prompts, texts, strict=True))
    return TradeoffPoint(arm, label, right, len(problems), float(per_call.mean()))


def _timeline(pipe: BlockDiffusionPipeline, prompt: str) -> Any:
    tokens = pipe.tokenizer(prompt, return_tensors="pt")["input_ids"]
    recorder = RevealRecorder(pipe.config["mask_token_id"])
    output = decode_blocks(
        pipe.model,
        tokens,
        mask_token_id=pipe.config["mask_token_id"],
        block_length=BLOCK,
        max_new_tokens=16,
        strategy=Threshold(THRESHOLD),
        eos_token_id=pipe.tokenizer.eos_token_id,
        callback=recorder,
    )
    length = int(output.lengths[0])
    text = [*pipe.tokenizer.decode(output.tokens[0], skip_special_tokens=True), "⏎"][:length]
    return draw_timeline(recorder.known[0, :length], text, kinds=recorder.kinds, block_length=BLOCK)
