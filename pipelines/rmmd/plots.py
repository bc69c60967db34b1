"""Pictures of distillation and reward: samples from the same noise, fronts, spectra, and fans of forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit.plotting import COLOURS

__all__ = ["draw_fans", "draw_front", "draw_ranks", "draw_samples", "draw_scores", "draw_spectra"]

_MARKS = "osD^vPX*<>"


def draw_samples(rows: Mapping[str, Tensor]) -> Any:
    """One row of images a model, side by side from the same noise and labels.

    Args:
        rows: title → images (n, C, H, W) in [-1, 1], C 1 or 3, one n for all.
    """
    import matplotlib.pyplot as plt

    count = len(next(iter(rows.values())))
    figure, axes = plt.subplots(len(rows), count, figsize=(0.72 * count + 1.6, 0.8 * len(rows) + 0.2), squeeze=False)
    for line, (title, images) in zip(axes, rows.items(), strict=True):
        shown = (0.5 * (images.float().clamp(-1, 1) + 1.0)).movedim(1, -1).numpy()
        for axis, image in zip(line, shown, strict=True):
            axis.imshow(image.squeeze(-1), cmap="gray_r" if image.shape[-1] == 1 else None, vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.grid(False)
        line[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9)
    return figure


def draw_front(
    fronts: Mapping[str, Tensor], base: tuple[float, float], *, reward: str, limit: float | None = None
) -> Any:
    """Quality against reward: each arm's points, joined in order of their reward; down and to the right is better.

    Args:
        fronts: arm → points (n, 2) of Fréchet distance and reward.
        base: the same of the student before any reward.
        reward: its name, for the axis.
        limit: the largest Fréchet distance shown.
    """
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    palette = plt.get_cmap("cividis")(np.linspace(0.0, 0.85, max(len(fronts), 2)))
    for i, (arm, points) in enumerate(fronts.items()):
        ordered = points[points[:, 1].argsort()].numpy()
        axis.plot(
            ordered[:, 1], ordered[:, 0], marker=_MARKS[i % len(_MARKS)], ms=4, lw=1.0, color=palette[i], label=arm
        )
    axis.scatter(base[1], base[0], marker="*", s=130, color=COLOURS["data"], zorder=5, label="before")
    axis.set(xlabel=f"mean reward: {reward} (higher is better)", ylabel="Fréchet distance (lower is better)")
    if limit is not None:
        axis.set_ylim(top=limit)
    axis.legend(fontsize=8, ncols=2)
    return figure


def draw_spectra(changes: Mapping[str, tuple[Tensor, Tensor]]) -> Any:
    """Where in frequency a fine-tuning changed the images: shares of the power of the change.

    Args:
        changes: arm → (frequencies, shares) of :func:`genkit.metrics.images.spectrum_of_change`.
    """
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.0, 3.6))
    palette = plt.get_cmap("cividis")(np.linspace(0.0, 0.85, max(len(changes), 2)))
    for i, (arm, (frequencies, shares)) in enumerate(changes.items()):
        axis.plot(
            frequencies.numpy(),
            shares.numpy(),
            marker=_MARKS[i % len(_MARKS)],
            ms=4,
            lw=1.2,
            color=palette[i],
            label=arm,
        )
    axis.set(xlabel="frequency (cycles per image)", ylabel="share of the change", ylim=(0, None))
    axis.legend(fontsize=8)
    return figure


def draw_fans(
    panels: Mapping[str, tuple[Tensor, Tensor]], hours: Sequence[float], *, unit: str, model: str = "ensemble"
) -> Any:
    """Forecast fans: median, central 50 and 90 % of the members, and what came.

    Args:
        panels: title → members (M, T) and observation (T,), NaN where unknown.
        hours: T lead times.
        unit: of the values.
        model: for the legend.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.3), squeeze=False)
    for axis, (title, (members, observed)) in zip(axes[0], panels.items(), strict=True):
        levels = torch.quantile(
            members.double(), torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64), dim=0
        )
        low, q1, median, q3, high = levels.numpy()
        axis.fill_between(hours, low, high, color=COLOURS["ours"], alpha=0.18, lw=0, label="90 %")
        axis.fill_between(hours, q1, q3, color=COLOURS["ours"], alpha=0.35, lw=0, label="50 %")
        axis.plot(hours, median, color=COLOURS["ours"], lw=1.4, label=f"{model}, median of {len(members)}")
        axis.plot(hours, observed.numpy(), "o", ms=4, color=COLOURS["data"], label="observed")
        axis.set(title=title, xlabel="hours ahead")
    axes[0][0].set_ylabel(unit)
    axes[0][0].legend(fontsize=7)
    return figure


def draw_ranks(histograms: Mapping[str, Tensor]) -> Any:
    """Rank histograms over the flat line with the band that chance leaves (2 standard deviations).

    Args:
        histograms: model → counts (M + 1,).
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(histograms), figsize=(3.2 * len(histograms), 2.9), sharey=True, squeeze=False)
    for axis, (name, counts) in zip(axes[0], histograms.items(), strict=True):
        total, bins = int(counts.sum()), len(counts)
        share = 1.0 / bins
        spread = 2.0 * (share * (1 - share) / total) ** 0.5
        axis.bar(range(bins), (counts / total).numpy(), width=1.0, color=COLOURS["ours"], alpha=0.6)
        axis.axhline(share, color=COLOURS["data"], lw=1.0)
        axis.axhspan(share - spread, share + spread, color="0.6", alpha=0.3, lw=0)
        axis.set(title=f"{name} (n = {total})", xlabel="rank of the observation")
    axes[0][0].set_ylabel("share")
    return figure


def draw_scores(curves: Mapping[str, Sequence[float]], hours: Sequence[float], *, label: str) -> Any:
    """A score by lead time, one line a model.

    Args:
        curves: model → T values.
        hours: T lead times.
        label: of the vertical axis.
    """
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.0, 3.6))
    palette = plt.get_cmap("cividis")(np.linspace(0.0, 0.85, max(len(curves), 2)))
    for i, (name, values) in enumerate(curves.items()):
        axis.plot(hours, values, marker=_MARKS[i % len(_MARKS)], ms=4, lw=1.2, color=palette[i], label=name)
    axis.set(xlabel="hours ahead", ylabel=label)
    axis.legend(fontsize=8)
    return figure
