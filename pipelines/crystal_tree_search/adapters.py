"""MatterGen's networks as the frozen base of a search: the same state, the same chain, the same tree.

MatterGen (Zeni et al., Nature 639 (2025) 624, arXiv 2312.03687) walks cells, fractional coordinates and masked types,
which are the fields of the family ``"matter"`` (:mod:`.state`). In its own conventions, with n atoms, ρ the density of
the data, β from 0.1 to 20 and log a_t = -t² (β_1 - β_0) / 4 - t β_0 / 2::

    cell          x_t = a_t x_0 + (1 - a_t) μ_n I + sqrt(1 - a_t²) ½ n^{1/3} ε,  μ_n = (n / ρ)^{1/3},  ε symmetric
    coordinates   x_t = x_0 + σ_t ε mod 1,  σ_t = 0.01^{1-t} 5^t n^{-1/3}
    types         atomic numbers from 1, the mask is 101; a share t of them is masked

so that y = (x - μ_n I) / (½ n^{1/3}) follows a variance-preserving chain of unit noise: :class:`LatticeCode` with a
spread of ½. Its module returns scores, of which this makes the outputs that the codec's schedulers expect.

MatterGen is no extra of genkit: its release 1.0.3 pins torch 2.2.1+cu118 (from its own index), numpy below 2 and
pytorch-lightning 2.0.6, none of which go with genkit's versions. Its code and weights are under the MIT licence. The
module is loaded by MatterGen itself, in an environment that has both (its checkpoints are pickles, which genkit does
not read)::

    from mattergen.common.utils.data_classes import MatterGenCheckpointInfo
    from mattergen.common.utils.eval_utils import load_model_diffusion
    module = load_model_diffusion(MatterGenCheckpointInfo.from_hf_hub("mattergen_base")).diffusion_module
    adapter = MatterGenAdapter(module)
    chain = Chain(adapter, adapter.codec.scheduler(), num_inference_steps=100, levels=8, stages=adapter.codec.stages())

Not covered: its Langevin correctors, whose step sizes depend on the other members of a batch, so that their kernel has
no density to weigh an edge with. The walk is the ancestral predictor alone. Where a model was fine-tuned in full, its
own unconditional branch is not the base model: give that as ``base`` of the proposal.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from genkit.errors import ConfigError, MissingExtraError, nearest
from genkit.pipelines.crystal_tree_search.state import CrystalCodec, symmetric_entries
from genkit.schedulers.masked import MaskedBlockScheduler
from genkit.schedulers.product import ProductScheduler, ProductTransition
from genkit.schedulers.vp import VPScheduler
from genkit.schedulers.wrapped import WrappedScheduler

__all__ = ["LinearRateScheduler", "MatterGenAdapter", "MatterGenCodec", "MatterGenScheduler"]

#: Atoms per cubic Angstrom of MatterGen's MP-20 set, its ``average_density``.
_DENSITY = 0.05771451654022283
_ELEMENTS = 100
#: β at t = 0 and at t = 1.
_BETA = (0.1, 20.0)
#: The attribute of a graph that says whose conditions are not told.
_UNTOLD = "_USE_UNCONDITIONAL_EMBEDDING"


class LinearRateScheduler(VPScheduler):
    """The variance-preserving chain whose β grows linearly in continuous time: log α_t = -t² (β_1 - β_0)/4 - t β_0/2.

    ``VPScheduler("linear")`` is the product of N discrete factors in its place, 3 % away in α_1 at N = 1000. Noise is
    predicted (``epsilon``); α_1 is 0.0066, not 0.

    Reference: Song et al., "Score-based generative modeling through SDEs", arXiv 2011.13456, eq. 33.
    """

    def __init__(self) -> None:
        super().__init__("linear", "epsilon")

    def _log_alpha_bar(self, t: Tensor) -> Tensor:
        return -(0.5 * (_BETA[1] - _BETA[0]) * t.square() + _BETA[0] * t)

    def _log_alpha_bar_rate(self, t: Tensor) -> Tensor:
        return -((_BETA[1] - _BETA[0]) * t + _BETA[0])


class MatterGenScheduler(ProductScheduler):
    """The product of the three chains; each sample's number of atoms is read from its mask where no context gives it.

    Coordinates have the width σ_t n^{-1/3}: one length for cells of all sizes. Options: :class:`ProductScheduler`.
    """

    def add_noise(self, x0: Any, noise: Any, t: Any, context: Any = None) -> dict[str, Tensor]:
        """See :class:`ProductScheduler`."""
        return super().add_noise(x0, noise, t, _counted(x0, context))

    def to_x0(self, model_output: Any, t: Any, sample: Any, context: Any = None) -> dict[str, Tensor]:
        """See :class:`ProductScheduler`."""
        return super().to_x0(model_output, t, sample, _counted(sample, context))

    def transition(
        self, model_output: Any, t: Any, s: Any, sample: Any, context: Any = None, eta: float | None = None
    ) -> ProductTransition:
        """See :class:`ProductScheduler`."""
        return super().transition(model_output, t, s, sample, _counted(sample, context), eta)


def _counted(state: Mapping[str, Tensor], context: Any) -> dict[str, Tensor]:
    return {"num_atoms": state["mask"].sum(dim=1), **(context or {})}


class MatterGenCodec(CrystalCodec):
    """Physical crystals ↔ MatterGen's chain, as a :class:`.state.CrystalCodec` of the elements 1 to 100.

    Args:
        density: ρ of the data that the model was trained on, atoms per cubic Angstrom (``average_density`` of its
            configuration; the default is MP-20's).
        max_atoms: N.
        num_atoms: probabilities of n = 1 … N; None: all equal. MatterGen draws n from the histogram of its data.

    Raises:
        ConfigError: an option of another type or range.
    """

    def __init__(
        self, density: float = _DENSITY, max_atoms: int = 20, num_atoms: Sequence[float] | None = None
    ) -> None:
        super().__init__(
            elements=tuple(range(1, _ELEMENTS + 1)),
            density=density,
            lattice_std=0.5,
            family="matter",
            max_atoms=max_atoms,
            num_atoms=num_atoms,
            sigma_min=0.01,
            sigma_max=5.0,
            schedule="linear",
        )

    def scheduler(self, fixed_types: bool = False) -> ProductScheduler:
        """MatterGen's noise levels; see :meth:`.state.CrystalCodec.scheduler`."""
        fields: dict[str, Any] = {
            "lattice": LinearRateScheduler(),
            "coordinates": WrappedScheduler(sigma_min=0.01, sigma_max=5.0, scale_by_num_atoms=True),
        }
        if not fixed_types:
            fields["types"] = MaskedBlockScheduler(mask_token_id=self.mask_id)
        return MatterGenScheduler(fields, masks={name: "mask" for name in fields if name != "lattice"})


class MatterGenAdapter(nn.Module):
    """A denoiser (state, t, cond) made of a MatterGen ``DiffusionModule``.

    Outputs, with MatterGen's scores s: lattice ε̂ = -σ_t ½ n^{1/3} (s + sᵀ)/2, six numbers (B, 6); coordinates
    -σ_t s (B, N, 3), 0 at padding; types logits (B, N, 101). Rows that are not finite, or whose cell has no volume, get
    NaN (types: equal logits) and leave the others alone.

    ``cond`` has the names of the properties that the model was trained with: float (B,), NaN where it is not told (0
    too for ``space_group``, which starts at 1). For a proposal: ``GuidedProposal({"dft_mag_density":
    torch.tensor([0.15])}, null={"dft_mag_density": torch.tensor([float("nan")])})``.

    Args:
        module: has ``score_fn(graph, t)``, and ``model.cond_fields_model_was_trained_on``.
        codec: of the state; None: the defaults.
        graph: makes a batch from (``pos`` (A, 3), ``cell`` (B, 3, 3), ``atomic_numbers`` (A,), ``num_atoms`` (B,)) and
            conditions; None: MatterGen's ``ChemGraph``.

    Raises:
        ConfigError: no such module; when called, a condition that the model does not know.
        MissingExtraError: when called without ``graph``, where MatterGen is not installed.
    """

    def __init__(
        self, module: Any, codec: MatterGenCodec | None = None, *, graph: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        if not callable(getattr(module, "score_fn", None)):
            raise ConfigError(
                f"module={type(module).__name__} has no score_fn(graph, t); expected MatterGen's DiffusionModule "
                "(the .diffusion_module of what load_model_diffusion returns)"
            )
        self.module = module
        self.codec = codec or MatterGenCodec()
        self._graph = graph or _chem_graph
        self._levels = self.codec.scheduler().schedulers

    @property
    def known_conditions(self) -> tuple[str, ...]:
        """Names of the properties that the model was trained with."""
        return tuple(getattr(getattr(self.module, "model", None), "cond_fields_model_was_trained_on", ()))

    def forward(
        self, x: Mapping[str, Tensor], t: Tensor, cond: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The outputs for the three noisy fields; see the class."""
        mask = x["mask"]
        count = mask.sum(dim=1)
        cell, coordinates, good = self._usable(x, count)
        fields = {
            "pos": torch.remainder(coordinates, 1.0)[mask],
            "cell": cell,
            "atomic_numbers": (x["types"] + 1)[mask],
            "num_atoms": count,
        }
        scores = self.module.score_fn(self._graph(fields, self._conditions(cond, len(mask))), t)
        return {
            "lattice": self._lattice(scores["cell"], t, count).masked_fill(~good[:, None], torch.nan),
            "coordinates": self._coordinates(scores["pos"], t, mask, count, good),
            "types": _scattered(scores["atomic_numbers"], mask).masked_fill(~good[:, None, None], 0.0),
        }

    def _usable(self, x: Mapping[str, Tensor], count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cells, coordinates and which rows these are truly of; the others get a cube, whose inverse exists."""
        code, mask = self.codec.lattice_code, x["mask"]
        cell, coordinates = code.decode(x["lattice"], count), x["coordinates"].to(torch.float32)
        cube = code.cube(count)
        finite = torch.isfinite(cell).flatten(1).all(1) & (torch.isfinite(coordinates).all(-1) | ~mask).all(1)
        whole = torch.linalg.det(torch.where(finite[:, None, None], cell, 0.0)).abs() > 1e-6 * cube**3
        good = finite & whole
        spare = cube[:, None, None] * torch.eye(3, device=cube.device)
        coordinates = torch.where(good[:, None, None], coordinates, 0.0)
        return torch.where(good[:, None, None], cell, spare), coordinates, good

    def _lattice(self, score: Tensor, t: Tensor, count: Tensor) -> Tensor:
        """An antisymmetric part would make the kernels of two conditions mutually singular: it is left out."""
        width = 0.5 * count.to(torch.float32).pow(1.0 / 3.0)
        scale = self._levels["lattice"].alpha_sigma(t)[1].to(width) * width
        return -scale[:, None] * symmetric_entries((score + score.mT) / 2).to(torch.float32)

    def _coordinates(self, score: Tensor, t: Tensor, mask: Tensor, count: Tensor, good: Tensor) -> Tensor:
        sigma = self._levels["coordinates"].alpha_sigma(t, {"num_atoms": count})[1].to(torch.float32)
        scaled = -sigma[:, None, None] * _scattered(score, mask)
        return torch.where((good[:, None] | ~mask).unsqueeze(-1), scaled, torch.nan)

    def _conditions(self, cond: Mapping[str, Tensor] | None, rows: int) -> dict[str, Any]:
        """Entries of the graph: each property's values, and for whom they are not told."""
        given, known = dict(cond or {}), self.known_conditions
        for name, value in given.items():
            if name not in known:
                raise ConfigError(
                    f"condition {name!r} is unknown to this model, which would ignore it; it was trained with "
                    f"{', '.join(known) or 'no condition'}.{nearest(name, known)}"
                )
            if name == "chemical_system" or value.shape != (rows,):
                raise ConfigError(f"condition {name!r} has shape {tuple(value.shape)}; expected ({rows},) numbers")
        values = {name: value.to(torch.float32) for name, value in given.items()}
        untold = {
            name: (~torch.isfinite(v) | ((v < 1) if name == "space_group" else False)) for name, v in values.items()
        }
        filled = {name: value.masked_fill(untold[name], 1.0) for name, value in values.items()}
        return {**filled, _UNTOLD: {name: flag.unsqueeze(1) for name, flag in untold.items()}} if given else {}


def _scattered(values: Tensor, mask: Tensor) -> Tensor:
    """Rows of atoms (A, K) at their places of (B, N, K), 0 at padding."""
    spread = torch.zeros(*mask.shape, values.shape[-1], device=mask.device)
    spread[mask] = values.to(torch.float32)
    return spread


def _chem_graph(fields: Mapping[str, Tensor], conditions: Mapping[str, Any]) -> Any:
    """MatterGen's batch of graphs, without edges (its network finds them)."""
    graphs, collate = _mattergen("mattergen.common.data.chemgraph"), _mattergen("mattergen.common.data.collate")
    counts = fields["num_atoms"].tolist()
    places, kinds = fields["pos"].split(counts), fields["atomic_numbers"].split(counts)
    single = [
        graphs.ChemGraph(
            pos=places[row],
            cell=fields["cell"][row : row + 1],
            atomic_numbers=kinds[row],
            num_atoms=fields["num_atoms"][row : row + 1],
            num_nodes=count,
        )
        for row, count in enumerate(counts)
    ]
    return collate.collate(single).replace(**conditions)


def _mattergen(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"MatterGen is not installed (or broken: {error}). It is no extra of genkit, since its release 1.0.3 pins "
            "torch 2.2.1+cu118, numpy<2 and pytorch-lightning 2.0.6; install it from github.com/microsoft/mattergen "
            "(MIT licence) in an environment of its own and genkit beside it, or use genkit's own base model"
        ) from error
