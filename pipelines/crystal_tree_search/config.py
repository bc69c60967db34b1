"""The configuration of the base model's training run, and how it becomes an objective, data and a saved pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from genkit.pipelines.crystal_tree_search.model import CrystalTransformer
from genkit.pipelines.crystal_tree_search.objective import CrystalDiffusionObjective
from genkit.pipelines.crystal_tree_search.state import CrystalCodec, fit_codec
from genkit.training.batches import TensorData
from genkit.training.config import ConfigPart, TrainerConfig
from genkit.training.recipe import Recipe

__all__ = [
    "Config",
    "CrystalData",
    "EvaluationConfig",
    "LossConfig",
    "ModelConfig",
    "Proto8Data",
    "build",
    "build_codec",
    "build_denoiser",
]


class CrystalData(TensorData):
    """Crystals in memory, and the elements of the set they are from (a split may lack some)."""

    def __init__(self, tensors: Mapping[str, Tensor], elements: Sequence[int] | None = None) -> None:
        super().__init__(tensors)
        self.elements = elements


class Proto8Data(ConfigPart):
    """Crystals of up to 8 atoms: prototypes decorated with 27 elements; the table ships with genkit."""

    name: Literal["proto8"] = "proto8"
    split: Literal["train", "all"] = Field("train", description="what is trained on; a tenth of the formulas is test")
    limit: int | None = Field(None, ge=1, description="only the first so many crystals (for tests); null: all")

    def load(self, split: str | None = None) -> CrystalData:
        """The physical crystals of a split with their conditions, held in memory; by default that of training."""
        from genkit.pipelines.crystal_tree_search.proto8 import Proto8

        # unshifted: the network sees differences of coordinates alone
        data = Proto8(split=self.split if split is None else split, augment=False)
        size = len(data) if self.limit is None else min(self.limit, len(data))
        return CrystalData(data[torch.arange(size)], data.elements)


class ModelConfig(ConfigPart):
    """The network's sizes."""

    width: int = Field(128, ge=8, le=4096)
    blocks: int = Field(6, ge=1, le=256)
    heads: int = Field(4, ge=1, le=64)
    expansion: int = Field(3, ge=1, le=16, description="hidden size of a block's perceptron, in widths")
    pair_width: int = Field(16, ge=1, le=1024, description="size of a pair's features")


class LossConfig(ConfigPart):
    """Weights of the three losses, and what the network is not always told."""

    lattice: float = Field(1.0, ge=0.0)
    coordinates: float = Field(1.0, ge=0.0)
    types: float = Field(0.3, ge=0.0)
    drop_conditions: float = Field(0.2, ge=0.0, lt=1.0, description="share of crystals without conditions")
    given_types: float = Field(0.1, ge=0.0, lt=1.0, description="share of crystals whose types are given")


class EvaluationConfig(ConfigPart):
    """How ``genkit evaluate`` measures: the same for every arm."""

    base: str | None = Field(None, description="the frozen base: a pipeline, zoo:<name>; null: train this file's")
    seeds: int = Field(5, ge=1, description="of the search")
    arms: list[str] | None = Field(None, description="null: all")
    space_groups: list[int] = Field([], description="rare ones that are asked for")
    rollouts: int = Field(2048, ge=16, description="times num_inference_steps: the network calls of every arm")
    num_samples: int = Field(256, ge=1, description="crystals that every arm delivers")
    num_inference_steps: int = Field(64, ge=1)
    levels: int = Field(8, ge=1)
    slots: int = Field(64, ge=1)
    lam: float = Field(20.0, ge=0.0, description="inverse temperature, atoms per eV for the stability")
    widening: list[float] = Field([2.0, 0.8], min_length=2, max_length=2, description="C, alpha of the trees")
    min_visits: int = Field(3, ge=1, description="quota of a child in the trees")
    guidance_scale: float = Field(1.5, gt=0.0, description="of the arm cfg; dts_guided finds its own")
    relax_steps: int = Field(20, ge=0, description="steps of relaxation of what was delivered; 0: none")
    judge: Literal["sevennet"] | None = Field(None, description="a second potential that judges what was relaxed")
    judged: int = Field(64, ge=1, description="delivered crystals that the second potential judges")
    workers: int = Field(2, ge=1, description="processes that measure side by side, one thread each")
    minutes: float = Field(3.0, gt=0.0, description="expected core-minutes of a row, to announce the cost")


class Config(TrainerConfig):
    """``method: crystal_tree_search``: the training of the base model that the search then leaves frozen."""

    free_on_resume: ClassVar[frozenset[str]] = TrainerConfig.free_on_resume | {"evaluation"}
    unhashed: ClassVar[frozenset[str]] = TrainerConfig.unhashed | {"evaluation"}

    method: Literal["crystal_tree_search"] = "crystal_tree_search"
    data: Proto8Data = Proto8Data()
    family: Literal["matter", "diffcsp"] = Field("matter", description="masked types, or noisy one-hot types")
    sigma_min: float = Field(0.005, gt=0.0, description="least width of the coordinates' noise, fractional")
    sigma_max: float = Field(0.5, gt=0.0, description="greatest width of the coordinates' noise, fractional")
    type_scale: float = Field(2.0, gt=0.0, description="length of a one-hot type (diffcsp)")
    time_powers: dict[str, float] = Field({}, description="field -> p, its time t^p: above 1 it is decided earlier")
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    evaluation: EvaluationConfig = EvaluationConfig()


def build_codec(config: Config, data: CrystalData) -> CrystalCodec:
    """The codec of a data set, of the configuration's family."""
    options = {name: getattr(config, name) for name in ("sigma_min", "sigma_max", "type_scale", "time_powers")}
    return fit_codec(data.tensors, config.family, elements=data.elements, **options)


def build_denoiser(config: Config, codec: CrystalCodec, stability_bins: int = 3) -> CrystalTransformer:
    """A fresh network for the codec's states; its weights depend on ``config.seed`` alone."""
    shared = {n: codec.config[n] for n in ("density", "lattice_std", "family", "sigma_min", "sigma_max")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return CrystalTransformer(
            num_elements=len(codec.elements), stability_bins=stability_bins, **shared, **config.model.model_dump()
        )


def build(config: Config) -> Recipe:
    """The objective, its data, and how the result becomes a pipeline folder."""
    data = config.data.load()
    codec = build_codec(config, data)
    denoiser = build_denoiser(config, codec)
    options = config.loss.model_dump()
    weights = {name: options.pop(name) for name in ("lattice", "coordinates", "types")}
    objective = CrystalDiffusionObjective(denoiser, codec, weights, **options)

    def save_pipeline(folder: Path, networks: Mapping[str, nn.Module]) -> None:
        from genkit.pipelines.crystal_tree_search.pipeline import CrystalTreeSearchPipeline

        network = cast(CrystalTransformer, networks["denoiser"])
        pipe = CrystalTreeSearchPipeline(network, codec.scheduler(), codec)
        pipe.save_pretrained(folder, card=_card(config, len(data), codec))

    return Recipe(objective, data, save_pipeline)


def _card(config: Config, size: int, codec: CrystalCodec) -> dict[str, Any]:
    """What the model card says of this run's data, and of nothing else."""
    settings = {k: v for k, v in config.resolved().items() if k not in ("output_dir", "resume_from_checkpoint")}
    return {
        "training_config": settings,
        "seed": config.seed,
        "toy_scale": True,
        "description": f"A diffusion model of crystals with up to {codec.max_atoms} atoms, the frozen base of a tree "
        "search.",
        "data": f"proto8, split {config.data.split!r}: {size} crystals of {len(codec.elements)} elements, decorated "
        "prototypes relaxed by a few steps of CHGNet 0.3.0.",
        "limits": [
            f"At most {codec.max_atoms} atoms and {len(codec.elements)} elements; decorated prototypes, not "
            "measured structures."
        ],
    }
