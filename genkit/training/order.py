"""Which samples each micro-batch takes: a pure function of (seed, epoch), the step and the rank.

Nothing is kept, so nothing can be lost: a resumed run asks for step k and gets the samples of step k.

A *window* is what one step consumes over all processes and micro-batches; the last window of an epoch holds what
remains.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from genkit.errors import ConfigError
from genkit.samplers.noise import training_keys

__all__ = ["DataOrder", "MicroBatch", "epoch_permutation"]


@functools.lru_cache(maxsize=2)
def epoch_permutation(seed: int, epoch: int, size: int) -> Tensor:
    """The order of ``size`` samples in an epoch, int64 (size,): each sample's keyed uniform number, sorted."""
    numbers = training_keys(seed, epoch, torch.arange(size)).at(purpose="order").uniform()
    return torch.argsort(numbers, stable=True)


@dataclass(frozen=True)
class MicroBatch:
    """Dataset indices, int64 (b,). ``real`` is False for a stand-in that counts nothing: a rank must take part in every
    backward pass even where the last window has no sample left for it."""

    indices: Tensor
    real: bool = True


@dataclass(frozen=True)
class DataOrder:
    """The order of ``size`` samples, in windows of ``accumulation`` micro-batches of ``batch_size`` on every process.

    Raises:
        ConfigError: no samples, a batch larger than the data, or more accumulation than an epoch has micro-batches.
    """

    seed: int
    size: int
    batch_size: int
    accumulation: int = 1
    world: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("the data set is empty (0 samples); check its path and its filters")
        if self.chunk > self.size:
            raise ConfigError(
                f"batch_size {self.batch_size} on {self.world} process(es) takes {self.chunk} samples at once, but the "
                f"data set has {self.size}; use batch_size <= {self.size // self.world}, fewer processes or more data"
            )
        most = -(-self.size // self.chunk)
        if self.accumulation > most:
            raise ConfigError(
                f"gradient_accumulation_steps {self.accumulation} is more than the {most} micro-batches of "
                f"{self.chunk} samples in an epoch of {self.size} samples; use at most {most}, or a smaller batch_size"
            )

    @property
    def chunk(self) -> int:
        """Samples of one micro-batch over all processes."""
        return self.batch_size * self.world

    @property
    def steps_per_epoch(self) -> int:
        """Windows in an epoch, the ragged last one included."""
        return -(-self.size // (self.chunk * self.accumulation))

    def place(self, step: int) -> tuple[int, int]:
        """(epoch, window inside it) of a step."""
        return divmod(step, self.steps_per_epoch)

    def window(self, step: int) -> Tensor:
        """The dataset indices that step ``step`` consumes over all processes."""
        epoch, index = self.place(step)
        size = self.chunk * self.accumulation
        return epoch_permutation(self.seed, epoch, self.size)[index * size : (index + 1) * size]

    def micro_batches(self, step: int, rank: int = 0) -> list[MicroBatch]:
        """One rank's micro-batches of a step; every rank gets equally many."""
        window = self.window(step)
        parts = [chunk.tensor_split(self.world)[rank] for chunk in window.split(self.chunk)]
        return [MicroBatch(part) if len(part) else MicroBatch(window[:1], real=False) for part in parts]
