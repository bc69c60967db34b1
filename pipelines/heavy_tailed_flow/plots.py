"""Pictures a risk analyst reads: tails beside held-out data, daily VaR and ES with the days that broke them, the
knob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit.data.returns import MarketReturns
from genkit.metrics.tails import exceedance
from genkit.pipelines.heavy_tailed_flow.backtest import RiskForecast, portfolio_weights
from genkit.plotting import COLOURS

__all__ = ["draw_backtest", "draw_scores", "draw_tail_knob", "draw_tails"]

TITLES = {"sp500": "S&P 500", "nasdaq": "Nasdaq", "wti": "WTI oil", "equal_weights": "Equal weights"}


def _losses(z: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Standardised losses of each asset and of the equally weighted portfolio of standardised returns."""
    titles, weights = portfolio_weights(names)
    return dict(zip(titles, -(z.to(torch.float64) @ weights.T).T, strict=True))


def draw_tails(held_out: MarketReturns, samples: Mapping[str, Tensor], colours: Mapping[str, str]) -> Any:
    """Survival functions of the losses on log-log axes: held-out days with their 95 % band, and each model's samples.

    Args:
        held_out: the test split.
        samples: model → joint samples (n, d) in the data's units.
        colours: model → a key of :data:`genkit.plotting.COLOURS`.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(held_out.names) + 1, figsize=(3.1 * (len(held_out.names) + 1), 3.3), sharey=True)
    reference = _losses(held_out.sample, held_out.names)
    models = {name: _losses(value, held_out.names) for name, value in samples.items()}
    for axis, title in zip(axes, reference, strict=True):
        _survival_with_band(axis, reference[title])
        for name, losses in models.items():
            thresholds = torch.logspace(-0.3, 1.1, 120, dtype=torch.float64)
            curve = exceedance(losses[title], thresholds, side="upper")
            kept = curve.probability > 0
            axis.plot(thresholds[kept], curve.probability[kept], color=COLOURS[colours[name]], label=name, lw=1.6)
        axis.set(xscale="log", yscale="log", title=TITLES.get(title, title), xlim=(0.5, 12), ylim=(1e-5, 1))
        axis.set_xticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
        axis.minorticks_off()
        axis.set_xlabel("daily loss / volatility")
    axes[0].set_ylabel("P(loss > x)")
    axes[0].legend(loc="lower left", fontsize=8)
    return figure


def _survival_with_band(axis: Any, losses: Tensor) -> None:
    """The empirical survival function with pointwise 95 % Clopper–Pearson intervals."""
    from scipy.stats import beta

    x = np.sort(losses.numpy())[::-1]
    x = x[x > 0.3]
    n, k = len(losses), np.arange(1, len(x) + 1)
    low, high = beta.ppf(0.025, k, n - k + 1), beta.ppf(0.975, k + 1, n - k)
    axis.fill_between(x, low, high, color="0.85", lw=0, step="pre", label=f"95 % band, n = {n}")
    axis.step(x, k / n, where="post", color=COLOURS["data"], lw=1.2, label="held-out days")


def draw_backtest(held_out: MarketReturns, forecast: RiskForecast, portfolio: str = "equal_weights") -> Any:
    """Daily losses with the one-day VaR and ES forecast, and the days whose loss exceeded the VaR."""
    import matplotlib.pyplot as plt

    titles, weights = portfolio_weights(held_out.names)
    column = titles.index(portfolio)
    loss = -(held_out.returns @ weights[column]).numpy()
    var, es = forecast.var[:, column].numpy(), forecast.es[:, column].numpy()
    broken = loss > var
    figure, axis = plt.subplots(figsize=(9.5, 3.4))
    dates = np.array(held_out.dates, dtype="datetime64[D]")
    axis.vlines(dates, 0, loss, color="0.75", lw=0.6, label="daily loss")
    axis.plot(dates, es, color=COLOURS["third"], lw=0.9, label=f"expected shortfall {100 * forecast.level:g} %")
    axis.plot(dates, var, color=COLOURS["ours"], lw=1.1, label=f"value at risk {100 * forecast.level:g} %")
    expected = len(loss) * (1.0 - forecast.level)
    label = f"{int(broken.sum())} exceedances ({expected:.1f} expected)"
    axis.plot(dates[broken], loss[broken], "o", color=COLOURS["baseline"], ms=4, label=label)
    axis.set(ylabel="percent of value", title=f"{TITLES.get(portfolio, portfolio)}: one-day forecasts on held-out days")
    axis.legend(ncols=2, fontsize=8)
    return figure


def draw_tail_knob(radius: Mapping[str, Tensor], indices: Mapping[str, float]) -> Any:
    """Bulk and tail of the sample radius for several requested tail indices.

    Args:
        radius: label → radii (n,) from the same seeds; the first one is the trained law.
        indices: label → the tail index that was asked for; its slope is drawn.
    """
    import matplotlib.pyplot as plt

    figure, (bulk, tail) = plt.subplots(1, 2, figsize=(9.5, 3.5))
    base = next(iter(radius.values()))
    edges = np.linspace(0, float(torch.quantile(base[:100_000], 0.97)), 60)
    for (label, r), colour in zip(radius.items(), ("data", "baseline", "fourth", "ours", "second"), strict=False):
        bulk.hist(r.numpy(), edges, density=True, histtype="step", color=COLOURS[colour], lw=1.3, label=label)
        thresholds = torch.logspace(float(base.median().log10()), 2.2, 150, dtype=torch.float64)
        curve = exceedance(r, thresholds, side="upper")
        kept = curve.probability > 0
        tail.plot(thresholds[kept], curve.probability[kept], color=COLOURS[colour], lw=1.5, label=label)
        if label in indices:
            start = float(torch.quantile(r[:1_000_000:4], 0.995))
            x = np.array([start, 12 * start])
            tail.plot(x, 0.0025 * (x / start) ** -indices[label], ":", color=COLOURS[colour], lw=1)
    bulk.set(xlabel="size of the move (whitened radius)", ylabel="density", title="The bulk does not move")
    tail.set(xscale="log", yscale="log", xlabel="size of the move", ylabel="P(size > x)", ylim=(1e-5, 1))
    tail.set_title("The tail follows the knob (dotted: requested slopes)")
    tail.legend(fontsize=8, loc="lower left")
    return figure


def draw_scores(scores: Mapping[str, tuple[float, float]], title: str, highlight: Sequence[str] = ()) -> Any:
    """Mean scores with 95 % intervals, best first; lower is better. NaN widths (a baseline without a seed) get no
    bar.
    """
    import matplotlib.pyplot as plt

    ordered = sorted(scores.items(), key=lambda item: item[1][0], reverse=True)
    figure, axis = plt.subplots(figsize=(6.5, 0.35 * len(ordered) + 1.2))
    for place, (name, (mean, half)) in enumerate(ordered):
        colour = COLOURS["ours" if name in highlight else "data"]
        axis.errorbar(mean, place, xerr=None if np.isnan(half) else half, fmt="o", color=colour, capsize=3, ms=5)
    axis.set_yticks(range(len(ordered)), [name for name, _ in ordered])
    axis.set(title=title, xlabel="mean score (lower is better)")
    return figure
