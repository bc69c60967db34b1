"""Measures of text: distinct n-grams, repetition, exact match with an interval.

Sequences are texts, which are split into words at white space, or lists (or 1-D integer tensors) of tokens; for
characters pass ``list(text)``. Low perplexity under a judge rewards loops: the first two measures say how much of it
is owed to them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist

from torch import Tensor

from genkit._checks import checked_count, checked_number
from genkit.errors import ConfigError
from genkit.metrics.tails import Interval

__all__ = ["distinct_n", "exact_match", "repetition_rate", "wilson_interval"]

TokenSequence = str | Sequence[Hashable] | Tensor


def _words(sequence: TokenSequence, name: str) -> list[Hashable]:
    """The tokens of one sequence: words of a text, numbers of a tensor."""
    if isinstance(sequence, str):
        return list(sequence.split())
    if isinstance(sequence, Tensor) and sequence.ndim == 1:
        return list(sequence.tolist())
    if isinstance(sequence, Sequence):
        return list(sequence)
    raise ConfigError(f"{name} holds a {type(sequence).__name__}; expected texts, lists or 1-D tensors of tokens")


def _grams(sequences: Sequence[TokenSequence] | Tensor, n: int, name: str) -> list[list[tuple[Hashable, ...]]]:
    """The n-grams of each sequence; they never span two."""
    if isinstance(sequences, str):
        raise ConfigError(f"{name} is one text; expected a list of texts: pass [text]")
    order = checked_count("n", n)
    tokens = [_words(sequence, name) for sequence in sequences]
    grams = [list(zip(*(row[i:] for i in range(order)), strict=False)) for row in tokens]
    if not any(grams):
        longest = max((len(row) for row in tokens), default=0)
        raise ConfigError(f"{name} hold no {order}-gram (the longest sequence has {longest} tokens); lower n")
    return grams


def distinct_n(sequences: Sequence[TokenSequence] | Tensor, n: int) -> float:
    """Distinct-n: different n-grams over all n-grams, of all sequences together; in (0, 1], 1 where none comes twice.

    It falls with the amount of text, so compare only samples of equal number and length.

    Args:
        sequences: texts (split into words), or lists, 1-D tensors or rows of tokens.
        n: tokens of an n-gram, >= 1. Shorter sequences have none.

    Raises:
        ConfigError: no n-gram at all, one text instead of a list.

    Reference: Li et al., "A diversity-promoting objective function for neural conversation models", NAACL 2016.
    """
    grams = [gram for row in _grams(sequences, n, "sequences") for gram in row]
    return len(set(grams)) / len(grams)


def repetition_rate(sequences: Sequence[TokenSequence] | Tensor, window: int, *, n: int = 1) -> float:
    """The share of n-grams that began before at one of the ``window`` preceding places of the same sequence.

        rep = #{(s, i): g_{s,i} ∈ {g_{s,j}: i - window <= j < i}} / #{(s, i)},    g_{s,i} the n-gram at place i

    n = 1 is rep/ℓ with ℓ = ``window``. Words of real text repeat too: compare with held-out text.

    Args:
        sequences: as for :func:`distinct_n`.
        window: places looked back, >= 1.
        n: tokens of an n-gram; with single characters take n > 1, for every character comes again soon.

    Raises:
        ConfigError: no n-gram at all, one text instead of a list.

    Reference: Welleck et al., "Neural text generation with unlikelihood training", ICLR 2020, section 6.1.
    """
    reach = checked_count("window", window)
    repeated = total = 0
    for row in _grams(sequences, n, "sequences"):
        last: dict[tuple[Hashable, ...], int] = {}
        for i, gram in enumerate(row):
            repeated += i - last.get(gram, -reach - 1) <= reach
            last[gram] = i
        total += len(row)
    return repeated / total


def wilson_interval(successes: int, trials: int, coverage: float = 0.95) -> Interval:
    """A share with Wilson's score interval, which holds its coverage near 0 and 1 where ± 2 standard errors do not.

        (p + z²/2n ± z √(p (1 - p)/n + z²/4n²)) / (1 + z²/n),    p = successes / n

    It is the set of shares q that the score test keeps: n (p - q)² <= z² q (1 - q).

    Args:
        successes: from 0 to ``trials``.
        trials: n >= 1, independent.
        coverage: in (0, 1).

    Reference: Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927.
    """
    n = checked_count("trials", trials)
    k = checked_count("successes", successes, f"an integer from 0 to trials={n}", 0)
    if k > n:
        raise ConfigError(f"successes={k}; expected an integer from 0 to trials={n}")
    inside = checked_number("coverage", coverage, "a share in (0, 1)", lambda c: 0.0 < c < 1.0)
    z, p = NormalDist().inv_cdf((1.0 + inside) / 2.0), k / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1.0 - p) / n + z * z / (4 * n * n))
    scale = 1.0 + z * z / n
    # the ends are 0 and 1 exactly there, where rounding would leave 1e-17
    return Interval(p, 0.0 if k == 0 else (centre - half) / scale, 1.0 if k == n else (centre + half) / scale)


def exact_match(
    predictions: Sequence[TokenSequence] | Tensor, answers: Sequence[TokenSequence] | Tensor, *, coverage: float = 0.95
) -> Interval:
    """The share of predictions that equal their answer, with Wilson's interval.

    Texts are compared character by character (white space and case count), tokens one by one.

    Args:
        predictions, answers: equally many, at least one; texts with texts, tokens with tokens.
        coverage: of the interval, in (0, 1).

    Raises:
        ConfigError: other numbers of predictions than answers, none at all, a text beside a list of tokens.
    """
    if isinstance(predictions, str) or isinstance(answers, str):
        raise ConfigError("predictions and answers must be lists of texts, got one text; pass [text]")
    if len(predictions) != len(answers):
        raise ConfigError(f"there are {len(predictions)} predictions and {len(answers)} answers; expected equally many")
    hits = [_equal(p, a, i) for i, (p, a) in enumerate(zip(predictions, answers, strict=True))]
    return wilson_interval(sum(hits), len(hits), coverage)


def _equal(prediction: TokenSequence, answer: TokenSequence, i: int) -> bool:
    if isinstance(prediction, str) != isinstance(answer, str):
        raise ConfigError(
            f"prediction {i} is a {type(prediction).__name__} and its answer a {type(answer).__name__}; "
            f"compare texts with texts, or tokens with tokens"
        )
    if isinstance(prediction, str):
        return prediction == answer
    return _words(prediction, "predictions") == _words(answer, "answers")
