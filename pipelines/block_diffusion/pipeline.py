"""The pipeline a user holds: prompts in, text out, block by block.

Differs from the paper in: nothing that its abstract states; the decoder follows the authors' released code, with the
differences that :func:`genkit.samplers.decode_blocks` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from diffusers.utils import BaseOutput
from numpy.typing import NDArray
from torch import Tensor

from genkit._checks import checked_changes, got
from genkit.errors import ConfigError
from genkit.models.causal_lm import CachedCausalLM, CachedModel, ContextRule, UncachedCausalLM
from genkit.pipeline import GenkitPipeline
from genkit.pipelines.block_diffusion.tokens import check_mask_id, choose_mask_token, encode_text, pad_left
from genkit.samplers.blockwise import DecodeStep, decode_blocks
from genkit.samplers.strategies import DecodingStrategy, make_strategy
from genkit.schedulers.masked import MaskedBlockScheduler

__all__ = ["BlockDiffusionOutput", "BlockDiffusionPipeline"]

Prompt = str | Sequence[Mapping[str, str]]


@dataclass
class BlockDiffusionOutput(BaseOutput):
    """What a call returns.

    Args:
        text: the continuations, without special tokens; None unless ``output_type="text"``.
        tokens: int64 (B, n), padded behind each row's end.
        calls: int64 (B,), network calls of each row, its prompt's pass included.
        tokens_per_call: float32 (B,).
    """

    text: list[str] | None
    tokens: Tensor | NDArray[Any]
    calls: Tensor | NDArray[Any]
    tokens_per_call: Tensor | NDArray[Any]


class BlockDiffusionPipeline(GenkitPipeline):
    """Writes text in blocks of tokens that are refined in parallel; at block length 1 it is the autoregressive model.

    Args:
        model: a causal language model of transformers (llama, qwen2, qwen3, gpt2), with LoRA layers or without.
        tokenizer: its tokenizer.
        scheduler: what decides which tokens become known: :class:`MaskedBlockScheduler` (the default) or diffusers'
            ``BlockRefinementScheduler``.
        mask_token_id: the mask token; None takes the tokenizer's.
        block_length: the one trained for; the default of a call.
        shift: the logit of a position predicts the next token (False: its own).
        rule: how committed tokens see each other: ``"causal"`` (exact cache), ``"block"`` (exact cache of block-causal
            models) or ``"full"`` (no cache is exact; every pass reads the whole text).

    Raises:
        ConfigError: no mask token; a model that does not obey a 4-D attention mask.
    """

    model_cpu_offload_seq = "model"
    _callback_tensor_inputs = ["block", "done"]
    _optional_components = ["scheduler"]

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        scheduler: Any = None,
        mask_token_id: int | None = None,
        block_length: int = 32,
        shift: bool = True,
        rule: ContextRule = "causal",
    ) -> None:
        super().__init__()
        if mask_token_id is None:
            mask_token_id = getattr(tokenizer, "mask_token_id", None)
        if mask_token_id is None:
            raise ConfigError(
                "the tokenizer has no mask token; give mask_token_id, or use BlockDiffusionPipeline.from_ar, which "
                "finds one"
            )
        check_mask_id(model, tokenizer, mask_token_id)
        if scheduler is None:
            scheduler = MaskedBlockScheduler(mask_token_id=mask_token_id, block_length=block_length)
        self.register_modules(model=model, tokenizer=tokenizer, scheduler=scheduler)
        self.register_to_config(mask_token_id=mask_token_id, block_length=block_length, shift=shift, rule=rule)
        self._adapter(block_length)  # refuses a model that does not obey masks

    def _adapter(self, block_length: int) -> CachedModel:
        shift, rule = self.config["shift"], self.config["rule"]
        kind = UncachedCausalLM if rule == "full" else CachedCausalLM
        return kind(self.model, rule=rule, shift=shift, block_length=block_length)

    @classmethod
    def from_ar(
        cls,
        model: Any,
        tokenizer: Any,
        mask_token: str | int | None = None,
        *,
        block_length: int = 32,
        scheduler: Any = None,
    ) -> Self:
        """An autoregressive checkpoint as a pipeline, ready to be adapted; at block length 1 it already is that model.

        Args:
            model: a causal language model of transformers; changed only where a mask token must be added.
            tokenizer: its tokenizer.
            mask_token: text or id of the token that stands for "masked": one that text never contains, or a new
                name such as ``"<|mask|>"``. None finds one, see
                :func:`genkit.pipelines.block_diffusion.tokens.choose_mask_token`.
            block_length: the block length to adapt to.
            scheduler: see the class.
        """
        mask = choose_mask_token(model, tokenizer, mask_token)
        return cls(model, tokenizer, scheduler, mask_token_id=mask, block_length=block_length)

    @torch.no_grad()
    def __call__(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_new_tokens: int | None = None,
        block_length: int | None = None,
        num_inference_steps: int | None = None,
        *,
        strategy: DecodingStrategy | str | Any | None = None,
        threshold: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        sub_block_length: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str = "text",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Mapping[str, Any]] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("block",),
    ) -> BlockDiffusionOutput | tuple[Any, ...]:
        """Continues prompts.

        Args:
            prompt: one text or several; a list of ``{"role", "content"}`` messages goes through the tokenizer's chat
                template.
            max_new_tokens: tokens written at most, each row ending at its end-of-sequence token. None: 128, or as many
                as the model can still read.
            block_length: tokens refined together (None: the one trained for); 1 is autoregressive decoding.
            num_inference_steps: denoising passes a block (or a sub-block), for the strategies that have such a number.
            strategy: a name (``sequential``, ``fixed_steps``, ``threshold``, ``entropy_bound``, ``margin``,
                ``random``), an object of :mod:`genkit.samplers.strategies`, or a scheduler. None: ``threshold`` where
                that is given, ``fixed_steps`` where ``num_inference_steps`` is, else the pipeline's scheduler.
            threshold, temperature, top_k, top_p: options of a strategy that is given by name (or by default).
            sub_block_length: parts of a block finished from left to right.
            generator: one generator, or a list with one per prompt.
            output_type: ``"text"``, ``"pt"`` or ``"np"`` (tokens only).
            return_dict: False returns the tuple (text, tokens, calls, tokens_per_call).
            callback_on_step_end: called as ``callback(pipe, call, timestep, tensors)`` after every network call, with
                timestep = 1000 x the masked share of the block; may return a changed ``block``.
            callback_on_step_end_tensor_inputs: which of ``block``, ``done`` it is given.

        Raises:
            ConfigError: an impossible argument; the message names it.
        """
        if output_type not in ("text", "pt", "np"):
            raise ConfigError(f"output_type={output_type!r}; expected 'text', 'pt' or 'np'")
        self.check_callback_inputs(callback_on_step_end_tensor_inputs)
        options = {"threshold": threshold, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        length = self.config["block_length"] if block_length is None else block_length
        tokens, valid = self._encode(prompt)
        device = self._execution_device  # diffusers looks through all components for it
        if max_new_tokens is None:
            longest = getattr(self.model.config, "max_position_embeddings", None) or 128 + tokens.shape[1]
            max_new_tokens = max(min(128, longest - tokens.shape[1]), 1)
        with self.progress_bar(total=max_new_tokens) as bar:
            output = decode_blocks(
                self._adapter(length),
                tokens.to(device),
                valid.to(device),
                mask_token_id=self.config["mask_token_id"],
                block_length=length,
                max_new_tokens=max_new_tokens,
                strategy=self._strategy(strategy, num_inference_steps, options),
                sub_block_length=sub_block_length,
                generator=generator,
                eos_token_id=self._ends(),
                pad_token_id=self.tokenizer.pad_token_id,
                callback=_adapted(self, callback_on_step_end, callback_on_step_end_tensor_inputs, bar),
            )
            bar.update(max(output.tokens.shape[1] - bar.n, 0))
        text = self.tokenizer.batch_decode(output.tokens, skip_special_tokens=True) if output_type == "text" else None
        values = [output.tokens, output.calls, output.tokens_per_call]
        result = BlockDiffusionOutput(text, *(v.cpu().numpy() if output_type == "np" else v for v in values))
        return result if return_dict else (result.text, result.tokens, result.calls, result.tokens_per_call)

    def _encode(self, prompt: Prompt | Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        given: Any = prompt
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise ConfigError(f"prompt has {got(prompt)}; expected a text, a list of texts, or lists of messages")
        several = not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], Mapping))
        rows = [self._encode_one(i, one) for i, one in enumerate(prompt if several else [prompt])]
        return pad_left(rows, self.tokenizer.pad_token_id or 0)

    def _encode_one(self, i: int, prompt: Any) -> Tensor:
        if not isinstance(prompt, str):
            messages = prompt if isinstance(prompt, Sequence) else ()
            if not messages or not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
                raise ConfigError(f"prompt {i} is {prompt!r}; expected a text or messages {{'role': …, 'content': …}}")
            if not getattr(self.tokenizer, "chat_template", None):
                raise ConfigError(
                    f"prompt {i} is a list of messages, but the tokenizer has no chat template; give text"
                )
            prompt = self.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        ids = encode_text(self.tokenizer, prompt)
        if not len(ids) and self.tokenizer.bos_token_id is not None:
            ids = torch.tensor([self.tokenizer.bos_token_id])
        if not len(ids):
            raise ConfigError(
                f"prompt {i} is empty and the tokenizer has no token to begin a text with; give some text"
            )
        return ids

    def _strategy(self, strategy: Any, steps: int | None, options: Mapping[str, Any]) -> DecodingStrategy:
        given = {key: value for key, value in options.items() if value is not None}
        if strategy in ("fixed_steps", "random") and steps is None:
            raise ConfigError(f"strategy={strategy!r} needs num_inference_steps, the denoising passes a block")
        if steps is not None:
            given["steps"] = steps
        if strategy is None:
            by_steps = self.scheduler if steps is None else "fixed_steps"
            strategy = by_steps if "threshold" not in given else "threshold"
        if isinstance(strategy, DecodingStrategy) and given:
            raise ConfigError(f"{sorted(given)} were given beside a strategy object, which has its own; drop them")
        return make_strategy(strategy, **given)

    def _ends(self) -> list[int]:
        """End tokens of the tokenizer and of the model's generation settings (chat models name several)."""
        settings = getattr(self.model, "generation_config", None)
        named = getattr(settings, "eos_token_id", None)
        several = [] if named is None else [named] if isinstance(named, int) else list(named)
        own = self.tokenizer.eos_token_id
        return sorted({*several, *([] if own is None else [own])})


def _adapted(
    pipe: Any, callback: Callable[..., Any] | None, inputs: Sequence[str], bar: Any
) -> Callable[[DecodeStep], Mapping[str, Tensor] | None]:
    """diffusers' callback in the decoder's terms; the bar counts the tokens of finished blocks."""

    def adapted(step: DecodeStep) -> Mapping[str, Tensor] | None:
        bar.update(step.start - bar.n)
        if callback is None:
            return None
        known = {"block": step.block, "done": step.done}
        masked = float((step.block == pipe.config["mask_token_id"]).float().mean())
        changed = callback(pipe, step.call, 1000.0 * masked, {name: known[name] for name in inputs})
        return checked_changes(changed, ["block"])

    return adapted
