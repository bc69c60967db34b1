"""Exponential moving average of a network's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["EMA", "local_part"]


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class EMA:
    """θ̄_k = d θ̄_{k−1} + (1 − d) θ_k after step k; until ``start_step`` steps are done θ̄_k = θ_k.

    So with s = ``start_step``: θ̄_n = d^(n−s) θ_s + (1 − d) Σ_{k=s+1..n} d^(n−k) θ_k. Kept in float32 (float64 for
    float64 weights) whatever the type of the weights.

    Args:
        parameters: the trained parameters by name.
        decay: d in [0, 1).
        start_step: number of steps after which averaging begins.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float, start_step: int = 0) -> None:
        self.decay, self.start_step = decay, start_step
        self.shadow = {name: _wide(p) for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: Mapping[str, Tensor], steps_done: int) -> None:
        """Takes in the weights after ``steps_done`` steps in all."""
        shadow = [local_part(s) for s in self.shadow.values()]
        current = [local_part(parameters[name].detach()) for name in self.shadow]
        if steps_done <= self.start_step:
            torch._foreach_copy_(shadow, current)
            return
        if any(c.dtype != s.dtype for c, s in zip(current, shadow, strict=True)):
            current = [c.to(s.dtype) for c, s in zip(current, shadow, strict=True)]
        torch._foreach_lerp_(shadow, current, 1.0 - self.decay)

    @contextmanager
    def swapped_into(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the parameters hold the average; afterwards their own values again."""
        own = {name: parameters[name].detach().clone() for name in self.shadow}
        _copy(parameters, self.shadow)
        try:
            yield
        finally:
            _copy(parameters, own)


def _wide(parameter: Tensor) -> Tensor:
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return parameter.detach().to(dtype, copy=True)


@torch.no_grad()
def _copy(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    for name, value in source.items():
        local_part(target[name]).copy_(local_part(value))
