"""What a training run says about itself: one record a step, and the error that ends a diverged run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from genkit.errors import GenkitError

__all__ = ["DivergenceError", "StepLog", "divergence"]


class DivergenceError(GenkitError, RuntimeError):
    """The loss or its gradient stayed non-finite; the weights and the checkpoints are those of the last finite step."""


@dataclass(frozen=True)
class StepLog:
    """What a step did.

    Attributes:
        step: steps done so far, this one included.
        phase, turn: the stage, and the network that was updated.
        loss: the mean over the whole window and all processes.
        learning_rate: η of this step.
        grad_norm: the gradient's 2-norm before clipping.
        seconds: wall time.
        logs: the objective's numbers, means like the loss.
        skipped: True where loss or gradient were not finite and nothing was updated.
        sample_ids: dataset indices of a skipped step (of its non-finite micro-batches where this process had them).
    """

    step: int
    phase: str
    turn: str
    loss: float
    learning_rate: float
    grad_norm: float
    seconds: float
    logs: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False
    sample_ids: tuple[int, ...] = ()


def divergence(entry: StepLog, limit: int, kept: Sequence[tuple[int, Path]]) -> DivergenceError:
    """The error for a step that was one skip too many; ``kept`` are the run's checkpoints, newest first."""
    newest = f"{kept[0][1]} is the last checkpoint and is finite" if kept else "no checkpoint was written yet"
    return DivergenceError(
        f"step {entry.step}: loss {entry.loss}, gradient norm {entry.grad_norm} on the samples "
        f"{list(entry.sample_ids[:20])}; more than max_skipped_steps={limit} in a row. The weights were not touched; "
        f"{newest}. Look at these samples, lower learning_rate, or raise max_skipped_steps"
    )
