"""Measures of samples: tails, risk backtests, mode coverage, text, several objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.metrics.modes import ModeCoverage as ModeCoverage
    from genkit.metrics.modes import mode_coverage as mode_coverage
    from genkit.metrics.pareto import ParetoArchive as ParetoArchive
    from genkit.metrics.pareto import epsilon_dominance_thinning as epsilon_dominance_thinning
    from genkit.metrics.pareto import hypervolume as hypervolume
    from genkit.metrics.pareto import non_dominated as non_dominated
    from genkit.metrics.risk import ChristoffersenTest as ChristoffersenTest
    from genkit.metrics.risk import TestResult as TestResult
    from genkit.metrics.risk import christoffersen as christoffersen
    from genkit.metrics.risk import diebold_mariano as diebold_mariano
    from genkit.metrics.risk import es_residual_test as es_residual_test
    from genkit.metrics.risk import expected_shortfall as expected_shortfall
    from genkit.metrics.risk import fz0_score as fz0_score
    from genkit.metrics.risk import kupiec as kupiec
    from genkit.metrics.risk import quantile_score as quantile_score
    from genkit.metrics.risk import value_at_risk as value_at_risk
    from genkit.metrics.risk import value_at_risk_and_shortfall as value_at_risk_and_shortfall
    from genkit.metrics.tails import EcfEstimate as EcfEstimate
    from genkit.metrics.tails import ExceedanceCurve as ExceedanceCurve
    from genkit.metrics.tails import HillEstimate as HillEstimate
    from genkit.metrics.tails import HillPlot as HillPlot
    from genkit.metrics.tails import Interval as Interval
    from genkit.metrics.tails import RobustWhitening as RobustWhitening
    from genkit.metrics.tails import TailComparison as TailComparison
    from genkit.metrics.tails import TailKS as TailKS
    from genkit.metrics.tails import bootstrap_interval as bootstrap_interval
    from genkit.metrics.tails import compare_tails as compare_tails
    from genkit.metrics.tails import ecf_tail_index as ecf_tail_index
    from genkit.metrics.tails import exceedance as exceedance
    from genkit.metrics.tails import hill as hill
    from genkit.metrics.tails import hill_plot as hill_plot
    from genkit.metrics.tails import quantile_ratio as quantile_ratio
    from genkit.metrics.tails import tail_ks as tail_ks
    from genkit.metrics.text import distinct_n as distinct_n
    from genkit.metrics.text import exact_match as exact_match
    from genkit.metrics.text import repetition_rate as repetition_rate
    from genkit.metrics.text import wilson_interval as wilson_interval

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "EcfEstimate": ".tails",
        "ExceedanceCurve": ".tails",
        "HillEstimate": ".tails",
        "HillPlot": ".tails",
        "Interval": ".tails",
        "RobustWhitening": ".tails",
        "TailComparison": ".tails",
        "TailKS": ".tails",
        "bootstrap_interval": ".tails",
        "compare_tails": ".tails",
        "ecf_tail_index": ".tails",
        "exceedance": ".tails",
        "hill": ".tails",
        "hill_plot": ".tails",
        "quantile_ratio": ".tails",
        "tail_ks": ".tails",
        "ChristoffersenTest": ".risk",
        "TestResult": ".risk",
        "christoffersen": ".risk",
        "diebold_mariano": ".risk",
        "es_residual_test": ".risk",
        "expected_shortfall": ".risk",
        "fz0_score": ".risk",
        "kupiec": ".risk",
        "quantile_score": ".risk",
        "value_at_risk": ".risk",
        "value_at_risk_and_shortfall": ".risk",
        "ModeCoverage": ".modes",
        "mode_coverage": ".modes",
        "ParetoArchive": ".pareto",
        "epsilon_dominance_thinning": ".pareto",
        "hypervolume": ".pareto",
        "non_dominated": ".pareto",
        "distinct_n": ".text",
        "exact_match": ".text",
        "repetition_rate": ".text",
        "wilson_interval": ".text",
    },
)
