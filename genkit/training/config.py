"""The training configuration: strict types, no unknown keys, frozen, with a hash.

Keys are flat and familiar; a method adds its own as nested parts (subclasses of :class:`ConfigPart`)::

    class Config(TrainerConfig):
        clock: ClockConfig
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from genkit.serialization import canonical_hash

__all__ = ["SCHEMA_VERSION", "ConfigPart", "TrainerConfig"]

SCHEMA_VERSION = 1

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Tracker = Literal["tensorboard", "wandb"]


class ConfigPart(BaseModel):
    """Base of all configuration: types are not converted ("False" is no boolean), unknown keys and NaN are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class TrainerConfig(ConfigPart):
    """The keys that every method's training has. Steps are optimiser updates; batch sizes are per process.

    ``learning_rate`` and ``ema_decay`` take one number, or one per network (networks not named keep no average).
    """

    #: keys that may change between a checkpoint and the run that resumes from it
    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        ("max_steps", "output_dir", "save_steps", "save_total_limit", "resume_from_checkpoint", "logging_steps")
        + ("report_to", "progress", "max_skipped_steps", "num_processes", "device", "compile")
    )
    #: keys that do not change the trained weights, left out of the hash
    unhashed: ClassVar[frozenset[str]] = free_on_resume - {"max_steps", "max_skipped_steps"}

    schema_version: int = SCHEMA_VERSION
    method: str = Field("", description="the method whose objective is trained, e.g. heavy_tailed_flow")
    output_dir: str = Field(min_length=1, description="checkpoints, log.jsonl and the final pipeline go here")
    max_steps: Positive = Field(description="optimiser updates in all; the phases of a method end earlier if shorter")
    save_steps: Positive = Field(500, description="a checkpoint every so many steps, and one at the end")
    save_total_limit: Positive | None = Field(None, description="how many checkpoints are kept; null keeps all")
    resume_from_checkpoint: str | None = Field(None, description="a checkpoint folder, 'latest', or null")
    seed: int = Field(0, ge=0, lt=2**63)
    learning_rate: Rate | dict[str, Rate] = 1e-4
    lr_scheduler: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: NonNegative = 0
    batch_size: Positive = 64
    gradient_accumulation_steps: Positive = 1
    max_grad_norm: float | None = Field(1.0, gt=0.0, description="null: no clipping")
    weight_decay: Rate = 0.0
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.999
    adam_epsilon: float = Field(1e-8, gt=0.0)
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    ema_decay: Fraction | dict[str, Fraction] | None = Field(None, description="null: no moving average")
    ema_start_step: NonNegative = Field(0, description="until this many steps the average equals the weights")
    logging_steps: Positive = 10
    report_to: Literal["none"] | Tracker | list[Tracker] = Field("none", description="trackers beside log.jsonl")
    max_skipped_steps: NonNegative = Field(3, description="non-finite steps in a row that are skipped before it stops")
    num_processes: Positive | None = Field(None, description="processes the run must have; null: as launched")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: bool = False
    progress: bool = Field(True, description="a bar on a terminal; TQDM_DISABLE=1 switches it off as well")

    def resolved(self) -> dict[str, Any]:
        """All keys with their values, defaults included, as plain JSON values."""
        return self.model_dump(mode="json")

    def config_hash(self) -> str:
        """SHA-256 of everything that decides the trained weights."""
        return canonical_hash({k: v for k, v in self.resolved().items() if k not in self.unhashed})

    def trackers(self) -> list[str]:
        """The names in ``report_to`` as a list."""
        if isinstance(self.report_to, list):
            return list(self.report_to)
        return [] if self.report_to == "none" else [self.report_to]
