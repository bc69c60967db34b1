"""The shipped set of 1911 emoji in 32 x 32 pixels: small colour images with names and naturally long-tailed classes.

The images are Twemoji, copyright Twitter, Inc and other contributors, CC-BY 4.0, as the npm package
``emoji-datasource-twitter`` 16.0.0 carries them, reduced from 64 pixels; skin tones are left out. The ten categories
are Unicode's: 386 of people down to 5 components. ``make_emoji.py`` makes the file.

The pack ``tables/emoji.npz`` holds two plain arrays of bytes, each one xz stream: ``pixels``, uint8 (n, 32, 32, 4) with
straight alpha in Unicode's order, and ``table``, JSON of the names. Pixels that nothing covers are zeros.
"""

from __future__ import annotations

import json
import lzma
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit._checks import checked_number
from genkit.data.splits import checked_split, keyed_unit
from genkit.data.text import checked_index
from genkit.errors import ConfigError, nearest

__all__ = ["EMOJI_SIZE", "Emoji", "EmojiPack", "read_emoji_pack"]

EMOJI_SIZE = 32
_SHIPPED = Path(__file__).parent / "tables" / "emoji.npz"
_TABLE_LIMIT = 1 << 22  # bytes: the shipped table has 150 thousand
_COLUMNS = ("name", "code_points", "category", "subcategory")


@dataclass(frozen=True)
class EmojiPack:
    """All emoji of a pack, n of them.

    Args:
        rgba: uint8 (n, 4, 32, 32), straight alpha.
        names: unique, in lower case.
        code_points: unique, such as ``1f468-200d-1f680``.
        label: int64 (n,), place of each emoji's category in ``categories``.
        categories: K names in order of size, the largest first (equal ones by name).
        subcategories: n names.
    """

    rgba: Tensor
    names: tuple[str, ...]
    code_points: tuple[str, ...]
    label: Tensor
    categories: tuple[str, ...]
    subcategories: tuple[str, ...]


def read_emoji_pack(path: str | Path | None = None) -> EmojiPack:
    """The emoji of a file that ``make_emoji.py`` wrote; None reads the shipped one.

    Raises:
        ConfigError: no such file, or one that is damaged or no pack of emoji (what is wrong with it is said).
    """
    source = _SHIPPED if path is None else Path(path).expanduser()
    if not source.is_file():
        remedy = "install genkit again" if path is None else "make it with python -m genkit.data.make_emoji"
        raise ConfigError(f"no file {source}; {remedy}")
    try:
        with np.load(source) as arrays:  # plain arrays only: numpy refuses all else unless asked
            streams = {name: arrays[name].tobytes() for name in ("pixels", "table")}
        table = json.loads(_unpacked(streams["table"], _TABLE_LIMIT))
        columns = _checked_columns(table)
        pixels = _unpacked(streams["pixels"], len(columns["name"]) * 4 * EMOJI_SIZE**2)
        rgba = np.frombuffer(pixels, np.uint8).reshape(len(columns["name"]), EMOJI_SIZE, EMOJI_SIZE, 4)
    except (OSError, ValueError, KeyError, EOFError, RecursionError, zipfile.BadZipFile, lzma.LZMAError) as error:
        raise ConfigError(
            f"{source} is damaged or no pack of emoji ({type(error).__name__}: {error}); install genkit again, or make "
            f"it with python -m genkit.data.make_emoji"
        ) from error
    sizes = Counter(columns["category"])
    categories = tuple(sorted(sizes, key=lambda name: (-sizes[name], name)))
    return EmojiPack(
        rgba=torch.from_numpy(np.ascontiguousarray(rgba.transpose(0, 3, 1, 2))),
        names=tuple(columns["name"]),
        code_points=tuple(columns["code_points"]),
        label=torch.tensor([categories.index(name) for name in columns["category"]]),
        categories=categories,
        subcategories=tuple(columns["subcategory"]),
    )


def _unpacked(stream: bytes, limit: int) -> bytes:
    """What an xz stream holds; `ValueError` where it is cut short or larger than ``limit`` bytes."""
    reader = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=1 << 28)
    data = reader.decompress(stream, max_length=limit + 1)
    if len(data) > limit or not reader.eof:
        raise ValueError(f"a stream is cut short, or holds more than {limit} bytes")
    return data


def _checked_columns(table: Any) -> dict[str, list[str]]:
    """The columns of text of a pack, of one length, names and code points unique."""
    if not isinstance(table, dict) or table.get("format") != 1:
        raise ValueError("the table is not of format 1")
    columns: dict[str, Any] = {name: table.get(name) for name in _COLUMNS}
    for name, values in columns.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"the column {name} is no list of text")
    if len({len(values) for values in columns.values()}) != 1 or not columns["name"]:
        raise ValueError("the columns are empty or of unequal lengths")
    for name in ("name", "code_points"):
        if len(set(columns[name])) < len(columns[name]):
            raise ValueError(f"the column {name} repeats an entry")
    return columns


@lru_cache(maxsize=1)
def _shipped_pack() -> EmojiPack:
    return read_emoji_pack()


def _held_out(pack: EmojiPack, holdout: float) -> Tensor:
    """Which emoji are held out, bool (n,): those whose code points have a hash below ``holdout``.

    Emoji with one image (the flags of Norway and of Svalbard) count as the one of least code points, so that none is in
    both splits. In every category the image of least hash is held out and that of largest hash is not.
    """
    pictures = [image.tobytes() for image in pack.rgba.numpy()]
    first: dict[bytes, str] = {}
    for picture, code in zip(pictures, pack.code_points, strict=True):
        first[picture] = min(code, first.get(picture, code))
    unit = torch.tensor([keyed_unit("emoji split", first[p].encode()) for p in pictures], dtype=torch.float64)
    held = unit < holdout
    for k in range(len(pack.categories)):
        members = unit[pack.label == k]
        held[unit == members.min()] = True
        held[unit == members.max()] = False
    return held


class Emoji:
    r"""The emoji as a map-style data set: ``data[index (b,)] -> {"sample", "label"}``.

    ``sample`` is float32 (b, 3, 32, 32) in [-1, 1]: the colour c over the background g, 2 (α c + (1 - α) g) - 1 with c,
    α and g in [0, 1], on the gamma-encoded values as browsers do it. ``label`` is int64 (b,), the place in
    ``categories``.

    An emoji is held out where the hash of its code points is below ``holdout``, so the split stays as it is when the
    pack grows; only those of least and of largest hash of a category are held out and trained on in any case. Emoji
    that share one image (some flags and families, 43 emoji with 10 images) share their hash too: no image is in both
    splits.

    Args:
        split: ``"train"``, ``"test"`` or ``"all"``.
        background: red, green and blue, each from 0 to 1.
        categories: names of the categories to keep, in any order; None keeps all ten.
        holdout: share that is held out, in (0, 1); each category has at least one emoji on either side.

    Attributes:
        names: m unique names in lower case.  code_points: m texts.  subcategories: m names.
        categories: K names in order of size in the whole pack, the largest first.
        label: int64 (m,), 0 to K-1.  category_counts: int64 (K,), emoji of this split.

    Raises:
        ConfigError: an unknown split or category (with the nearest name), a background or share outside its range, a
            damaged pack; an index out of range.
    """

    def __init__(
        self,
        split: str = "train",
        *,
        background: Sequence[float] = (1.0, 1.0, 1.0),
        categories: Sequence[str] | None = None,
        holdout: float = 0.1,
    ) -> None:
        self.split, self.background = checked_split(split), _checked_background(background)
        self.holdout = checked_number("holdout", holdout, "a share in (0, 1)", lambda h: 0.0 < h < 1.0)
        pack = _shipped_pack()
        kept = _checked_categories(categories, pack.categories)
        wanted = torch.isin(pack.label, torch.tensor(kept))
        if split != "all":
            wanted &= _held_out(pack, self.holdout) == (split == "test")
        rows = wanted.nonzero().flatten()
        self.categories = tuple(pack.categories[k] for k in kept)
        self.names = tuple(pack.names[row] for row in rows)
        self.code_points = tuple(pack.code_points[row] for row in rows)
        self.subcategories = tuple(pack.subcategories[row] for row in rows)
        self.label = torch.searchsorted(torch.tensor(kept), pack.label[rows])
        self.category_counts = torch.bincount(self.label, minlength=len(kept))
        self._rgba = pack.rgba[rows]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        rgba = self.rgba(index).to(torch.float32) / 255.0
        colour, alpha = rgba[:, :3], rgba[:, 3:]
        ground = torch.tensor(self.background, dtype=torch.float32).reshape(3, 1, 1)
        return {"sample": 2.0 * (alpha * colour + (1.0 - alpha) * ground) - 1.0, "label": self.label[index]}

    def rgba(self, index: Tensor) -> Tensor:
        """The images with their straight alpha, uint8 (b, 4, 32, 32), of int64 indices (b,)."""
        return self._rgba[checked_index(index, len(self), "Emoji")]

    @staticmethod
    def sprite(name: str) -> Tensor:
        """The emoji called ``name`` (up to upper and lower case), uint8 (4, 32, 32), whatever split it is in.

        Raises:
            ConfigError: no emoji has that name; the nearest one is given.
        """
        pack = _shipped_pack()
        wanted = str(name).lower()
        if wanted not in pack.names:
            raise ConfigError(
                f"no emoji is called {name!r}.{nearest(wanted, pack.names)} Emoji('all').names lists all "
                f"{len(pack.names)}"
            )
        return pack.rgba[pack.names.index(wanted)].clone()


def _checked_background(background: Any) -> tuple[float, ...]:
    if isinstance(background, (str, Tensor)) or not isinstance(background, Sequence) or len(background) != 3:
        raise ConfigError(f"background={background!r}; expected (red, green, blue), each from 0 to 1")
    expected = "a number from 0 (dark) to 1"
    return tuple(
        checked_number(f"background[{i}]", value, expected, lambda v: 0.0 <= v <= 1.0)
        for i, value in enumerate(background)
    )


def _checked_categories(categories: Any, known: Sequence[str]) -> list[int]:
    """Places in ``known``, increasing."""
    if categories is None:
        return list(range(len(known)))
    if isinstance(categories, str) or not isinstance(categories, Sequence) or len(categories) == 0:
        raise ConfigError(f"categories={categories!r}; expected a list with at least one of {', '.join(known)}")
    for name in categories:
        if name not in known:
            raise ConfigError(f"no category {name!r}; it is one of {', '.join(known)}.{nearest(str(name), known)}")
    return sorted({known.index(name) for name in categories})
