"""The evaluation harness's adapter against brute force; lm_eval itself is played by a stub with its abstract class."""

from __future__ import annotations

import abc
import math
import sys
import types
from dataclasses import dataclass

import pytest
import torch

from genkit.errors import ConfigError, MissingExtraError
from genkit.pipelines.block_diffusion.lm_eval import BlockDiffusionLM, harness_model
from genkit.pipelines.block_diffusion.pipeline import BlockDiffusionPipeline
from genkit.pipelines.block_diffusion.tokens import character_tokenizer

LETTERS = "abcdefghi "
EOS, MASK = 1, 2


@dataclass
class Request:
    args: tuple


def requests(*arguments):
    return [Request(one) for one in arguments]


@pytest.fixture(scope="module")
def pipe(tiny):
    return quiet(BlockDiffusionPipeline(tiny(), character_tokenizer(LETTERS, 64), block_length=2))


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def ids(text):
    return [3 + LETTERS.index(letter) for letter in text]


def next_log_probabilities(pipe, prefix):
    """log p of the token behind ``prefix``, by a pass of its own; never a mask."""
    logits = pipe.model(torch.tensor([prefix])).logits[0, -1]
    logits[MASK] = -math.inf
    return logits.log_softmax(dim=0)


@torch.no_grad()
def brute_force(pipe, context, continuation):
    """log p of the continuation and whether each of its tokens is the most probable one, token by token."""
    total, greedy, prefix = 0.0, True, list(context)
    for token in continuation:
        log_p = next_log_probabilities(pipe, prefix)
        total += float(log_p[token])
        greedy &= int(log_p.argmax()) == token
        prefix.append(token)
    return total, greedy


@torch.no_grad()
def greedy_text(pipe, context, count):
    """``count`` letters that an autoregressive model would write; None where it ends earlier."""
    prefix = ids(context)
    for _ in range(count):
        token = int(next_log_probabilities(pipe, prefix).argmax())
        if token < 3:
            return None
        prefix.append(token)
    return "".join(LETTERS[token - 3] for token in prefix[len(context) :])


@pytest.fixture(scope="module")
def greedy_context(pipe):
    """A context that the model continues with at least 12 letters."""
    contexts = [a + b for a in LETTERS[:9] for b in LETTERS[:9]]
    return next(context for context in contexts if greedy_text(pipe, context, 12))


def test_exact_log_likelihoods_equal_brute_force(pipe, greedy_context):
    greedy = greedy_text(pipe, greedy_context, 4)
    asked = [("abc", "de"), ("b", "hgfedcba"), (greedy_context, greedy), ("", "cab"), ("ab ", "d"), ("c", "")]
    expected = [
        brute_force(pipe, ids("abc"), ids("de")),
        brute_force(pipe, ids("b"), ids("hgfedcba")),
        brute_force(pipe, ids(greedy_context), ids(greedy)),
        brute_force(pipe, [EOS], ids("cab")),
        brute_force(pipe, ids("ab"), ids(" d")),  # the space belongs to the continuation
        (0.0, True),
    ]
    for batch_size in (1, 4):
        found = BlockDiffusionLM(pipe, batch_size=batch_size).loglikelihood(requests(*asked))
        for (value, same), (wanted, wanted_same) in zip(found, expected, strict=True):
            assert value == pytest.approx(wanted, abs=1e-10)
            assert same == wanted_same
    assert [same for _, same in expected][:3] == [False, False, True]  # both answers occur


def test_a_long_context_loses_its_first_tokens(pipe):
    model = BlockDiffusionLM(pipe, max_length=6)
    (found,) = model.loglikelihood(requests(("abcdefghi", "ab")))
    # the clean path reads all but the last token: 6 + 1 in all
    assert found[0] == pytest.approx(brute_force(pipe, ids("efghi"), ids("ab"))[0], abs=1e-10)
    with pytest.raises(ConfigError, match="does not fit behind a context"):
        model.loglikelihood(requests(("a", "abcdefg")))


def test_rolling_windows_predict_each_token_once(pipe):
    """The windows that the harness's documentation shows, for 10 tokens and 4 that are read."""
    text = "abcdefghia"
    tokens = ids(text)
    windows = [([EOS], tokens[:4]), (tokens[3:4], tokens[4:8]), (tokens[5:8], tokens[8:])]
    expected = sum(brute_force(pipe, *window)[0] for window in windows)
    found = BlockDiffusionLM(pipe, max_length=4).loglikelihood_rolling(requests((text,), ("ab",), ("",)))
    assert found == pytest.approx([expected, brute_force(pipe, [EOS], ids("ab"))[0], 0.0], abs=1e-10)
    whole = BlockDiffusionLM(pipe).loglikelihood_rolling(requests((text,)))
    assert whole[0] == pytest.approx(brute_force(pipe, [EOS], tokens)[0], abs=1e-10)


def test_the_bound_equals_its_sum_over_all_masks(pipe, oracle):
    """At block length 2 each block has one maskable token, so the sweep is exact."""
    model = BlockDiffusionLM(pipe, likelihood="nelbo", block_length=2)
    for context, continuation in (("abc", "defg"), ("ab", "cde"), ("a", "b")):
        tokens = torch.tensor(ids(context + continuation))
        wanted = torch.arange(len(tokens)) >= len(context)
        expected = oracle.bound(pipe.model, tokens, 2, offset=len(context) % 2, wanted=wanted)
        (found,) = model.loglikelihood(requests((context, continuation)))
        assert found[0] == pytest.approx(-expected, abs=1e-9)
    assert model.loglikelihood_rolling(requests(("abc",)))[0] == pytest.approx(
        -oracle.bound(pipe.model, torch.tensor([EOS, *ids("abc")]), 2, offset=1), abs=1e-9
    )


def test_block_length_one_makes_the_bound_exact(pipe):
    asked = requests(("abc", "defg"), ("ab", "cd"))
    exact = BlockDiffusionLM(pipe).loglikelihood(asked)
    bound = BlockDiffusionLM(pipe, likelihood="nelbo", block_length=1, strategy="sequential").loglikelihood(asked)
    assert [value for value, _ in bound] == pytest.approx([value for value, _ in exact], abs=1e-10)
    assert [same for _, same in bound] == [same for _, same in exact]


def test_the_bounds_greedy_flag_is_block_decodings(pipe):
    contexts = [a + b for a in LETTERS[:5] for b in LETTERS[:5]]
    texts = pipe(contexts, max_new_tokens=4, block_length=4, threshold=0.3).text
    context, written = next((c, t) for c, t in zip(contexts, texts, strict=True) if len(t) == 4)
    other = ("b" if written[0] == "a" else "a") + written[1:]
    model = BlockDiffusionLM(pipe, likelihood="nelbo", block_length=4, threshold=0.3)
    assert [same for _, same in model.loglikelihood(requests((context, written), (context, other)))] == [True, False]


def test_generation_stops_at_strings_and_lengths(pipe, greedy_context):
    text = greedy_text(pipe, greedy_context, 12)
    model = BlockDiffusionLM(pipe, block_length=1, strategy="sequential", max_gen_toks=12)
    stop = text[4:6]
    place = text.index(stop)
    asked = requests(
        (greedy_context, {}),
        (greedy_context, {"until": [stop, text[11]], "max_gen_toks": 12}),
        (greedy_context, {"max_gen_toks": 5, "until": ["zzz"], "do_sample": False, "temperature": 0.0}),
        (greedy_context, {"until": stop}),
        (greedy_context, {"max_new_tokens": 3, "until": None}),
    )
    cut = min(place, text.index(text[11]))
    assert model.generate_until(asked) == [text, text[:cut], text[:5], text[:place], text[:3]]


def test_a_stop_string_saves_the_rest_of_the_calls(pipe, greedy_context):
    text = greedy_text(pipe, greedy_context, 12)
    model = BlockDiffusionLM(pipe, block_length=1, strategy="sequential", max_gen_toks=12)
    passes = []
    handle = pipe.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        model.generate_until(requests((greedy_context, {"until": text[:2]})))
        stopped = len(passes)
        model.generate_until(requests((greedy_context, {})))
    finally:
        handle.remove()
    assert stopped == 3  # two tokens, and the pass in which the end is noticed
    assert len(passes) - stopped == 12


@pytest.mark.parametrize("block_length", [1, 3, 4])
def test_stopped_rows_of_a_batch_are_what_they_are_alone(pipe, block_length):
    """Rows with other lengths and stop places; all at the end of blocks of any length."""
    contexts = ["ab", "cde", "fghia", "b"]
    free = BlockDiffusionLM(pipe, block_length=block_length, threshold=0.2, max_gen_toks=11, batch_size=4)
    whole = free.generate_until(requests(*((context, {}) for context in contexts)))
    assert max(map(len, whole)) > 4
    stop = max(whole, key=len)[3]
    asked = requests(*((context, {"until": [stop]}) for context in contexts))
    for batch_size in (1, 4):
        model = BlockDiffusionLM(pipe, block_length=block_length, threshold=0.2, max_gen_toks=11, batch_size=batch_size)
        assert model.generate_until(asked) == [text.split(stop)[0] for text in whole]


def test_sampled_text_depends_on_the_request_not_on_the_batch(pipe):
    asked = requests(*[("ab", {"do_sample": True, "max_gen_toks": 6})] * 5)
    first, second = (
        BlockDiffusionLM(pipe, strategy="threshold", batch_size=size, seed=3).generate_until(asked) for size in (1, 5)
    )
    assert first == second
    assert len(set(first)) > 1  # repeats are other draws
    other = BlockDiffusionLM(pipe, strategy="threshold", batch_size=5, seed=90).generate_until(asked)
    assert other != first


def test_a_context_is_shortened_from_the_left(pipe):
    model = BlockDiffusionLM(pipe, max_length=8, max_gen_toks=4)
    full = BlockDiffusionLM(pipe, max_gen_toks=4)
    assert model.generate_until(requests(("iabcdef", {}))) == full.generate_until(requests(("cdef", {})))
    with pytest.raises(ConfigError, match="lower max_gen_toks"):
        model.generate_until(requests(("a", {"max_gen_toks": 8})))


def test_what_cannot_be_meant_is_refused(pipe, tiny):
    with pytest.raises(ConfigError, match=r"Did you mean 'until'\?"):
        BlockDiffusionLM(pipe).generate_until(requests(("a", {"untill": ["b"]})))
    with pytest.raises(ConfigError, match="expected one of ar, nelbo"):
        BlockDiffusionLM(pipe, likelihood="exact")
    full = BlockDiffusionPipeline(tiny(), character_tokenizer(LETTERS, 64), block_length=2, rule="full")
    with pytest.raises(ConfigError, match="use likelihood='nelbo'"):
        BlockDiffusionLM(full)


class Harness:
    """lm_eval's abstract class, with what its evaluator touches."""

    class LM(abc.ABC):
        def __init__(self):
            self._rank, self._world_size, self._device = 0, 1, None
            self.cache_hook = None

        @abc.abstractmethod
        def loglikelihood(self, requests): ...

        @abc.abstractmethod
        def loglikelihood_rolling(self, requests): ...

        @abc.abstractmethod
        def generate_until(self, requests): ...

        @property
        def rank(self):
            return self._rank


@pytest.fixture
def harness(monkeypatch):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = Harness.LM
    return Harness


def test_the_harness_model_is_its_lm_and_fills_its_cache(pipe, harness):
    class Hook:
        def __init__(self):
            self.kept = []

        def add_partial(self, kind, arguments, answer):
            self.kept.append((kind, arguments, answer))

    model = harness_model(pipe, block_length=1)
    assert isinstance(model, harness.LM) and isinstance(model, BlockDiffusionLM)
    assert model.rank == 0
    model.cache_hook = Hook()
    (answer,) = model.loglikelihood(requests(("abc", "de")))
    (text,) = model.generate_until(requests(("abc", {"max_gen_toks": 2})))
    assert model.cache_hook.kept == [
        ("loglikelihood", ("abc", "de"), answer),
        ("generate_until", ("abc", {"max_gen_toks": 2}), text),
    ]


def test_without_the_harness_the_extra_is_named(pipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtraError, match=r"genkit-diffusion\[eval\]"):
        harness_model(pipe)
