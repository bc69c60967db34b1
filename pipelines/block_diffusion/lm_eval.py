"""Block-diffusion pipelines in EleutherAI's lm-evaluation-harness.

    from lm_eval import simple_evaluate
    from genkit.pipelines.block_diffusion.lm_eval import harness_model

    results = simple_evaluate(model=harness_model(pipe, block_length=8), tasks=["arc_easy", "gsm8k"])

Multiple-choice tasks ask for log-likelihoods, and there are two honest answers. The clean path of a context-causal
model is an autoregressive model, so it has an exact one (``"ar"``); it says what adaptation has kept. What the blocks
know is only bounded (``"nelbo"``): −bound ≤ log p, estimated with random masks.

Differs from the paper in: its evaluation code is not published; truncation, windows and stop strings follow the
harness's own adapter for transformers models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from genkit._checks import checked_count
from genkit.errors import ConfigError, MissingExtraError, nearest
from genkit.models.attention import mask_for
from genkit.pipelines.block_diffusion.likelihood import nelbo
from genkit.pipelines.block_diffusion.masks import BlockGrid, causal_mask
from genkit.pipelines.block_diffusion.pipeline import BlockDiffusionPipeline
from genkit.pipelines.block_diffusion.scoring import check_head
from genkit.pipelines.block_diffusion.tokens import encode_text
from genkit.samplers.blockwise import decode_blocks
from genkit.samplers.strategies import DecodingStrategy

__all__ = ["BlockDiffusionLM", "Likelihood", "harness_model"]

Likelihood = Literal["ar", "nelbo"]

#: Logits (positions x vocabulary) held at once.
_CHUNK = 2**25
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_k", "top_p")


def harness_model(pipeline: BlockDiffusionPipeline, **options: Any) -> Any:
    """A :class:`BlockDiffusionLM` that is also the harness's ``lm_eval.api.model.LM``, to be given to its evaluator.

    Args:
        pipeline: what is evaluated.
        **options: those of :class:`BlockDiffusionLM`.

    Raises:
        MissingExtraError: lm_eval is not installed.
        ConfigError: see :class:`BlockDiffusionLM`.
    """
    try:
        from lm_eval.api.model import LM  # type: ignore[import-not-found]  # heavy, and not in the default install
    except ImportError as error:
        raise MissingExtraError(
            "the evaluation harness is not installed: install genkit-diffusion[eval] (its dependencies are heavy)"
        ) from error
    kind = type("HarnessBlockDiffusionLM", (BlockDiffusionLM, LM), {})
    return kind(pipeline, **options)


class BlockDiffusionLM:
    """Answers the harness's three kinds of request. It needs no lm_eval by itself: a request is anything whose
    ``args`` are the harness's.

    Args:
        pipeline: what is evaluated.
        block_length: of generation and of the bound; None: the one that the pipeline was trained for.
        likelihood: ``"ar"``, the exact log-likelihood of the clean path; ``"nelbo"``, minus the bound on it, whose
            blocks start where the continuation does.
        strategy: how tokens are revealed (see the pipeline's call); None: the pipeline's scheduler.
        threshold: option of a strategy that is given by name.
        draws: passes of the bound, see :func:`genkit.pipelines.block_diffusion.likelihood.nelbo`.
        batch_size: rows a pass, of generation and of ``"ar"`` (the bound is computed row by row).
        max_gen_toks: new tokens where a task names no number.
        max_length: tokens that the network reads; None: its own limit.
        seed: of masks and of sampled tokens.

    Raises:
        ConfigError: an option that is not known, or a likelihood that the pipeline does not have.
    """

    def __init__(
        self,
        pipeline: BlockDiffusionPipeline,
        *,
        block_length: int | None = None,
        likelihood: Likelihood = "ar",
        strategy: Any = None,
        threshold: float | None = None,
        draws: int | None = None,
        batch_size: int = 8,
        max_gen_toks: int = 256,
        max_length: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        rule, shift = pipeline.config["rule"], pipeline.config["shift"]
        if likelihood not in get_args(Likelihood):
            raise ConfigError(f"likelihood={likelihood!r}; expected one of {', '.join(get_args(Likelihood))}")
        if likelihood == "ar" and (rule, shift) != ("causal", True):
            raise ConfigError(
                f"a pipeline with rule={rule!r}, shift={shift} has no autoregressive path; use likelihood='nelbo'"
            )
        own = pipeline.model.config.max_position_embeddings if max_length is None else max_length
        self.pipeline, self.likelihood, self.strategy, self.threshold = pipeline, likelihood, strategy, threshold
        trained = pipeline.config["block_length"] if block_length is None else block_length
        self.block_length = checked_count("block_length", trained)
        self.draws = None if draws is None else checked_count("draws", draws)
        self.batch_size = checked_count("batch_size", batch_size)
        self.max_gen_toks = checked_count("max_gen_toks", max_gen_toks)
        self.max_length = checked_count("max_length", own, "an integer, at least 2", 2)
        self.seed = checked_count("seed", seed, "an integer, at least 0", 0)

    # --- text and tokens ----------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The pipeline's."""
        return self.pipeline.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """What the harness's caches of requests are kept under."""
        return str(self.tokenizer.name_or_path or type(self.tokenizer).__name__)

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by: the token that begins a text, else the one that ends one."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise ConfigError("the tokenizer has neither a first nor an end token; give every request a context")

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Chat messages as one text."""
        text: str = self.tokenizer.apply_chat_template(
            list(chat_history),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The tokenizer's template, or an empty text where none is asked for."""
        if not chat_template:
            return ""
        template: str = self.tokenizer.get_chat_template(None if chat_template is True else chat_template)
        return template

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = encode_text(self.tokenizer, text).tolist() if text else []
        return ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of both; spaces at the end of the context belong to the continuation, as in the harness."""
        if not context:
            ids, prefix = self._encode(continuation), self.prefix_token_id
            return ([prefix], ids) if not ids or ids[0] != prefix else (ids[:1], ids[1:])
        spaces = len(context) - len(context.rstrip())
        if 0 < spaces < len(context):
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        first, whole = self._encode(context), self._encode(context + continuation)
        return first, whole[len(first) :]

    # --- log-likelihood -----------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log p(continuation | context), whether it is what greedy decoding writes) of each request, whose ``args``
        are (context, continuation).

        With ``likelihood="nelbo"`` the number is minus the bound, and greedy decoding is that of the strategy at this
        block length. A context that does not fit loses its first tokens.

        Raises:
            ConfigError: a continuation longer than the network reads.
        """
        pairs = [self._fitted(*self._encode_pair(*request.args)) for request in requests]
        answers = self._scores(pairs, greedy=True)
        for request, answer in zip(requests, answers, strict=True):
            self._remember("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts (``args`` is (text,)), the first token after :attr:`prefix_token_id`.

        A text longer than the network reads is cut into windows; each token is predicted once, and the last window
        has as much context as fits.
        """
        owners, pairs = [], []
        for i, request in enumerate(requests):
            windows = self._windows(self._encode(request.args[0]))
            owners += [i] * len(windows)
            pairs += windows
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._scores(pairs, greedy=False), strict=True):
            totals[owner] += value
        for request, total in zip(requests, totals, strict=True):
            self._remember("loglikelihood_rolling", request.args, total)
        return totals

    @property
    def _room(self) -> int:
        """Tokens of context and continuation together; the clean path does not read the last one."""
        return self.max_length + (self.likelihood == "ar")

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        left = self._room - len(continuation)
        if left < 1:
            raise ConfigError(
                f"a continuation of {len(continuation)} tokens does not fit behind a context: the model reads "
                f"{self.max_length} tokens"
            )
        return context[-left:], continuation

    def _windows(self, ids: list[int]) -> list[tuple[list[int], list[int]]]:
        """(context, what is predicted) of a text: disjoint predictions of at most room − 1 tokens."""
        text, width = [self.prefix_token_id, *ids], self._room - 1
        windows = []
        for start in range(1, len(text), width):
            end = min(start + width, len(text))
            begin = 0 if start == 1 else end - self._room
            windows.append((text[begin:start], text[start:end]))
        return windows

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]], greedy: bool) -> list[tuple[float, bool]]:
        """Log-likelihood and greedy flag of each (context, continuation); long rows first."""
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        order = [i for i in order if pairs[i][1]]
        scores = [(0.0, True)] * len(pairs)
        size = self.batch_size if self.likelihood == "ar" else 1
        with self.pipeline.progress_bar(total=len(order)) as bar:
            for start in range(0, len(order), size):
                chosen = order[start : start + size]
                rows = [pairs[i] for i in chosen]
                found = self._exact(rows) if self.likelihood == "ar" else [self._bounded(*rows[0], greedy)]
                for i, score in zip(chosen, found, strict=True):
                    scores[i] = score
                bar.update(len(chosen))
        return scores

    @torch.no_grad()
    def _exact(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """The causal path, in one pass over rows that are padded on the right, where nothing looks."""
        model, device = self.pipeline.model, self.pipeline.device
        check_head(model)
        rows = [torch.tensor((context + continuation)[:-1]) for context, continuation in pairs]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        mask = mask_for(model, causal_mask(BlockGrid.make(tokens.shape[1], 1, device=device)))
        hidden = model.base_model(tokens, attention_mask=mask, use_cache=False)[0]
        scores = []
        for row, (context, continuation) in zip(hidden, pairs, strict=True):
            states = row[len(context) - 1 : len(context) + len(continuation) - 1]
            scores.append(self._score_states(states, torch.tensor(continuation, device=device)))
        return scores

    def _score_states(self, states: Tensor, targets: Tensor) -> tuple[float, bool]:
        """Σ log p(target) and whether every target is the most probable token; the mask token has probability 0."""
        head, total, same = self.pipeline.model.get_output_embeddings(), 0.0, True
        size = max(_CHUNK // head.weight.shape[0], 1)
        for part, wanted in zip(states.split(size), targets.split(size), strict=True):
            logits = head(part)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logits[:, self.pipeline.config["mask_token_id"]] = -torch.inf
            total += float(logits.log_softmax(dim=1).gather(1, wanted.unsqueeze(1)).double().sum())
            same = same and bool((logits.argmax(dim=1) == wanted).all())
        return total, same

    def _bounded(self, context: list[int], continuation: list[int], greedy: bool) -> tuple[float, bool]:
        """Minus the bound on −log p(continuation | context), with the block grid at the continuation's start."""
        config, device = self.pipeline.config, self.pipeline.device
        tokens = torch.tensor([context + continuation], device=device)
        wanted = torch.arange(tokens.shape[1], device=device).unsqueeze(0) >= len(context)
        full = config["rule"] == "full"
        bound = nelbo(
            self.pipeline.model,
            {"tokens": tokens, "loss_mask": wanted},
            mask_token_id=config["mask_token_id"],
            block_length=tokens.shape[1] if full else self.block_length,
            shift=config["shift"],
            clean_rule="block" if config["rule"] == "block" else "causal",
            noise_rule="full" if full else "block",
            offset=0 if full else len(context),
            draws=self.draws,
            seed=self.seed,
        ).nelbo
        written = greedy and self._writes(context, continuation)
        return -bound.value * bound.tokens, written

    def _writes(self, context: list[int], continuation: list[int]) -> bool:
        """Whether decoding at temperature 0 continues the context in this way."""
        pipe = self.pipeline
        output = decode_blocks(
            pipe._adapter(self.block_length),
            torch.tensor([context], device=pipe.device),
            mask_token_id=pipe.config["mask_token_id"],
            block_length=self.block_length,
            max_new_tokens=len(continuation),
            strategy=self._greedy(),
        )
        return bool(output.tokens[0].tolist() == continuation)

    def _greedy(self) -> DecodingStrategy:
        strategy = self.pipeline._strategy(self.strategy, None, {"threshold": self.threshold})
        return replace(strategy, temperature=0.0)

    # --- generation ---------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, cut before the first stop string. ``args`` is (context, options) with
        ``until`` (a text or several), ``max_gen_toks``, ``do_sample``, ``temperature``, ``top_k``, ``top_p``.

        A row ends at the block in which a stop string appeared. A context that does not fit loses its first tokens.

        Raises:
            ConfigError: an option that is not known; new tokens that leave no room for a context.
        """
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(i)
        texts = [""] * len(requests)
        with self.pipeline.progress_bar(total=len(requests)) as bar:
            for indices in groups.values():
                for start in range(0, len(indices), self.batch_size):
                    chosen = indices[start : start + self.batch_size]
                    for i, text in zip(chosen, self._generated(requests, chosen), strict=True):
                        texts[i] = text
                        self._remember("generate_until", requests[i].args, text)
                    bar.update(len(chosen))
        return texts

    def _generated(self, requests: Sequence[Any], chosen: Sequence[int]) -> list[str]:
        until, count, sampling = self._options(requests[chosen[0]].args[1])
        room = self.max_length - count
        if room < 1:
            raise ConfigError(
                f"{count} new tokens leave no room for a context: the model reads {self.max_length} tokens; lower "
                "max_gen_toks"
            )
        contexts = [self._shortened(requests[i].args[0], room) for i in chosen]
        generators = [torch.Generator().manual_seed(self.seed + i) for i in chosen]  # draws do not depend on the batch
        stop = _StopStrings(self.tokenizer, self.pipeline.config["mask_token_id"], until)
        watching = bool(until) and self.tokenizer.eos_token_id is not None
        output = self._call(
            contexts,
            count,
            generator=generators,
            callback_on_step_end=stop if watching else None,
            callback_on_step_end_tensor_inputs=("block", "done"),
            **sampling,
        )
        return [stop.cut(text) for text in output.text]

    def _options(self, given: Mapping[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
        """Stop strings, number of new tokens and sampling options of a task's ``generation_kwargs``."""
        known = ("until", "do_sample", *_LENGTHS, *_SAMPLING)
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ConfigError(
                f"generation option {unknown[0]!r} is not known; expected some of {', '.join(known)}."
                f"{nearest(unknown[0], known)}"
            )
        until = given.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        count = next((given[name] for name in _LENGTHS if given.get(name) is not None), self.max_gen_toks)
        temperature = given.get("temperature")
        drawn = given.get("do_sample", bool(temperature))
        sampling = {name: given.get(name) for name in _SAMPLING} if drawn else {}
        if drawn and temperature is None:
            sampling["temperature"] = 1.0
        return [text for text in until if text], checked_count("max_gen_toks", count), sampling

    def _shortened(self, context: str, room: int) -> str:
        """The end of a context that fits; decoding and encoding again may change the number of tokens."""
        ids = self._encode(context)
        if len(ids) <= room:
            return context
        texts = (str(self.tokenizer.decode(ids[-kept:])) for kept in range(room, 0, -1))
        return next(text for text in texts if len(self._encode(text)) <= room)

    def _call(self, contexts: Sequence[str], count: int, **options: Any) -> Any:
        hidden = getattr(self.pipeline, "_progress_bar_config", {})
        self.pipeline.set_progress_bar_config(disable=True)  # of each batch; requests have a bar of their own
        try:
            return self.pipeline(
                list(contexts),
                max_new_tokens=count,
                block_length=self.block_length,
                strategy=self.strategy,
                threshold=self.threshold,
                **options,
            )
        finally:
            self.pipeline.set_progress_bar_config(**hidden)

    def _remember(self, kind: str, arguments: Any, answer: Any) -> None:
        """The harness's cache of answers, where one is used."""
        hook = getattr(self, "cache_hook", None)
        if hook is not None:
            hook.add_partial(kind, arguments, answer)


class _StopStrings:
    """A pipeline's callback that ends a row once its finished blocks hold a stop string, and the final cut."""

    def __init__(self, tokenizer: Any, mask_token_id: int, until: Sequence[str]) -> None:
        self.tokenizer, self.mask_token_id, self.until = tokenizer, mask_token_id, until
        self._finished: list[Tensor] = []
        self._block: Tensor | None = None

    def cut(self, text: str) -> str:
        """The text before the first stop string in it."""
        places = [place for stop in self.until if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def __call__(self, pipe: Any, call: int, timestep: float, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        block, done = tensors["block"], tensors["done"]
        if self._block is not None:  # the block before is finished, so this is the next one
            self._finished.append(self._block)
            block = torch.where(self._stopped(block).unsqueeze(1), self.tokenizer.eos_token_id, block)
        unfinished = (block == self.mask_token_id) & ~done.unsqueeze(1)
        self._block = None if bool(unfinished.any()) else block
        return {"block": block}

    def _stopped(self, block: Tensor) -> Tensor:
        """Rows whose finished blocks hold a stop string, bool (B,)."""
        texts = self.tokenizer.batch_decode(torch.cat(self._finished, dim=1), skip_special_tokens=True)
        return torch.tensor([self.cut(text) != text for text in texts], device=block.device)
