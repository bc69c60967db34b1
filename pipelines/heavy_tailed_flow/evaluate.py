"""The evidence: every arm at equal parameters, training budget and network calls, over several seeds, losing rows in.

Rows are appended to ``<results_dir>/heavy_tailed_flow/<data>.jsonl``; a row that is there is not measured again.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from genkit.data.mixtures import StableMixture
from genkit.data.returns import MarketReturns
from genkit.errors import ConfigError
from genkit.metrics.modes import mode_coverage
from genkit.metrics.results import ResultRow, append_rows, read_rows, rows_of_configuration, summary_table
from genkit.metrics.tails import RobustWhitening, compare_tails, hill
from genkit.pipelines.heavy_tailed_flow.backtest import BacktestRow, backtest, classical_forecasts, format_rows
from genkit.pipelines.heavy_tailed_flow.config import Config, ReturnsData, build
from genkit.pipelines.heavy_tailed_flow.pipeline import HeavyTailedFlowPipeline
from genkit.serialization import canonical_hash, load_tensors
from genkit.training.arms import Job, measure_rows, train_pipeline

__all__ = ["ARMS", "arm_config", "evaluate", "evaluate_samples", "headline", "sample_arm", "train_arm"]

METHOD = "heavy_tailed_flow"
#: Trained arms by data set: what each changes in the configuration.
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "returns": {
        "rank": {},
        "independent": {"coupling": "independent"},
        "gaussian_flow": {"coupling": "independent", "clock": {"law": "gaussian"}},
        "rank_raw": {"data": {"kind": "raw"}},
        "gaussian_flow_raw": {"data": {"kind": "raw"}, "coupling": "independent", "clock": {"law": "gaussian"}},
    },
    "mixture2d": {
        "rank": {},
        "rank_constant_scale": {"model": {"scale": "constant"}},
        "independent": {"coupling": "independent"},
        "gaussian_flow": {"coupling": "independent", "clock": {"law": "gaussian"}},
    },
}
#: Tail indices asked of the trained networks on the mixture.
TAIL_INDICES = (1.2, 1.5, 1.8)
TRUTH_LEVELS = (0.99, 0.999, 0.9999)


def evaluate(config: Config, *, table_only: bool = False, results_dir: str | Path = "docs/results") -> str:
    """Measures the rows that are missing (unless ``table_only``) and returns the tables as Markdown.

    Raises:
        ConfigError: there are no rows to make a table of.
    """
    path = Path(results_dir) / METHOD / f"{config.data.name}.jsonl"
    if not table_only:
        _run_missing(config, path)
    rows = rows_of_configuration(path, _hashes(config), _setting(config))
    return "\n\n".join(_tables(config, rows))


def evaluate_samples(path: str | Path) -> str:
    """Scores of a user's samples of the shipped returns: what ``genkit sample`` wrote, or a folder of it.

    Args:
        path: ``samples.safetensors`` with ``samples`` (n, 3), joint returns in units of their EWMA volatility.

    Returns:
        A Markdown table: backtests on the held-out days, then tails beside them.
    """
    file = Path(path)
    file = file / "samples.safetensors" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; expected what 'genkit sample zoo:returns-flow --out DIR' writes")
    tensors = load_tensors(file)
    samples, test = tensors.get("samples"), MarketReturns(split="test")
    if samples is None or samples.ndim != 2 or samples.shape[1] != len(test.names):
        got = {name: tuple(value.shape) for name, value in tensors.items()}
        raise ConfigError(f"{file} holds {got}; expected 'samples' (n, {len(test.names)}): {', '.join(test.names)}")
    samples = samples.to(torch.float64)
    table = format_rows({file.parent.name: backtest(samples, test)})
    if len(samples) < len(test):
        return table
    tails = [f"{name}: {value:.3f}" for name, value, _ in _tail_numbers(samples, test.sample.to(torch.float64))]
    return "\n".join([table, "", f"beside {len(test)} held-out days, equal n and k: " + ", ".join(tails)])


def arm_config(config: Config, arm: str, seed: int) -> Config:
    """The configuration of a trained arm: the given one with the arm's changes and the seed."""
    changes = ARMS[config.data.name][arm]
    values = config.resolved()
    for key, value in changes.items():
        merge = isinstance(value, Mapping) and key != "clock"
        values[key] = {**values[key], **value} if merge else value
    return Config.model_validate({**values, "seed": seed, "progress": False, "report_to": "none"})


def train_arm(config: Config, folder: Path) -> HeavyTailedFlowPipeline:
    """Trains a configuration from scratch and returns its pipeline (with averaged weights)."""
    return cast(HeavyTailedFlowPipeline, train_pipeline(build(config), config, folder))


def sample_arm(pipe: HeavyTailedFlowPipeline, config: Config, seed: int, **options: Any) -> Tensor:
    """Samples at the evaluation's number of network calls, float64 (n, d)."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    run = config.evaluation
    output = pipe(run.num_samples, run.num_inference_steps, solver=run.solver, generator=generator, **options)
    return torch.as_tensor(output[0]).to(torch.float64)


def _data_hash(config: Config) -> str:
    """What the rows of baselines without a seed depend on."""
    return canonical_hash(config.data.model_dump(mode="json"))


def _hashes(config: Config) -> set[str]:
    """Of the rows that belong to this configuration: those of an older one are not averaged in."""
    seeds = range(config.evaluation.seeds)
    return {arm_config(config, arm, seed).config_hash() for arm in ARMS[config.data.name] for seed in seeds} | {
        _data_hash(config)
    }


def headline(pipe: HeavyTailedFlowPipeline, config: Config) -> tuple[str, float]:
    """The one number a model card states: its name with n and setting, and its value."""
    samples = sample_arm(pipe, config, config.seed)
    if isinstance(config.data, ReturnsData):
        test = config.data.load("test")
        rows = backtest(samples, test, levels=(0.99,))
        name = f"mean FZ0 score of 99 % VaR and ES, {len(test)} held-out days, seed {config.seed}"
        return name, _mean(row.fz0_score for row in rows)
    truth = float(config.data.load().radius_quantile(0.999))
    name = f"99.9 % quantile of |x| over the truth, n = {len(samples)}, seed {config.seed}"
    return name, float(_quantile(samples.norm(dim=1), 0.999)) / truth


def _setting(config: Config) -> str:
    run = config.evaluation
    return f"{run.solver}-{run.num_inference_steps}, n={run.num_samples}"


def _run_missing(config: Config, path: Path) -> None:
    """Trains and measures what is missing, in processes of one thread each; rows are written as they come."""
    done = {(row.arm, row.seed, row.config_hash, row.setting) for row in read_rows(path)}
    setting = _setting(config)
    jobs = []
    for seed in range(config.evaluation.seeds):
        for arm in ARMS[config.data.name]:
            if (arm, seed, arm_config(config, arm, seed).config_hash(), setting) not in done:
                jobs.append(Job(f"{arm} seed {seed}", _measure_arm, (config.resolved(), arm, seed)))
    if isinstance(config.data, ReturnsData) and ("historical_simulation", 0, _data_hash(config), setting) not in done:
        append_rows(path, _classical_rows(config.data, setting, _data_hash(config)))
    measure_rows(jobs, path, workers=config.evaluation.workers, minutes=config.evaluation.minutes)


def _measure_arm(values: Mapping[str, Any], arm: str, seed: int) -> list[ResultRow]:
    """Trains one arm and measures it; runs in a process of its own."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    base = Config.model_validate(values)
    config = arm_config(base, arm, seed)
    with tempfile.TemporaryDirectory() as folder:
        pipe = train_arm(config, Path(folder) / "run")
    if isinstance(config.data, ReturnsData):
        numbers = list(_returns_metrics(pipe, config, config.data.load("test"), seed))
    else:
        numbers = list(_mixture_metrics(pipe, config, config.data.load(), seed))
    seconds = time.perf_counter() - began
    return [
        ResultRow(METHOD, arm, _setting(base), config.config_hash(), seed, metric, value, n, round(seconds, 1))
        for metric, value, n in numbers
    ]


# ---- market returns -------------------------------------------------------------------------------------------------


def _returns_metrics(
    pipe: HeavyTailedFlowPipeline, config: Config, test: MarketReturns, seed: int
) -> Iterator[tuple[str, float, int]]:
    samples = sample_arm(pipe, config, seed)
    yield from _backtest_numbers(backtest(samples, test))
    yield from _tail_numbers(samples, test.sample.to(torch.float64))


def _tail_numbers(samples: Tensor, held_out: Tensor) -> Iterator[tuple[str, float, int]]:
    """Tails beside the held-out days at equal n and k: averages over many sets of as many samples as there are days."""
    whitening = RobustWhitening.fit(held_out)
    radius, reference = whitening.radius(samples), whitening.radius(held_out)
    n, sets = len(reference), min(len(radius) // len(reference), 50)
    compared = [compare_tails(radius[i * n : (i + 1) * n], reference, fraction=0.05) for i in range(sets)]
    yield "radius_hill_ratio", _mean(c.hill_ratio for c in compared), n
    yield "radius_tail_ks", _mean(c.tail_ks.distance for c in compared), n
    for level in (0.95, 0.99):
        yield f"radius_quantile_ratio/{level}", _mean(c.quantile_ratios[level] for c in compared), n


def _backtest_numbers(rows: Sequence[BacktestRow]) -> Iterator[tuple[str, float, int]]:
    for row in rows:
        for name, value in row.numbers().items():
            if name != "n":
                yield f"{name}/{row.portfolio}/{row.level}", value, row.n
    for level in sorted({row.level for row in rows}):
        of_level = [row for row in rows if row.level == level]
        n = of_level[0].n
        yield f"quantile_score/{level}", _mean(row.quantile_score for row in of_level), n
        yield f"fz0_score/{level}", _mean(row.fz0_score for row in of_level), n
        yield f"kupiec_rejections/{level}", float(sum(row.kupiec_p < 0.05 for row in of_level)), n
        yield f"christoffersen_rejections/{level}", float(sum(row.conditional_coverage_p < 0.05 for row in of_level)), n
        yield f"violation_ratio/{level}", _mean(row.violations / row.expected_violations for row in of_level), n


def _classical_rows(data: ReturnsData, setting: str, data_hash: str) -> list[ResultRow]:
    """The baselines that have no seed: one row each, fitted to the same training days."""
    rows = []
    began = time.perf_counter()
    for name, results in classical_forecasts(data.load("train"), data.load("test")).items():
        numbers = list(_backtest_numbers(results))
        seconds = round(time.perf_counter() - began, 1)
        rows += [ResultRow(METHOD, name, setting, data_hash, 0, m, v, n, seconds) for m, v, n in numbers]
    return rows


# ---- the mixture ----------------------------------------------------------------------------------------------------


def _mixture_metrics(
    pipe: HeavyTailedFlowPipeline, config: Config, data: StableMixture, seed: int
) -> Iterator[tuple[str, float, int]]:
    samples = sample_arm(pipe, config, seed)
    radius, n = samples.norm(dim=1), len(samples)
    for level in TRUTH_LEVELS:
        yield f"quantile_ratio/{level}", float(_quantile(radius, level)) / float(data.radius_quantile(level)), n
    modes = mode_coverage(samples, data.centres, data.weights, radius=5.0 * data.noise_scale)
    yield "mode_total_variation", modes.total_variation, n
    yield "in_mode_mass", modes.in_mode_mass, n
    yield "captured_modes", float(modes.captured), n
    reference, _ = data.draw(n, start=len(data))
    yield (
        "hill_ratio",
        hill(radius, fraction=0.005).tail_index / hill(reference.norm(dim=1), fraction=0.005).tail_index,
        n,
    )
    if config.clock["law"] == "gaussian":
        return
    for tail_index in TAIL_INDICES:
        knob = _quietly(pipe, config, seed, tail_index).norm(dim=1)
        yield f"knob_hill/{tail_index}", hill(knob, fraction=0.005).tail_index, n
        for level in (0.5, 0.9):
            yield f"knob_shift_q{level}/{tail_index}", float(_quantile(knob, level) / _quantile(radius, level)) - 1.0, n


def _quietly(pipe: HeavyTailedFlowPipeline, config: Config, seed: int, tail_index: float) -> Tensor:
    """Samples with the tail knob; the independent arm's warning that it has none is expected here."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sample_arm(pipe, config, seed, tail_index=tail_index)


def _quantile(x: Tensor, level: float) -> Tensor:
    """The order statistic with floor(n (1 − level)) values above it."""
    return x.topk(int(len(x) * (1.0 - level) + 1e-9) + 1).values[-1]


def _mean(values: Any) -> float:
    collected = list(values)
    return sum(collected) / len(collected)


# ---- tables ---------------------------------------------------------------------------------------------------------


def _tables(config: Config, rows: Sequence[ResultRow]) -> list[str]:
    arms = list(ARMS[config.data.name])
    title = f"{config.data.name}: {_setting(config)}; mean ± 95 % interval over seeds. Toy scale."
    if config.data.name == "mixture2d":
        truth = [f"quantile_ratio/{level}" for level in TRUTH_LEVELS]
        knob = [f"knob_hill/{a}" for a in TAIL_INDICES] + [
            f"knob_shift_q{q}/{a}" for q in (0.5, 0.9) for a in (1.2, 1.8)
        ]
        general = ["hill_ratio", "mode_total_variation", "in_mode_mass", "captured_modes"]
        return [title, summary_table(rows, truth + general, arms), summary_table(rows, knob, arms[:3])]
    arms += sorted({row.arm for row in rows} - set(arms))
    tables = [title]
    for level in (0.975, 0.99):
        names = ("quantile_score", "fz0_score", "violation_ratio", "kupiec_rejections", "christoffersen_rejections")
        tables.append(summary_table(rows, [f"{name}/{level}" for name in names], arms, digits=4))
    tails = ["radius_hill_ratio", "radius_tail_ks", "radius_quantile_ratio/0.95", "radius_quantile_ratio/0.99"]
    tables.append(summary_table(rows, tails, list(ARMS["returns"])))
    return tables
