"""What decoding in blocks gains: beside token by token, beside a loop without a cache, beside transformers' generate.

    OMP_NUM_THREADS=1 python benchmarks/block_decoding.py [--pipeline FOLDER] [--text-pipeline FOLDER] [--only tasks …]

Four parts; one whose model is not here is skipped by name. Speed-ups are wall clock per written token, the peer's
divided by genkit's, measured in the same repeat.

* ``tasks``: answers to test problems of ``VerifiableTasks`` at batch 1. ``speedup_vs_ar_b1`` compares blocks
  (threshold 0.9) with the same weights, cache and code at block length 1; exact match and tokens per network call of
  both are printed. ``speedup_over_tokens_per_call`` is that speed-up divided by the blocks' tokens per call: the cost
  of a call that reads one token over that of a call that reads a block.
* ``text``: 256 new characters behind 256 of a held-out chapter; end tokens are ignored.
  ``speedup_vs_uncached``: diffusers' LLaDA2Pipeline, which reads the whole text in every pass, block 32 and one token a
  pass on both sides (32 steps a block, threshold above 1), so that both make 256 network calls over the same blocks.
  The peer's model is the same network behind an adapter (``Uncached``) that gives it what it does not do itself: the
  shifted logits, only those of the block, no mask token, and the block's mask, made once a block.
  ``speedup_vs_generate``: transformers' ``generate`` (greedy, its own cache) beside block 8, threshold 0.9.
* ``overhead``: ``decode_blocks`` divided by the network calls it makes, written bare: masks, positions and tokens
  ready, the same cache written. On a Llama of width 512 with 8 layers; the text model is INFO (a call of it is short).
* ``smollm2`` (INFO, where the asset is installed): what a call that reads 8 or 16 tokens costs beside one that reads 1,
  with 128 in the cache. Blocks gain only where their tokens per call exceed it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _bench import Ratio, bench_line, info_line, interleaved, keep_memory, one_thread, ratio
from _blocks import CountCalls, bare_passes, random_lm, traced

import genkit
from genkit.data.tasks import VerifiableTasks, check_answer
from genkit.errors import GenkitError
from genkit.models.attention import AttentionMask, mask_for
from genkit.models.causal_lm import CachedCausalLM
from genkit.pipelines.block_diffusion.tokens import encode_text
from genkit.samplers.blockwise import decode_blocks
from genkit.samplers.strategies import make_strategy

BLOCK, PEER_BLOCK, LEAST_MS = 8, 32, 5.0
ONE_A_PASS = 1.5  # a threshold that no probability exceeds
DEFAULTS = {"tasks": "zoo:tasks-block", "kjv": "zoo:kjv-block"}


def load(source: str, data: str) -> Any:
    """A saved pipeline; ``random`` builds the small model of ``data`` with random weights, to try the script."""
    pipe = genkit.load(source) if source != "random" else random_pipeline(data)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def random_pipeline(data: str) -> Any:
    """The small model of a configuration, untrained."""
    from genkit.pipelines.block_diffusion import BlockDiffusionPipeline, Config
    from genkit.pipelines.block_diffusion.config import build_model

    values = {"output_dir": "unused", "max_steps": 1, "data": {"name": data}, "method": "block_diffusion"}
    model, tokenizer, mask = build_model(Config.model_validate(values))
    return BlockDiffusionPipeline(model.eval(), tokenizer, mask_token_id=mask, block_length=BLOCK)


def inverse(peers: Sequence[float], ours: Sequence[float], factor: float = 1.0) -> Ratio:
    """The speed-up peers / ours, times ``factor``."""
    return ratio(peers, ours, per_call=1.0 / factor)


# --- tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way of decoding, and what it gave on all prompts together."""

    run: Callable[[], object]
    tokens: int
    calls: int
    right: float = 0.0

    @property
    def per_call(self) -> float:
        return self.tokens / self.calls


def answering(pipe: Any, problems: Sequence[tuple[str, str]], length: int, strategy: Any, batch: int = 1) -> Way:
    """Answers all problems, ``batch`` at a time, as a user of the pipeline does."""
    longest = max(len(answer) for _, answer in problems) + 1
    options = {"max_new_tokens": -(-longest // length) * length, "block_length": length, "strategy": strategy}
    batches = [[p for p, _ in problems[i : i + batch]] for i in range(0, len(problems), batch)]

    def run() -> list[Any]:
        return [pipe(prompts, **options) for prompts in batches]

    outputs = run()
    texts = [text for output in outputs for text in output.text]
    right = [check_answer(prompt, text) for (prompt, _), text in zip(problems, texts, strict=True)]
    tokens = sum(float((o.tokens_per_call * o.calls).sum()) for o in outputs)
    calls = sum(int(o.calls.sum()) for o in outputs)
    return Way(run, round(tokens), calls, sum(right) / len(right))


def tasks(options: Any) -> Iterator[str]:
    """Blocks beside token by token on the tasks' test problems."""
    pipe = load(options.pipeline, "tasks")
    held_out = VerifiableTasks(num_samples=options.problems, seed=0, split="test")
    problems = [held_out.problem(i) for i in range(options.problems)]
    threshold = make_strategy("threshold", threshold=0.9)
    for batch in (1, 16):
        ar = answering(pipe, problems, 1, "sequential", batch)
        blocks = answering(pipe, problems, BLOCK, threshold, batch)
        seconds = interleaved({"ar": ar.run, "blocks": blocks.run}, options.repeats, warmup=0)
        per_token = inverse(seconds["ar"], seconds["blocks"], blocks.tokens / ar.tokens)
        counts = {"ar": ar.tokens, "blocks": blocks.tokens}
        rates = {name: count / statistics.median(seconds[name]) for name, count in counts.items()}
        yield (
            f"INFO tasks batch {batch}: {options.problems} problems; token by token {ar.tokens} tokens in {ar.calls} "
            f"calls, exact match {ar.right:.3f}, {rates['ar']:.0f} tokens/s; block {BLOCK} threshold 0.9 "
            f"{blocks.tokens} tokens in {blocks.calls} calls ({blocks.per_call:.2f} a call), exact match "
            f"{blocks.right:.3f}, {rates['blocks']:.0f} tokens/s"
        )
        if batch > 1:
            yield info_line(f"speedup_vs_ar_b{batch}", per_token, "(no goal: rows wait for one another)")
            continue
        yield bench_line("speedup_vs_ar_b1", per_token, ">=2")
        efficiency = inverse(seconds["ar"], seconds["blocks"], blocks.tokens / ar.tokens / blocks.per_call)
        yield bench_line("speedup_over_tokens_per_call", efficiency, ">=0.8")


# --- text -------------------------------------------------------------------------------------------------------------


class Uncached(nn.Module):
    """What LLaDA2Pipeline calls: ``model(tokens, attention_mask, position_ids).logits`` of the block at its end."""

    def __init__(self, model: Any, mask_token_id: int) -> None:
        super().__init__()
        self.model, self.mask_token_id, self.calls = model, mask_token_id, 0
        self.masks: dict[int, Any] = {}
        self.device, self.dtype = model.device, model.dtype  # the pipeline asks for them

    def forward(self, tokens: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        length = tokens.shape[1]
        if length not in self.masks:
            if not bool(attention_mask.all()):
                raise ValueError("prompt and new tokens must fill whole blocks of the peer's grid")
            dense = torch.ones(length, length, dtype=torch.bool).tril()
            dense[length - PEER_BLOCK :] = True
            self.masks[length] = mask_for(self.model, AttentionMask.of(dense[None, None]))
        self.calls += 1
        options = {"use_cache": False, "logits_to_keep": PEER_BLOCK + 1}
        output = self.model(tokens, attention_mask=self.masks[length], position_ids=position_ids, **options)
        logits = output.logits[:, :-1]  # the logit at a position predicts the next token
        logits[..., self.mask_token_id] = -torch.inf
        return SimpleNamespace(logits=logits)


def llada2(pipe: Any, prompt: Tensor, new: int, threshold: float) -> Way:
    """diffusers' loop over the same network."""
    from diffusers import BlockRefinementScheduler, LLaDA2Pipeline

    adapter = Uncached(pipe.model, pipe.config["mask_token_id"])
    scheduler = BlockRefinementScheduler(PEER_BLOCK, PEER_BLOCK, threshold=threshold)
    peer = LLaDA2Pipeline(adapter, scheduler)
    peer.set_progress_bar_config(disable=True)
    options = {"block_length": PEER_BLOCK, "num_inference_steps": PEER_BLOCK, "threshold": threshold}
    options |= {"editing_threshold": None, "eos_early_stop": False, "mask_token_id": adapter.mask_token_id}

    def run() -> Tensor:
        return peer(input_ids=prompt, gen_length=new, output_type="seq", **options).sequences

    written = run()
    if bool((written == adapter.mask_token_id).any()) or written.shape[1] != new:
        raise ValueError(f"the peer wrote {tuple(written.shape)} with masks left")
    return Way(run, written.numel(), adapter.calls)


def continued(pipe: Any, prompt: Tensor, new: int, length: int, strategy: Any) -> Way:
    """genkit's decoder, end tokens ignored."""
    adapter = CachedCausalLM(pipe.model)
    options = {"mask_token_id": pipe.config["mask_token_id"], "block_length": length, "max_new_tokens": new}

    def run() -> Any:
        return decode_blocks(adapter, prompt, strategy=strategy, **options)

    output = run()
    return Way(run, int(output.lengths.sum()), int(output.calls.sum()))


def generated(pipe: Any, prompt: Tensor, new: int) -> tuple[Way, Tensor]:
    """transformers' greedy generation with its own cache, and what it writes."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=new, do_sample=False, use_cache=True, eos_token_id=None, bos_token_id=None, pad_token_id=0
    )
    ones = torch.ones_like(prompt)

    @torch.no_grad()
    def run() -> Tensor:
        return pipe.model.generate(prompt, generation_config=settings, attention_mask=ones)[:, prompt.shape[1] :]

    own, pipe.model.generation_config = pipe.model.generation_config, settings  # its end token would be merged in
    with CountCalls(pipe.model) as counter:
        written = run()
    calls = counter.calls * len(prompt)
    if written.shape[1] != new:
        raise ValueError(f"generate stopped after {written.shape[1]} of {new} tokens; {own}")
    return Way(run, written.numel(), calls), written


def held_out_prompts(pipe: Any, count: int, length: int) -> Tensor:
    """``count`` stretches of the held-out chapters, evenly taken, int64 (count, length)."""
    from genkit.data.text import king_james_text

    text = encode_text(pipe.tokenizer, king_james_text("test"))
    starts = torch.linspace(0, len(text) - length - 1, count).long()
    return torch.stack([text[start : start + length] for start in starts.tolist()])


def text(options: Any) -> Iterator[str]:
    """The text model beside the loop without a cache and beside transformers' generate."""
    pipe, new = load(options.text_pipeline, "kjv"), options.new_tokens
    prompts = held_out_prompts(pipe, 16, options.prompt)
    one = prompts[7:8]
    yield from uncached_lines(pipe, one, options)
    greedy, written = generated(pipe, one, new)
    ways = {"generate": greedy, "ar": continued(pipe, one, new, 1, "sequential")}
    ways["blocks"] = continued(pipe, one, new, BLOCK, make_strategy("threshold", threshold=0.9))
    same = bool((ways["ar"].run().tokens == written).all())
    seconds = interleaved({name: way.run for name, way in ways.items()}, options.repeats, warmup=0)
    blocks = ways["blocks"]
    yield (
        f"INFO text: {new} new tokens behind {options.prompt}, batch 1: block {BLOCK} threshold 0.9 makes "
        f"{blocks.calls} calls ({blocks.per_call:.2f} tokens a call); generate writes what block 1 writes: {same}"
    )
    yield bench_line("speedup_vs_generate", inverse(seconds["generate"], seconds["blocks"]), None)
    yield info_line("speedup_block1_vs_generate", inverse(seconds["generate"], seconds["ar"]), "(block 1)")
    yield info_line("speedup_text_vs_ar_b1", inverse(seconds["ar"], seconds["blocks"]), f"(block {BLOCK})")
    yield from batch_lines(pipe, prompts, options)


def uncached_lines(pipe: Any, prompt: Tensor, options: Any) -> Iterator[str]:
    """One token a pass, the goal's case; as INFO the threshold that decoding uses, and a short prompt."""
    name, new, short = "speedup_vs_uncached", options.new_tokens, prompt[:, :PEER_BLOCK]
    cases = [(name, prompt, ONE_A_PASS), (f"{name}_threshold_0.9", prompt, 0.9), (f"{name}_short", short, ONE_A_PASS)]
    for name, given, threshold in cases:
        peer = llada2(pipe, given, new, threshold)
        ours = continued(pipe, given, new, PEER_BLOCK, make_strategy("threshold", threshold=threshold))
        seconds = interleaved({"peer": peer.run, "ours": ours.run}, max(options.repeats // 2, 1), warmup=0)
        measured = inverse(seconds["peer"], seconds["ours"])
        note = f"{new} new tokens behind {given.shape[1]}, calls: LLaDA2Pipeline {peer.calls}, genkit {ours.calls}"
        if given is prompt and threshold == ONE_A_PASS:
            yield f"INFO text: {name}: block {PEER_BLOCK}, {note}"
            yield bench_line(name, measured, ">=3")
        else:
            yield info_line(name, measured, f"(block {PEER_BLOCK}, {note})")


def batch_lines(pipe: Any, prompts: Tensor, options: Any) -> Iterator[str]:
    ways = {"ar": continued(pipe, prompts, options.new_tokens, 1, "sequential")}
    ways["blocks"] = continued(pipe, prompts, options.new_tokens, BLOCK, make_strategy("threshold", threshold=0.9))
    seconds = interleaved({name: way.run for name, way in ways.items()}, max(options.repeats // 2, 1), warmup=0)
    rates = {name: way.tokens / statistics.median(seconds[name]) for name, way in ways.items()}
    yield (
        f"INFO text batch {len(prompts)}: tokens/s token by token {rates['ar']:.0f}, block {BLOCK} threshold 0.9 "
        f"{rates['blocks']:.0f} ({ways['blocks'].per_call:.2f} tokens a call and row)"
    )
    yield info_line(f"speedup_text_vs_ar_b{len(prompts)}", inverse(seconds["ar"], seconds["blocks"]), "(no goal)")


# --- overhead ---------------------------------------------------------------------------------------------------------


def overhead_line(name: str, model: Any, prompt: Tensor, repeats: int, **options: Any) -> str:
    """``decode_blocks`` over its bare network calls; INFO where one takes less than 5 ms."""
    adapter = CachedCausalLM(model)
    _, passes = traced(adapter, prompt, **options)
    bare = bare_passes(adapter, prompt, passes)
    with CountCalls(model) as counter:
        bare()
    decode = {"decode": lambda: decode_blocks(adapter, prompt, **options), "bare": bare}
    with CountCalls(model) as again:
        decode["decode"]()
    if not counter.calls == again.calls == len(passes):
        raise ValueError(f"{name}: decoding makes {again.calls} calls, the bare loop {counter.calls}")
    seconds = interleaved(decode, repeats, warmup=1)
    forward = 1000 * statistics.median(seconds["bare"]) / len(passes)
    note = f"({len(passes)} calls of {forward:.2f} ms)"
    print(f"{name}: {note}", flush=True)
    measured = ratio(seconds["decode"], seconds["bare"])
    return bench_line(name, measured) if forward >= LEAST_MS else info_line(name, measured, note)


def overhead(options: Any) -> Iterator[str]:
    """The decoder beside its own network calls."""
    model = random_lm(512, 8, 8, 8192)
    new = min(options.new_tokens, 64)
    prompt = torch.arange(2, 66).unsqueeze(0)
    settings = {"mask_token_id": model.config.vocab_size - 1, "max_new_tokens": new}
    cases = [(f"b{BLOCK}_threshold", BLOCK, make_strategy("threshold", threshold=0.02)), ("b1", 1, "sequential")]
    cases.append((f"b{BLOCK}_sequential", BLOCK, "sequential"))
    for name, length, strategy in cases:
        case = {**settings, "block_length": length, "strategy": strategy}
        yield overhead_line(f"decode_overhead_{name}", model, prompt, options.repeats, **case)
    try:
        pipe = load(options.text_pipeline, "kjv")
    except GenkitError as error:
        yield f"SKIPPED overhead of the text model: {error}"
        return
    settings["mask_token_id"], small = pipe.config["mask_token_id"], prompt % 32 + 3
    for name, length, strategy in cases:
        case = {**settings, "block_length": length, "strategy": strategy}
        yield overhead_line(f"decode_overhead_{name}_small", pipe.model, small, options.repeats, **case)


# --- a pretrained model -----------------------------------------------------------------------------------------------


def smollm2(options: Any) -> Iterator[str]:
    """What a longer call costs on a model of 135 million parameters."""
    from genkit.models.pretrained import load_causal_lm

    adapter = CachedCausalLM(load_causal_lm("smollm2")[0])
    prompt = torch.arange(1000, 1128).unsqueeze(0)
    with torch.no_grad():
        _, cache = adapter.prefill(prompt, torch.ones_like(prompt, dtype=torch.bool))
        calls = {n: prompt[:, :n] for n in (1, 8, 16, 32)}
        runs = {str(n): (lambda tokens=tokens: adapter.denoise(tokens, cache)) for n, tokens in calls.items()}
        seconds = interleaved(runs, options.repeats, warmup=1)
    one = statistics.median(seconds["1"])
    for n in ("8", "16", "32"):
        note = f"(tokens per call that blocks of {n} must exceed; a call of 1 token takes {1000 * one:.0f} ms)"
        yield info_line(f"smollm2_call_of_{n}_vs_1", ratio(seconds[n], seconds["1"]), note)


PARTS = {"tasks": tasks, "text": text, "overhead": overhead, "smollm2": smollm2}


def lines_of(name: str, options: Any) -> Iterator[str]:
    """A part's lines; where its default model or data are not here, the part is skipped by name."""
    defaults = options.pipeline == DEFAULTS["tasks"] if name == "tasks" else options.text_pipeline == DEFAULTS["kjv"]
    try:
        yield from PARTS[name](options)
    except GenkitError as error:
        if not defaults:
            raise
        yield f"SKIPPED {name}: {error}"


def main() -> None:
    """Measures all parts; the BENCH lines come last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", default=DEFAULTS["tasks"], help="a tasks pipeline, or 'random'")
    parser.add_argument("--text-pipeline", default=DEFAULTS["kjv"], help="a King James pipeline, or 'random'")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--problems", type=int, default=96)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a text prompt, a multiple of 32")
    parser.add_argument("--new-tokens", type=int, default=256, help="a multiple of 32")
    options = parser.parse_args()
    if options.prompt % PEER_BLOCK or options.new_tokens % PEER_BLOCK:
        parser.error(f"--prompt and --new-tokens must be multiples of {PEER_BLOCK}")
    one_thread()
    keep_memory()
    found = []
    for name in options.only:
        for line in lines_of(name, options):
            print(line, flush=True)
            found.append(line)
    print()
    for line in sorted(found, key=lambda line: line.startswith("BENCH")):
        print(line)


if __name__ == "__main__":
    main()
