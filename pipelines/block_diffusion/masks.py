"""Who attends to whom: the block grid, and the masks of training on [x_t ; x_0].

Differs from the paper in: nothing that its abstract states; the predicate is derived from the authors' released
inference code, the switches for other recipes, packing and offsets are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from genkit._checks import checked_count
from genkit.errors import ConfigError
from genkit.models.attention import AttentionMask

__all__ = ["BlockGrid", "CleanRule", "NoiseRule", "causal_mask", "format_mask", "one_pass_mask", "print_mask"]

CleanRule = Literal["causal", "block"]
NoiseRule = Literal["block", "causal", "full"]

#: Padding carries this document number; it attends to itself alone, and nothing attends to it.
PADDING = -1


@dataclass(frozen=True)
class BlockGrid:
    """How rows of tokens are cut into blocks.

    The token at position p of its document lies in block ⌊(p − offset)/block_length⌋; with an offset the first block
    is short. Blocks never reach across documents.

    Args:
        position: int64 (B or 1, L), position of each token in its document (also its position id).
        document: int64 (B or 1, L), which document; −1 is padding.
        block_length: tokens a block.
        offset: int64 (B or 1, 1) in [0, block_length): where the grid starts.
        plain_offset: the offset where all rows are whole and alike, so that their masks can be kept; else None.
    """

    position: Tensor
    document: Tensor
    block_length: int
    offset: Tensor
    plain_offset: int | None = None

    @classmethod
    def make(
        cls,
        length: int,
        block_length: int,
        *,
        offset: int | Tensor = 0,
        document: Tensor | None = None,
        position: Tensor | None = None,
        valid: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> BlockGrid:
        """The grid of rows of ``length`` tokens.

        Args:
            length: tokens a row, L.
            block_length: tokens a block, B; L or more makes one block of everything.
            offset: where the grid starts, an integer or int64 (B,); taken modulo ``block_length``.
            document: int64 (B, L), document numbers of packed rows, −1 for padding; None: one document a row.
            position: int64 (B, L), positions in the documents; None: counted from each document's first token.
            valid: bool (B, L), False for padding (an alternative to −1 in ``document``).
            device: where index tensors are made, unless ``document`` says it.

        Raises:
            ConfigError: a length or block length below 1, or tensors of another shape.
        """
        length = checked_count("length", length, "an integer, at least 1", 1)
        block_length = checked_count("block_length", block_length, "an integer, at least 1", 1)
        for name, value in (("document", document), ("position", position), ("valid", valid)):
            if value is not None and (value.ndim != 2 or value.shape[1] != length):
                raise ConfigError(f"{name} has shape {tuple(value.shape)}; expected (B, {length})")
        given = next((v for v in (document, valid, position) if v is not None), None)
        plain = offset % block_length if given is None and isinstance(offset, int) else None
        device = device if given is None else given.device
        if document is None:
            document = torch.zeros(1, length, dtype=torch.int64, device=device)
        if valid is not None:
            document = torch.where(valid, document, PADDING)
        position = _positions(document) if position is None else position
        offset = torch.as_tensor(offset, dtype=torch.int64, device=device).reshape(-1, 1) % block_length
        return cls(position, document, block_length, offset, plain)

    @property
    def length(self) -> int:
        """Tokens a row, L."""
        return self.document.shape[1]

    @property
    def rows(self) -> int | None:
        """Number of rows that differ, or None where one grid serves all."""
        rows = max(len(self.position), len(self.document), len(self.offset))
        return None if rows == 1 else rows

    @cached_property
    def block(self) -> Tensor:
        """Block number of each token in its document, int64 (B or 1, L), from 0."""
        return self._shifted // self.block_length

    @cached_property
    def first(self) -> Tensor:
        """Bool (B or 1, L): the first token of its block, which the clean path predicts."""
        return (self._shifted % self.block_length == 0) | (self.position == 0) | self.start

    @cached_property
    def start(self) -> Tensor:
        """Bool (B or 1, L): the first token of a document in its row, which nothing predicts."""
        return _starts(self.document)

    @property
    def _shifted(self) -> Tensor:
        return self.position - self.offset + self.block_length * (self.offset > 0)

    @property
    def real(self) -> Tensor:
        """Bool (B or 1, L): no padding."""
        return self.document != PADDING

    def position_ids(self, rows: int) -> Tensor:
        """Positions of [x_t ; x_0], int64 (rows, 2L): both halves count alike."""
        return torch.cat([self.position, self.position], dim=1).expand(rows, -1)

    def repeat(self, times: int) -> BlockGrid:
        """The grid of ``times`` copies of the batch, one below the other."""

        def copies(x: Tensor) -> Tensor:
            return x if len(x) == 1 else x.repeat(times, 1)

        return replace(self, position=copies(self.position), document=copies(self.document), offset=copies(self.offset))


def _positions(document: Tensor) -> Tensor:
    """Positions counted from the first token of each run of equal document numbers."""
    index = torch.arange(document.shape[1], device=document.device).expand_as(document)
    return index - torch.where(_starts(document), index, 0).cummax(dim=1).values


def _starts(document: Tensor) -> Tensor:
    """The first token of each run of equal document numbers, bool like ``document``."""
    starts = torch.ones_like(document, dtype=torch.bool)
    starts[:, 1:] = document[:, 1:] != document[:, :-1]
    return starts


def one_pass_mask(
    grid: BlockGrid, *, clean_rule: CleanRule = "causal", noise_rule: NoiseRule = "block"
) -> AttentionMask:
    """The mask of one pass over [x_t ; x_0] (2L tokens, noisy half first), within documents::

        noisy → noisy   the own block                  ("causal": up to the token itself; "full": every noisy token)
        noisy → clean   clean tokens of earlier blocks ("full": none)
        clean → clean   causal                         ("block": all of the own and of earlier blocks)
        clean → noisy   never

    With the causal rule, the clean half is the autoregressive model itself, so a next-token loss on it leaks nothing
    (with the block rule it would); block length 1 is the autoregressive model, one block of everything is masked
    diffusion.

    Args:
        grid: blocks, documents and padding.
        clean_rule: ``"causal"`` (context-causal) or ``"block"`` (block-causal, as in BD3LM and its followers).
        noise_rule: ``"block"``, ``"causal"`` or ``"full"``, see above.

    Raises:
        ConfigError: an unknown rule.
    """
    for name, value, known in (("clean_rule", clean_rule, CleanRule), ("noise_rule", noise_rule, NoiseRule)):
        if value not in get_args(known):
            raise ConfigError(f"{name}={value!r}; expected one of {', '.join(get_args(known))}")
    if grid.plain_offset is not None and grid.length <= 512:
        device = str(grid.document.device)
        return _plain_mask(grid.length, grid.block_length, grid.plain_offset, clean_rule, noise_rule, device)
    return _build(grid, clean_rule, noise_rule)


@lru_cache(maxsize=64)
def _plain_mask(
    length: int, block_length: int, offset: int, clean_rule: CleanRule, noise_rule: NoiseRule, device: str
) -> AttentionMask:
    """One mask for all rows without packing or padding; a curriculum with random offsets meets few of them."""
    return _build(BlockGrid.make(length, block_length, offset=offset, device=device), clean_rule, noise_rule)


def _build(grid: BlockGrid, clean_rule: CleanRule, noise_rule: NoiseRule) -> AttentionMask:
    n, block, document = grid.length, grid.block, grid.document

    def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q_clean, k_clean = q >= n, k >= n
        qi, ki = torch.where(q_clean, q - n, q), torch.where(k_clean, k - n, k)
        qb, kb = _at(block, b, qi), _at(block, b, ki)
        to_clean = kb < qb
        if noise_rule == "full":
            to_noisy, to_clean = qi == qi, qi != qi
        else:
            to_noisy = (qb == kb) & (ki <= qi) if noise_rule == "causal" else qb == kb
        among_clean = ki <= qi if clean_rule == "causal" else kb <= qb
        ok = (~q_clean & ~k_clean & to_noisy) | (~q_clean & k_clean & to_clean) | (q_clean & k_clean & among_clean)
        qd, kd = _at(document, b, qi), _at(document, b, ki)
        return (ok & (qd == kd) & (kd != PADDING)) | (q == k)  # padding sees itself: no row is empty

    return AttentionMask(predicate, grid.rows, 2 * n, 2 * n, grid.document.device)


def _at(table: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """``table`` (B or 1, L) at row b and ``index``."""
    return table[0 if len(table) == 1 else b, index]


def causal_mask(grid: BlockGrid, *, clean_rule: CleanRule = "causal") -> AttentionMask:
    """The mask of the clean half alone (L tokens): one ordinary pass, at half the cost of :func:`one_pass_mask`."""
    n, block, document = grid.length, grid.block, grid.document

    def predicate(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        ok = k <= q if clean_rule == "causal" else _at(block, b, k) <= _at(block, b, q)
        qd, kd = _at(document, b, q), _at(document, b, k)
        return (ok & (qd == kd) & (kd != PADDING)) | (q == k)

    return AttentionMask(predicate, grid.rows, n, n, grid.document.device)


def format_mask(mask: AttentionMask, row: int = 0, marks: str = "·█") -> str:
    """The mask as text: a line a query, a column a key; a bar and a rule divide the halves of [x_t ; x_0]."""
    dense = mask.dense[row if len(mask.dense) > 1 else 0, 0]
    half = mask.queries // 2 if mask.queries == mask.keys and mask.queries % 2 == 0 else None
    lines = []
    for q, values in enumerate(dense.tolist()):
        cells = [marks[int(v)] for v in values]
        if half:
            cells.insert(half, "│")
            if q == half:
                lines.append("─" * half + "┼" + "─" * half)
        lines.append("".join(cells))
    return "\n".join(lines)


def print_mask(mask: AttentionMask, row: int = 0) -> None:
    """Prints :func:`format_mask`. The picture is :func:`genkit.pipelines.block_diffusion.plots.draw_mask`."""
    print(format_mask(mask, row))
