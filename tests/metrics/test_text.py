from __future__ import annotations

import math

import pytest
import torch

from genkit.errors import ConfigError
from genkit.metrics.text import distinct_n, exact_match, repetition_rate, wilson_interval


def rows(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count, length), generator=g).tolist()


# --- distinct n-grams -------------------------------------------------------------------------------------------------


def test_distinct_n_counted_by_hand():
    # unigrams: the cat the dog | the cat -> 3 of 6; bigrams: the cat, cat the, the dog | the cat -> 3 of 4
    texts = ["the cat the dog", "the  cat"]
    assert distinct_n(texts, 1) == 3 / 6
    assert distinct_n(texts, 2) == 3 / 4
    assert distinct_n(texts, 3) == 1.0  # the second text has none
    assert distinct_n([["a", "b"], ["a", "b"]], 2) == 1 / 2


@pytest.mark.parametrize("n", [1, 2, 4])
def test_distinct_n_equals_brute_force(n):
    sample = rows(5, 40, 3)
    grams = [tuple(row[i : i + n]) for row in sample for i in range(len(row) - n + 1)]
    unique = [gram for i, gram in enumerate(grams) if gram not in grams[:i]]
    expected = len(unique) / len(grams)
    assert distinct_n(sample, n) == expected
    assert distinct_n(torch.tensor(sample), n) == distinct_n([torch.tensor(row) for row in sample], n) == expected
    assert distinct_n([" ".join(map(str, row)) for row in sample], n) == expected


def test_distinct_n_of_extremes():
    assert distinct_n([range(50)], 3) == 1.0
    assert distinct_n([[7] * 50], 3) == 1 / 48
    assert distinct_n([[1, 2]] * 10, 1) == 2 / 20


# --- repetition -------------------------------------------------------------------------------------------------------


def test_repetition_counted_by_hand():
    # a b a c b a: repeats within 2 places: the first a->a only; within 3: also b (1 -> 4) and a (2 -> 5)
    tokens = [list("abacba")]
    assert repetition_rate(tokens, 1) == 0.0
    assert repetition_rate(tokens, 2) == 1 / 6
    assert repetition_rate(tokens, 3) == 3 / 6
    assert repetition_rate(["to be or not to be"], 10) == 2 / 6
    assert repetition_rate(["to be or not to be"], 10, n=2) == 1 / 5
    assert repetition_rate(["to be or not to be"], 3, n=2) == 0.0


@pytest.mark.parametrize(("window", "n"), [(1, 1), (5, 1), (64, 1), (7, 2), (20, 3)])
def test_repetition_equals_brute_force(window, n):
    sample = rows(4, 60, 5, seed=1)
    repeated = total = 0
    for row in sample:
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        total += len(grams)
        repeated += sum(gram in grams[max(0, i - window) : i] for i, gram in enumerate(grams))
    assert (
        repetition_rate(sample, window, n=n) == repetition_rate(torch.tensor(sample), window, n=n) == repeated / total
    )


def test_repetition_of_independent_tokens_is_the_closed_form():
    """With v equally likely tokens a place beyond the first w repeats with probability 1 - (1 - 1/v)^w."""
    v, w, length, count = 20, 8, 400, 50
    inside = [1 - (1 - 1 / v) ** min(i, w) for i in range(length)]
    rate = repetition_rate(rows(count, length, v, seed=2), w)
    assert rate == pytest.approx(math.fsum(inside) / length, abs=0.015)  # neighbours correlate: about 4 s.e.
    assert repetition_rate([[3, 1, 4] * 100], w) == 297 / 300  # a loop: all but its first turn


def test_sequences_do_not_see_each_other():
    assert repetition_rate([[1], [1], [1]], 5) == 0.0
    assert repetition_rate([[1, 1, 1]], 5) == 2 / 3


def test_sequences_are_checked():
    for measure in (lambda s, n: distinct_n(s, n), lambda s, n: repetition_rate(s, 4, n=n)):
        with pytest.raises(ConfigError, match="is one text"):
            measure("a text", 1)
        with pytest.raises(ConfigError, match=r"no 3-gram \(the longest sequence has 2 tokens\)"):
            measure(["a b", "c"], 3)
        with pytest.raises(ConfigError, match="no 1-gram"):
            measure([], 1)
        with pytest.raises(ConfigError, match="n=0"):
            measure(["a"], 0)
        with pytest.raises(ConfigError, match="holds a int"):
            measure([1, 2, 3], 1)
    with pytest.raises(ConfigError, match="window=0"):
        repetition_rate(["a"], 0)


# --- exact match ------------------------------------------------------------------------------------------------------


def test_exact_match_counts():
    result = exact_match(["4", "5 ", "a", "A"], ["4", "5", "a", "a"])
    assert result.value == 2 / 4
    tokens = exact_match([torch.tensor([1, 2]), [3], (4,)], [[1, 2], [3, 0], [4]])
    assert tokens.value == 2 / 3
    assert exact_match(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [4, 3]])).value == 1 / 2


@pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 10), (7, 10), (10, 10), (480, 500), (1, 1)])
@pytest.mark.parametrize("coverage", [0.8, 0.95, 0.99])
def test_wilson_equals_scipy(k, n, coverage):
    from scipy.stats import binomtest

    expected = binomtest(k, n).proportion_ci(coverage, method="wilson")
    interval = wilson_interval(k, n, coverage)
    assert (interval.value, interval.low, interval.high) == pytest.approx(
        (k / n, expected.low, expected.high), abs=1e-12
    )
    assert 0.0 <= interval.low <= interval.value <= interval.high <= 1.0


def test_wilson_ends_solve_the_score_equation():
    k, n, z = 37, 120, 1.959963984540054
    interval = wilson_interval(k, n)
    for q in (interval.low, interval.high):
        assert n * (k / n - q) ** 2 == pytest.approx(z * z * q * (1 - q), rel=1e-9)


def test_wilson_covers_where_the_normal_interval_does_not():
    """Exact coverage at p = .98, n = 50: Wilson's is near 95 %, that of p ± 1.96 s.e. near 64 %."""
    from scipy.stats import binom

    p, n = 0.98, 50
    wilson = wald = 0.0
    for k in range(n + 1):
        mass, share = float(binom.pmf(k, n, p)), k / n
        interval = wilson_interval(k, n)
        wilson += mass * (interval.low <= p <= interval.high)
        wald += mass * (abs(share - p) <= 1.96 * math.sqrt(share * (1 - share) / n))
    assert wilson > 0.9 > 0.7 > wald


def test_exact_match_is_checked():
    with pytest.raises(ConfigError, match="2 predictions and 1 answers"):
        exact_match(["a", "b"], ["a"])
    with pytest.raises(ConfigError, match="trials=0"):
        exact_match([], [])
    with pytest.raises(ConfigError, match="one text"):
        exact_match("abc", "abc")
    with pytest.raises(ConfigError, match="prediction 0 is a str and its answer a list"):
        exact_match(["12"], [[1, 2]])
    with pytest.raises(ConfigError, match="successes=3; expected an integer from 0 to trials=2"):
        wilson_interval(3, 2)
    with pytest.raises(ConfigError, match="coverage=1.0"):
        wilson_interval(1, 2, 1.0)
