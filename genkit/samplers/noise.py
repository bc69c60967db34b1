"""Keys and counter-based noise: randomness as a value that is passed, never as a state that is kept.

Every random number is a pure function of five integers::

    word = Philox-4x32-10(counter = (element // 4, sample, step, purpose), key)

so a sample's noise depends on its own key (and, in training, on its dataset index and the step) alone: not on the
batch it sits in, the order of the calls, the number of processes, the device or compilation.

* In a walk each sample has its own int64 key (drawn once from the caller's ``torch.Generator``); ``sample`` is 0.
* In training the key is the seed, ``sample`` the dataset index, ``step`` the optimiser step.

Normals come from the Box-Muller transform in float64 and are rounded to float32, so that a last-bit difference between
two libraries' logarithms vanishes in the rounding.

Reference: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox, Table 2 and
the published known-answer vectors).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from genkit._checks import check_generator, checked_count
from genkit.errors import ConfigError

__all__ = ["Keys", "draw_keys", "philox4x32", "purpose_code", "training_keys"]

Words = Any  # an int64 tensor, or an int64 numpy array

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, Words, Words, Words]:
    """Philox-4x32-10 on int64 tensors (or int64 numpy arrays) that hold unsigned 32-bit words.

    Args:
        counter: four broadcastable int64 tensors with values in [0, 2^32).
        key: two broadcastable int64 tensors with values in [0, 2^32).

    Returns:
        Four int64 tensors of random 32-bit words. The all-zero input gives
        ``6627e8d5 e169c58d bc57ac4c 9b00dbd8``.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 64-bit products (wrapping keeps all bits); c1 and c3 carry their upper halves along until the next mask
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0 = ((product1 >> 32) ^ (c1 ^ k0)) & _MASK
        c2 = ((product0 >> 32) ^ (c3 ^ k1)) & _MASK
        c1, c3 = product1, product0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def _philox_on_cpu(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same function on numpy views: its calls cost a third of torch's, which decides in small batches."""
    with np.errstate(over="ignore"):
        a, b, c, d = philox4x32([c.numpy() for c in counter], [k.numpy() for k in key])
    return torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(c), torch.from_numpy(d)


def purpose_code(purpose: str) -> int:
    """The 32-bit word of a purpose (``"latents"``, ``"transition"``, ``"time"``, …): the CRC-32 of its name."""
    crc = _MASK
    for byte in purpose.encode():  # zlib.crc32, in a form that torch.compile can follow
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 & -(crc & 1))
    return crc ^ _MASK


@dataclass(frozen=True)
class Keys:
    """One counter-based random stream per sample.

    Args:
        key: int64 tensor (B,), the samples' keys.
        sample: int64 tensor (B,), the samples' dataset indices (zeros in a walk).
        step: int64 tensor, scalar or (B,): the step of the walk or of training.
        purpose: what the numbers are for; other words give independent numbers.

    A ``Keys`` is a value: :meth:`at` returns a changed copy, and every draw of the same value is the same.
    """

    key: Tensor
    sample: Tensor
    step: Tensor
    purpose: str = "noise"

    def __len__(self) -> int:
        return self.key.shape[0]

    def __getitem__(self, index: Tensor | slice) -> Keys:
        """The streams of a part of the batch."""
        step = self.step[index] if self.step.ndim else self.step
        return replace(self, key=self.key[index], sample=self.sample[index], step=step)

    def at(self, *, step: int | Tensor | None = None, purpose: str | None = None) -> Keys:
        """The same streams at another step (scalar, or one step per sample) or for another purpose."""
        new_step = self.step if step is None else torch.as_tensor(step, dtype=torch.int64, device=self.key.device)
        return replace(self, step=new_step, purpose=self.purpose if purpose is None else purpose)

    def to(self, device: torch.device | str) -> Keys:
        """The same streams with their integers on another device (the numbers do not change)."""
        return replace(self, key=self.key.to(device), sample=self.sample.to(device), step=self.step.to(device))

    def _blocks(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four words of each of ``count`` Philox blocks, int64 (B, count) each."""
        counter = (
            torch.arange(count, device=self.key.device).unsqueeze(0),
            self.sample.unsqueeze(1) & _MASK,
            self.step.reshape(-1, 1) & _MASK,
            torch.full((1, 1), purpose_code(self.purpose), device=self.key.device),
        )
        key = ((self.key & _MASK).unsqueeze(1), ((self.key >> 32) & _MASK).unsqueeze(1))
        on_cpu = self.key.device.type == "cpu" and not torch.compiler.is_compiling()
        return _philox_on_cpu(counter, key) if on_cpu else philox4x32(counter, key)

    def words(self, count: int) -> Tensor:
        """Random 32-bit words, int64 (B, count) in [0, 2^32)."""
        words = torch.stack(self._blocks(-(-count // 4)), dim=-1)
        return words.reshape(len(self), words.shape[1] * 4)[:, :count]

    def uniform(self, shape: Sequence[int] = (), dtype: torch.dtype = torch.float64) -> Tensor:
        """Uniform numbers in the open interval (0, 1) with 52 random bits, (B, \\*shape).

        ``dtype=torch.float32`` rounds them and may give 1.
        """
        words = self.words(2 * math.prod(shape)).reshape(len(self), *shape, 2)
        bits = ((words[..., 0] >> 6) << 26) + (words[..., 1] >> 6)
        # with a 53rd bit, bits + 1/2 would round up to 1 at the top
        return ((bits.to(torch.float64) + 0.5) * 2.0**-52).to(dtype)

    def normal(self, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers, (B, \\*shape): float32 values whatever ``dtype`` holds them."""
        count = math.prod(shape)
        a, b, c, d = self._blocks(-(-count // 4))
        values = torch.stack((*_box_muller(a, b), *_box_muller(c, d)), dim=-1)
        return values.reshape(len(self), values.shape[1] * 4)[:, :count].reshape(len(self), *shape).to(dtype)

    def exponential(self, shape: Sequence[int] = ()) -> Tensor:
        """Standard exponential numbers, float64 (B, \\*shape), strictly positive."""
        return -torch.log(self.uniform(shape))


def _box_muller(radius_words: Tensor, angle_words: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent standard normals of each pair of 32-bit words, float32."""
    uniform = radius_words.to(torch.float64).add_(0.5).mul_(2.0**-32)
    radius = uniform.log_().mul_(-2.0).sqrt_()
    angle = angle_words.to(torch.float64).add_(0.5).mul_(2.0**-32).mul_(2.0 * math.pi)
    return (angle.cos() * radius).to(torch.float32), angle.sin_().mul_(radius).to(torch.float32)


def draw_keys(
    generator: torch.Generator | Sequence[torch.Generator] | None,
    batch_size: int,
    device: torch.device | str = "cpu",
) -> Keys:
    """Draws one int64 key per sample: what a walk does first, and the only use it makes of a generator.

    Args:
        generator: one generator (``batch_size`` keys are drawn in order), a list with one generator per sample (one
            key is drawn from each), or None for torch's global generator.
        batch_size: number of samples B.
        device: where the keys, and therefore the noise, are wanted.

    Raises:
        ConfigError: something else than generators, or a list of them whose length is not ``batch_size``.
    """
    check_generator(generator)
    batch_size = checked_count("batch_size", batch_size, "an integer, at least 0", 0)
    top = torch.iinfo(torch.int64).max
    if isinstance(generator, Sequence):
        if len(generator) != batch_size:
            raise ConfigError(
                f"generator is a list of {len(generator)} generators, but there are {batch_size} samples; pass one "
                f"generator per sample, or a single generator"
            )
        drawn = [torch.randint(0, top, (1,), generator=g, device=g.device).cpu() for g in generator]
        key = torch.cat(drawn) if drawn else torch.zeros(0, dtype=torch.int64)
    else:
        source = "cpu" if generator is None else generator.device
        key = torch.randint(0, top, (batch_size,), generator=generator, device=source)
    key = key.to(device)
    return Keys(key, torch.zeros_like(key), torch.zeros((), dtype=torch.int64, device=key.device))


def training_keys(seed: int, step: int, sample_ids: Tensor) -> Keys:
    """The streams of one training micro-batch: keyed by (seed, step, dataset index), never by rank or position."""
    key = torch.full_like(sample_ids, seed)
    return Keys(key, sample_ids, torch.full((), step, dtype=torch.int64, device=sample_ids.device))
