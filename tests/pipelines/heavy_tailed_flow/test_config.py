"""Configurations, and the whole path from a configuration to a table."""

from pathlib import Path

import pytest
import torch

from genkit.errors import ConfigError
from genkit.metrics.results import ResultRow, append_rows, read_rows
from genkit.pipelines.heavy_tailed_flow.config import Config, build
from genkit.pipelines.heavy_tailed_flow.evaluate import ARMS, arm_config, evaluate
from genkit.training import load_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "heavy_tailed_flow"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.widht=8", "width"),
        ("clock.nuu=3.0", "nu"),
        ("clock.nu=-1.0", "nu"),
        ("clock.law=studentt", "student_t"),
        ("data.holdout=1.5", "holdout"),
        ("data.path=missing.csv", "missing.csv"),
        ("coupling=ot", "coupling"),
        ("evaluation.solver=heunn", "Did you mean 'heun'"),
        ("model.class_conditional=true", "no labels"),
        ("batch_size=100000", "100000"),
    ],
)
def test_mistakes_are_named(override, message, tmp_path):
    from genkit.training.trainer import Trainer

    with pytest.raises(ConfigError, match=message):
        config = load_config(CONFIGS / "returns.yaml", [override, f"output_dir={tmp_path}/run"], Config)
        recipe = build(config)
        next(iter(Trainer(recipe.objective, config, recipe.data).train()))


def test_weights_depend_on_the_seed_alone():
    first, again, other = (build(load_config(CONFIGS / "returns.yaml", [f"seed={s}"], Config)) for s in (0, 0, 1))
    weights = [r.objective.denoiser.network.input.weight for r in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_every_arm_is_a_valid_configuration_of_equal_size():
    for data in ("returns", "mixture2d"):
        config = load_config(CONFIGS / f"{data}.yaml", [], Config)
        sizes = {
            sum(p.numel() for p in build(arm_config(config, arm, 0)).objective.denoiser.parameters())
            for arm in ARMS[data]
        }
        assert len(sizes) == 1
        assert len({arm_config(config, arm, 0).config_hash() for arm in ARMS[data]}) == len(ARMS[data])


def test_the_table_averages_only_rows_of_this_configuration(tmp_path):
    """A row of the same arm and setting, but of a configuration since changed, must not enter the mean."""
    config = load_config(CONFIGS / "mixture2d.yaml", [], Config)
    run, path = config.evaluation, tmp_path / "heavy_tailed_flow" / "mixture2d.jsonl"
    setting = f"{run.solver}-{run.num_inference_steps}, n={run.num_samples}"
    rows = [
        ResultRow("heavy_tailed_flow", "rank", setting, config_hash, 0, "hill_ratio", value, 10, 1.0)
        for config_hash, value in ((arm_config(config, "rank", 0).config_hash(), 1.5), ("of another", 9.5))
    ]
    append_rows(path, rows)
    table = evaluate(config, table_only=True, results_dir=tmp_path)
    assert "| rank | 1 | – | – | – | 1.500 |" in table and "5.5" not in table


@pytest.mark.slow
def test_evaluation_writes_each_row_once_and_the_table_from_them(tmp_path):
    tiny = ["max_steps=20", "evaluation.seeds=2", "evaluation.num_samples=2000", "evaluation.num_inference_steps=2"]
    config = load_config(CONFIGS / "returns.yaml", [*tiny, "warmup_steps=0"], Config)
    table = evaluate(config, results_dir=tmp_path)
    path = tmp_path / "heavy_tailed_flow" / "returns.jsonl"
    rows = read_rows(path)
    assert {(r.arm, r.seed) for r in rows if r.arm in ARMS["returns"]} == {
        (a, s) for a in ARMS["returns"] for s in (0, 1)
    }
    assert {"pot_gpd", "multivariate_t", "historical_simulation"} <= {r.arm for r in rows}
    before = path.read_bytes()
    assert evaluate(config, results_dir=tmp_path) == table and path.read_bytes() == before
    assert "| pot_gpd | 1 |" in table and "| rank | 2 |" in table


def test_the_card_speaks_of_the_data_that_were_used(tmp_path):
    """A user's own file is named, and the shipped table is not."""
    import csv
    import datetime

    generator = torch.Generator().manual_seed(0)
    prices = 100 * torch.randn(400, 2, generator=generator).mul(0.01).cumsum(0).exp()
    with (tmp_path / "mine.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["date", "aa", "bb"])
        start = datetime.date(2015, 1, 1)
        rows.writerows([start + datetime.timedelta(days=i), *map(float, p)] for i, p in enumerate(prices))
    settings = [f"data.path={tmp_path}/mine.csv", "data.holdout=0.3", f"output_dir={tmp_path}/run"]
    config = load_config(CONFIGS / "returns.yaml", settings, Config)
    recipe = build(config)
    recipe.save_pipeline(tmp_path / "pipe", {"denoiser": recipe.objective.denoiser})
    text = (tmp_path / "pipe" / "README.md").read_text()
    assert "first 70 % of the days of the user's own file mine.csv" in text and "of 2 assets" in text
    assert "Nasdaq" not in text and str(tmp_path) not in text


def test_a_table_of_nothing_says_where_it_looked(tmp_path):
    config = load_config(CONFIGS / "returns.yaml", [], Config)
    with pytest.raises(ConfigError, match="holds no rows of this configuration"):
        evaluate(config, table_only=True, results_dir=tmp_path)


def test_the_committed_rows_are_those_of_the_committed_configurations():
    """The tables in the README are made from rows whose configuration hash is the committed file's."""
    results = Path(__file__).resolve().parents[3] / "docs" / "results"
    for data in ("returns", "mixture2d"):
        config = load_config(CONFIGS / f"{data}.yaml", [], Config)
        table = evaluate(config, table_only=True, results_dir=results)
        assert all(f"| {arm} | 5 |" in table for arm in ARMS[data])


def test_a_file_of_samples_is_scored(tmp_path):
    """Resampled training days get the scores of filtered historical simulation on those days."""
    from genkit.data import MarketReturns
    from genkit.pipelines.heavy_tailed_flow.backtest import backtest
    from genkit.pipelines.heavy_tailed_flow.evaluate import evaluate_samples
    from genkit.serialization import save_tensors

    samples = MarketReturns(split="train").sample
    save_tensors(tmp_path / "samples.safetensors", {"samples": samples})
    text = evaluate_samples(tmp_path)
    row = backtest(samples.double(), MarketReturns(split="test"))[3]
    assert f"| equal_weights | 0.975 | {row.violations} " in text and f"| {row.fz0_score:.4f} |" in text
    assert "radius_hill_ratio: 1.408" in text  # the days in their order: four blocks of 982
    save_tensors(tmp_path / "other.safetensors", {"samples": samples[:, :2]})
    for wrong, message in (("other.safetensors", r"expected 'samples' \(n, 3\)"), ("none.safetensors", "no such file")):
        with pytest.raises(ConfigError, match=message):
            evaluate_samples(tmp_path / wrong)
