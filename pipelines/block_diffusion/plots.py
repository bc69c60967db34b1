"""Pictures of block diffusion: who attends to whom, when each token became known, what parallel decoding costs, and
how an autoregressive model is led to blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.metrics.text import wilson_interval
from genkit.models.attention import AttentionMask
from genkit.pipelines.block_diffusion.masks import BlockGrid
from genkit.plotting import COLOURS
from genkit.samplers.blockwise import DecodeStep
from genkit.training.step_log import StepLog

__all__ = ["RevealRecorder", "TradeoffPoint", "draw_adaptation", "draw_mask", "draw_timeline", "draw_tradeoff"]

_MASKED = "#E6E6E6"
_QUIET = "0.55"


# --- masks ------------------------------------------------------------------------------------------------------------


def draw_mask(
    masks: AttentionMask | Mapping[str, AttentionMask],
    labels: Sequence[str] | None = None,
    *,
    grid: BlockGrid | None = None,
    row: int = 0,
) -> Any:
    """Query x key pictures of masks: a cell is dark where the query (a line) attends to the key (a column).

    Heavy lines divide the noisy from the clean half of [x_t ; x_0] (drawn where a mask is square and even), thin ones
    the blocks. Colours say which half the query and the key are in.

    Args:
        masks: one mask, or several side by side under their names.
        labels: a text for each token of a row, L or 2L of them.
        grid: where the blocks start; None draws no block lines.
        row: which row of a batch of masks.

    Raises:
        ConfigError: a number of labels that is neither L nor 2L.
    """
    import matplotlib.pyplot as plt

    named = {"": masks} if isinstance(masks, AttentionMask) else dict(masks)
    largest = max(mask.keys for mask in named.values())
    side = min(max(0.17 * largest + 0.9, 2.6), 6.0)
    figure, axes = plt.subplots(1, len(named), figsize=(side * len(named), side + 0.5), squeeze=False)
    for axis, (title, mask) in zip(axes[0], named.items(), strict=True):
        _draw_one_mask(axis, mask, labels, grid, row)
        axis.set_title(title)
    return figure


def _draw_one_mask(
    axis: Any, mask: AttentionMask, labels: Sequence[str] | None, grid: BlockGrid | None, row: int
) -> None:
    from matplotlib.colors import ListedColormap

    dense = mask.dense[row if len(mask.dense) > 1 else 0, 0].cpu()
    half = mask.queries // 2 if mask.queries == mask.keys and mask.queries % 2 == 0 else None
    kind = torch.ones_like(dense, dtype=torch.int64)
    if half:
        kind[:half, half:], kind[half:] = 2, 3
    colours = ListedColormap(["#FFFFFF", COLOURS["ours"], COLOURS["fourth"], "0.25"])
    picture = torch.where(dense, kind, 0).numpy()
    axis.imshow(picture, cmap=colours, vmin=0, vmax=3, interpolation="nearest", aspect="equal")
    axis.grid(False)
    _draw_edges(axis, mask, half, _block_starts(grid, half or mask.queries, row))
    _label_tokens(axis, mask, half, labels)


def _block_starts(grid: BlockGrid | None, length: int, row: int) -> list[int]:
    """Where blocks begin behind position 0."""
    if grid is None or grid.length != length:
        return []
    block, document = (x[row if len(x) > 1 else 0].cpu() for x in (grid.block, grid.document))
    changed = (block[1:] != block[:-1]) | (document[1:] != document[:-1])
    return (changed.nonzero().squeeze(1) + 1).tolist()


def _draw_edges(axis: Any, mask: AttentionMask, half: int | None, starts: Sequence[int]) -> None:
    """Block borders and the border of the halves, within the picture."""
    shifts = (0, half) if half else (0,)
    for start in (shift + start - 0.5 for shift in shifts for start in starts):
        axis.hlines(start, -0.5, mask.keys - 0.5, color="0.6", lw=0.6)
        axis.vlines(start, -0.5, mask.queries - 0.5, color="0.6", lw=0.6)
    if half:
        axis.hlines(half - 0.5, -0.5, mask.keys - 0.5, color=COLOURS["baseline"], lw=1.6)
        axis.vlines(half - 0.5, -0.5, mask.queries - 0.5, color=COLOURS["baseline"], lw=1.6)
    for side in axis.spines.values():
        side.set_visible(True)
    axis.set(xlim=(-0.5, mask.keys - 0.5), ylim=(mask.queries - 0.5, -0.5))


def _label_tokens(axis: Any, mask: AttentionMask, half: int | None, labels: Sequence[str] | None) -> None:
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    if labels is not None:
        texts = list(labels) * (mask.keys // max(len(labels), 1))
        if len(texts) != mask.keys:
            raise ConfigError(f"there are {len(labels)} labels for a mask of {mask.keys} keys; expected one a token")
        axis.set_xticks(range(mask.keys), texts, fontsize=7, family="monospace")
        axis.set_yticks(range(mask.queries), texts[: mask.queries], fontsize=7, family="monospace")
    elif half:
        middle = [(half - 1) / 2, half + (half - 1) / 2]
        axis.set_xticks(middle, ["noisy", "clean"])
        axis.set_yticks(middle, ["noisy", "clean"], rotation=90, va="center")
    if half and labels is not None:
        axis.set(xlabel="keys: noisy | clean", ylabel="queries: clean | noisy")
    else:
        axis.set(xlabel="keys", ylabel="queries")


# --- decoding ---------------------------------------------------------------------------------------------------------


class RevealRecorder:
    """A callback that notes at which network call each new token became known.

    Pass it as ``callback`` to :func:`genkit.samplers.decode_blocks`, or its method :meth:`on_step_end` as
    ``callback_on_step_end`` to a pipeline. Calls are counted for the whole batch; of a single prompt they are the
    row's own. Make a new one for each text.

    Args:
        mask_token_id: the mask token.

    Attributes:
        kinds: what each call was: ``"prefill"``, ``"denoise"`` or ``"commit"``.
    """

    def __init__(self, mask_token_id: int) -> None:
        self.mask_token_id = mask_token_id
        self.kinds: list[str] = []
        self._blocks: list[Tensor] = []
        self._unfinished = False

    @property
    def known(self) -> Tensor:
        """int64 (B, n): the call, from 0, at which each new token became known; −1 where it never did. What stands
        behind a row's end is padding: its numbers mean nothing.

        Raises:
            ConfigError: nothing was decoded yet.
        """
        if not self._blocks:
            raise ConfigError("nothing was recorded; pass the recorder to decode_blocks(callback=…) or to a pipeline")
        return torch.cat(self._blocks, dim=1)

    def __call__(self, step: DecodeStep) -> None:
        self._see(step.kind, step.block, step.done)

    def on_step_end(self, pipe: Any, call: int, timestep: float, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same as a pipeline's callback; changes nothing.

        Raises:
            ConfigError: the pipeline was not asked for ``callback_on_step_end_tensor_inputs=("block", "done")``.
        """
        if not {"block", "done"} <= set(tensors):
            raise ConfigError(
                f"the callback was given {sorted(tensors)}; pass callback_on_step_end_tensor_inputs=('block', 'done')"
            )
        kind = "denoise" if self._unfinished else "commit" if self.kinds else "prefill"
        self._see(kind, tensors["block"], tensors["done"])
        return {}

    def _see(self, kind: str, block: Tensor, done: Tensor) -> None:
        if kind != "denoise":
            self._blocks.append(torch.full(block.shape, -1, dtype=torch.int64))
        masked, known = block == self.mask_token_id, self._blocks[-1]
        self._unfinished = bool((masked & ~done.unsqueeze(1)).any())
        known = torch.where(known < 0, len(self.kinds), known)
        self._blocks[-1] = torch.where(masked.cpu(), -1, known)
        self.kinds.append(kind)


def draw_timeline(
    known: Tensor | Sequence[int],
    text: Sequence[str],
    *,
    kinds: Sequence[str] | None = None,
    block_length: int | None = None,
    title: str = "",
) -> Any:
    """When each token became known: position on x, network calls downwards, one line a call.

    A token stands on its call's colour where it became known, and in grey below; light cells are masks of the block
    that is being written.

    Args:
        known: call, from 0, of each token, (n,): a row of :attr:`RevealRecorder.known`.
        text: the n tokens as text (of a text of characters, the text itself).
        kinds: names of the calls, for the axis.
        block_length: draws the blocks' borders and masks.
        title: such as the prompt.

    Raises:
        ConfigError: other numbers of tokens than of calls; a token that never became known.
    """
    import matplotlib.pyplot as plt

    at = torch.as_tensor(known, dtype=torch.int64).tolist()
    if len(at) != len(text) or not at or min(at) < 0:
        raise ConfigError(f"known={at} for {len(text)} tokens of text; expected the call (from 0) of each token")
    calls = max(at) + 1
    figure, axis = plt.subplots(figsize=(max(0.24 * len(at) + 1.4, 4.0), max(0.23 * calls + 0.9, 1.8)))
    palette = plt.get_cmap("viridis")
    for position, (call, token) in enumerate(zip(at, text, strict=True)):
        for line in range(_block_begins(at, position, block_length), call):
            _cell(axis, position, line, _MASKED)
        shade = palette(0.9 * call / max(calls - 1, 1))
        _cell(axis, position, call, shade, token, "black" if call > 0.6 * (calls - 1) and calls > 1 else "white")
        for line in range(call + 1, calls):
            axis.text(position, line, token, ha="center", va="center", color=_QUIET, family="monospace", fontsize=8)
    _dress_timeline(axis, len(at), calls, kinds, block_length)
    axis.set_title(title, loc="left", family="monospace", fontsize=9)
    return figure


def _block_begins(at: Sequence[int], position: int, block_length: int | None) -> int:
    """The call at which the block of a position appeared; the position's own where blocks are not known."""
    if block_length is None:
        return at[position]
    start = position // block_length * block_length
    return min(at[start : start + block_length])


def _cell(axis: Any, position: int, line: int, colour: Any, token: str = "", ink: str = "black") -> None:
    from matplotlib.patches import Rectangle

    kind = "token" if token else "mask"
    axis.add_patch(Rectangle((position - 0.46, line - 0.42), 0.92, 0.84, facecolor=colour, lw=0, gid=kind))
    if token:
        axis.text(position, line, token, ha="center", va="center", color=ink, family="monospace", fontsize=8)


def _dress_timeline(axis: Any, length: int, calls: int, kinds: Sequence[str] | None, block_length: int | None) -> None:
    axis.grid(False)
    axis.set(xlim=(-0.6, length - 0.4), ylim=(calls - 0.4, -0.6), xlabel="position of the token")
    names = [f"{call + 1}" if kinds is None else f"{kinds[call]} {call + 1}" for call in range(calls)]
    axis.set_yticks(range(calls), names, fontsize=8)
    axis.set_ylabel("network call")
    axis.tick_params(length=0)
    for start in range(block_length or length, length, block_length or length):
        axis.axvline(start - 0.5, color="0.6", lw=0.8, ls=":")


@dataclass(frozen=True)
class TradeoffPoint:
    """One way of decoding the same problems.

    Args:
        arm: points of one arm are joined; ``"ar"`` is drawn as a line across.
        label: written beside the point, such as the threshold.
        right: problems solved.
        problems: problems in all.
        tokens_per_call: mean over problems.
    """

    arm: str
    label: str
    right: int
    problems: int
    tokens_per_call: float


def draw_tradeoff(points: Sequence[TradeoffPoint]) -> Any:
    """Exact match against tokens per network call, with Wilson's 95 % intervals.

    Args:
        points: in the order in which an arm's points are joined; an arm called ``ar`` becomes a line with its band.
            At most six other arms.

    Raises:
        ConfigError: no points, or too many arms to tell apart.
    """
    import matplotlib.pyplot as plt

    arms = dict.fromkeys(point.arm for point in points)
    if not points or len(arms.keys() - {"ar"}) > 6:
        raise ConfigError(f"points has the arms {list(arms)}; expected at least one, and at most six beside 'ar'")
    figure, axis = plt.subplots(figsize=(6.8, 3.8))
    looks = zip(("ours", "baseline", "second", "third", "fourth", "light"), "os^Dvp", strict=True)
    for arm in arms:
        chosen = [point for point in points if point.arm == arm]
        if arm == "ar":
            _draw_reference(axis, chosen[0])
        else:
            colour, marker = next(looks)
            alone = len(arms.keys() - {"ar"}) == 1
            above = [number % 2 == 0 if alone else marker in "o^v" for number in range(len(chosen))]
            _draw_arm(axis, arm, chosen, COLOURS[colour], marker, above)
    axis.set(xlabel="tokens per network call", ylabel="exact match (95 % interval)")
    axis.margins(x=0.06, y=0.22)  # room for the labels
    axis.set_title(f"n = {points[0].problems} problems", fontsize=9.5, loc="left")
    figure.legend(fontsize=8, loc="outside upper right", ncols=4)
    return figure


def _draw_reference(axis: Any, point: TradeoffPoint) -> None:
    share = wilson_interval(point.right, point.problems)
    axis.axhspan(share.low, share.high, color="0.92", lw=0)
    axis.axhline(share.value, color=COLOURS["data"], lw=1.2, ls="--", label="token by token (band: its interval)")
    axis.plot(point.tokens_per_call, share.value, "o", color=COLOURS["data"], ms=5)


def _draw_arm(
    axis: Any, arm: str, points: Sequence[TradeoffPoint], colour: str, marker: str, above: Sequence[bool]
) -> None:
    """Points with their intervals, and upright labels ``above`` or below each of them."""
    shares = [wilson_interval(point.right, point.problems) for point in points]
    x = [point.tokens_per_call for point in points]
    y = np.array([share.value for share in shares])
    widths = np.array([[share.value - share.low, share.high - share.value] for share in shares]).T
    axis.errorbar(x, y, yerr=widths, fmt=f"-{marker}", color=colour, lw=1.3, ms=5, elinewidth=0.9, capsize=2, label=arm)
    text = {"fontsize": 7.5, "color": colour, "rotation": 90, "ha": "center", "textcoords": "offset points"}
    for point, share, up in zip(points, shares, above, strict=True):
        spot = (point.tokens_per_call, share.high if up else share.low)
        axis.annotate(point.label, spot, xytext=(0, 4 if up else -4), va="bottom" if up else "top", **text)


# --- adaptation -------------------------------------------------------------------------------------------------------


def draw_adaptation(rows: Sequence[StepLog], window: int = 25) -> Any:
    """Loss, bound and next-token loss along training, on a background that steps with the block length.

    Args:
        rows: what ``Trainer.train()`` yields; skipped steps are left out.
        window: steps that a curve's point is the mean of.

    Raises:
        ConfigError: no rows of a block-diffusion objective.
    """
    import matplotlib.pyplot as plt

    rows = [row for row in rows if not row.skipped and {"nelbo", "ar_nll", "block_length"} <= set(row.logs)]
    if not rows:
        raise ConfigError("no step has the logs nelbo, ar_nll and block_length; expected a block-diffusion objective's")
    steps = np.array([row.step for row in rows])
    figure, axis = plt.subplots(figsize=(8.2, 3.8))
    curves = {
        "bound per token (nelbo)": ([row.logs["nelbo"] for row in rows], "ours", "-"),
        "next-token loss of the clean path": ([row.logs["ar_nll"] for row in rows], "baseline", "-"),
        "loss that is minimised": ([row.loss for row in rows], "data", ":"),
    }
    for name, (values, colour, style) in curves.items():
        smooth = _running_mean(np.array(values), window)
        axis.plot(steps, smooth, style, color=COLOURS[colour], lw=1.4, label=name)
    axis.set(xlabel="step", ylabel="nats per token", yscale="log", xlim=(steps[0], steps[-1]))
    _shade_stages(axis, rows)
    axis.legend(fontsize=8)
    return figure


def _running_mean(values: Any, window: int) -> Any:
    """The mean of the last ``window`` values, fewer at the start."""
    total = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (total[ends] - total[starts]) / (ends - starts)


def _shade_stages(axis: Any, rows: Sequence[StepLog]) -> None:
    """One band for each block length, from its first step on (mixing may bring back the one before)."""
    sizes = np.maximum.accumulate([row.logs["block_length"] for row in rows])
    begins = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist()]
    ends = [*begins[1:], len(rows) - 1]
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        name = f"block {sizes[begin]:g}" if sizes[begin] > 1 else "next token"
        if i % 2:
            axis.axvspan(rows[begin].step, rows[end].step, color="0.94", lw=0, zorder=0)
        middle = (rows[begin].step + rows[end].step) / 2
        axis.text(
            middle, 1.01, name, transform=axis.get_xaxis_transform(), ha="center", va="bottom", fontsize=8, color="0.3"
        )
