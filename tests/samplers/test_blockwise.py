"""Block-wise decoding against autoregressive decoding, against a plain loop, and of a batch against its rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from diffusers import BlockRefinementScheduler
from scripted_lm import START, STRATEGIES, Script, decode, script, starts, strategies
from tiny_lms import ARCHITECTURES, EOS, MASK, PAD, prompts, seeded, shared_lm
from torch import nn

from genkit.errors import ConfigError
from genkit.models.attention import mask_for
from genkit.models.causal_lm import CachedCausalLM, UncachedCausalLM
from genkit.pipelines.block_diffusion.masks import BlockGrid, one_pass_mask
from genkit.samplers import draw_keys, make_strategy

RAGGED = [6, 2, 9, 1]
ENDS = 7  # a token that the tiny models write now and then


@pytest.fixture(scope="module")
def gpt2() -> CachedCausalLM:
    return CachedCausalLM(shared_lm("gpt2"))


def right_padded(tokens: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [row[keep] for row, keep in zip(tokens, valid, strict=True)]
    out = torch.full_like(tokens, PAD)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out, valid.flip(1)


# ---- a model that follows a script ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("block_length", [1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_writes_the_script(name, block_length, shift):
    """Position by position, block lengths that divide the length or not, with shifted logits or without."""
    model = script([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], shift=shift)
    output = decode(model, START, block_length=block_length, max_new_tokens=11, strategy=strategies()[name],
                    generator=seeded())  # fmt: skip
    assert torch.equal(output.tokens, model.text)
    assert output.lengths.tolist() == [11] and output.calls.tolist() == [len(model.calls)]
    assert output.tokens_per_call.tolist() == pytest.approx([11 / len(model.calls)])


# ---- block length 1 is autoregressive decoding ----------------------------------------------------------------------


def greedy_loop(model, tokens: torch.Tensor, count: int, ends: tuple[int, ...]) -> list[int]:
    """One row, no cache, no padding."""
    text, new = tokens.unsqueeze(0), []
    while len(new) < count and not (new and new[-1] in ends):
        with torch.no_grad():
            logits = model(text).logits[0, -1]
        logits[MASK] = -torch.inf
        new.append(int(logits.argmax()))
        text = torch.cat([text, torch.tensor([[new[-1]]])], dim=1)
    return new


@pytest.mark.parametrize("ends", [(), (ENDS,), (3, ENDS, 15)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_block_length_one_is_greedy_decoding(name, ends):
    model = shared_lm(name)
    tokens, valid = prompts(RAGGED)
    output = decode(model, tokens, valid, block_length=1, eos_token_id=ends or None, pad_token_id=PAD)
    loops = [greedy_loop(model, row[keep], 13, ends) for row, keep in zip(tokens, valid, strict=True)]
    assert [row[:n] for row, n in zip(output.tokens.tolist(), output.lengths.tolist(), strict=True)] == loops
    assert output.calls.tolist() == output.lengths.tolist()
    theirs = model.generate(
        tokens, attention_mask=valid.long(), max_new_tokens=13, do_sample=False, pad_token_id=PAD,
        eos_token_id=list(ends) or None, suppress_tokens=[MASK],
    )  # fmt: skip
    assert torch.equal(output.tokens, theirs[:, tokens.shape[1] :])
    if len(ends) == 3:
        assert len(set(output.lengths.tolist())) > 1  # rows that end at different times


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sequential_decoding_of_blocks_makes_one_call_a_token(name):
    tokens, valid = prompts(RAGGED)
    for strategy in ("sequential", make_strategy("threshold", threshold=2.0)):
        output = decode(shared_lm(name), tokens, valid, block_length=4, strategy=strategy)
        assert output.calls.tolist() == [13] * 4 and output.tokens_per_call.tolist() == [1.0] * 4


# ---- a plain loop ---------------------------------------------------------------------------------------------------


def plain_decode(model, prompt, count, size, threshold, ends, shift, rule):
    """One row in plain Python: whole text in every pass, dense masks made by hand."""

    def read(text: list[int], active: int) -> torch.Tensor:
        n, context = len(text), len(text) - active
        dense = torch.ones(n, n, dtype=torch.bool) if rule == "full" else torch.ones(n, n, dtype=torch.bool).tril()
        dense[context:] = True
        with torch.no_grad():
            z = model(torch.tensor([text]), attention_mask=dense.view(1, 1, n, n)).logits[0]
        z[:, MASK] = -torch.inf
        return z

    text, calls, first = prompt.tolist(), 1, None
    new: list[int] = []
    if shift:
        first = int(read(text, 0)[-1].argmax())
    while len(new) < count:
        n = min(size, count - len(new))
        block = [first if shift else MASK] + [MASK] * (n - 1)

        def ended(block=block) -> int | None:
            known = list(itertools.takewhile(lambda t: t != MASK, block))
            return next((i for i, t in enumerate(known) if t in ends), None)

        while MASK in block and ended() is None:
            z, calls = read(text + block, n), calls + 1
            z = z[len(text) - shift :][:n].softmax(-1).float()
            confidence = {i: float(z[i].max()) for i, t in enumerate(block) if t == MASK}
            best = max(confidence, key=lambda i: confidence[i])
            for i, value in confidence.items():
                if value > threshold or i == best:
                    block[i] = int(z[i].argmax())
        if ended() is not None:
            return new + block[: ended() + 1], calls
        new, text = new + block, text + block
        if len(new) < count:
            calls += 1
            first = int(read(text, 0)[-1].argmax()) if shift else None
    return new, calls


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("rule", "shift"), [("causal", True), ("causal", False), ("full", False)])
def test_threshold_decoding_is_the_plain_loop(name, rule, shift):
    model = shared_lm(name)
    adapter = UncachedCausalLM(model, rule=rule, shift=shift) if rule == "full" else CachedCausalLM(model, shift=shift)
    tokens, valid = prompts(RAGGED, seed=2)
    for size in (1, 4, 5):
        output = decode(adapter, tokens, valid, block_length=size, eos_token_id=[ENDS, 12],
                        strategy=make_strategy("threshold", threshold=0.5))  # fmt: skip
        for i, n in enumerate(output.lengths.tolist()):
            expected = plain_decode(model, tokens[i][valid[i]], 13, size, 0.5, (ENDS, 12), shift, rule)
            assert (output.tokens[i, :n].tolist(), int(output.calls[i])) == expected


# ---- rows are alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_batch_is_its_rows(gpt2, name, temperature):
    tokens, valid = prompts(RAGGED)
    strategy = strategies(temperature=temperature)[name]
    options = {"block_length": 6, "sub_block_length": 4, "strategy": strategy, "eos_token_id": [ENDS, 12]}
    whole = decode(gpt2, tokens, valid, generator=[seeded(i) for i in range(4)], **options)
    for i in range(4):
        row = decode(gpt2, tokens[i : i + 1, valid[i]], generator=seeded(i), **options)
        n = int(row.lengths[0])
        assert whole.lengths[i] == n and torch.equal(whole.tokens[i, :n], row.tokens[0])
        assert bool((whole.tokens[i, n:] == ENDS).all())
        assert whole.calls[i] == row.calls[0] and whole.tokens_per_call[i] == row.tokens_per_call[0]
    if temperature:
        other = decode(gpt2, tokens, valid, generator=[seeded(9 + i) for i in range(4)], **options)
        assert other.tokens.tolist() != whole.tokens.tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_side_of_the_padding_does_not_matter(name):
    tokens, valid = prompts(RAGGED)
    model = CachedCausalLM(shared_lm(name))
    options = {"block_length": 4, "eos_token_id": ENDS}
    left = decode(model, tokens, valid, **options)
    assert torch.equal(decode(model, *right_padded(tokens, valid), **options).tokens, left.tokens)
    # padding outside the vocabulary, columns of padding alone, and a hole inside a row
    wide, wide_valid = nn.functional.pad(tokens, (3, 2)), nn.functional.pad(valid.long(), (3, 2))
    wide = wide.masked_fill(wide_valid == 0, -100)
    assert torch.equal(decode(model, wide, wide_valid, **options).tokens, left.tokens)
    holes = [torch.cat([x[:, :-1], x.new_zeros(4, 2), x[:, -1:]], dim=1) for x in (tokens, valid)]
    assert torch.equal(decode(model, *holes, **options).tokens, left.tokens)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_other_integers_are_read_as_int64(gpt2, dtype):
    tokens, valid = prompts(RAGGED)
    output = decode(gpt2, tokens.to(dtype), valid, block_length=4)
    assert torch.equal(output.tokens, decode(gpt2, tokens, valid, block_length=4).tokens)
    assert output.tokens.dtype == torch.int64


def test_the_generator_may_be_keys(gpt2):
    tokens, valid = prompts(RAGGED)
    options = {"block_length": 4, "strategy": make_strategy("threshold", temperature=1.0)}
    generators = [seeded(i) for i in range(4)]
    expected = decode(gpt2, tokens, valid, generator=generators, **options)
    keys = draw_keys([seeded(i) for i in range(4)], 4)
    for same in (keys, keys.at(step=17, purpose="elsewhere")):
        assert torch.equal(decode(gpt2, tokens, valid, generator=same, **options).tokens, expected.tokens)
    with pytest.raises(ConfigError, match="1 keys, but there are 4 prompts"):
        decode(gpt2, tokens, valid, generator=keys[:1], **options)


# ---- sub-blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_sub_block_is_the_whole_block(gpt2, name):
    tokens, valid = prompts(RAGGED)
    outputs = [
        decode(gpt2, tokens, valid, block_length=5, sub_block_length=sub, strategy=strategies()[name],
               generator=seeded())
        for sub in (None, 5, 50)
    ]  # fmt: skip
    for output in outputs[1:]:
        assert torch.equal(output.tokens, outputs[0].tokens) and torch.equal(output.calls, outputs[0].calls)


@pytest.mark.parametrize("sub", [1, 2, 3])
def test_sub_blocks_are_finished_from_left_to_right(sub):
    """Though the model is surest of the last position."""
    seen = []
    model = script([5, 6, 7, 8, 9, 10, 11, 12], confidence=torch.linspace(0.3, 0.8, 8))
    decode(
        model, START, block_length=8, max_new_tokens=8, sub_block_length=sub, callback=lambda s: seen.append(s.block)
    )
    assert len(seen) == 8  # below the threshold: one position a pass
    for block in seen:
        masked = (block[0] == MASK).view(-1).tolist()
        parts = [masked[i : i + sub] for i in range(0, 8, sub)]
        untouched = [all(part) for part in parts]
        first_open = next((i for i, part in enumerate(parts) if any(part)), len(parts))
        assert all(untouched[first_open + 1 :])
    order = [int((a != b).nonzero()[0, 1]) for a, b in itertools.pairwise(seen)]
    parts = [[p for p in range(i, min(i + sub, 8)) if p] for i in range(0, 8, sub)]
    assert order == [p for part in parts for p in reversed(part)]  # surest first, inside a part


# ---- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 5, 11, 12, 13])
def test_calls_of_the_slowest_and_the_fastest_way(count):
    text = list(range(2, 2 + count))
    slow = [("sequential", {}), ("fixed_steps", {"steps": 3}), ("threshold", {"threshold": 1.5})]
    for name, options in slow:
        model = script(text)
        output = decode(model, START, block_length=4, max_new_tokens=count, strategy=make_strategy(name, **options))
        assert len(model.calls) == count and output.calls.tolist() == [count]
    model = script(text)
    output = decode(
        model, START, block_length=4, max_new_tokens=count, strategy=make_strategy("threshold", threshold=0)
    )
    blocks = [min(4, count - start) for start in range(0, count, 4)]
    expected = [kind for size in blocks for kind in ("commit", *["denoise"] * (size > 1))]
    assert model.calls == ["prefill", *expected[1:]]
    assert output.calls.tolist() == [len(expected)]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "random"])
def test_never_more_calls_than_tokens(gpt2, name):
    tokens, valid = prompts(RAGGED)
    for size, sub in ((3, None), (8, 3)):
        output = decode(gpt2, tokens, valid, block_length=size, sub_block_length=sub, strategy=strategies()[name])
        assert bool((output.calls <= output.lengths).all())


def test_nothing_is_committed_behind_the_last_block(gpt2):
    for count, commits in ((4, 0), (5, 1), (8, 1), (9, 2)):
        model = script(list(range(2, 2 + count)))
        decode(model, START, block_length=4, max_new_tokens=count)
        assert model.calls.count("commit") == commits


def test_no_or_one_new_token(gpt2):
    tokens, valid = prompts(RAGGED)
    none = decode(gpt2, tokens, valid, max_new_tokens=0)
    assert none.tokens.shape == (4, 0) and none.calls.tolist() == none.lengths.tolist() == [0] * 4
    assert none.tokens_per_call.tolist() == [0.0] * 4
    one = decode(gpt2, tokens, valid, max_new_tokens=1)
    assert one.calls.tolist() == [1] * 4
    assert one.tokens.tolist() == decode(gpt2, tokens, valid, block_length=1).tokens[:, :1].tolist()


def test_an_empty_batch(gpt2):
    for shape in ((0, 5), (0, 0)):
        output = decode(gpt2, torch.zeros(shape, dtype=torch.int64), eos_token_id=EOS)
        assert output.tokens.shape == (0, 0) and output.calls.shape == output.lengths.shape == (0,)


def test_a_block_longer_than_what_is_left(gpt2):
    tokens, valid = prompts(RAGGED)
    expected = decode(gpt2, tokens, valid, block_length=13)
    assert torch.equal(decode(gpt2, tokens, valid, block_length=500).tokens, expected.tokens)


# ---- the mask token -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_mask_token_is_never_written(name, temperature):
    for logit in (1e9, torch.inf, torch.nan):
        model = script([5, 6, 7, 8, 9], confidence=1 - 1e-12, mask_logit=logit)
        output = decode(model, START, block_length=3, max_new_tokens=5, generator=seeded(),
                        strategy=strategies(temperature=temperature)[name])  # fmt: skip
        assert torch.equal(output.tokens, model.text)


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_an_end_as_the_first_token_of_a_block():
    model = script([EOS, 6, 7, 8, 9])
    output = decode(model, START, block_length=4, eos_token_id=EOS, pad_token_id=PAD)
    assert output.tokens.tolist() == [[EOS]] and output.lengths.tolist() == [1] and model.calls == ["prefill"]
    model = script([5, 6, EOS, 8, 9])
    output = decode(model, START, block_length=2, eos_token_id=EOS, pad_token_id=PAD)
    assert output.tokens.tolist() == [[5, 6, EOS]] and model.calls == ["prefill", "denoise", "commit"]
    assert output.calls.tolist() == [3]


def test_an_end_counts_once_everything_before_it_is_known():
    """The end token is known at once; the row goes on until the two positions before it are."""
    model = script([5, 6, 7, EOS, 8, 9, 10, 11], confidence=torch.tensor([0.9, 0.4, 0.5, 0.99, 0.3, 0.3, 0.3, 0.3]))
    dones = []
    output = decode(model, START, block_length=8, eos_token_id=EOS, callback=lambda s: dones.append(bool(s.done)))
    assert output.tokens.tolist() == [[5, 6, 7, EOS]]
    assert dones == [False, False, False, True] and output.calls.tolist() == [4]


def test_an_earlier_end_takes_the_place_of_a_later_one():
    model = script([5, EOS, 7, EOS], confidence=torch.tensor([0.9, 0.4, 0.5, 0.99]))
    assert decode(model, START, block_length=4, eos_token_id=EOS).tokens.tolist() == [[5, EOS]]


def test_rows_end_for_themselves():
    model = script([5, EOS, 7, 8, 9, 10], [5, 6, 7, 8, 20, 10], [5, 6, 7, 8, 9, 10], [EOS, 6, 7, 8, 9, 10])
    output = decode(model, starts(4), block_length=4, max_new_tokens=6, eos_token_id=[EOS, 20], pad_token_id=PAD)
    assert output.tokens.tolist() == [
        [5, EOS, PAD, PAD, PAD, PAD],
        [5, 6, 7, 8, 20, PAD],
        [5, 6, 7, 8, 9, 10],
        [EOS, PAD, PAD, PAD, PAD, PAD],
    ]
    assert output.lengths.tolist() == [2, 5, 6, 1]
    assert output.calls.tolist() == [2, 3, 4, 1]
    assert output.tokens_per_call.tolist() == pytest.approx([1, 5 / 3, 1.5, 1])
    assert model.calls == ["prefill", "denoise", "commit", "denoise"]


def test_the_walk_stops_when_the_last_row_ends():
    model = script([5, 6, EOS, 8, 9], [5, EOS, 7, 8, 9])
    output = decode(model, starts(2), block_length=3, max_new_tokens=50, eos_token_id=EOS)
    assert output.tokens.tolist() == [[5, 6, EOS], [5, EOS, EOS]]  # padded with the end token by default
    assert model.calls == ["prefill", "denoise"]


def test_a_padding_token_that_is_the_mask_keeps_no_row_going():
    class Lenient(Script):
        def commit(self, tokens, cache):
            return super().commit(tokens.masked_fill(tokens == MASK, PAD), cache)

    model = Lenient(torch.tensor([[5, EOS, 7, 8], [5, 6, 7, 8]]))
    output = decode(model, starts(2), block_length=2, max_new_tokens=4, eos_token_id=EOS, pad_token_id=MASK)
    assert output.tokens.tolist() == [[5, EOS, MASK, MASK], [5, 6, 7, 8]] and output.calls.tolist() == [2, 4]


def test_ends_in_many_forms(gpt2):
    tokens, valid = prompts(RAGGED)
    expected = decode(gpt2, tokens, valid, eos_token_id=[ENDS])
    assert min(expected.lengths) < 13
    for form in (ENDS, (ENDS,), torch.tensor([ENDS]), torch.tensor(ENDS), np.int64(ENDS), {ENDS}):
        assert torch.equal(decode(gpt2, tokens, valid, eos_token_id=form).tokens, expected.tokens)
    assert decode(gpt2, tokens, valid, eos_token_id=[]).lengths.tolist() == [13] * 4


# ---- schedulers of diffusers ----------------------------------------------------------------------------------------


def test_a_scheduler_of_diffusers_is_a_strategy(gpt2):
    """With a threshold that nothing reaches, n steps commit the surest of n positions one by one, as ours does."""
    tokens, valid = prompts(RAGGED)
    scheduler = BlockRefinementScheduler(threshold=2.0)
    scheduler.set_timesteps(3)
    theirs = decode(gpt2, tokens, valid, block_length=4, strategy=scheduler)
    ours = decode(gpt2, tokens, valid, block_length=4, strategy=make_strategy("fixed_steps", steps=3))
    assert torch.equal(theirs.tokens, ours.tokens) and torch.equal(theirs.calls, ours.calls)
    # its own step, by hand, on the first block
    _, cache = gpt2.prefill(tokens, valid)
    known = torch.cat([ours.tokens[:, :1], torch.full((4, 3), MASK)], dim=1)
    for step in range(3):
        logits = gpt2.denoise(known, cache)[:, :3]
        logits[..., MASK] = -torch.inf
        scheduler.set_timesteps(3, block_length=3)
        known[:, 1:] = scheduler.step(logits, step, known[:, 1:], mask_token_id=MASK, temperature=0.0).prev_sample
    assert torch.equal(theirs.tokens[:, :4], known)


# ---- training and decoding see the same -----------------------------------------------------------------------------

PATTERNS = torch.tensor(list(itertools.product([False, True], repeat=3)))


@pytest.mark.parametrize("rule", ["causal", "block"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_logits_are_those_of_decoding(name, rule):
    """Every pattern of masks in every block of 4, for every offset of the grid; without masks x_t is x_0."""
    network, length, size = shared_lm(name), 13, 4
    text = torch.randint(2, MASK, (1, length), generator=seeded(4)).expand(8, length)
    noise = torch.rand(8, length, generator=seeded(5)) < 0.5
    worst = 0.0
    for start in range(1, length - size + 1):
        inside = slice(start, start + size)
        hidden = noise.clone()
        hidden[:, inside] = nn.functional.pad(PATTERNS, (1, 0))
        noisy = text.masked_fill(hidden, MASK)
        grid = BlockGrid.make(length, size, offset=start % size)
        with torch.no_grad():
            training = network(
                torch.cat([noisy, text], dim=1),
                attention_mask=mask_for(network, one_pass_mask(grid, clean_rule=rule)),
                position_ids=grid.position_ids(8),
            ).logits
        for kind in (CachedCausalLM, UncachedCausalLM):
            model = kind(network, rule=rule, block_length=size)
            with torch.no_grad():
                first, cache = model.prefill(text[:, :start], torch.ones(8, start, dtype=torch.bool))
                decoding = model.denoise(noisy[:, inside], cache)
            worst = max(
                worst,
                float((training[:, :length][:, inside] - decoding).abs().max()),
                float((training[:, length + start - 1] - first).abs().max()),  # the block's first token
            )
        # control: the same tokens on a grid that starts elsewhere
        elsewhere = BlockGrid.make(length, size, offset=(start + 1) % size)
        with torch.no_grad():
            other = network(
                torch.cat([noisy, text], dim=1),
                attention_mask=mask_for(network, one_pass_mask(elsewhere, clean_rule=rule)),
                position_ids=elsewhere.position_ids(8),
            ).logits
        assert float((other[:, :length][:, inside] - decoding).abs().max()) > 1e-2
    assert worst < (1e-11 if name == "gpt2" else 1e-5)
