"""Measures of samples: tails, risk backtests, ensemble forecasts, mode coverage, images, text, several objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.metrics.ensemble import ForecastComparison as ForecastComparison
    from genkit.metrics.ensemble import block_bootstrap as block_bootstrap
    from genkit.metrics.ensemble import compare_forecasts as compare_forecasts
    from genkit.metrics.ensemble import crps as crps
    from genkit.metrics.ensemble import energy_score as energy_score
    from genkit.metrics.ensemble import latitude_weights as latitude_weights
    from genkit.metrics.ensemble import rank_histogram as rank_histogram
    from genkit.metrics.ensemble import reliability_index as reliability_index
    from genkit.metrics.ensemble import spread_skill as spread_skill
    from genkit.metrics.ensemble import weighted_mean as weighted_mean
    from genkit.metrics.feature_network import FeatureOutput as FeatureOutput
    from genkit.metrics.feature_network import FeaturePipeline as FeaturePipeline
    from genkit.metrics.images import ClassDiversity as ClassDiversity
    from genkit.metrics.images import FrechetFloor as FrechetFloor
    from genkit.metrics.images import PrecisionRecall as PrecisionRecall
    from genkit.metrics.images import RadialSpectrum as RadialSpectrum
    from genkit.metrics.images import SpectrumOfChange as SpectrumOfChange
    from genkit.metrics.images import class_diversity as class_diversity
    from genkit.metrics.images import frechet_distance as frechet_distance
    from genkit.metrics.images import frechet_floor as frechet_floor
    from genkit.metrics.images import hypervolume_difference as hypervolume_difference
    from genkit.metrics.images import hypervolume_interval as hypervolume_interval
    from genkit.metrics.images import precision_recall as precision_recall
    from genkit.metrics.images import radial_spectrum as radial_spectrum
    from genkit.metrics.images import spectrum_of_change as spectrum_of_change
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
        "ForecastComparison": ".ensemble",
        "block_bootstrap": ".ensemble",
        "compare_forecasts": ".ensemble",
        "crps": ".ensemble",
        "energy_score": ".ensemble",
        "latitude_weights": ".ensemble",
        "rank_histogram": ".ensemble",
        "reliability_index": ".ensemble",
        "spread_skill": ".ensemble",
        "weighted_mean": ".ensemble",
        "FeatureOutput": ".feature_network",
        "FeaturePipeline": ".feature_network",
        "ModeCoverage": ".modes",
        "mode_coverage": ".modes",
        "ClassDiversity": ".images",
        "FrechetFloor": ".images",
        "PrecisionRecall": ".images",
        "RadialSpectrum": ".images",
        "SpectrumOfChange": ".images",
        "class_diversity": ".images",
        "frechet_distance": ".images",
        "frechet_floor": ".images",
        "hypervolume_difference": ".images",
        "hypervolume_interval": ".images",
        "precision_recall": ".images",
        "radial_spectrum": ".images",
        "spectrum_of_change": ".images",
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
