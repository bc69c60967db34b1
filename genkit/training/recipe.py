"""What a method's configuration builds: everything a training run needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from genkit.training.objective import Objective

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """The result of a method's ``build(config)``.

    Args:
        objective: losses and trainable networks.
        data: map-style training data.
        save_pipeline: writes the trained networks (their moving averages where there are any) as a pipeline folder.
    """

    objective: Objective
    data: Any
    save_pipeline: Callable[[Path, Mapping[str, nn.Module]], None]
