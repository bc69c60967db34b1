"""What block-wise decoding refuses, what its callback may do, and what happens to logits that are no numbers."""

from __future__ import annotations

import pytest
import torch
from scripted_lm import START, STRATEGIES, Script, decode, script, starts, strategies
from tiny_lms import EOS, MASK, PAD, VOCAB, prompts, seeded, shared_lm, tiny_lm
from torch import nn

from genkit.errors import ConfigError, GenkitError
from genkit.models.causal_lm import CachedCausalLM
from genkit.samplers import DecodingStrategy, make_strategy

RAGGED = [6, 2, 9, 1]


@pytest.fixture(scope="module")
def gpt2() -> CachedCausalLM:
    return CachedCausalLM(shared_lm("gpt2"))


# ---- callback -------------------------------------------------------------------------------------------------------


def test_the_callback_sees_every_call_in_order():
    steps = []
    model = script([5, 6, 7, 8, 9])
    decode(model, START, block_length=3, max_new_tokens=5, strategy="sequential", callback=steps.append)
    assert [(s.kind, s.call, s.start, s.block.tolist()) for s in steps] == [
        ("prefill", 0, 0, [[5, MASK, MASK]]),
        ("denoise", 1, 0, [[5, 6, MASK]]),
        ("denoise", 2, 0, [[5, 6, 7]]),
        ("commit", 3, 3, [[8, MASK]]),
        ("denoise", 4, 3, [[8, 9]]),
    ]
    assert [s.kind for s in steps] == model.calls


def test_the_callback_may_replace_the_block():
    def replace(step):
        if step.call == 0:
            return {"block": torch.tensor([[19, MASK, 18]])}
        return {} if step.call == 1 else None

    model = script([5, 6, 7, 8])
    output = decode(model, START, block_length=3, max_new_tokens=4, callback=replace)
    assert output.tokens.tolist() == [[19, 6, 18, 8]]
    assert [block.tolist() for block in model.blocks] == [[[19, MASK, 18]]]


def test_masks_that_the_callback_puts_back_are_filled_again():
    again = {2: [[5, MASK, MASK]], 4: [[5, 6, MASK]]}
    model = script([5, 6, 7])
    output = decode(model, START, block_length=3, max_new_tokens=3, strategy="sequential",
                    callback=lambda s: {"block": torch.tensor(again[s.call])} if s.call in again else None)  # fmt: skip
    assert output.tokens.tolist() == [[5, 6, 7]] and output.calls.tolist() == [6]


@pytest.mark.parametrize("call", [0, 1])
def test_an_end_that_the_callback_writes_ends_the_row(call):
    model = script([5, 6, 7, 8, 9, 10])
    output = decode(model, START, block_length=3, max_new_tokens=6, eos_token_id=EOS,
                    callback=lambda s: {"block": torch.tensor([[5, EOS, 7]])} if s.call == call else None)  # fmt: skip
    assert output.tokens.tolist() == [[5, EOS]] and output.calls.tolist() == [call + 1]


@pytest.mark.parametrize("call", [0, 1])
def test_an_end_that_the_callback_takes_away_ends_nothing(call):
    model = script([EOS if call == 0 else 5, EOS, 7, 8, 9, 10])
    output = decode(model, START, block_length=3, max_new_tokens=6, eos_token_id=EOS, callback=lambda s: {
        "block": s.block.masked_fill(s.block == EOS, 12)} if s.start == 0 else None)  # fmt: skip
    assert output.tokens.tolist() == [[12 if call == 0 else 5, 12, 7, 8, 9, 10]] and output.lengths.tolist() == [6]


def block(*values, dtype=torch.int64):
    return {"block": torch.tensor([values], dtype=dtype)}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"tokens": START}, "returned .*tokens.*; expected None or"),
        (START, "returned shape"),
        (True, "returned type bool"),
        (block(5, 6), r"expected shape \(1, 3\)"),
        (block(5, 6, 7, dtype=torch.int32), "torch.int32"),
        (block(5, 6, 7, dtype=torch.float32), "torch.float32"),
        ({"block": [[5, 6, 7]]}, "type list"),
        ({"block": None}, "type NoneType"),
        (block(MASK, 6, 7), "mask token 22 before position 1"),
        (block(5, -1, 7), "outside the vocabulary"),
    ],
)
def test_wrong_replacements_are_refused(answer, message):
    with pytest.raises(ConfigError, match=message):
        decode(script([5, 6, 7, 8]), START, block_length=3, max_new_tokens=4, callback=lambda s: answer)


def test_replacements_are_checked_against_the_vocabulary_and_the_sub_block(gpt2):
    with pytest.raises(ConfigError, match="outside the vocabulary of 23"):
        decode(gpt2, START, block_length=3, callback=lambda s: block(5, VOCAB, 7))
    with pytest.raises(ConfigError, match="before position 3"):  # its pass is over
        decode(gpt2, START, block_length=5, sub_block_length=3, strategy="sequential",
               callback=lambda s: block(5, MASK, 7, 8, MASK) if s.call == 3 else None)  # fmt: skip


# ---- numbers that are none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", STRATEGIES)
def test_logits_that_are_not_finite_end_the_walk(name, temperature, value):
    for call in range(4):
        model, seen = script([5, 6, 7, 8], spoil={call: value}), []
        with pytest.raises(GenkitError, match=f"network call {call} gave logits that are NaN or infinite"):
            decode(model, START, block_length=2, max_new_tokens=4, generator=seeded(), callback=seen.append,
                   strategy=strategies(temperature=temperature)[name])  # fmt: skip
        assert len(model.calls) == call + 1 and [s.kind for s in seen] == model.calls[:call]  # nothing is shown of it
        model = script([5, 6, 7, 8], spoil={call: value})
        with pytest.raises(GenkitError, match=f"network call {call}"):
            decode(model, START, block_length=2, max_new_tokens=4, generator=seeded(),
                   strategy=strategies(temperature=temperature)[name])  # fmt: skip


def test_one_position_that_is_not_finite_is_enough():
    class OnePosition(Script):
        def denoise(self, tokens, cache):
            logits = super().denoise(tokens, cache)
            logits[1, 1] = -torch.inf
            return logits

    model = OnePosition(torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]]))
    with pytest.raises(GenkitError, match="network call 1"):
        decode(model, starts(2), block_length=4, max_new_tokens=4)


def test_a_row_that_has_ended_harms_nobody():
    """What the network says of it is not read; alone, it would not have been asked."""

    class SecondRowBreaks(Script):
        def _logits(self, kind, start, size):
            logits = super()._logits(kind, start, size)
            if len(self.calls) > 2:
                logits[1] = torch.nan
            return logits

    model = SecondRowBreaks(torch.tensor([[5, 6, 7, 8], [5, EOS, 7, 8]]))
    output = decode(model, starts(2), block_length=2, max_new_tokens=4, eos_token_id=EOS, pad_token_id=PAD)
    assert output.tokens.tolist() == [[5, 6, 7, 8], [5, EOS, PAD, PAD]]


def test_broken_weights_give_an_error():
    model = tiny_lm("gpt2")
    adapter = CachedCausalLM(model)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(GenkitError, match="network call 0"):
        decode(adapter, START)


def test_a_strategy_that_reveals_nothing_ends_in_an_error():
    class Idle(DecodingStrategy):
        def reveal(self, logits, tokens, masked, step=0, keys=None):
            return tokens

    with pytest.raises(GenkitError, match="left masks after 2 passes over 2 positions"):
        decode(script([5, 6, 7]), START, block_length=3, strategy=Idle(), callback=lambda step: None)


def test_a_strategy_cannot_overwrite_what_is_known():
    class Careless(DecodingStrategy):
        def reveal(self, logits, tokens, masked, step=0, keys=None):
            return torch.full_like(tokens, 19) if step else torch.where(masked.cumsum(1) == 1, 6, tokens)

    output = decode(script([5, 6, 7]), START, block_length=3, max_new_tokens=3, strategy=Careless())
    assert output.tokens.tolist() == [[5, 6, 19]]


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_length": 0}, "block_length=0"),
        ({"block_length": 2.0}, "block_length=2.0"),
        ({"block_length": True}, "block_length=True"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"sub_block_length": 0}, "sub_block_length=0"),
        ({"max_new_tokens": 159}, "161, but the model reads 160"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"mask_token_id": VOCAB}, "mask_token_id=23; expected one of the model's 23 tokens"),
        ({"mask_token_id": None}, "mask_token_id=None"),
        ({"mask_token_id": 3}, "the prompts hold the mask token 3"),
        ({"eos_token_id": MASK}, "is an end token too"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"eos_token_id": [1, -1]}, "eos_token_id=-1"),
        ({"eos_token_id": VOCAB}, "eos_token_id=23"),
        ({"pad_token_id": -100}, "pad_token_id=-100"),
        ({"pad_token_id": VOCAB}, "pad_token_id=23"),
        ({"strategy": "treshold"}, "threshold"),
        ({"strategy": "fixed_steps"}, "needs steps"),
        ({"generator": 3}, "generator=3"),
        ({"generator": [seeded(), seeded()]}, "list of 2 generators, but there are 1"),
    ],
)
def test_impossible_options_are_refused(gpt2, options, message):
    with pytest.raises(ConfigError, match=message):
        decode(gpt2, START, **options)


@pytest.mark.parametrize(
    ("tokens", "valid", "message"),
    [
        (START.double(), None, "dtype torch.float64; expected int64"),
        (START.bool(), None, "dtype torch.bool; expected int64"),
        (START.to(torch.complex64), None, "expected int64"),
        ([[2, 3]], None, "type list"),
        (START[0], None, r"shape \(2,\)"),
        (START.unsqueeze(0), None, r"shape \(1, 1, 2\)"),
        (torch.zeros(2, 0, dtype=torch.int64), None, r"rows \[0, 1\] of tokens hold no prompt"),
        (starts(3), torch.tensor([[1, 1], [0, 0], [0, 1]]), r"rows \[1\] of tokens hold no prompt"),
        (START, torch.ones(1, 3), "expected bool"),
        (START, torch.ones(2, dtype=torch.bool), r"valid has shape \(2,\)"),
        (START, torch.zeros(1, 2), "dtype torch.float32; expected bool"),  # an additive mask would be turned around
        (START, [[1, 1]], "type list"),
        (torch.tensor([[2, MASK]]), None, "hold the mask token 22"),
        (torch.tensor([[2, -1]]), None, "tokens from -1 to 2; expected the model's 23 tokens"),
        (torch.tensor([[2, VOCAB]]), None, "tokens from 2 to 23"),
        (torch.full((1, 148), 2), None, "161, but the model reads 160"),
    ],
)
def test_impossible_prompts_are_refused(gpt2, tokens, valid, message):
    with pytest.raises(ConfigError, match=message):
        decode(gpt2, tokens, valid)


def test_the_whole_context_may_be_used_and_the_mask_may_stand_in_padding(gpt2):
    assert decode(gpt2, torch.full((1, 147), 2)).tokens.shape == (1, 13)
    tokens, valid = torch.tensor([[MASK, 2, 3]]), torch.tensor([[False, True, True]])
    assert torch.equal(decode(gpt2, tokens, valid).tokens, decode(gpt2, START).tokens)
    # the padding of a batch does not count
    assert decode(gpt2, torch.full((1, 200), 2), torch.arange(200).unsqueeze(0) < 147).tokens.shape == (1, 13)


def test_a_network_may_be_the_cached_model_itself(gpt2):
    class Network(nn.Module):
        shift, max_length = True, None

        def prefill(self, tokens, valid):
            return gpt2.prefill(tokens, valid)

        def denoise(self, tokens, cache):
            return gpt2.denoise(tokens, cache)

        def commit(self, tokens, cache):
            return gpt2.commit(tokens, cache)

    expected = decode(gpt2, START, block_length=4)
    assert torch.equal(decode(Network(), START, block_length=4).tokens, expected.tokens)
    assert torch.equal(decode(shared_lm("gpt2"), START, block_length=4).tokens, expected.tokens)
    with pytest.raises(ConfigError, match="type str; expected a causal language model"):
        decode("gpt2", START)
    with pytest.raises(ConfigError, match="Linear is no language model"):
        decode(nn.Linear(2, 2), START)


def test_decoding_writes_neither_into_its_arguments_nor_into_the_global_generator(gpt2):
    tokens, valid = prompts(RAGGED)
    kept, state = (tokens.clone(), valid.clone()), torch.random.get_rng_state()
    decode(
        gpt2, tokens, valid, block_length=4, generator=seeded(), strategy=make_strategy("threshold", temperature=1.0)
    )
    assert torch.equal(tokens, kept[0]) and torch.equal(valid, kept[1])
    assert torch.equal(torch.random.get_rng_state(), state)
