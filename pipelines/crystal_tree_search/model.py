"""A compact periodic transformer for noisy crystals: one token an atom and one for the lattice, with a pair bias.

What it is told of positions are differences of fractional coordinates alone, through periodic functions, and minimum
image distances in the noisy cell. So its outputs do not change with a common shift of the atoms or with integers added
to coordinates; they are permuted with the atoms, and padding adds nothing.

The score of the coordinates is a sum over pairs of odd periodic functions with learned weights, less its mean over the
atoms: a density that does not change with a common shift has a score that sums to zero.

Differs from the paper in: everything here; only the paper's abstract is public. The pair bias follows the idea of
"Crystalite", arXiv 2604.02270, the modulation by the time that of DiT, arXiv 2212.09748.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn.functional import silu

from genkit._checks import checked_count
from genkit.errors import ConfigError
from genkit.models.mlp import FourierTimeEmbedding
from genkit.models.precision import FixedPrecision
from genkit.pipelines.crystal_tree_search.state import LatticeCode, symmetric_entries
from genkit.schedulers.wrapped import score_size

__all__ = ["CrystalTransformer", "PairGeometry"]

#: zeros of sin 2πmδ lie at the multiples of 1/2m, where atoms of simple structures are apart
_HARMONICS = (1, 2, 3, 4, 6)
_SPACE_GROUPS = 230


class PairGeometry(FixedPrecision):
    """Features of every pair of atoms that do not change along the blocks, float32.

    With δ_ij = f_j − f_i in [−½, ½): cos 2πmδ and sin 2πmδ a dimension, tanh(sin 2πmδ / 4πmσ_t), which tells offsets of
    the size of the noise from a special position, and Gaussians of the minimum image distance over the 27 images (for
    an atom with itself: the shortest lattice translation).

    Args:
        radial: number of Gaussians.
        cutoff: centre of the widest one, in Å.
    """

    images: Tensor
    centres: Tensor
    harmonics: Tensor

    def __init__(self, radial: int = 16, cutoff: float = 8.0) -> None:
        super().__init__()
        images = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=3)))
        self.register_buffer("images", images, persistent=False)
        self.register_buffer("centres", torch.linspace(0.5, cutoff, radial), persistent=False)
        self.register_buffer("harmonics", torch.tensor(_HARMONICS, dtype=torch.float32), persistent=False)
        self.width = (cutoff - 0.5) / (radial - 1)
        self.odd_channels = 2 * len(_HARMONICS)
        self.channels = 3 * (len(_HARMONICS) + self.odd_channels) + radial

    def forward(self, coordinates: Tensor, lattice: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, N, N, C), and the odd functions (B, N, N, 3, O) whose sums are the score.

        Args:
            coordinates: (B, N, 3).
            lattice: (B, 3, 3), vectors in Å as rows.
            sigma: width of the coordinates' noise, (B,).
        """
        delta = coordinates.unsqueeze(1) - coordinates.unsqueeze(2)
        delta = delta - torch.round(delta)
        angle = (2.0 * math.pi) * delta.unsqueeze(-1) * self.harmonics
        sine = angle.sin()
        resolution = (4.0 * math.pi) * sigma.unsqueeze(-1) * self.harmonics
        odd = torch.cat((sine, torch.tanh(sine / resolution[:, None, None, None])), dim=-1)
        even = angle.cos().flatten(-2)
        return torch.cat((even, odd.flatten(-2), self._radial(self.distances(delta, lattice))), dim=-1), odd

    def distances(self, delta: Tensor, lattice: Tensor) -> Tensor:
        """Minimum image distances in Å, (B, N, N), of fractional differences (B, N, N, 3) in [−½, ½]."""
        gram = lattice @ lattice.mT
        transformed = delta.flatten(1, 2) @ gram
        within = (transformed * delta.flatten(1, 2)).sum(dim=-1, keepdim=True)
        across = transformed @ (2.0 * self.images.T)
        of_image = ((self.images @ gram) * self.images).sum(dim=-1)
        # |δ + k|² = δGδ + 2 kGδ + kGk with the metric G
        own = torch.eye(delta.shape[1], device=delta.device).flatten().unsqueeze(-1)
        at_origin = (self.images == 0.0).all(dim=-1)
        excluded = torch.where(at_origin & (own > 0.0), 1e6, 0.0)
        squared = (within + across + of_image.unsqueeze(1) + excluded).amin(dim=-1)
        return squared.clamp(min=1e-6).sqrt().unflatten(1, delta.shape[1:3])

    def _radial(self, distance: Tensor) -> Tensor:
        return torch.exp(-0.5 * ((distance.unsqueeze(-1) - self.centres) / self.width).square())


class _NoiseLevels(FixedPrecision):
    """σ_t of the coordinates, and the root mean square of their target −σ_t · score at t, by a table in t."""

    size: Tensor

    def __init__(self, sigma_min: float, sigma_max: float, knots: int = 257) -> None:
        super().__init__()
        self.log_min, self.log_ratio = math.log(sigma_min), math.log(sigma_max / sigma_min)
        t = torch.linspace(0.0, 1.0, knots, dtype=torch.float64)
        size = score_size((self.log_min + self.log_ratio * t).exp())
        self.register_buffer("size", size.to(torch.float32), persistent=False)

    def forward(self, t: Tensor) -> tuple[Tensor, Tensor]:
        t = t.to(torch.float32)
        place = t.clamp(0.0, 1.0) * (len(self.size) - 1)
        left = place.to(torch.int64).clamp(max=len(self.size) - 2)
        size = torch.lerp(self.size[left], self.size[left + 1], place - left)
        return (self.log_min + self.log_ratio * t).exp(), size


class _Attention(nn.Module):
    """Attention over the tokens with an additive pair bias, whose values also carry the pair's own features."""

    def __init__(self, width: int, heads: int, pair_width: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.project = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width + heads * pair_width, width)

    def forward(self, h: Tensor, bias: Tensor, pair: Tensor) -> Tensor:
        """h (B, T, D), bias (B, H, T, T) with −∞ at padding, pair (B, N, N, C) of the N = T − 1 atoms → (B, T, D)."""
        batch, tokens, _ = h.shape
        q, k, v = self.project(h).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = torch.add(bias, q @ k.transpose(-1, -2), alpha=self.scale).softmax(dim=-1)
        seen = (weights @ v).transpose(1, 2).reshape(batch, tokens, -1)
        of_pairs = weights[:, :, 1:, 1:].transpose(1, 2) @ pair  # (B, N, H, C)
        of_pairs = nn.functional.pad(of_pairs.flatten(2), (0, 0, 1, 0))  # the lattice's token has no pairs
        return self.output(torch.cat((seen, of_pairs), dim=-1))


class _Block(nn.Module):
    """Attention and a perceptron, each in an adaptive layer norm: h + gate · f(scale · norm(h) + shift)."""

    def __init__(self, width: int, heads: int, pair_width: int, expansion: int) -> None:
        super().__init__()
        self.attention = _Attention(width, heads, pair_width)
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)
        # what this block adds to the modulation that all blocks share
        self.offset = nn.Parameter(torch.zeros(6, width))

    def forward(self, h: Tensor, modulation: Tensor, bias: Tensor, pair: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = (modulation + self.offset).unsqueeze(2).unbind(1)
        inner = torch.addcmul(shift, _norm(h), 1.0 + scale)
        h = torch.addcmul(h, 1.0 + gate, self.attention(inner, bias, pair))
        inner = torch.addcmul(shift2, _norm(h), 1.0 + scale2)
        return torch.addcmul(h, 1.0 + gate2, self.down(silu(self.up(inner))))


def _norm(h: Tensor) -> Tensor:
    return nn.functional.layer_norm(h, h.shape[-1:])


class CrystalTransformer(ModelMixin, ConfigMixin):
    """(state, t, condition) → what the fields' schedulers expect: lattice v, coordinates −σ_t · score, types.

    Args:
        num_elements: K, number of elements.
        density, lattice_std: of the codec, for distances in Å (:class:`LatticeCode`).
        family: ``"matter"`` (types int64 with the mask K, logits out) or ``"diffcsp"`` (real types in and out).
        sigma_min, sigma_max: widths of the coordinates' noise, those of the scheduler.
        width: size of a token.
        blocks: number of blocks.
        heads: attention heads.
        expansion: hidden size of a block's perceptron, in widths.
        pair_width: size of a pair's features.
        stability_bins: number of stability classes (the label 0 means: not told).
        max_atoms: largest number of atoms it can be told.

    Raises:
        ConfigError: sizes that are not positive integers, or a width that the heads do not divide.
    """

    @register_to_config
    def __init__(
        self,
        num_elements: int,
        density: float,
        lattice_std: float,
        family: str = "matter",
        sigma_min: float = 0.005,
        sigma_max: float = 0.5,
        width: int = 128,
        blocks: int = 6,
        heads: int = 4,
        expansion: int = 3,
        pair_width: int = 16,
        stability_bins: int = 3,
        max_atoms: int = 64,
    ) -> None:
        super().__init__()
        if checked_count("width", width) % checked_count("heads", heads) or width % 2:
            raise ConfigError(f"width={width}, heads={heads}; expected an even width that the heads divide")
        self.lattice_code = LatticeCode(density, lattice_std, family)
        self.masked = family == "matter"
        self.levels = _NoiseLevels(sigma_min, sigma_max)
        self.geometry = PairGeometry()
        self._build_inputs(num_elements, width, stability_bins, max_atoms)
        self._build_pairs(width, blocks, heads, pair_width)
        self.layers = nn.ModuleList(_Block(width, heads, pair_width, expansion) for _ in range(blocks))
        self._build_heads(num_elements, width, pair_width)

    def _build_inputs(self, num_elements: int, width: int, bins: int, max_atoms: int) -> None:
        self.time = FourierTimeEmbedding(32)
        self.told = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.count = nn.Embedding(max_atoms + 1, width)
        self.space_group = nn.Embedding(_SPACE_GROUPS + 1, width)
        self.stability = nn.Embedding(bins + 1, width)
        self.modulation = nn.Linear(width, 6 * width)
        self.types = nn.Embedding(num_elements + 1, width) if self.masked else nn.Linear(num_elements, width)
        self.lattice = nn.Sequential(nn.Linear(12, width), nn.SiLU(), nn.Linear(width, width))

    def _build_pairs(self, width: int, blocks: int, heads: int, pair_width: int) -> None:
        hidden = 2 * pair_width
        self.pair = nn.Sequential(nn.Linear(self.geometry.channels, hidden), nn.SiLU(), nn.Linear(hidden, pair_width))
        self.pair_bias = nn.Linear(pair_width, blocks * heads)
        self.surroundings = nn.Linear(pair_width, width)
        self.lattice_bias = nn.Parameter(torch.zeros(3, blocks * heads))  # from it, to it, to itself

    def _build_heads(self, num_elements: int, width: int, pair_width: int) -> None:
        hidden, odd = width // 2, self.geometry.odd_channels
        self.of_target, self.of_source = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.of_pair = nn.Linear(pair_width, hidden, bias=False)
        self.pair_weights = nn.Linear(hidden, 3 * odd)
        self.to_score = nn.Linear(width, 3)
        self.to_types = nn.Linear(width, num_elements + 1 if self.masked else num_elements)
        self.to_lattice = nn.Linear(width, 6)
        for layer in (self.pair_weights, self.to_score, self.to_types, self.to_lattice):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self, x: Mapping[str, Tensor], t: Tensor, cond: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The outputs for the three noisy fields.

        Args:
            x: the state (B, \\*): ``lattice``, ``coordinates``, ``types`` and ``mask``.
            t: (B,) in [0, 1].
            cond: ``space_group`` int64 (B,), 1 to 230, and ``stability`` int64 (B,); 0, or a missing entry: not told.

        Returns:
            ``lattice`` (B, 6), ``coordinates`` (B, N, 3), 0 at padding, and ``types`` (B, N, K + 1) logits or
            (B, N, K).
        """
        mask = x["mask"]
        num_atoms = mask.sum(dim=1)
        cell = self.lattice_code.decode(x["lattice"], num_atoms)
        sigma, size = self.levels(t)
        features, odd = self.geometry(x["coordinates"].to(torch.float32), cell, sigma)
        real = (mask.unsqueeze(1) & mask.unsqueeze(2)).unsqueeze(-1)
        dtype = self.to_lattice.weight.dtype
        pair = self.pair(features.to(dtype)) * real
        modulation = self.modulation(self._condition(t, num_atoms, cond)).unflatten(-1, (6, -1))
        h = self._tokens(x, cell, num_atoms, pair)
        for block, bias in zip(self.layers, self._biases(pair, mask), strict=True):
            h = block(h, modulation, bias, pair)
        h = _norm(h)
        score = self._score(h[:, 1:], pair, odd.to(dtype), mask)
        return {
            "lattice": self.to_lattice(h[:, 0]).to(torch.float32),
            "coordinates": size[:, None, None] * score.to(torch.float32),
            "types": self.to_types(h[:, 1:]).to(torch.float32),
        }

    def _condition(self, t: Tensor, num_atoms: Tensor, cond: Mapping[str, Tensor] | None) -> Tensor:
        dtype = self.to_lattice.weight.dtype
        told = self.told(self.time(t).to(dtype)) + self.count(num_atoms)
        for name, table in (("space_group", self.space_group), ("stability", self.stability)):
            label = (cond or {}).get(name)
            told = told + (table.weight[0] if label is None else table(label))
        return silu(told)

    def _tokens(self, x: Mapping[str, Tensor], cell: Tensor, num_atoms: Tensor, pair: Tensor) -> Tensor:
        """The lattice's token, then the atoms', (B, 1 + N, D)."""
        dtype = self.to_lattice.weight.dtype
        types = x["types"] if self.masked else x["types"].to(dtype)
        surroundings = self.surroundings(pair.sum(dim=2) / num_atoms[:, None, None].to(dtype))
        scale = self.lattice_code.cube(num_atoms).square()[:, None]
        metric = symmetric_entries(cell @ cell.mT) / scale
        lattice = self.lattice(torch.cat((x["lattice"], metric.clamp(-20.0, 20.0)), dim=-1).to(dtype))
        return torch.cat((lattice.unsqueeze(1), self.types(types) + surroundings), dim=1)

    def _biases(self, pair: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """The attention biases of all blocks, (B, H, T, T) each: computed once, −∞ at padded keys."""
        inner = self.pair_bias(pair)
        outgoing, incoming, own = self.lattice_bias
        batch, n = mask.shape
        top = torch.cat((own.expand(batch, 1, 1, -1), outgoing.expand(batch, 1, n, -1)), dim=2)
        rest = torch.cat((incoming.expand(batch, n, 1, -1), inner), dim=2)
        bias = torch.cat((top, rest), dim=1).unflatten(-1, (len(self.layers), -1)).permute(3, 0, 4, 1, 2)
        hidden = nn.functional.pad(~mask, (1, 0))[:, None, None, :]
        return bias.masked_fill(hidden, -math.inf).contiguous().unbind()  # softmax is slow on strided rows

    def _score(self, atoms: Tensor, pair: Tensor, odd: Tensor, mask: Tensor) -> Tensor:
        """Σ_j Σ_o w_ijo φ_o(δ_ij) in each dimension, less the mean over the atoms, (B, N, 3)."""
        hidden = self.of_target(atoms).unsqueeze(2) + self.of_source(atoms).unsqueeze(1) + self.of_pair(pair)
        weights = self.pair_weights(silu(hidden)).unflatten(-1, odd.shape[-2:])
        between = (mask.unsqueeze(1) & mask.unsqueeze(2))[..., None, None]
        raw = (weights * odd * between).sum(dim=(2, -1)) + self.to_score(atoms)
        return without_drift(raw, mask)


def without_drift(vectors: Tensor, mask: Tensor) -> Tensor:
    """Vectors (B, N, 3) less their mean over the real atoms of ``mask`` (B, N); 0 at padding."""
    weight = mask.unsqueeze(-1).to(vectors.dtype)
    return (vectors - (vectors * weight).sum(dim=1, keepdim=True) / weight.sum(dim=1, keepdim=True)) * weight
