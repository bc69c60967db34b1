"""What the block-diffusion benchmarks share: random models, bare decoding passes, training in two passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from genkit.models.attention import AttentionMask, mask_for
from genkit.models.causal_lm import CachedCausalLM, KeyValueCache
from genkit.pipelines.block_diffusion import BlockCurriculum, BlockDiffusionObjective, BlockGrid, one_pass_mask
from genkit.pipelines.block_diffusion.objective import corrupt, predicted
from genkit.samplers.blockwise import decode_blocks
from genkit.samplers.noise import Keys, draw_keys

_NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_lm(
    width: int,
    layers: int,
    heads: int,
    vocabulary: int,
    *,
    kind: str = "Llama",
    positions: int = 1024,
    key_heads: int | None = None,
    inner: int | None = None,
    std: float = 0.05,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A Llama or Qwen2 of transformers with random weights, the same at every call; its last token is the mask."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner or 4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads or heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=std,
        **_NO_SPECIAL,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():  # the rotary frequencies stay in float32, as transformers keeps them
        parameter.data = parameter.data.to(dtype)
    return model.eval()


# --- decoding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """A network call of a decoding: its kind, and how many tokens it reads."""

    kind: str
    count: int


def traced(model: Any, tokens: Tensor, **options: Any) -> tuple[Any, list[Pass]]:
    """What :func:`decode_blocks` writes, and the network calls that it makes."""
    passes: list[Pass] = []
    sizes = [tokens.shape[1]]

    def note(step: Any) -> None:
        passes.append(Pass(step.kind, step.block.shape[1] if step.kind == "denoise" else sizes[-1]))
        sizes.append(step.block.shape[1])

    return decode_blocks(model, tokens, callback=note, **options), passes


def bare_passes(adapter: CachedCausalLM, tokens: Tensor, passes: Sequence[Pass]) -> Callable[[], None]:
    """The same network calls and nothing else: masks and positions are ready, keys and values are written alike."""
    model, calls, context, rows = adapter.model, [], 0, len(tokens)
    prepared: dict[tuple[str, int, int], tuple[Any, Tensor]] = {}
    for one in passes:
        key = (one.kind, one.count, context)
        if key not in prepared:
            dense = torch.ones(one.count, context + one.count, dtype=torch.bool, device=tokens.device)
            dense = dense if one.kind == "denoise" else dense.tril(context)
            places = torch.arange(context, context + one.count, device=tokens.device).expand(rows, -1)
            prepared[key] = (mask_for(model, AttentionMask.of(dense[None, None])), places)
        text = tokens if one.kind == "prefill" else tokens[:, :1].repeat(1, one.count)
        calls.append((text, *prepared[key], one.kind == "denoise"))
        context += 0 if one.kind == "denoise" else one.count
    valid, argument = torch.ones_like(tokens, dtype=torch.bool), adapter._cache_argument

    @torch.no_grad()
    def run() -> None:
        cache = KeyValueCache(valid)
        for text, mask, positions, keeps in calls:
            extra = {argument: cache, "logits_to_keep": 0 if keeps else 1}
            model(text, attention_mask=mask, position_ids=positions, use_cache=True, **extra)
            cache = cache if keeps else cache.committed(text.shape[1])

    return run


class CountCalls:
    """Counts the forward passes of a network while it is entered."""

    def __init__(self, network: nn.Module) -> None:
        self.network, self.calls = network, 0

    def __enter__(self) -> CountCalls:
        self.handle = self.network.register_forward_hook(self._count)
        return self

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


# --- training ---------------------------------------------------------------------------------------------------------


def block_objective(model: Any, block_length: int = 8, **options: Any) -> BlockDiffusionObjective:
    """The method's loss at one block length; the mask is the last token of the vocabulary."""
    curriculum = BlockCurriculum([block_length], 1, 0.0, 0.0)
    return BlockDiffusionObjective(
        model, model.config.vocab_size - 1, curriculum, weight="1/k", **{"random_offset": False, **options}
    )


def random_batch(model: Any, rows: int, length: int, device: str = "cpu") -> dict[str, Tensor]:
    """Tokens without masks; drawn on the CPU, so that every device has the same."""
    tokens = torch.randint(2, model.config.vocab_size - 1, (rows, length), generator=seeded(1))
    return {"tokens": tokens.to(device)}


def batch_keys(rows: int, device: str = "cpu") -> Keys:
    return draw_keys(seeded(2), rows).to(device)


def loss_and_gradient(
    objective: BlockDiffusionObjective, batch: Mapping[str, Tensor], keys: Keys
) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of all parameters as one vector, float32."""
    objective.scorer.model.zero_grad(set_to_none=True)
    loss = objective.loss("model", batch, step=0, keys=keys).loss
    loss.backward()
    parameters = [p for p in objective.scorer.model.parameters() if p.grad is not None]
    return loss.detach().float(), torch.cat([p.grad.flatten().float() for p in parameters])


class LayerMemory(Cache):
    """Keys and values of a clean pass with their gradients, put behind those of a later, noisy pass."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.reading = False

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.reading:
            self.pairs.append((keys, values))
            return keys, values
        clean_keys, clean_values = self.pairs[layer]
        return torch.cat([keys, clean_keys], dim=2), torch.cat([values, clean_values], dim=2)

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def get_query_offset(self, layer: int = 0) -> int:
        return 0

    def get_mask_sizes(self, count: int, layer: int) -> tuple[int, int]:
        return int(count), 0


class TwoPasses:
    """The loss of ``objective`` (one block length, no offset, whole rows) in two forward passes.

    First the clean text, causally; then the noisy text, whose attention reads the clean keys and values of the first
    pass, gradients included. Corruption and weights come from the same keys: the loss is the same number.
    """

    def __init__(self, objective: BlockDiffusionObjective, batch: Mapping[str, Tensor]) -> None:
        self.objective, self.model, self.mask = objective, objective.scorer.model, objective.scorer.mask_token_id
        rows, length = batch["tokens"].shape
        device = batch["tokens"].device
        self.grid = BlockGrid.make(length, objective.curriculum.sizes[-1], device=device)
        dense = one_pass_mask(self.grid).dense[:, :, :length]
        self.noisy_mask = mask_for(self.model, AttentionMask.of(dense))
        self.positions = self.grid.position.expand(rows, -1)
        self.wanted = predicted(batch, self.grid)
        self.blocks = objective._most_blocks(batch, self.grid.block_length)

    def loss(self, batch: Mapping[str, Tensor], keys: Keys) -> Tensor:
        tokens, memory = batch["tokens"], LayerMemory()
        maskable = self.wanted & ~self.grid.first
        (view,) = corrupt(keys, maskable, self.grid.first, self.blocks, weight="1/k")
        clean = self._cross_entropy(self._hidden(tokens, None, memory), tokens, self.wanted)
        memory.reading = True
        noisy_text = torch.where(view.masked, self.mask, tokens)
        noisy = self._cross_entropy(self._hidden(noisy_text, self.noisy_mask, memory), tokens, view.masked)
        first = self.grid.first.expand_as(tokens)[self.wanted]
        weighted = torch.where(first, 1.0, self.objective.ar_weight) * clean
        return (weighted.sum() + (noisy * view.weight[view.masked]).sum()) / self.wanted.sum()

    def _hidden(self, tokens: Tensor, mask: Any, memory: LayerMemory) -> Tensor:
        options = {"attention_mask": mask, "position_ids": self.positions, "use_cache": True}
        return self.model.base_model(tokens, **options, **{self._argument: memory})[0]

    @property
    def _argument(self) -> str:
        from genkit.models.causal_lm import _cache_argument

        return _cache_argument(self.model)

    def _cross_entropy(self, hidden: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden[:, :-1][chosen[:, 1:]]).float()
        hidden_mask = torch.zeros_like(logits[:1])
        hidden_mask[:, self.mask] = -torch.inf
        return nn.functional.cross_entropy(logits + hidden_mask, tokens[chosen], reduction="none")
