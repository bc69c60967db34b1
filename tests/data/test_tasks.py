from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter

import pytest
import torch

from genkit.data.tasks import ALPHABET, SPECIAL, TASKS, VerifiableTasks, check_answer, problem_split
from genkit.errors import ConfigError

GOLDEN = ["A2063+9853=", "L4374+5809=", "S93296582=", "Civzpq=", "Rdtfrieox=", "B{}{}(({}{="]


def schoolbook_sum(a: str, b: str) -> str:
    """a + b digit by digit with a carry, least significant digit first."""
    digits, carry = "", 0
    for x, y in itertools.zip_longest(reversed(a), reversed(b), fillvalue="0"):
        carry, digit = divmod(int(x) + int(y) + carry, 10)
        digits += str(digit)
    return digits + "1" * carry


def balanced(brackets: str) -> bool:
    stack: list[str] = []
    for bracket in brackets:
        if bracket in "([{":
            stack.append(bracket)
        elif not stack or stack.pop() + bracket not in ("()", "[]", "{}"):
            return False
    return not stack


LAWS = {
    "addition": lambda content, answer: schoolbook_sum(*content.split("+"))[::-1] == answer,
    "addition_reversed": lambda content, answer: schoolbook_sum(*(x[::-1] for x in content.split("+"))) == answer,
    "sort": lambda content, answer: (
        Counter(content) == Counter(answer) and all(a <= b for a, b in itertools.pairwise(answer))
    ),
    "copy": lambda content, answer: content == answer,
    "reverse": lambda content, answer: all(a == b for a, b in zip(content, reversed(answer), strict=True)),
    "brackets": lambda content, answer: balanced(content + answer) and set(answer) <= set(")]}") and answer != "",
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_obey_the_law_of_their_task(task, split):
    for prompt, answer in VerifiableTasks([task], split=split, seed=3).problems(range(300)):
        assert LAWS[task](prompt[1:-1], answer), (prompt, answer)
        assert check_answer(prompt, answer)


@pytest.mark.parametrize("task", TASKS)
def test_every_other_answer_is_wrong(task):
    """All answers at an edit distance of one, an empty one and one with a blank fail: a control of check_answer."""
    for prompt, answer in VerifiableTasks([task]).problems(range(5)):
        deleted = {answer[:i] + answer[i + 1 :] for i in range(len(answer))}
        changed = {answer[:i] + c + answer[i + 1 :] for i in range(len(answer)) for c in ALPHABET}
        inserted = {answer[:i] + c + answer[i:] for i in range(len(answer) + 1) for c in ALPHABET}
        others = (deleted | changed | inserted | {"", answer + " ", answer + "<pad>"}) - {answer}
        assert not any(check_answer(prompt, other) for other in others)


def test_answers_worked_out_by_hand():
    table = {
        "A123+4567=": "4690",
        "L321+7654=": "0964",
        "A99999+1=": "100000",
        "L059+05=": "0001",
        "S31415926=": "11234569",
        "S90000000=": "00000009",
        "Cgenkit=": "genkit",
        "Rgenkit=": "tikneg",
        "B([]{(=": ")})",
        "B[[[[=": "]]]]",
        "B()[]=": "",
    }
    assert all(check_answer(prompt, answer) for prompt, answer in table.items())


@pytest.mark.parametrize(
    "prompt", ["", "A1+2", "A1+=", "X12=", "Cab1=", "B(x=", "A1+2=3", "A-1+2=", "B(]=", "B)=", "A١+٢="]
)
def test_prompts_of_no_task_are_refused(prompt):
    with pytest.raises(ConfigError, match="prompt"):
        check_answer(prompt, "1")


# --- the splits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_no_problem_is_in_both_splits_whatever_the_seeds(task):
    """The proof is problem_split: a function of the prompt alone, which agrees with the split of every problem."""
    train, test = (
        {
            prompt
            for seed in range(3)
            for prompt, _ in VerifiableTasks([task], seed=seed, split=split).problems(range(n))
        }
        for split, n in (("train", 1000), ("test", 300))
    )
    assert not train & test
    assert {problem_split(prompt) for prompt in train} == {"train"}
    assert {problem_split(prompt) for prompt in test} == {"test"}


def test_what_gives_the_answer_away_is_of_the_same_split():
    for prompt, _ in VerifiableTasks(split="test", seed=1).problems(range(120)):
        content = prompt[1:-1]
        if "+" in content:
            a, b = content.split("+")
            twins = [f"{prompt[0]}{b}+{a}=", f"{'AL'.replace(prompt[0], '')}{a[::-1]}+{b[::-1]}="]
        elif prompt[0] == "S":
            twins = [f"S{''.join(sorted(content, reverse=True))}=", f"S{content[::-1]}="]
        else:
            twins = [f"{letter}{content}=" for letter in "CR"] if content.isalpha() else []
        assert all(problem_split(twin) == "test" for twin in twins)


def test_one_problem_in_eight_is_a_test_problem():
    """Of 20,000 consecutive sums without their mirror images; five standard deviations of the binomial law."""
    share = statistics.fmean(problem_split(f"A{100}+{1000 + k}=") == "test" for k in range(20_000))
    assert share == pytest.approx(1 / 8, abs=5 * (1 / 8 * 7 / 8 / 20_000) ** 0.5)


# --- the generator ----------------------------------------------------------------------------------------------------


def test_a_problem_depends_on_seed_split_and_number_alone():
    data = VerifiableTasks(seed=5)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    shuffled = dict(zip(order.tolist(), data.problems(order), strict=True))
    assert [shuffled[i] for i in range(200)] == VerifiableTasks(seed=5, num_samples=200).problems(range(200))
    for other in (VerifiableTasks(seed=6), VerifiableTasks(seed=5, split="test")):
        assert sum(a == b for a, b in zip(data.problems(range(200)), other.problems(range(200)), strict=True)) <= 1


def test_the_first_problems_are_golden():
    """The data set is part of every trained checkpoint's meaning: a change here needs a line in the changelog."""
    assert [prompt for prompt, _ in VerifiableTasks().problems(range(6))] == GOLDEN


def test_contents_have_the_stated_laws():
    """Chi-square of the operands' lengths, first digits, letters and bracket lengths against uniform ones."""
    n = 3000

    def contents(task: str) -> list[str]:
        return [prompt[1:-1] for prompt, _ in VerifiableTasks([task]).problems(range(n))]

    operands = [x for content in contents("addition") for x in content.split("+")]
    words, brackets = contents("copy"), contents("brackets")
    assert uniform(Counter(len(x) for x in operands), {3, 4, 5})
    assert uniform(Counter(x[0] for x in operands), set("123456789"))
    assert uniform(Counter(x[-1] for x in operands), set("0123456789"))
    assert uniform(Counter("".join(contents("sort"))), set("0123456789"))
    assert uniform(Counter(len(x) for x in words), set(range(4, 9)))
    assert uniform(Counter("".join(words)), set("abcdefghijklmnopqrstuvwxyz"))
    assert uniform(Counter(len(x) for x in brackets), set(range(4, 13)))
    assert not uniform(Counter("".join(brackets)), set("()[]{}"))  # the control: more opens than closes


def uniform(counts: Counter, support: set) -> bool:
    """Whether the counts pass a chi-square test of the uniform law on the support at level 1e-4."""
    from scipy.stats import chisquare

    assert set(counts) == support
    return chisquare([counts[x] for x in support]).pvalue > 1e-4


def test_tasks_take_turns():
    data = VerifiableTasks(["sort", "copy", "brackets"])
    assert "".join(prompt[0] for prompt, _ in data.problems(range(7))) == "SCBSCBS"


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_rows_hold_prompt_answer_and_end():
    data = VerifiableTasks(split="test")
    index = torch.tensor([17, 3, 17, 999_999])
    batch = data[index]
    for row, (prompt, answer) in enumerate(data.problems(index)):
        tokens = [*data.encode(prompt), *data.encode(answer), data.eos_token_id]
        size = len(tokens)
        assert batch["tokens"][row].tolist() == tokens + [data.pad_token_id] * (data.length - size)
        assert batch["document"][row].tolist() == [0] * size + [-1] * (data.length - size)
        learned = [len(prompt) <= i < size for i in range(data.length)]
        assert batch["loss_mask"][row].tolist() == learned
        assert int(batch["response_start"][row]) == len(prompt)
        assert data.decode(batch["tokens"][row]) == prompt + answer
    assert batch["tokens"].dtype == torch.int64
    assert data[index[:0]]["tokens"].shape == (0, data.length)


def test_ids_are_the_special_tokens_and_then_the_alphabet():
    data = VerifiableTasks(["copy"])
    assert (SPECIAL, len(set(ALPHABET)), data.vocab_size) == (("<pad>", "<eos>", "<mask>"), len(ALPHABET), 53)
    assert data.encode(ALPHABET).tolist() == list(range(3, 53))
    assert data.decode(torch.arange(3, 53)) == ALPHABET == data.alphabet
    assert (data.pad_token_id, data.eos_token_id, data.mask_token_id) == (0, 1, 2)


def test_decoding_hides_no_padding_within_an_answer():
    data = VerifiableTasks()
    four, two = data.encode("42").tolist()
    assert data.decode([0, 0, four, two, 0]) == "42"
    assert data.decode([four, two, 1, four, 2]) == "42"
    assert data.decode([four, 0, two, 2, 1]) == "4<pad>2<mask>"
    assert data.decode([]) == data.decode([0]) == data.decode([1, four]) == ""
    with pytest.raises(ConfigError, match="id 53 is outside the vocabulary, 0 to 52"):
        data.decode(torch.tensor([53]))


@pytest.mark.parametrize("task", TASKS)
def test_rows_have_room_for_the_longest_problem(task):
    longest = {
        "addition": "A99999+99999=199998",
        "addition_reversed": "L99999+99999=899991",
        "sort": "S99999999=99999999",
        "copy": "Czzzzzzzz=zzzzzzzz",
        "reverse": "Rzzzzzzzz=zzzzzzzz",
        "brackets": "B" + "[]" * 3 + "[" * 6 + "=" + "]" * 6,
    }[task]
    data = VerifiableTasks([task])
    assert len(longest) + 1 <= data.length <= len(longest) + 8 and data.length % 8 == 0
    drawn = max(len(prompt) + len(answer) for prompt, answer in data.problems(range(2000)))
    assert len(longest) - 2 <= drawn <= len(longest)


@pytest.mark.parametrize(("split", "limit"), [("train", 3.0), ("test", 20.0)])
def test_a_batch_takes_a_small_part_of_a_training_step(split, limit):
    """64 samples in milliseconds, the fastest of ten: at most 3 in training."""
    data, times = VerifiableTasks(split=split), []
    for i in range(10):
        start = time.perf_counter()
        data[torch.arange(64 * i, 64 * i + 64)]
        times.append(time.perf_counter() - start)
    assert min(times) * 1e3 < limit


def test_arguments_are_checked():
    with pytest.raises(ConfigError, match=r"task 'adition' is not known; .* Did you mean 'addition'"):
        VerifiableTasks(["adition"])
    for tasks in ([], ["copy", "copy"]):
        with pytest.raises(ConfigError, match="at least one task, each once"):
            VerifiableTasks(tasks)
    with pytest.raises(ConfigError, match=r"split must be one of train, test, got 'tset'. Did you mean 'test'"):
        VerifiableTasks(split="tset")
    with pytest.raises(ConfigError, match="num_samples=0"):
        VerifiableTasks(num_samples=0)
    with pytest.raises(ConfigError, match="seed=-1"):
        VerifiableTasks(seed=-1)
    data = VerifiableTasks(num_samples=5)
    for bad in (5, -1):
        with pytest.raises(ConfigError, match=f"index {bad} is out of range"):
            data.problem(bad)
        with pytest.raises(ConfigError, match=f"index {bad} is out of range"):
            data[torch.tensor([0, bad])]
    with pytest.raises(ConfigError, match="character 'é' at place 1"):
        data.encode("aé")
