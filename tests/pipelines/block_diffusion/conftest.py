"""Tiny networks with large random weights, and block diffusion written out block by block, as a decoder runs it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from genkit.pipelines.block_diffusion.curriculum import BlockCurriculum
from genkit.pipelines.block_diffusion.objective import BlockDiffusionObjective

KINDS = ("llama", "qwen2", "qwen3", "gpt2")
PAD, EOS, MASK, VOCABULARY = 0, 1, 2, 13


def make_model(kind="llama", dtype=torch.float64, vocab=VOCABULARY, seed=0, layers=2, attention="sdpa", tied=False):
    """Weights of standard deviation 0.4, so that every token matters to every logit."""
    import transformers

    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=layers, n_head=2, vocab_size=vocab, n_positions=64, initializer_range=0.4
        )
    else:
        names = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
        config = getattr(transformers, names[kind])(
            vocab_size=vocab,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            initializer_range=0.4,
            **({"head_dim": 8} if kind == "qwen3" else {}),
        )
    config.tie_word_embeddings = tied
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.to(dtype).eval()


class Oracle:
    """Losses of one row, block by block: a pass over the clean context and the partly masked block."""

    @staticmethod
    def blocks(length, size, offset=0):
        """Start and end of each block of a document."""
        edges = [0, *range(offset % size or size, length, size), length]
        return [(a, b) for a, b in itertools.pairwise(edges) if a < b]

    @staticmethod
    def _log_probabilities(model, tokens, dense):
        logits = model(tokens.unsqueeze(0), attention_mask=dense[None, None]).logits[0]
        return logits.index_fill(1, torch.tensor([MASK]), -math.inf).log_softmax(dim=1)

    def clean(self, model, tokens):
        """−log p(token i | earlier ones), (L,), NaN for the first."""
        causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        log_p = self._log_probabilities(model, tokens, causal)
        nan = torch.full((1,), math.nan, dtype=log_p.dtype)
        return torch.cat([nan, -log_p[:-1].gather(1, tokens[1:, None])[:, 0]])

    def noisy(self, model, tokens, masked, size, offset=0, shift=True, rule="causal"):
        """Cross-entropy of every token where the tokens in ``masked`` are hidden, (L,), NaN where there is none."""
        text = torch.where(masked, MASK, tokens)
        out = torch.full((len(tokens),), math.nan, dtype=torch.float64)
        edges = self.blocks(len(tokens), size, offset)
        for start, end in edges:
            dense = torch.ones(end, end, dtype=torch.bool).tril()
            for a, b in edges if rule == "block" else [(start, end)]:
                dense[a:b, a : min(b, end)] = True
            log_p = self._log_probabilities(model, torch.cat([tokens[:start], text[start:end]]), dense)
            for i in range(start + shift, end):
                out[i] = -log_p[i - shift, tokens[i]]
        return out

    @torch.no_grad()
    def bound(self, model, tokens, size, offset=0, wanted=None, **options):
        """The likelihood bound, summed over the wanted tokens: every set of masks, with weight 1/(k C(n, k))."""
        wanted = torch.arange(len(tokens)) > 0 if wanted is None else wanted
        total = 0.0
        shift = options.get("shift", True)
        clean = self.clean(model, tokens) if shift else None
        for start, end in self.blocks(len(tokens), size, offset):
            if shift and wanted[start]:
                total += float(clean[start])
            places = [i for i in range(start + shift, end) if wanted[i]]
            for k in range(1, len(places) + 1):
                for chosen in itertools.combinations(places, k):
                    masked = torch.zeros(len(tokens), dtype=torch.bool)
                    masked[list(chosen)] = True
                    noisy = self.noisy(model, tokens[:end], masked[:end], size, offset, **options)
                    total += float(noisy[list(chosen)].sum()) / (k * math.comb(len(places), k))
        return total


@pytest.fixture(scope="session")
def tiny():
    """``tiny(kind, **options)``: a random model in eval mode, float64 unless told otherwise."""
    return make_model


@pytest.fixture(scope="session")
def oracle():
    return Oracle()


@pytest.fixture(scope="session")
def make_objective():
    """``make_objective(model, block_length, **options)`` with one block length and the grid at 0."""

    def make(model, size, **options):
        options.setdefault("random_offset", False)
        return BlockDiffusionObjective(model, MASK, BlockCurriculum([size], 1), **options)

    return make


@pytest.fixture(scope="session")
def text():
    """``text(rows, length, seed)``: random tokens that are no special ones, int64 (rows, length)."""

    def make(rows, length, seed=0):
        return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture
def watch():
    """``watch(objective)``: a list that grows by (text, mask, positions, index, targets) with each network call."""

    def install(objective):
        calls = []
        objective.scorer.register_forward_pre_hook(lambda module, inputs: calls.append(inputs))
        return calls

    return install
