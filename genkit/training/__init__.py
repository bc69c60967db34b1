"""Training: one loop for every objective, strict configuration, verified checkpoints, exact resume."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.training.batches import TensorData
    from genkit.training.config import ConfigPart, TrainerConfig
    from genkit.training.config_files import load_config
    from genkit.training.ema import EMA
    from genkit.training.objective import LossOutput, Objective, Phase
    from genkit.training.recipe import Recipe
    from genkit.training.step_log import DivergenceError, StepLog
    from genkit.training.trainer import Trainer

__all__ = [
    "EMA",
    "ConfigPart",
    "DivergenceError",
    "LossOutput",
    "Objective",
    "Phase",
    "Recipe",
    "StepLog",
    "TensorData",
    "Trainer",
    "TrainerConfig",
    "load_config",
]

__getattr__, __dir__, _ = lazy_exports(
    __name__,
    {
        "ConfigPart": ".config",
        "DivergenceError": ".step_log",
        "EMA": ".ema",
        "LossOutput": ".objective",
        "Objective": ".objective",
        "Phase": ".objective",
        "Recipe": ".recipe",
        "StepLog": ".step_log",
        "TensorData": ".batches",
        "Trainer": ".trainer",
        "TrainerConfig": ".config",
        "load_config": ".config_files",
    },
)
