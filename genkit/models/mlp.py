"""A residual perceptron with adaptive layer norm: the network for vectors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genkit.models.precision import FixedPrecision

__all__ = ["ConditionalMLP", "FourierTimeEmbedding"]


class FourierTimeEmbedding(FixedPrecision):
    """t ↦ (cos 2π f_k t, sin 2π f_k t) with f_k geometric from ¼ to ``max_frequency``; float32 in any network.

    Args:
        channels: number of outputs, even.
        max_frequency: highest frequency, in periods over t ∈ [0, 1].
    """

    frequencies: Tensor

    def __init__(self, channels: int, max_frequency: float = 16.0) -> None:
        super().__init__()
        exponents = torch.linspace(math.log(0.25), math.log(max_frequency), channels // 2)
        self.register_buffer("frequencies", 2.0 * math.pi * exponents.exp(), persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        """(B,) → (B, channels)."""
        angle = t.to(torch.float32).unsqueeze(-1) * self.frequencies
        return torch.cat((angle.cos(), angle.sin()), dim=-1)


class _Block(nn.Module):
    """h + gate · W₂ silu(W₁ (scale · norm(h) + shift)), with scale, shift and gate read off the condition
    (adaLN-zero).
    """

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, h: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition).chunk(3, dim=-1)
        inner = torch.addcmul(shift, self.norm(h), 1.0 + scale)
        return torch.addcmul(h, 1.0 + gate, self.down(self.dropout(nn.functional.silu(self.up(inner)))))


class ConditionalMLP(nn.Module):
    """A residual perceptron (x, t, condition) → output, whose output starts at 0.

    Blocks follow the adaptive layer norm of DiT (Peebles, Xie, arXiv 2212.09748), with open gates, since the zero
    output layer already makes the network start at 0.

    Args:
        channels: size of x and of the output, (B, channels).
        cond_channels: size of the condition vector (0 for none).
        width: hidden width.
        blocks: number of residual blocks.
        num_classes: number of class labels (0 for none); label ``num_classes`` is the null label of guidance.
        dropout: share of each block's hidden units that training switches off.
    """

    def __init__(
        self,
        channels: int,
        cond_channels: int = 0,
        width: int = 128,
        blocks: int = 3,
        num_classes: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.time = FourierTimeEmbedding(32)
        self.condition = nn.Sequential(
            nn.Linear(32 + cond_channels, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.classes = nn.Embedding(num_classes + 1, 32 + cond_channels) if num_classes else None
        self.input = nn.Linear(channels, width)
        self.blocks = nn.ModuleList(_Block(width, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, channels)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(
        self, x: Tensor, t: Tensor, condition: Tensor | None = None, class_labels: Tensor | None = None
    ) -> Tensor:
        """x (B, channels), t (B,), condition (B, cond_channels), class_labels int64 (B,) → (B, channels).

        Inputs of another floating type are cast to the weights'.
        """
        dtype = self.output.weight.dtype
        told = self.time(t)
        if condition is not None:
            told = torch.cat((told, condition.to(told.dtype)), dim=-1)
        told = told.to(dtype)
        if self.classes is not None and class_labels is not None:
            told = told + self.classes(class_labels)
        told = self.condition(told)
        h = self.input(x.to(dtype))
        for block in self.blocks:
            h = block(h, told)
        return self.output(nn.functional.silu(self.norm(h)))
