r"""Synthetic tasks whose answers can be checked, made on the fly: the test bed of a language model of toy size.

===================  ========================  ===============  ==============================================
task                 prompt                    answer           problem
===================  ========================  ===============  ==============================================
addition             ``A4123+1567=``           ``5690``         operands of equally many digits, 3 to 5
addition_reversed    ``L3214+7651=``           ``0965``         the same, all numbers least significant digit first
sort                 ``S31415926=``            ``11234569``     8 digits in ascending order
copy                 ``Cgenkit=``              ``genkit``       4 to 8 lower-case letters
reverse              ``Rgenkit=``              ``tikneg``       the same, backwards
brackets             ``B([]{(=``               ``)})``          closes what 4 to 12 brackets leave open (1 to 6)
===================  ========================  ===============  ==============================================

A row of tokens is the prompt, the answer and the end-of-sequence token. Ids: 0 is padding, 1 the end of the sequence, 2
the mask, then the characters of :data:`ALPHABET`.

Problem number i is a pure function of (tasks, seed, split, i): its content is read off the 512-bit BLAKE2b hash of
(seed, split, i, attempt), as the digits of a number in mixed radix, and the first attempt whose content belongs to the
split is taken. Which split a content belongs to is a hash of the content alone (see :func:`problem_split`), so that
training and test problems are disjoint for all seeds and sizes. The tasks take turns: number i is of task i mod
len(tasks).
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_count
from genkit.data.text import checked_index, supervised_batch
from genkit.errors import ConfigError, nearest

__all__ = ["ALPHABET", "SPECIAL", "TASKS", "VerifiableTasks", "check_answer", "problem_split"]

SPECIAL = ("<pad>", "<eos>", "<mask>")
ALPHABET = "0123456789+=()[]{}ABCLRSabcdefghijklmnopqrstuvwxyz"
PAD, EOS, MASK = range(3)

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_CLOSES = {"(": ")", "[": "]", "{": "}"}
_MOST_OPEN = 6
_TEST_BYTES = 32  # of 256 values of the split's hash: one problem in eight is a test problem
_SPLITS = ("train", "test")
_GRAIN = 8  # rows are a multiple of it long

_BYTE_TO_ID = np.zeros(256, dtype=np.int64)
_BYTE_TO_ID[[ord(c) for c in ALPHABET]] = np.arange(len(SPECIAL), len(SPECIAL) + len(ALPHABET))
_BYTE_TO_ID[EOS] = EOS  # a row is assembled as bytes, in which the special tokens are their own ids


def _addition(x: int) -> tuple[str, str]:
    """Two numbers of equally many digits, 3 to 5 (the count is uniform)."""
    x, more = divmod(x, 3)
    least = 100 * 10**more
    x, a = divmod(x, 9 * least)
    x, b = divmod(x, 9 * least)
    return f"{a + least}+{b + least}", str(a + b + 2 * least)


def _addition_reversed(x: int) -> tuple[str, str]:
    content, answer = _addition(x)
    return "+".join(number[::-1] for number in content.split("+")), answer[::-1]


def _sort(x: int) -> tuple[str, str]:
    content = f"{x % 10**8:08d}"
    return content, "".join(sorted(content))


def _copy(x: int) -> tuple[str, str]:
    x, more = divmod(x, 5)
    letters = []
    for _ in range(4 + more):
        x, letter = divmod(x, 26)
        letters.append(_LETTERS[letter])
    content = "".join(letters)
    return content, content


def _reverse(x: int) -> tuple[str, str]:
    content, _ = _copy(x)
    return content, content[::-1]


def _brackets(x: int) -> tuple[str, str]:
    x, more = divmod(x, 9)
    last, content, closing = 3 + more, "", ""
    for i in range(4 + more):
        x, choice = divmod(x, 6)
        must_open = len(closing) == 0 or (i == last and len(closing) == 1)
        if must_open or (choice < 3 and len(closing) < _MOST_OPEN):
            bracket = "([{"[choice % 3]
            content, closing = content + bracket, _CLOSES[bracket] + closing
        else:
            content, closing = content + closing[0], closing[1:]
    return content, closing


# name: the prompt's letter, the generator, the longest prompt and answer
_GENERATORS: dict[str, tuple[str, Callable[[int], tuple[str, str]], int]] = {
    "addition": ("A", _addition, len("A99999+99999=199998")),
    "addition_reversed": ("L", _addition_reversed, len("L99999+99999=899991")),
    "sort": ("S", _sort, len("S00000000=00000000")),
    "copy": ("C", _copy, len("Cabcdefgh=abcdefgh")),
    "reverse": ("R", _reverse, len("Rabcdefgh=hgfedcba")),
    "brackets": ("B", _brackets, 2 + 12 + _MOST_OPEN),
}
TASKS = tuple(_GENERATORS)


def _hash(text: str, purpose: bytes, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size, person=purpose).digest(), "little")


def problem_split(prompt: str) -> str:
    """``"train"`` or ``"test"``: the split that a prompt belongs to, whatever the seed; one in eight is ``"test"``.

    It is a hash of what decides the answer, without the task's letter: the two operands in either order, the digits
    to sort in any order, else the content. So a test problem's commuted sum, another order of its digits, or the same
    letters under another task are not in the training split either.
    """
    content = prompt[1:-1]
    if "+" in content:
        step = -1 if prompt[0] == "L" else 1
        content = "+".join(sorted(number[::step] for number in content.split("+")))
    elif prompt[0] == "S":
        content = "".join(sorted(content))
    return "test" if _hash(content, b"genkit split", 1) < _TEST_BYTES else "train"


class VerifiableTasks:
    """Prompts with checkable answers, as a map-style data set without an end.

    ``data[index (B,)] -> {"tokens", "document", "loss_mask", "response_start"}`` with rows of ``length`` tokens,
    padded on the right, as :class:`genkit.data.PromptResponses`; the answer and the end-of-sequence token are learned.

    Args:
        tasks: names of :data:`TASKS`, each once; they take turns in this order.
        num_samples: length of the data set, >= 1. A longer one begins with the same problems.
        seed: an integer >= 0.
        split: ``"train"`` or ``"test"``; no problem is in both, whatever the seeds.

    Attributes:
        length: tokens of a row: the longest prompt, answer and end of these tasks, rounded up to a multiple of 8.
        alphabet: the characters in the order of their ids, the same for all choices of tasks.
        vocab_size: special tokens and characters.
        pad_token_id, eos_token_id, mask_token_id: 0, 1, 2.

    Raises:
        ConfigError: an unknown, repeated or missing task, an unknown split, a count or seed out of range, an index out
            of range.
    """

    pad_token_id, eos_token_id, mask_token_id = PAD, EOS, MASK

    def __init__(
        self, tasks: Sequence[str] = TASKS, *, num_samples: int = 1_000_000, seed: int = 0, split: str = "train"
    ) -> None:
        self.tasks = _checked_tasks(tasks)
        self.num_samples = checked_count("num_samples", num_samples)
        self.seed = checked_count("seed", seed, "an integer, at least 0", 0)
        if split not in _SPLITS:
            raise ConfigError(f"split must be one of {', '.join(_SPLITS)}, got {split!r}.{nearest(split, _SPLITS)}")
        self.split, self.alphabet, self.vocab_size = split, ALPHABET, len(SPECIAL) + len(ALPHABET)
        longest = max(_GENERATORS[task][2] for task in self.tasks) + 1
        self.length = -(-longest // _GRAIN) * _GRAIN

    def __len__(self) -> int:
        return self.num_samples

    def problem(self, i: int) -> tuple[str, str]:
        """Prompt and answer of problem number i, 0 <= i < ``num_samples``."""
        if not 0 <= i < self.num_samples:
            raise ConfigError(f"index {i} is out of range: there are {self.num_samples} problems, from number 0 on")
        letter, generate, _ = _GENERATORS[self.tasks[i % len(self.tasks)]]
        for attempt in itertools.count():
            content, answer = generate(_hash(f"{self.seed}/{self.split}/{i}/{attempt}", b"genkit problem", 64))
            prompt = f"{letter}{content}="
            if problem_split(prompt) == self.split:
                break
        return prompt, answer

    def problems(self, indices: Iterable[int] | Tensor) -> list[tuple[str, str]]:
        """Prompts and answers of several problems."""
        return [self.problem(i) for i in (indices.tolist() if isinstance(indices, Tensor) else indices)]

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        pairs = self.problems(checked_index(index, len(self), "VerifiableTasks"))
        rows = "".join(f"{prompt}{answer}\x01".ljust(self.length, "\0") for prompt, answer in pairs)
        tokens = _BYTE_TO_ID[np.frombuffer(rows.encode("ascii"), dtype=np.uint8)].reshape(-1, self.length)
        sizes = torch.tensor([(len(p), len(p) + len(a) + 1) for p, a in pairs], dtype=torch.int64).reshape(-1, 2)
        return supervised_batch(torch.from_numpy(tokens), sizes[:, 0].contiguous(), sizes[:, 1])

    def encode(self, text: str) -> Tensor:
        """The ids of a text's characters, int64 (len(text),); no end-of-sequence token is added.

        Raises:
            ConfigError: a character outside the alphabet, named with its place.
        """
        unknown = next((i for i, character in enumerate(text) if character not in ALPHABET), None)
        if unknown is not None:
            raise ConfigError(
                f"character {text[unknown]!r} at place {unknown} of {text!r} is not in the alphabet {ALPHABET!r}"
            )
        return torch.from_numpy(_BYTE_TO_ID[np.frombuffer(text.encode("ascii"), dtype=np.uint8)])

    def decode(self, ids: Tensor | Sequence[int]) -> str:
        """The text of ids (n,) up to the first end-of-sequence token.

        Padding at either end is dropped. Padding or masks *within* the text appear as ``<pad>`` and ``<mask>``, so
        that an answer which holds them does not pass for one that does not.

        Raises:
            ConfigError: an id outside [0, ``vocab_size``).
        """
        values = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        outside = [i for i in values if not 0 <= i < self.vocab_size]
        if outside:
            raise ConfigError(f"id {outside[0]} is outside the vocabulary, 0 to {self.vocab_size - 1}")
        values = values[: values.index(EOS)] if EOS in values else values
        names = [*SPECIAL, *ALPHABET]
        return "".join(names[i] for i in _stripped(values))


def _stripped(values: list[int]) -> list[int]:
    """Without the padding at either end."""
    used = [i for i, value in enumerate(values) if value != PAD]
    return values[used[0] : used[-1] + 1] if used else []


def _checked_tasks(tasks: Sequence[str]) -> tuple[str, ...]:
    names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
    for name in names:
        if name not in _GENERATORS:
            raise ConfigError(f"task {name!r} is not known; expected {', '.join(TASKS)}.{nearest(name, TASKS)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"tasks={list(names)}; expected at least one task, each once, of {', '.join(TASKS)}")
    return names


def check_answer(prompt: str, response: str) -> bool:
    """Whether ``response`` is, character by character, the answer to ``prompt``.

    The answer is worked out from the prompt alone, by other means than the generator's. ``response`` is the text
    before the end-of-sequence token; nothing is stripped from it.

    Raises:
        ConfigError: a prompt that is no problem of any task.
    """
    return response == _solve(prompt)


_SUM = re.compile(r"[AL](\d+)\+(\d+)=", re.ASCII)
_DIGITS = re.compile(r"S(\d+)=", re.ASCII)
_WORD = re.compile(r"[CR]([a-z]+)=")
_BRACKETS = re.compile(r"B([()\[\]{}]+)=")


def _solve(prompt: str) -> str:
    """The answer of a prompt."""
    if match := _SUM.fullmatch(prompt):
        step = 1 if prompt[0] == "A" else -1
        return str(int(match[1][::step]) + int(match[2][::step]))[::step]
    if match := _DIGITS.fullmatch(prompt):
        return "".join(digit * match[1].count(digit) for digit in "0123456789")
    if match := _WORD.fullmatch(prompt):
        return match[1] if prompt[0] == "C" else "".join(reversed(match[1]))
    if match := _BRACKETS.fullmatch(prompt):
        return _solve_brackets(prompt, match[1])
    raise ConfigError(f"prompt {prompt!r} is no problem of {', '.join(TASKS)}; expected for example 'A123+4567='")


def _solve_brackets(prompt: str, brackets: str) -> str:
    """Cancels neighbouring pairs until only what is open remains, and closes it from the inside out."""
    remaining = brackets
    while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", remaining)) != remaining:
        remaining = shorter
    if set(remaining) - set(_CLOSES):
        raise ConfigError(f"prompt {prompt!r} closes a bracket that is not open")
    return "".join(_CLOSES[bracket] for bracket in reversed(remaining))
