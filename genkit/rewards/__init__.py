"""Rewards: samples (and what they are judged against) → values, with a mask of the valid ones. Higher is better."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.rewards.analytic import GaussianMixtureLogDensity as GaussianMixtureLogDensity
    from genkit.rewards.analytic import LinearFunctional as LinearFunctional
    from genkit.rewards.analytic import QuadraticTarget as QuadraticTarget
    from genkit.rewards.analytic import SquaredExceedance as SquaredExceedance
    from genkit.rewards.base import FunctionReward as FunctionReward
    from genkit.rewards.base import Reward as Reward
    from genkit.rewards.base import RewardOutput as RewardOutput
    from genkit.rewards.base import reward_output as reward_output
    from genkit.rewards.check import RewardCheck as RewardCheck
    from genkit.rewards.check import check_differentiable as check_differentiable
    from genkit.rewards.classifier import ClassEntropy as ClassEntropy
    from genkit.rewards.classifier import ClassifierLogProbability as ClassifierLogProbability
    from genkit.rewards.classifier import FeatureSimilarity as FeatureSimilarity
    from genkit.rewards.combine import WeightedSum as WeightedSum
    from genkit.rewards.crps import CRPSReward as CRPSReward
    from genkit.rewards.images import GreyScale as GreyScale
    from genkit.rewards.images import Ink as Ink
    from genkit.rewards.images import LaplacianSmoothness as LaplacianSmoothness
    from genkit.rewards.images import Symmetry as Symmetry
    from genkit.rewards.stack import StackedRewards as StackedRewards

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "CRPSReward": ".crps",
        "ClassEntropy": ".classifier",
        "ClassifierLogProbability": ".classifier",
        "FeatureSimilarity": ".classifier",
        "FunctionReward": ".base",
        "GaussianMixtureLogDensity": ".analytic",
        "GreyScale": ".images",
        "Ink": ".images",
        "LaplacianSmoothness": ".images",
        "LinearFunctional": ".analytic",
        "QuadraticTarget": ".analytic",
        "Reward": ".base",
        "RewardCheck": ".check",
        "RewardOutput": ".base",
        "SquaredExceedance": ".analytic",
        "StackedRewards": ".stack",
        "Symmetry": ".images",
        "WeightedSum": ".combine",
        "check_differentiable": ".check",
        "reward_output": ".base",
    },
)
