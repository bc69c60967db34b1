"""The configuration of a training run, and how it becomes an objective, data and a saved pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import torch
from pydantic import Field, field_validator, model_validator
from torch import nn

from genkit.data.mixtures import StableMixture
from genkit.data.returns import MarketReturns
from genkit.errors import ConfigError
from genkit.pipelines.heavy_tailed_flow.clocks import Clock
from genkit.pipelines.heavy_tailed_flow.denoiser import ClockDenoiser
from genkit.pipelines.heavy_tailed_flow.objective import HeavyTailedFlowObjective
from genkit.pipelines.heavy_tailed_flow.pipeline import HeavyTailedFlowPipeline
from genkit.samplers.solvers import make_solver
from genkit.schedulers.flow import FlowScheduler
from genkit.training.config import ConfigPart, TrainerConfig
from genkit.training.recipe import Recipe

__all__ = ["Config", "MixtureData", "ModelConfig", "ReturnsData", "build", "build_denoiser"]


class ReturnsData(ConfigPart):
    """Joint daily log-returns, from the table that ships with genkit or from a CSV file of one's own."""

    name: Literal["returns"]
    kind: Literal["ewma", "raw"] = Field("ewma", description="ewma: r_t / σ_{t−1}; raw: r_t in percent")
    decay: float = Field(0.94, gt=0.0, lt=1.0, description="λ of the volatility recursion")
    holdout: float = Field(0.2, gt=0.0, lt=1.0, description="share of the days held out, in time order")
    path: str | None = Field(None, description="CSV with a date column; null: S&P 500, Nasdaq and WTI oil")
    columns: list[str] | None = None
    values: Literal["prices", "returns"] = "prices"

    def load(self, split: str = "train") -> MarketReturns:
        """The data of a split: ``"train"``, ``"test"`` or ``"all"``."""
        options = {key: value for key, value in self.model_dump().items() if key != "name"}
        return MarketReturns(split=split, **options)


class MixtureData(ConfigPart):
    """Nine imbalanced α-stable modes in the plane: synthetic data whose tails are known."""

    name: Literal["mixture2d"]
    num_samples: int = Field(32768, ge=1)
    alpha: float = Field(1.5, gt=0.0, le=2.0)
    noise_scale: float = Field(0.1, gt=0.0)
    spacing: float = Field(1.0, gt=0.0)
    seed: int = Field(0, ge=0)

    def load(self, split: str = "train") -> StableMixture:
        """The training set (the held-out part is any later stretch of its keyed sequence)."""
        return StableMixture(**{key: value for key, value in self.model_dump().items() if key != "name"})


class ModelConfig(ConfigPart):
    """The network and what it is told of the clock."""

    width: int = Field(128, ge=8, le=8192)
    blocks: int = Field(3, ge=1, le=256)
    grid: int = Field(16, ge=1, le=1024, description="cells of the clock path")
    depth: int = Field(3, ge=1, le=6, description="depth of its log-signature")
    path_feature: Literal["logsignature", "terminal"] = "logsignature"
    transform: Literal["whiten", "mad", "none"] = Field("whiten", description="affine standardisation of the data")
    scale: Literal["conditional", "constant"] = Field(
        "conditional", description="constant: ignore the coupling's scale"
    )
    class_conditional: bool = Field(False, description="tell the network the data's labels")


class EvaluationConfig(ConfigPart):
    """How ``genkit evaluate`` measures: the same for every arm."""

    seeds: int = Field(5, ge=1)
    num_samples: int = Field(200_000, ge=1000)
    num_inference_steps: int = Field(10, ge=1)
    solver: str = Field("heun", description="checked before anything is trained")
    workers: int = Field(2, ge=1, description="processes that train side by side, one thread each")
    minutes: float = Field(3.0, gt=0.0, description="expected core-minutes of one arm and seed, to announce the cost")

    @field_validator("solver")
    @classmethod
    def _known_solver(cls, value: str) -> str:
        make_solver(value)
        return value


class Config(TrainerConfig):
    """``method: heavy_tailed_flow``. The clock is a mapping such as ``{law: student_t, nu: 3}``."""

    free_on_resume: ClassVar[frozenset[str]] = TrainerConfig.free_on_resume | {"evaluation"}
    unhashed: ClassVar[frozenset[str]] = TrainerConfig.unhashed | {"evaluation"}

    method: Literal["heavy_tailed_flow"] = "heavy_tailed_flow"
    data: Annotated[ReturnsData | MixtureData, Field(discriminator="name")]
    clock: dict[str, Any]
    model: ModelConfig = ModelConfig()
    coupling: Literal["independent", "rank"] = "rank"
    loss_weight: Literal["velocity", "residual"] = "velocity"
    evaluation: EvaluationConfig = EvaluationConfig()

    @field_validator("clock")
    @classmethod
    def _known_clock(cls, value: dict[str, Any]) -> dict[str, Any]:
        return Clock.from_dict(value).to_dict()

    @model_validator(mode="after")
    def _labels_exist(self) -> Self:
        if self.model.class_conditional and self.data.name != "mixture2d":
            raise ConfigError(f"model.class_conditional is true, but the data {self.data.name!r} have no labels")
        return self


def _card(config: Config, channels: int) -> dict[str, Any]:
    """What the model card says of this run's data, and of nothing else."""
    settings = {k: v for k, v in config.resolved().items() if k not in ("output_dir", "resume_from_checkpoint")}
    if settings["data"].get("path"):
        settings["data"]["path"] = Path(settings["data"]["path"]).name  # a card names no place on this machine
    facts: dict[str, Any] = {"training_config": settings, "seed": config.seed, "toy_scale": True}
    if isinstance(config.data, MixtureData):
        described = f"nine imbalanced α-stable modes in the plane (α = {config.data.alpha:g})"
        data, limits = "Synthetic: genkit.data.StableMixture.", ["Synthetic data in two dimensions."]
    else:
        unit = f"in units of their EWMA volatility (λ = {config.data.decay:g})"
        described = f"joint daily returns of {channels} assets " + (
            unit if config.data.kind == "ewma" else "in percent"
        )
        source = "daily closes of S&P 500, Nasdaq and WTI oil, 1999–2018 (arch package, NCSA licence)"
        source = source if config.data.path is None else f"the user's own file {Path(config.data.path).name}"
        data = f"The first {100 * (1 - config.data.holdout):g} % of the days of {source}."
        limits = [f"{channels} assets and one period; not investment advice."]
    return facts | {
        "description": f"A heavy-tailed flow (random clocks) for {described}.",
        "data": data,
        "limits": limits,
    }


def build_denoiser(config: Config, data: MarketReturns | StableMixture) -> ClockDenoiser:
    """A fresh network, fitted to the data's location, spread and radius; its weights depend on ``config.seed``
    alone.
    """
    classes = len(data.weights) if isinstance(data, StableMixture) and config.model.class_conditional else 0
    options = config.model.model_dump(exclude={"transform", "scale", "class_conditional"})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        denoiser = ClockDenoiser(
            channels=data.sample.shape[1], clock=config.clock, num_classes=classes, coupling=config.coupling, **options
        )
    denoiser.fit(data.sample, config.model.transform, conditional=config.model.scale == "conditional")
    return denoiser


def build(config: Config) -> Recipe:
    """The objective, its data, and how the result becomes a pipeline folder."""
    data = config.data.load("train")
    denoiser = build_denoiser(config, data)
    objective = HeavyTailedFlowObjective(denoiser, FlowScheduler(), config.loss_weight)

    def save_pipeline(folder: Path, networks: Mapping[str, nn.Module]) -> None:
        pipe = HeavyTailedFlowPipeline(cast(ClockDenoiser, networks["denoiser"]), FlowScheduler())
        pipe.save_pretrained(folder, card=_card(config, denoiser.config["channels"]))

    return Recipe(objective, _Unlabelled(data) if not config.model.class_conditional else data, save_pipeline)


class _Unlabelled:
    """The data without their labels: an unconditional network must not rank its clocks within them either."""

    def __init__(self, data: MarketReturns | StableMixture) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sample": self.data[index]["sample"]}
