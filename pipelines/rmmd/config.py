"""The configuration of a training run, and how it becomes an objective, data and a saved pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import nn

from genkit.errors import ConfigError
from genkit.metrics.feature_network import FeaturePipeline
from genkit.models.features import FeatureNetwork
from genkit.pipelines.rmmd.baselines import DiffInstructObjective, DMD2Objective
from genkit.pipelines.rmmd.forecast import ForecastCodec
from genkit.pipelines.rmmd.networks import as_denoiser, network_of
from genkit.pipelines.rmmd.objective import MomentMatchingObjective
from genkit.pipelines.rmmd.parts import (
    ClassifierPart,
    DataPart,
    DistilPart,
    MLPModel,
    ModelPart,
    RewardPart,
    SchedulerPart,
    TeacherPart,
    TrainingData,
    build_reward,
)
from genkit.pipelines.rmmd.pipeline import RMMDPipeline, check_reward
from genkit.pipelines.rmmd.stages import TeacherFirst
from genkit.training.config import ConfigPart, TrainerConfig
from genkit.training.objective import Objective, Phase
from genkit.training.objectives import ClassificationObjective, DenoisingObjective
from genkit.training.recipe import Recipe

__all__ = ["Config", "EvaluationConfig", "build"]


class EvaluationConfig(ConfigPart):
    """How ``genkit evaluate`` measures: the same for every arm."""

    seeds: int = Field(3, ge=1)
    num_samples: int = Field(898, ge=2, description="samples of one measurement")
    repeats: int = Field(4, ge=1, description="measurements that are averaged")
    features: str = Field("zoo:features-digits", description="the network of Fréchet distances and class rewards")
    student_steps: list[int] = [4, 8]
    steps: int = Field(300, ge=4, description="of each run of an arm")
    members: int = Field(50, ge=2, description="of an ensemble forecast")
    leads: int = Field(10, ge=1, description="forecasts one after the other")
    starts: int = Field(300, ge=2, description="held-out states that are forecast from")
    block: int = Field(10, ge=1, description="starts in a block of the bootstrap")
    arms: list[str] | None = Field(None, description="null: all")
    rewards: list[str] = []
    phases: list[str] = Field([], description="rewards by which the orders of distillation and reward are compared")
    workers: int = Field(2, ge=1, description="processes that train side by side, one thread each")
    minutes: float = Field(3.0, gt=0.0, description="expected core-minutes of one arm and seed, to announce the cost")


class Config(TrainerConfig):
    """``method: rmmd``: phases teacher, distil and reward, each of the steps that its part says."""

    free_on_resume: ClassVar[frozenset[str]] = TrainerConfig.free_on_resume | {"evaluation"}
    unhashed: ClassVar[frozenset[str]] = TrainerConfig.unhashed | {"evaluation"}

    method: Literal["rmmd"] = "rmmd"
    data: DataPart
    model: ModelPart = MLPModel()
    scheduler: SchedulerPart = SchedulerPart()
    init_from: str | None = Field(None, description="a pipeline with student, teacher and auxiliary to go on from")
    num_inference_steps: int = Field(8, ge=1, description="K, the student's steps")
    eta: float = Field(1.0, gt=0.0, le=1.0)
    teacher: TeacherPart = TeacherPart()
    distil: DistilPart = DistilPart()
    reward: RewardPart | None = None
    classifier: ClassifierPart | None = Field(None, description="trains a feature network, and nothing else")
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _has_an_origin(self) -> Self:
        if self.classifier is not None:
            if self.init_from or self.teacher.source or self.teacher.steps or self.distil.steps or self.reward:
                raise ConfigError("classifier is trained alone; leave init_from, teacher, distil and reward out")
            return self
        origins = [self.init_from is not None, self.teacher.source is not None, self.teacher.steps > 0]
        if sum(origins) != 1:
            raise ConfigError(
                f"init_from={self.init_from}, teacher.source={self.teacher.source}, "
                f"teacher.steps={self.teacher.steps}: expected exactly one of them to be set, so that it is clear "
                "where the teacher comes from"
            )
        return self


def build(config: Config) -> Recipe:
    """The objective, its data, and how the result becomes a pipeline folder."""
    data = config.data.load("train")
    if config.classifier is not None:
        return _feature_network(config, config.classifier, data)
    pipe = _start(config, data)
    kind = config.scheduler.prediction_type
    nets = {name: as_denoiser(getattr(pipe, name), kind) for name in ("student", "auxiliary", "teacher")}
    then = _distillation(config, data, pipe, nets)
    objective: Objective | None = then
    if config.teacher.steps:
        teacher = DenoisingObjective(
            nets["teacher"],
            pipe.scheduler,
            condition_names=data.condition_names,
            drop=config.teacher.drop,
            null=data.null() if config.teacher.drop else None,
            name="teacher",
        )
        copies = (nets["student"], nets["auxiliary"])
        objective = TeacherFirst(teacher, config.teacher.steps, config.teacher.learning_rate_factor, then, copies)
    if objective is None:
        raise ConfigError("teacher.steps, distil.steps and reward.steps are all 0: there is nothing to train")

    def save_pipeline(folder: Path, networks: Mapping[str, nn.Module]) -> None:
        made: dict[str, Any] = {name: network_of(networks.get(name, net)) for name, net in nets.items()}
        if then is None:
            made["student"].load_state_dict(made["teacher"].state_dict())
            made["auxiliary"].load_state_dict(made["teacher"].state_dict())
        values: dict[str, Any] = {k: pipe.config[k] for k in _VALUES}
        RMMDPipeline(scheduler=pipe.scheduler, **made, **values).save_pretrained(folder, card=_card(config, data))

    return Recipe(objective, data, save_pipeline)


_VALUES = (
    "sample_shape",
    "num_inference_steps",
    "eta",
    "num_classes",
    "guidance_scale",
    "teacher_steps",
    "teacher_solver",
    "fields",
)


def _start(config: Config, data: TrainingData) -> RMMDPipeline:
    """The networks that training begins with."""
    from genkit.pipeline import load

    values: dict[str, Any] = {
        "sample_shape": list(data.sample_shape),
        "num_inference_steps": config.num_inference_steps,
        "eta": config.eta,
        "num_classes": data.num_classes,
        "guidance_scale": config.teacher.guidance_scale,
        "teacher_steps": config.teacher.num_inference_steps,
        "teacher_solver": config.teacher.solver,
        "fields": ForecastCodec.of(data.data).to_dict() if data.cond_shape else None,
    }
    if config.init_from is None:
        teacher = _teacher(config, data)
        return RMMDPipeline.from_teacher(teacher, config.scheduler.make(config.eta), **values)
    pipe = load(config.init_from)
    if not isinstance(pipe, RMMDPipeline):
        raise ConfigError(f"init_from={config.init_from} is a {type(pipe).__name__}; expected an RMMDPipeline")
    changed = [f"{k}: {pipe.config[k]} there, {v} here" for k, v in values.items() if pipe.config[k] != v]
    theirs = {k: pipe.scheduler.config[k] for k in config.scheduler.model_dump()}
    changed += [
        f"scheduler.{k}: {theirs[k]} there, {v} here"
        for k, v in config.scheduler.model_dump().items()
        if theirs[k] != v
    ]
    if changed:
        raise ConfigError(f"init_from={config.init_from} was trained with other settings: {'; '.join(changed)}")
    if pipe.teacher is None or pipe.auxiliary is None:
        raise ConfigError(f"init_from={config.init_from} was saved without its teacher or auxiliary network")
    return pipe


def _teacher(config: Config, data: TrainingData) -> nn.Module:
    """A fresh network, whose weights depend on ``config.seed`` alone, or the trained one that ``source`` names."""
    source = config.teacher.source
    if source is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return config.model.make(data, config.scheduler.prediction_type)
    folder = Path(source).expanduser()
    if source.startswith("zoo:") or (folder / "model_index.json").is_file():
        from genkit.pipeline import load

        found = getattr(load(source), "teacher", None)
        if found is None:
            raise ConfigError(
                f"teacher.source={source} holds no teacher; expected an RMMDPipeline that was saved with one"
            )
        return cast(nn.Module, found)
    from diffusers import AutoModel

    return cast(nn.Module, AutoModel.from_pretrained(source, use_safetensors=True))


def _distillation(
    config: Config, data: TrainingData, pipe: RMMDPipeline, nets: Mapping[str, nn.Module]
) -> MomentMatchingObjective | None:
    """The phases distil and reward, or None where there are none."""
    distil, reward = config.distil, config.reward
    phases = [Phase("distil", distil.steps, distil.learning_rate_factor)] if distil.steps else []
    if reward is not None and reward.steps:
        phases.append(Phase("reward", reward.steps, reward.learning_rate_factor))
    if not phases:
        return None
    options: dict[str, Any] = distil.model_dump(exclude={"steps", "learning_rate_factor"})
    if reward is not None:
        made = build_reward(reward)
        check_reward(made, data, reward.members)
        options |= {"reward": made, "joint": reward.joint}
        options |= {key: getattr(reward, key) for key in ("lam", "lam_reg", "members", "on_policy", "reference")}
    shared = {
        "eta": config.eta,
        "guidance_scale": config.teacher.guidance_scale,
        "phases": phases,
        "shape": data.sample_shape,
        "condition_names": data.condition_names,
    }
    return make_objective(nets, pipe.scheduler, config.num_inference_steps, options | shared)


def make_objective(
    nets: Mapping[str, nn.Module], scheduler: Any, num_inference_steps: int, options: Mapping[str, Any]
) -> MomentMatchingObjective:
    """The objective that ``options["objective"]`` names; a baseline takes of the options what it knows."""
    options = dict(options)
    name = options.pop("objective")
    networks = (nets["student"], nets["auxiliary"], nets["teacher"], scheduler)
    if name == "moment":
        return MomentMatchingObjective(*networks, num_inference_steps=num_inference_steps, **options)
    own = ("time_law", "teacher_weight", "normalize", "on_policy", "reference")
    options = {key: value for key, value in options.items() if key not in own}
    if name == "dmd2":
        return DMD2Objective(*networks, num_inference_steps=num_inference_steps, **options)
    if num_inference_steps != 1:
        raise ConfigError(f"distil.objective diff_instruct trains one step; num_inference_steps={num_inference_steps}")
    options = {key: value for key, value in options.items() if key not in ("eta", "chain_dropout")}
    return DiffInstructObjective(*networks, **options)


def _feature_network(config: Config, part: ClassifierPart, data: TrainingData) -> Recipe:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = part.make(data)
    options = part.model_dump(include={"label_smoothing", "shift", "flip"})

    def save_pipeline(folder: Path, networks: Mapping[str, nn.Module]) -> None:
        pipe = FeaturePipeline(cast(FeatureNetwork, networks["network"]), part.name)
        description = f"A classifier of {data.num_classes} classes, whose features Fréchet distances are measured in."
        pipe.save_pretrained(folder, card=_card(config, data) | {"description": description})

    return Recipe(ClassificationObjective(network, **options), data, save_pipeline)


def _card(config: Config, data: TrainingData) -> dict[str, Any]:
    """What the model card says of this run's data, and of nothing else."""
    settings = {k: v for k, v in config.resolved().items() if k not in ("output_dir", "resume_from_checkpoint")}
    for part, key in ((settings, "init_from"), (settings["teacher"], "source")):
        if part[key] and not part[key].startswith("zoo:"):
            part[key] = Path(part[key]).name  # a card names no place on this machine
    told = " class-conditional" if data.num_classes else ""
    return {
        "description": f"A{told} student of {config.num_inference_steps} steps, distilled from a diffusion model by "
        f"moment matching{' and fine-tuned on a reward' if config.reward else ''}; the teacher is in it.",
        "data": config.data.described(),
        "training_config": settings,
        "seed": config.seed,
        "toy_scale": True,
        "limits": [config.data.limits()],
    }
