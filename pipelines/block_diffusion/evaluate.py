"""The evidence: every arm from the same autoregressive base of its seed, at equal parameters, over several seeds
(``scratch`` excepted: it has the adaptation's steps alone, from fresh weights).

Rows are appended to ``<results_dir>/block_diffusion/<data>-<parameters>.jsonl``; a row that is there is not measured
again. Arms are compared at equal tokens (the name alone) and at equal forward cost (``@cost``: arms that read a token
once instead of twice get twice the steps).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from genkit.data.tasks import VerifiableTasks, check_answer
from genkit.errors import ConfigError
from genkit.metrics.results import ResultRow, read_rows, rows_of_configuration, summary_table
from genkit.pipelines.block_diffusion.config import Config, DiffusionPart, SmallModel, TasksData, build, held_out_rows
from genkit.pipelines.block_diffusion.likelihood import LikelihoodBound, nelbo
from genkit.pipelines.block_diffusion.pipeline import BlockDiffusionPipeline
from genkit.training.arms import Job, measure_rows, train_pipeline

__all__ = ["ARMS", "answer_problems", "arm_config", "evaluate", "headline", "likelihood"]

METHOD = "block_diffusion"
#: What each arm changes in the configuration.
ARMS: dict[str, dict[str, Any]] = {
    "ar_base": {},
    "full": {},
    "no_curriculum": {"curriculum": None},
    "no_ar_loss": {"ar_weight": 0.0},
    "direct": {"curriculum": None, "ar_weight": 0.0},
    "block_causal": {"curriculum": None, "ar_weight": 0.0, "clean_rule": "block", "shift": False},
    "annealing": {"recipe": "annealing", "ar_weight": 0.0},
    "annealing@cost": {"recipe": "annealing", "ar_weight": 0.0},
    "scratch": {},
    "ar_continued": {"curriculum": None, "block_length": 1},
    "ar_continued@cost": {"curriculum": None, "block_length": 1},
    "weight_1/t": {"weight": "1/t"},
}
#: Arms whose result does not depend on the block length asked for.
BLOCKLESS = ("ar_base", "annealing", "annealing@cost", "ar_continued", "ar_continued@cost")


def evaluate(config: Config, *, table_only: bool = False, results_dir: str | Path = "docs/results") -> str:
    """Measures the rows that are missing (unless ``table_only``) and returns the tables as Markdown.

    Raises:
        ConfigError: there are no rows to make a table of, or an arm of ``evaluation.arms`` is unknown.
    """
    _check(config)
    path = Path(results_dir) / METHOD / f"{_setting(config)}.jsonl"
    if not table_only:
        _run_missing(config, path)
    hashes = {arm_config(config, *arm).config_hash() for arm in _cells(config)}
    rows = rows_of_configuration(path, hashes)
    return "\n\n".join(_tables(config, rows))


def _check(config: Config) -> None:
    unknown = sorted(set(config.evaluation.arms or ()) - set(ARMS))
    if unknown:
        raise ConfigError(f"evaluation.arms names {unknown}; expected some of {', '.join(ARMS)}")
    if "scratch" in (config.evaluation.arms or ()) and config.model.name != "small":
        raise ConfigError("evaluation.arms names scratch, but a pretrained model has no fresh weights; leave it out")
    if not config.pretraining.steps and config.model.name == "small":
        raise ConfigError("evaluation compares adaptations of one autoregressive base; give pretraining.steps")


def _setting(config: Config) -> str:
    """Data and size: the name of the file of rows."""
    if isinstance(config.model, SmallModel):
        part = config.model
        return f"{config.data.name}-{part.layers}x{part.width}"
    return f"{config.data.name}-{Path(config.model.source).name}"


def _cells(config: Config) -> Iterator[tuple[str, int, int]]:
    """(arm, block length, seed) of everything this configuration measures; block length 1 for blockless arms."""
    pretrained = not isinstance(config.model, SmallModel)
    for seed in range(config.evaluation.seeds):
        for arm in config.evaluation.arms or [arm for arm in ARMS if not (pretrained and arm == "scratch")]:
            if arm in BLOCKLESS:
                yield arm, 1, seed
            else:
                for block_length in config.evaluation.block_lengths:
                    yield arm, block_length, seed


def arm_config(config: Config, arm: str, block_length: int, seed: int) -> Config:
    """The configuration of an arm, its base's training included (an arm from scratch has none)."""
    values = config.resolved()
    if arm == "ar_base":  # does not depend on how it is adapted
        values["diffusion"] = DiffusionPart(block_length=1, curriculum=None).model_dump(mode="json")
    values["diffusion"] = {**values["diffusion"], "block_length": block_length, **ARMS[arm]}
    curriculum = values["diffusion"]["curriculum"]
    if curriculum and curriculum["sizes"] and curriculum["sizes"][-1] != block_length:
        values["diffusion"]["curriculum"] = {**curriculum, "sizes": None}  # written for another block length
    first = config.pretraining.steps
    adaptation = (config.max_steps - first) * (2 if arm.endswith("@cost") else 1)
    if arm == "scratch":
        values["pretraining"] = {**values["pretraining"], "steps": 0}
        first = 0
    values["max_steps"] = max(first, 1) if arm == "ar_base" else first + adaptation
    return Config.model_validate({**values, "seed": seed, "progress": False, "report_to": "none"})


def _run_missing(config: Config, path: Path) -> None:
    """The bases first, one a seed; then the arms that start from them."""
    done = {(row.arm, row.setting, row.seed, row.config_hash) for row in read_rows(path)}
    missing = []
    for arm, block_length, seed in _cells(config):
        key = (arm, _row_setting(block_length), seed, arm_config(config, arm, block_length, seed).config_hash())
        if key not in done:
            missing.append((arm, block_length, seed))
    run, values = config.evaluation, config.resolved()
    needed = sorted({seed for arm, _, seed in missing if arm not in ("scratch", "ar_base")})
    bases = [
        Job(f"base of seed {seed}", _train_base, (values, seed)) for seed in needed if _base_is_missing(config, seed)
    ]
    measure_rows(bases, path, workers=run.workers, minutes=run.minutes)
    jobs = [Job(f"{cell[0]} block {cell[1]} seed {cell[2]}", _measure_arm, (values, *cell)) for cell in missing]
    measure_rows(jobs, path, workers=run.workers, minutes=run.minutes)


def _row_setting(block_length: int) -> str:
    return f"block {block_length}"


def base_folder(config: Config, seed: int) -> Path:
    """Where the autoregressive base of a seed is trained, once for all arms."""
    base = arm_config(config, "ar_base", 1, seed)
    return Path(f"{config.output_dir}-bases") / f"seed-{seed}-{base.config_hash()[:12]}"


def _base_is_missing(config: Config, seed: int) -> bool:
    trained = base_folder(config, seed) / "pipeline" / "manifest.json"
    return isinstance(config.model, SmallModel) and not trained.is_file()


def _train_base(values: Mapping[str, Any], seed: int) -> list[ResultRow]:
    """Trains a seed's base, once, before the arms that start from it; it has no rows of its own."""
    torch.set_num_threads(1)
    config = Config.model_validate(values)
    base = arm_config(config, "ar_base", 1, seed)
    train_pipeline(build(base), base, base_folder(config, seed), keep=True)
    return []


def _base(config: Config, seed: int) -> Path | None:
    """The pipeline of the seed's base; None for pretrained models."""
    if not isinstance(config.model, SmallModel):
        return None
    if _base_is_missing(config, seed):
        _train_base(config.resolved(), seed)
    return base_folder(config, seed) / "pipeline"


def train_arm(config: Config, arm: str, block_length: int, seed: int, folder: Path) -> BlockDiffusionPipeline:
    """Trains an arm from the base of its seed."""
    full = arm_config(config, arm, block_length, seed)
    base = None if arm == "scratch" else _base(config, seed)
    if arm == "ar_base" and base is not None:
        return _quiet(BlockDiffusionPipeline.from_pretrained(base))
    first = full.pretraining.steps
    changes: dict[str, Any] = {"max_steps": full.max_steps - first, "init_from": None if base is None else str(base)}
    changes["pretraining"] = {**full.resolved()["pretraining"], "steps": 0}
    if arm == "ar_base":  # a pretrained model as it is
        recipe = build(full)
        recipe.save_pipeline(folder / "pipeline", recipe.objective.networks())
        return _quiet(BlockDiffusionPipeline.from_pretrained(folder / "pipeline"))
    adaptation = Config.model_validate({**full.resolved(), **changes})
    return cast(BlockDiffusionPipeline, train_pipeline(build(adaptation), adaptation, folder))


def _quiet(pipe: BlockDiffusionPipeline) -> BlockDiffusionPipeline:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _measure_arm(values: Mapping[str, Any], arm: str, block_length: int, seed: int) -> list[ResultRow]:
    """Trains one arm and measures it; runs in a process of its own."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    config = Config.model_validate(values)
    with tempfile.TemporaryDirectory() as folder:
        pipe = train_arm(config, arm, block_length, seed, Path(folder))
    if isinstance(config.data, TasksData):
        numbers = list(_task_numbers(pipe, config, arm, block_length))
    else:
        numbers = list(_text_numbers(pipe, config, arm, block_length))
    seconds = round(time.perf_counter() - began, 1)
    name = arm_config(config, arm, block_length, seed).config_hash()
    return [
        ResultRow(METHOD, arm, _row_setting(block_length), name, seed, metric, value, n, seconds)
        for metric, value, n in numbers
    ]


# --- text: likelihood -------------------------------------------------------------------------------------------------


def likelihood(pipe: BlockDiffusionPipeline, config: Config, block_length: int) -> LikelihoodBound:
    """The bound and the next-token loss of a pipeline on held-out rows."""
    rule, shift = pipe.config["rule"], pipe.config["shift"]
    rows = held_out_rows(config, pipe.tokenizer, config.evaluation.rows)
    return nelbo(
        pipe.model,
        rows,
        mask_token_id=pipe.config["mask_token_id"],
        block_length=rows["tokens"].shape[1] if rule == "full" else block_length,
        shift=shift,
        clean_rule="block" if rule == "block" else "causal",
        noise_rule="full" if rule == "full" else "block",
        draws=config.evaluation.draws,
    )


def _text_numbers(
    pipe: BlockDiffusionPipeline, config: Config, arm: str, block_length: int
) -> Iterator[tuple[str, float, int]]:
    rule = pipe.config["rule"]
    sizes = sorted({4, block_length}) if rule == "causal" and not arm.startswith("ar_") else [block_length]
    for size in sizes:
        bound = likelihood(pipe, config, size)
        if rule == "full":  # its own bound, of the row as one block
            yield "nelbo/row", bound.nelbo.value, bound.nelbo.tokens
        elif size > 1:
            yield f"nelbo/{size}", bound.nelbo.value, bound.nelbo.tokens
            if size == block_length:
                yield "nelbo", bound.nelbo.value, bound.nelbo.tokens
    if pipe.config["shift"]:
        yield "ar_nll", bound.ar_nll.value, bound.ar_nll.tokens


# --- tasks: exact match -----------------------------------------------------------------------------------------------


def answer_problems(
    pipe: BlockDiffusionPipeline,
    problems: Sequence[tuple[str, str]],
    *,
    block_length: int,
    strategy: Any = "threshold",
    batch_size: int = 100,
    **options: Any,
) -> tuple[list[str], torch.Tensor]:
    """Answers to prompts, and the tokens per network call of each."""
    longest = max(len(answer) for _, answer in problems) + 1
    texts: list[str] = []
    per_call: list[torch.Tensor] = []
    for start in range(0, len(problems), batch_size):
        prompts = [prompt for prompt, _ in problems[start : start + batch_size]]
        new = -(-longest // block_length) * block_length
        text, _, _, rate = pipe(prompts, new, block_length, strategy=strategy, return_dict=False, **options)
        texts += text
        per_call.append(rate)
    return texts, torch.cat(per_call)


def _task_numbers(
    pipe: BlockDiffusionPipeline, config: Config, arm: str, block_length: int
) -> Iterator[tuple[str, float, int]]:
    data = cast(TasksData, config.data)
    held_out = VerifiableTasks(data.tasks, num_samples=config.evaluation.problems, seed=data.seed, split="test")
    problems = [held_out.problem(i) for i in range(len(held_out))]
    rule = pipe.config["rule"]
    if rule == "full":
        block_length = held_out.length - min(len(prompt) for prompt, _ in problems)  # the row, as in training
    ways: list[tuple[str, int, str, dict[str, Any]]] = [("ar", 1, "sequential", {})] if rule == "causal" else []
    if not arm.startswith("ar_"):
        ways += [(f"{t:g}", block_length, "threshold", {"threshold": t}) for t in config.evaluation.thresholds]
        ways.append(("sequential", block_length, "sequential", {}))
    for name, length, strategy, options in ways:
        texts, per_call = answer_problems(pipe, problems, block_length=length, strategy=strategy, **options)
        right = [check_answer(prompt, text) for (prompt, _), text in zip(problems, texts, strict=True)]
        yield f"exact_match/{name}", sum(right) / len(right), len(right)
        yield f"tokens_per_call/{name}", float(per_call.mean()), len(right)
        for i, task in enumerate(data.tasks[: len(right)]):
            of_task = right[i :: len(data.tasks)]
            yield f"exact_match/{name}/{task}", sum(of_task) / len(of_task), len(of_task)


def headline(pipe: BlockDiffusionPipeline, config: Config) -> tuple[str, float]:
    """The one number a model card states: its name with n and setting, and its value."""
    block_length = config.diffusion.block_length
    pipe.set_progress_bar_config(disable=True)
    if isinstance(config.data, TasksData):
        numbers = {name: (value, n) for name, value, n in _task_numbers(pipe, config, "full", block_length)}
        threshold = f"{config.evaluation.thresholds[0]:g}"
        value, n = numbers[f"exact_match/{threshold}"]
        calls, alone = numbers[f"tokens_per_call/{threshold}"][0], numbers["exact_match/ar"][0]
        return (
            f"exact match on {n} test problems, block {block_length}, threshold {threshold}, {calls:.2f} tokens per "
            f"call (the same weights token by token: {alone:.3f}), seed {config.seed}",
            value,
        )
    bound = likelihood(pipe, config, block_length)
    return (
        f"likelihood bound at block {block_length} in nats per token, n = {bound.nelbo.tokens} held-out tokens "
        f"(next-token loss {bound.ar_nll.value:.4f}), seed {config.seed}",
        bound.nelbo.value,
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def _block_means(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """One number for a model that is asked for any block length: the mean of its bounds at blocks 1, 4 and B."""
    found: dict[tuple[str, str, int], dict[str, ResultRow]] = {}
    for row in rows:
        found.setdefault((row.arm, row.setting, row.seed), {})[row.metric] = row
    parts = ("ar_nll", "nelbo/4", "nelbo")
    whole = [[metrics[name] for name in parts] for metrics in found.values() if metrics.keys() >= set(parts)]
    return [replace(three[0], metric="mean/1,4,B", value=sum(r.value for r in three) / 3) for three in whole]


def _tables(config: Config, rows: Sequence[ResultRow]) -> list[str]:
    rows = [*rows, *_block_means(rows)]
    tables = [f"{_setting(config)}: mean ± 95 % interval over seeds."]
    for block_length in config.evaluation.block_lengths:
        chosen = [row for row in rows if row.setting in (_row_setting(block_length), _row_setting(1))]
        equal = [arm for arm in ARMS if not arm.endswith("@cost") and any(row.arm == arm for row in chosen)]
        dear = [f"{arm}@cost" if f"{arm}@cost" in ARMS else arm for arm in equal]
        cost = [arm for arm in dear if any(row.arm == arm for row in chosen)]
        for title, arms in (("equal tokens", equal), ("equal forward cost", cost)):
            metrics = _metrics(config)
            tables.append(f"Block {block_length}, {title}:\n\n{summary_table(chosen, metrics, arms, digits=4)}")
    return tables


def _metrics(config: Config) -> list[str]:
    if not isinstance(config.data, TasksData):
        return ["nelbo", "nelbo/4", "ar_nll", "mean/1,4,B", "nelbo/row"]
    ways = [f"{t:g}" for t in config.evaluation.thresholds]
    return ["exact_match/ar", *(f"{m}/{w}" for w in (*ways, "sequential") for m in ("exact_match", "tokens_per_call"))]
