"""Objectives that several methods use: rewards through the walk's gradient, and through its densities."""

from genkit.training.objectives.classification import ClassificationObjective
from genkit.training.objectives.denoising import DenoisingObjective
from genkit.training.objectives.policy_gradient import PolicyGradientObjective, advantages
from genkit.training.objectives.reward_gradient import RewardGradientObjective
from genkit.training.objectives.windows import GradientWindow, WindowDraw

__all__ = [
    "ClassificationObjective",
    "DenoisingObjective",
    "GradientWindow",
    "PolicyGradientObjective",
    "RewardGradientObjective",
    "WindowDraw",
    "advantages",
]
