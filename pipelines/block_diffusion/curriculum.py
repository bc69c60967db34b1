"""Block sizes along training: a pure function of the step.

Differs from the paper in: the schedule. The abstract says that the block size grows gradually; step counts are not
published, so sizes, ramp and mixing are configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from genkit._checks import checked_count, checked_number
from genkit.errors import ConfigError

__all__ = ["BlockCurriculum", "doubling_sizes"]


def doubling_sizes(block_length: int) -> tuple[int, ...]:
    """2, 4, 8, … up to ``block_length``, which is the last one whatever it is."""
    sizes = []
    size = 2
    while size < block_length:
        sizes.append(size)
        size *= 2
    return (*sizes, block_length)


@dataclass(frozen=True)
class BlockCurriculum:
    """Sizes that share the first ``ramp`` of the steps equally; then the last one holds.

    Args:
        sizes: block lengths in order, the target last.
        steps: training steps in all.
        ramp: share of the steps in which the sizes before the target are passed through.
        mix: in the first tenth of each size's stage, a step uses the previous size with this probability.
    """

    sizes: Sequence[int]
    steps: int
    ramp: float = 0.5
    mix: float = 0.0

    def __post_init__(self) -> None:
        checked_count("steps", self.steps)
        for name in ("ramp", "mix"):
            checked_number(name, getattr(self, name), "a share from 0 to 1", lambda value: 0.0 <= value <= 1.0)
        sizes = [checked_count("sizes", size, "block lengths of at least 1", 1) for size in self.sizes]
        if not sizes or sizes != sorted(set(sizes)):
            raise ConfigError(f"sizes={list(self.sizes)}; expected at least one block length, growing")

    def stage(self, step: int) -> int:
        """Index of the size that step ``step`` (from 0) belongs to."""
        growing = len(self.sizes) - 1
        if growing == 0 or step >= self.ramp * self.steps:
            return growing
        return min(int(step * growing / (self.ramp * self.steps)), growing)

    def block_length(self, step: int, uniform: float = 1.0) -> int:
        """The block length of step ``step``; ``uniform`` in (0, 1) is that step's random number, used for mixing."""
        stage = self.stage(step)
        if stage and uniform < self.mix and self.stage(max(step - self._overlap, 0)) < stage:
            stage -= 1
        return self.sizes[stage]

    @property
    def _overlap(self) -> int:
        growing = max(len(self.sizes) - 1, 1)
        return max(int(0.1 * self.ramp * self.steps / growing), 1)
