"""The demo: the trained flow on held-out market returns, beside a Gaussian flow of the same size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import genkit
from genkit.data.returns import MarketReturns
from genkit.demo import DemoRow
from genkit.metrics.risk import diebold_mariano
from genkit.metrics.tails import RobustWhitening
from genkit.pipelines.heavy_tailed_flow.backtest import BacktestRow, backtest, forecast_risk
from genkit.pipelines.heavy_tailed_flow.plots import draw_backtest, draw_tail_knob, draw_tails
from genkit.plotting import figure_style, save_figure

__all__ = ["demo"]

SEED, SAMPLES, STEPS, KNOB = 0, 50_000, 10, (2.5, 6.0)


def demo(out: Path, progress: bool = True) -> DemoRow:
    """Samples both checkpoints of the zoo, scores their one-day risk forecasts and draws three pictures into
    ``out``.
    """
    held_out = MarketReturns("ewma", split="test")
    flow, gaussian = (_sample(name, progress) for name in ("returns-flow", "returns-gaussian"))
    ours, theirs = (backtest(samples, held_out, levels=(0.99,)) for samples in (flow, gaussian))
    spliced = {index: _sample("returns-flow", progress, tail_index=index) for index in KNOB}
    radius = RobustWhitening.fit(held_out.sample.double()).radius
    with figure_style():
        tails = draw_tails(
            held_out,
            {"heavy-tailed flow": flow, "Gaussian flow": gaussian},
            {"heavy-tailed flow": "ours", "Gaussian flow": "baseline"},
        )
        risk = draw_backtest(held_out, forecast_risk(flow, held_out.scale, held_out.names, 0.99))
        labels = {index: f"tail index {index:g} asked for" for index in KNOB}
        radii = {"as trained": radius(flow)} | {labels[index]: radius(z) for index, z in spliced.items()}
        knob = draw_tail_knob(radii, {labels[index]: index for index in KNOB})
        note = f"n = {SAMPLES} samples"
        named = (("tails.png", tails), ("value_at_risk.png", risk), ("tail_knob.png", knob))
        pictures = [save_figure(figure, out / name, seed=SEED, note=note) for name, figure in named]
    return DemoRow(
        name="heavy_tailed_flow",
        measured=f"mean 99 % quantile score of 4 portfolios on {len(held_out)} held-out days, lower is better (FZ0 "
        f"{_mean(ours, 'fz0_score'):.3f} against {_mean(theirs, 'fz0_score'):.3f}, Diebold–Mariano p = "
        f"{_same_skill(ours, theirs):.2f}); baseline: Gaussian flow of the same size. Toy scale",
        value=_mean(ours, "quantile_score"),
        baseline=_mean(theirs, "quantile_score"),
        ratio=_mean(ours, "quantile_score") / _mean(theirs, "quantile_score"),
        pictures=pictures,
    )


def _sample(name: str, progress: bool, tail_index: float | None = None) -> Tensor:
    pipe = genkit.load(f"zoo:{name}")
    pipe.set_progress_bar_config(disable=not progress)
    generator = torch.Generator().manual_seed(SEED)
    return pipe(SAMPLES, STEPS, solver="heun", tail_index=tail_index, generator=generator).samples.double()


def _mean(rows: Sequence[BacktestRow], name: str) -> float:
    return sum(float(getattr(row, name)) for row in rows) / len(rows)


def _same_skill(ours: Sequence[BacktestRow], theirs: Sequence[BacktestRow]) -> float:
    """p-value of equal mean FZ0 scores, of the portfolios' daily mean."""
    a, b = (torch.stack([row.daily_fz0_score for row in rows]).mean(dim=0) for rows in (ours, theirs))
    return diebold_mariano(a, b).p_value
