"""Modules whose numbers must survive a cast of the network to half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

__all__ = ["FixedPrecision"]


class FixedPrecision(nn.Module):
    """A module whose buffers follow a move to another device, but keep their dtype when the network is cast.

    For normalisers, tables and noise levels, which half precision would spoil.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = buffer.to(fn(buffer).device)
        return self
