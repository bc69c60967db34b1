"""One look for all pictures: a colour-blind-safe cycle, thin axes, and a footer that says what made the picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["COLOURS", "figure_style", "save_figure"]

#: Okabe–Ito, readable with every common colour blindness; black is for data.
COLOURS = {
    "data": "#000000",
    "ours": "#0072B2",
    "baseline": "#D55E00",
    "second": "#009E73",
    "third": "#CC79A7",
    "fourth": "#E69F00",
    "light": "#56B4E9",
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Matplotlib settings for the pictures drawn inside the ``with`` block."""
    import matplotlib.pyplot as plt

    settings = {
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "axes.prop_cycle": plt.cycler(color=list(COLOURS.values())),
        "legend.frameon": False,
        "font.size": 9.5,
    }
    with plt.rc_context(settings):
        yield


def save_figure(figure: Any, path: str | Path, *, seed: int, note: str = "") -> Path:
    """Saves a matplotlib figure with its footer (note, seed, version) and closes it.

    Args:
        figure: the figure.
        path: ``.png`` or ``.svg``; the folder is made.
        seed: the seed of what is shown.
        note: one phrase, such as the sample size.
    """
    import matplotlib.pyplot as plt

    import genkit

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    footer = " · ".join(part for part in (note, f"seed {seed}", f"genkit {genkit.__version__}") if part)
    figure.supxlabel(footer, fontsize=7, color="0.45", x=0.99, ha="right")
    figure.savefig(path)
    plt.close(figure)
    return path
