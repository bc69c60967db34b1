"""The cache against the same network without one: logits, what denoising leaves behind, and what a commit stores."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_lms import ARCHITECTURES, MASK, VOCAB, prompts, seeded, shared_lm, tiny_lm
from torch import nn

from genkit.errors import ConfigError
from genkit.models.causal_lm import CachedCausalLM, KeyValueCache, UncachedCausalLM
from genkit.samplers.blockwise import decode_blocks

RAGGED = [6, 2, 9, 1]
#: RMSNorm and rotary angles of transformers are float32 whatever the weights are.
CLOSE = {"llama": 1e-5, "qwen2": 1e-5, "qwen3": 1e-5, "gpt2": 1e-12}


def close(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=CLOSE[name])


def random_block(rows: int, size: int, seed: int) -> torch.Tensor:
    """A block with some masks in it."""
    block = torch.randint(2, MASK, (rows, size), generator=seeded(seed))
    return block.masked_fill(torch.rand(rows, size, generator=seeded(seed + 1)) < 0.5, MASK)


def walk(model, tokens, valid, sizes):
    """Logits of two denoising passes and a commit per block; every model sees the same blocks."""
    seen, (last, cache) = [], model.prefill(tokens, valid)
    seen.append(last)
    for i, size in enumerate(sizes):
        for attempt in range(2):
            seen.append(model.denoise(random_block(len(tokens), size, 10 * i + attempt), cache))
        last, cache = model.commit(random_block(len(tokens), size, 10 * i + 7).clamp(max=MASK - 1), cache)
        seen.append(last)
    return seen, cache


# ---- cached == uncached ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("shift", [True, False])
def test_cached_logits_equal_uncached(name, shift):
    tokens, valid = prompts(RAGGED)
    cached, uncached = (kind(shared_lm(name), shift=shift) for kind in (CachedCausalLM, UncachedCausalLM))
    for got, expected in zip(
        walk(cached, tokens, valid, [4, 1, 3, 8])[0], walk(uncached, tokens, valid, [4, 1, 3, 8])[0], strict=True
    ):
        close(name, got, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_block_rule_is_the_same_with_and_without_a_cache(name):
    tokens, valid = prompts(RAGGED)
    cached, uncached = (
        kind(shared_lm(name), rule="block", block_length=3) for kind in (CachedCausalLM, UncachedCausalLM)
    )
    got, _ = walk(cached, tokens, valid, [3, 3, 3])
    for one, other in zip(got, walk(uncached, tokens, valid, [3, 3, 3])[0], strict=True):
        close(name, one, other)
    causal, _ = walk(CachedCausalLM(shared_lm(name)), tokens, valid, [3, 3, 3])
    assert float((causal[0] - got[0]).abs().max()) > 1e-2


def test_the_grid_of_the_block_rule_ends_where_the_prompt_ends():
    """Prompt of 5, blocks of 3: positions 0-1 see each other, 2-4 see all."""
    dense = UncachedCausalLM(shared_lm("gpt2"), rule="block", block_length=3)._among_context(5, torch.device("cpu"))
    expected = torch.ones(5, 5, dtype=torch.bool)
    expected[:2, 2:] = False
    assert torch.equal(dense, expected)


def test_block_rule_commits_whole_blocks_of_its_grid_only():
    tokens, valid = prompts([4])
    for kind in (CachedCausalLM, UncachedCausalLM):
        model = kind(shared_lm("gpt2"), rule="block", block_length=3)
        _, cache = model.prefill(tokens, valid)
        model.denoise(tokens[:, :2], cache)  # a short last block is only looked at
        with pytest.raises(ConfigError, match="a block of 2 tokens is committed.*block_length=3"):
            model.commit(tokens[:, :2], cache)


def test_full_rule_lets_every_token_see_every_token():
    """With the shift, a block's tokens are predicted by their left neighbours, the first by the context's last."""
    tokens, valid = prompts([5, 3])
    model = UncachedCausalLM(shared_lm("gpt2"), rule="full")
    _, text = model.prefill(tokens, valid)
    block = random_block(2, 4, 1)
    got = model.denoise(block, text)
    for row, length in enumerate((5, 3)):
        whole = torch.cat([tokens[row, 5 - length :], block[row]]).unsqueeze(0)
        mask = torch.ones(1, 1, length + 4, length + 4, dtype=torch.bool)
        with torch.no_grad():
            expected = shared_lm("gpt2")(whole, attention_mask=mask).logits[0, length - 1 : -1]
        close("gpt2", got[row], expected)


def test_full_rule_has_no_exact_cache():
    with pytest.raises(ConfigError, match="no cache is exact; use UncachedCausalLM"):
        CachedCausalLM(shared_lm("llama"), rule="full")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "diagonal"}, "expected one of causal, block, full"),
        ({"rule": "block"}, "needs block_length"),
        ({"rule": "block", "block_length": 0}, "block_length=0"),
        ({"block_length": 2.0}, "block_length=2.0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    for kind in (CachedCausalLM, UncachedCausalLM):
        with pytest.raises(ConfigError, match=message):
            kind(shared_lm("llama"), **options)


def test_a_network_without_a_cache_argument_is_refused():
    class NoCache(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.config = [tiny_lm("gpt2")], tiny_lm("gpt2").config
            self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, tokens, attention_mask=None, position_ids=None, use_cache=False, logits_to_keep=0):
            return self.inner[0](tokens, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)

    with pytest.raises(ConfigError, match="takes no cache; use UncachedCausalLM"):
        CachedCausalLM(NoCache())
    # it returns all logits whatever it is asked for; the block's own are taken
    tokens, valid = prompts(RAGGED)
    got, _ = walk(UncachedCausalLM(NoCache()), tokens, valid, [4, 3])
    for one, other in zip(got, walk(UncachedCausalLM(shared_lm("gpt2")), tokens, valid, [4, 3])[0], strict=True):
        close("gpt2", one, other)


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_other_backends_decode_alike(attention):
    tokens, valid = prompts([5, 3])
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        got, _ = walk(CachedCausalLM(shared_lm("qwen3", attention, torch.float32)), tokens, valid, [4, 3])
        expected, _ = walk(CachedCausalLM(shared_lm("qwen3", "sdpa", torch.float32)), tokens, valid, [4, 3])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


# ---- wrapped networks -----------------------------------------------------------------------------------------------


def test_an_adapter_of_peft_keeps_its_cache():
    """peft passes the cache on by name; the wrong name would lose the context without a word."""
    peft = pytest.importorskip("peft")
    inner = tiny_lm("llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(inner, config).eval()
    tokens, valid = prompts(RAGGED)
    got, cache = walk(CachedCausalLM(wrapped), tokens, valid, [4, 3])
    for one, other in zip(got, walk(UncachedCausalLM(wrapped), tokens, valid, [4, 3])[0], strict=True):
        close("llama", one, other)
    assert cache.length == 9 + 4 + 3


class DropsTheCache(transformers.LlamaForCausalLM):
    """What gradient checkpointing does in training mode, in transformers before 5."""

    def forward(self, tokens, cache=None, past_key_values=None, **options):
        return super().forward(tokens, **options)


def test_a_network_that_drops_the_cache_is_refused():
    model = tiny_lm("llama")
    model.__class__ = DropsTheCache
    with pytest.raises(ConfigError, match=r"stored no keys.*model\.eval\(\)"):
        CachedCausalLM(model).prefill(*prompts(RAGGED))


# ---- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_denoising_leaves_no_trace(name):
    tokens, valid = prompts(RAGGED)
    model = CachedCausalLM(shared_lm(name))
    _, cache = model.prefill(tokens, valid)
    before = [tensor.clone() for layer in range(2) for tensor in cache.layer(layer)]
    block = random_block(4, 5, 3)
    first = model.denoise(block, cache)
    model.denoise(random_block(4, 80, 4), cache)  # beyond the first buffer
    assert torch.equal(model.denoise(block, cache), first)
    after = [tensor for layer in range(2) for tensor in cache.layer(layer)]
    assert cache.length == 9 and all(map(torch.equal, after, before))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_cache_holds_what_an_autoregressive_prefill_holds(name):
    """Context-causal: after denoising and commits, keys and values are those of one causal pass over the same text."""
    tokens, valid = prompts(RAGGED)
    model = CachedCausalLM(shared_lm(name))
    last, cache = model.prefill(tokens, valid)
    text = tokens
    for i in range(3):
        model.denoise(random_block(4, 4, i), cache)
        done = random_block(4, 4, 30 + i).clamp(max=MASK - 1)
        last, cache = model.commit(done, cache)
        text = torch.cat([text, done], dim=1)
    valid = torch.cat([valid, valid.new_ones(4, 12)], dim=1)
    fresh_last, fresh = model.prefill(text, valid)
    close(name, last, fresh_last)
    assert cache.length == fresh.length == 21
    for one in (cache, fresh):  # the next token sees all but the padding, which its position does not count
        assert torch.equal(one.visible(1, True)[:, 0, 0, :21], valid)
        assert torch.equal(one.positions(2), valid.sum(1, keepdim=True) + torch.arange(2))
    for layer in range(2):
        for got, expected in zip(cache.layer(layer), fresh.layer(layer), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    # and those of transformers' own cache, row by row without padding
    for row, length in enumerate(RAGGED):
        with torch.no_grad():
            output = shared_lm(name)(text[row : row + 1, 9 - length :], use_cache=True)
        own = output.cache if hasattr(output, "cache") else output.past_key_values
        for layer in range(2):
            keys, values = cache.layer(layer)
            torch.testing.assert_close(keys[row : row + 1, :, 9 - length :], own.layers[layer].keys, rtol=0, atol=1e-5)
            torch.testing.assert_close(
                values[row : row + 1, :, 9 - length :], own.layers[layer].values, rtol=0, atol=1e-5
            )


def test_the_buffer_grows_and_keeps_what_it_holds():
    model = CachedCausalLM(shared_lm("gpt2"))
    uncached = UncachedCausalLM(shared_lm("gpt2"))
    tokens, valid = prompts([60, 33])
    got, cache = walk(model, tokens, valid, [3, 8, 60, 7])  # 64 slots, then 126, then 252
    for one, other in zip(got, walk(uncached, tokens, valid, [3, 8, 60, 7])[0], strict=True):
        close("gpt2", one, other)
    assert cache.length == 138


def test_an_older_cache_stays_usable_until_something_is_written_behind_it():
    """``committed`` is a value: the shorter cache still says what it held."""
    model = CachedCausalLM(shared_lm("llama"))
    tokens, valid = prompts([5])
    _, cache = model.prefill(tokens, valid)
    block = random_block(1, 4, 2)
    logits = model.denoise(block, cache)
    _, longer = model.commit(block.clamp(max=MASK - 1), cache)
    assert (cache.length, longer.length) == (5, 9) and cache.valid.shape[1] == 5
    assert torch.equal(model.denoise(block, cache), logits)


def test_padding_reaches_nothing():
    """Whatever token stands in the padding, and however much of it there is."""
    model = CachedCausalLM(shared_lm("qwen2"))
    tokens, valid = prompts(RAGGED)
    got, _ = walk(model, tokens, valid, [4, 3])
    other = torch.where(valid, tokens, torch.randint(0, VOCAB, tokens.shape, generator=seeded(9)))
    for one, two in zip(got, walk(model, other, valid, [4, 3])[0], strict=True):
        assert torch.equal(one, two)
    more, more_valid = nn.functional.pad(tokens, (5, 0)), nn.functional.pad(valid, (5, 0))
    for one, two in zip(got, walk(model, more, more_valid, [4, 3])[0], strict=True):
        close("qwen2", one, two)


def test_cached_passes_keep_no_graph():
    """The buffers are written in place and live on: a graph would grow with every pass."""
    model = CachedCausalLM(shared_lm("gpt2"))
    seen, cache = walk(model, *prompts([5]), [4])
    assert not any(logits.requires_grad for logits in seen)
    assert not any(tensor.requires_grad for tensor in cache.layer(0))
    assert walk(UncachedCausalLM(shared_lm("gpt2")), *prompts([5]), [4])[0][1].requires_grad


# ---- controls: what breaks the equality -----------------------------------------------------------------------------


class KeepsEverything(KeyValueCache):
    """Stores the denoising passes too, as a cache of transformers does."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx)
        if layer_idx == 1:
            self.length = keys.shape[2]
            self.valid = nn.functional.pad(self.valid, (0, self.length - self.valid.shape[1]), value=True)
            self.inputs.clear()
        return keys, values

    def committed(self, count):
        return self


class ForgetsTheMask(CachedCausalLM):
    def _inputs(self, rule, count, cache):
        return None, super()._inputs(rule, count, cache)[1]


def test_control_a_cache_that_keeps_denoising_passes(monkeypatch):
    tokens, valid = prompts([5, 5])
    with torch.no_grad():
        expected, _ = walk(UncachedCausalLM(shared_lm("llama")), tokens, valid, [4])
    monkeypatch.setattr("genkit.models.causal_lm.KeyValueCache", KeepsEverything)
    got, _ = walk(CachedCausalLM(shared_lm("llama")), tokens, valid, [4])
    close("llama", got[0], expected[0])
    close("llama", got[1], expected[1])
    assert float((got[2] - expected[2]).abs().max()) > 1e-2
    assert float((got[3] - expected[3]).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_control_a_forgotten_mask(name):
    """Nothing fails: the block is read causally, and its logits are others."""
    tokens, valid = prompts([5, 5])
    expected, _ = walk(CachedCausalLM(shared_lm(name)), tokens, valid, [4])
    got, _ = walk(ForgetsTheMask(shared_lm(name)), tokens, valid, [4])
    close(name, got[3], expected[3])  # the commit is causal anyway
    assert float((got[1] - expected[1]).abs().max()) > 1e-2


# ---- decoding -------------------------------------------------------------------------------------------------------

WAYS = [("threshold", 0.0), ("sequential", 0.8), ("entropy_bound", 1.0)]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("block_length", [1, 3, 4, 8])
def test_cached_decoding_equals_uncached(name, block_length):
    from genkit.samplers.strategies import make_strategy

    tokens, valid = prompts(RAGGED)
    for strategy, temperature in WAYS:
        outputs = [
            decode_blocks(
                kind(shared_lm(name)), tokens, valid, mask_token_id=MASK, block_length=block_length, max_new_tokens=13,
                strategy=make_strategy(strategy, temperature=temperature), generator=seeded(5), eos_token_id=7,
            )
            for kind in (CachedCausalLM, UncachedCausalLM)
        ]  # fmt: skip
        assert torch.equal(outputs[0].tokens, outputs[1].tokens)
        assert torch.equal(outputs[0].calls, outputs[1].calls)
