"""The evidence: what each arm trains, from which base, what is measured once and only once, and the tables."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import genkit
from genkit.errors import ConfigError, GenkitError
from genkit.metrics.results import ResultRow, append_rows, read_rows
from genkit.pipelines.block_diffusion import BlockDiffusionPipeline
from genkit.pipelines.block_diffusion import evaluate as module
from genkit.pipelines.block_diffusion.config import Config, build_model, held_out_rows
from genkit.pipelines.block_diffusion.evaluate import ARMS, _cells, arm_config, evaluate, likelihood
from genkit.pipelines.block_diffusion.likelihood import ar_nll, nelbo
from genkit.pipelines.block_diffusion.tokens import character_tokenizer
from genkit.training import load_config
from genkit.training.arms import Job, measure_rows

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs" / "block_diffusion").glob("*.yaml"))
committed = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def make(folder, evaluation=None, **changes):
    """Copying and reversing: 3 steps of a base, 3 of an arm."""
    values = {
        "output_dir": str(folder),
        "max_steps": 6,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "progress": False,
        "device": "cpu",
        "data": {"name": "tasks", "tasks": ["copy", "reverse"], "num_samples": 64},
        "model": {"name": "small", "layers": 2, "width": 32, "heads": 2, "max_length": 64},
        "pretraining": {"steps": 3},
        "diffusion": {"block_length": 4},
    }
    chosen = {"seeds": 2, "block_lengths": [4], "problems": 4, "workers": 1, "arms": ["ar_base", "full", "annealing"]}
    return Config.model_validate(values | {"evaluation": chosen | (evaluation or {})} | changes)


# --- what the arms are ------------------------------------------------------------------------------------------------


@committed
def test_every_cell_of_the_committed_configurations_has_a_hash_of_its_own(path):
    config = load_config(path, [], Config)
    cells = list(_cells(config))
    assert len(cells) == len(set(cells)) > 0
    hashes = Counter(arm_config(config, *cell).config_hash() for cell in cells)
    assert max(hashes.values()) == 1
    everything = config.model.name == "small" and config.evaluation.arms is None
    assert ("scratch" in {arm for arm, _, _ in cells}) is everything
    module._check(config)


@committed
def test_an_arm_changes_what_its_name_says_and_nothing_else(path):
    config = load_config(path, [], Config)
    for arm, block_length, seed in _cells(config):
        got, own = arm_config(config, arm, block_length, seed), config.resolved()
        assert got.seed == seed and got.diffusion.block_length == block_length
        values = got.resolved()
        free = {"seed", "progress", "report_to", "max_steps", "diffusion"} | (
            {"pretraining"} if arm == "scratch" else set()
        )
        assert {key: value for key, value in values.items() if key not in free} == {
            key: value for key, value in own.items() if key not in free
        }
        if arm != "ar_base":
            expected = own["diffusion"] | {"block_length": block_length} | ARMS[arm]
            assert values["diffusion"] == expected


@committed
def test_steps_of_an_arm(path):
    """Equal tokens by the name alone; twice the adaptation at equal cost; a base has none, and scratch nothing else."""
    config = load_config(path, [], Config)
    first, whole = config.pretraining.steps, config.max_steps
    for arm in ARMS:
        if arm == "scratch" and config.model.name != "small":
            continue
        got = arm_config(config, arm, 4, 0)
        steps = (got.pretraining.steps, got.max_steps - got.pretraining.steps)
        if arm == "ar_base":
            assert steps == (first, 0 if first else 1)  # 1: a pretrained model as it is; no step is taken
        elif arm == "scratch":
            assert steps == (0, whole - first)
        else:
            assert steps == (first, (whole - first) * (2 if arm.endswith("@cost") else 1))


def test_a_base_does_not_depend_on_how_it_is_adapted(tmp_path):
    one, other = make(tmp_path), make(tmp_path, diffusion={"block_length": 8, "ar_weight": 0.1}, max_steps=9)
    assert module.base_folder(one, 1) == module.base_folder(other, 1) != module.base_folder(one, 0)
    assert module.base_folder(one, 1) != module.base_folder(make(tmp_path, learning_rate=2e-2), 1)


def test_what_cannot_be_compared_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "measure_rows", None)
    text = {"name": "text", "files": ["x.txt"]}
    pretrained = {"model": {"name": "pretrained", "source": "smollm2"}, "data": text}
    for config, message in (
        (make(tmp_path, {"arms": ["full", "fulll"]}), r"names \['fulll'\]; expected some of ar_base, full"),
        (make(tmp_path, {"arms": ["scratch"]}, **pretrained), "names scratch, but a pretrained model has no fresh"),
        (make(tmp_path, pretraining={"steps": 0}), r"give pretraining\.steps"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate(config, results_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"tasks-2x32\.jsonl holds no rows of this configuration"):
        evaluate(make(tmp_path), table_only=True, results_dir=tmp_path)
    assert not list(tmp_path.rglob("*.jsonl"))


# --- one run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A small evaluation: its configuration, folder of results and table."""
    folder = tmp_path_factory.mktemp("evaluation")
    config = make(folder / "out")
    for seed in (0, 1):  # in this process, which saves starting another
        module._train_base(config.resolved(), seed)
    return config, folder / "results", evaluate(config, results_dir=folder / "results")


def rows_of(measured):
    return read_rows(measured[1] / "block_diffusion" / "tasks-2x32.jsonl")


def refuse(*arguments, **options):
    raise AssertionError("trained or measured again")


def test_every_cell_is_measured_once(measured):
    rows, config = rows_of(measured), measured[0]
    assert {(r.arm, r.setting, r.seed) for r in rows} == {
        (arm, setting, seed)
        for arm, setting in (("ar_base", "block 1"), ("full", "block 4"), ("annealing", "block 1"))
        for seed in (0, 1)
    }
    assert len({(r.config_hash, r.metric) for r in rows}) == len(rows)
    ways = {"ar_base": {"ar"}, "full": {"ar", "0.9", "sequential"}, "annealing": {"0.9", "sequential"}}
    for row in rows:
        assert row.config_hash == arm_config(config, row.arm, int(row.setting[6:]), row.seed).config_hash()
        assert row.metric.split("/")[1] in ways[row.arm]
    for arm, names in ways.items():
        found = {r.metric: r for r in rows if r.arm == arm and r.seed == 0}
        assert len(found) == 4 * len(names)
        for way in names:
            parts = [found[f"exact_match/{way}/{task}"] for task in ("copy", "reverse")]
            assert [p.n for p in parts] == [2, 2] and found[f"exact_match/{way}"].n == 4
            assert found[f"exact_match/{way}"].value == pytest.approx(sum(p.value for p in parts) / 2)
            calls = found[f"tokens_per_call/{way}"].value
            assert calls == 1.0 if way == "ar" else 0.0 < calls <= (1.0 if way == "sequential" else 4.0)


def test_the_table_is_made_of_the_rows_without_measuring(measured, monkeypatch):
    config, results, table = measured
    before = rows_of(measured)
    monkeypatch.setattr(module, "train_pipeline", refuse)
    monkeypatch.setattr(module, "measure_rows", refuse)
    assert evaluate(config, table_only=True, results_dir=results) == table
    assert "Block 4, equal tokens" in table and "| full | 2 |" in table
    value = sum(r.value for r in before if (r.arm, r.metric) == ("full", "tokens_per_call/0.9")) / 2
    (line,) = {line for line in table.splitlines() if line.startswith("| full |")}
    assert f"{value:.4f} ±" in line
    with pytest.raises(ConfigError, match="holds no rows of this configuration"):  # another training, no row of it
        evaluate(make(config.output_dir, learning_rate=2e-2), table_only=True, results_dir=results)


def test_a_second_evaluation_measures_nothing_and_an_interrupted_one_the_rest(measured, tmp_path, monkeypatch):
    config, results, table = measured
    jobs = []
    monkeypatch.setattr(module, "train_pipeline", refuse)
    monkeypatch.setattr(module, "measure_rows", lambda found, path, **options: jobs.append([j.name for j in found]))
    assert evaluate(config, results_dir=results) == table
    assert jobs == [[], []]
    path = tmp_path / "block_diffusion" / "tasks-2x32.jsonl"
    append_rows(path, [r for r in rows_of(measured) if (r.arm, r.seed) != ("full", 1)])
    evaluate(config, results_dir=tmp_path)
    assert jobs[2:] == [[], ["full block 4 seed 1"]]
    evaluate(make(config.output_dir, {"seeds": 3, "arms": ["full", "scratch"]}), results_dir=results)
    assert jobs[4] == ["base of seed 2"]
    assert jobs[5] == [f"scratch block 4 seed {s}" for s in (0, 1)] + [
        f"{a} block 4 seed 2" for a in ("full", "scratch")
    ]


def test_arms_start_from_the_base_of_their_seed_and_scratch_from_none(measured, tmp_path, monkeypatch):
    config, found = measured[0], {}

    def seen(recipe, adaptation, folder, keep=False):
        found[arm] = (recipe.objective.scorer.model.state_dict(), adaptation)

    monkeypatch.setattr(module, "train_pipeline", seen)
    bases = [genkit.load(module.base_folder(config, seed) / "pipeline").model.state_dict() for seed in (0, 1)]
    for arm in ("full", "annealing@cost", "scratch"):
        module.train_arm(config, arm, 4, 1, tmp_path)
    fresh = build_model(arm_config(config, "scratch", 4, 1))[0].state_dict()
    for arm, start in (("full", bases[1]), ("annealing@cost", bases[1]), ("scratch", fresh)):
        weights, adaptation = found[arm]
        assert all(torch.equal(weights[name], value) for name, value in start.items())
        assert (adaptation.init_from is None) is (arm == "scratch")
        assert (adaptation.pretraining.steps, adaptation.max_steps) == (0, 6 if arm == "annealing@cost" else 3)
    name = "model.embed_tokens.weight"
    assert not torch.equal(bases[0][name], bases[1][name]) and not torch.equal(bases[1][name], fresh[name])
    assert found["annealing@cost"][1].diffusion.recipe == "annealing"


# --- likelihood, and pretrained models --------------------------------------------------------------------------------


@pytest.fixture
def answers(tmp_path, tiny):
    """A configuration of prompts and responses of many lengths, and a pretrained model's folder."""
    tokenizer = character_tokenizer("0123456789+=", 64)
    tiny(vocab=len(tokenizer), dtype=torch.float32).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    lines = [json.dumps({"prompt": f"{i}+{10**k}=", "response": str(i + 10**k)}) for i in range(9) for k in range(5)]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return make(
        tmp_path / "out",
        {"seeds": 1, "arms": None, "rows": 8},
        data={"name": "responses", "path": str(tmp_path / "answers.jsonl"), "length": 16, "holdout": 0.3},
        model={"name": "pretrained", "source": str(tmp_path / "lm")},
        pretraining={"steps": 0},
        max_steps=2,
    )


def test_the_bound_of_responses_has_its_blocks_where_each_response_begins(answers):
    model, tokenizer, mask = build_model(answers)
    rows = held_out_rows(answers, tokenizer, 8)
    starts = rows["response_start"]
    assert len({int(s) % 4 for s in starts}) > 1
    pipe = BlockDiffusionPipeline(model, tokenizer, mask_token_id=mask, block_length=4)
    got = likelihood(pipe, answers, 4)
    options = {"mask_token_id": mask, "block_length": 4}
    assert got == nelbo(model, rows, offset=starts, **options)
    elsewhere = nelbo(model, rows, offset=0, **options)
    assert got.nelbo.value != pytest.approx(elsewhere.nelbo.value, rel=1e-3)
    assert got.ar_nll.value == pytest.approx(elsewhere.ar_nll.value)
    assert got.nelbo.tokens == int(rows["loss_mask"].sum())


def test_a_pretrained_model_is_measured_as_it_is_and_adapted(answers):
    model, tokenizer, mask = build_model(answers)
    rows = module._measure_arm(answers.resolved(), "ar_base", 1, 0)
    expected = ar_nll(model, held_out_rows(answers, tokenizer, 8), mask_token_id=mask)
    assert [(r.arm, r.setting, r.metric, r.n) for r in rows] == [("ar_base", "block 1", "ar_nll", expected.tokens)]
    assert rows[0].value == pytest.approx(expected.value, rel=1e-6)
    adapted = {r.metric: r.value for r in module._measure_arm(answers.resolved(), "full", 8, 0)}
    assert adapted.keys() == {"nelbo/4", "nelbo/8", "nelbo", "ar_nll"}
    assert adapted["nelbo"] == adapted["nelbo/8"] != adapted["nelbo/4"]
    assert adapted["ar_nll"] != pytest.approx(expected.value, rel=1e-6)
    annealed = module._measure_arm(answers.resolved(), "annealing", 1, 0)
    assert [r.metric for r in annealed] == ["nelbo/row", "ar_nll"]


def test_the_mean_over_block_lengths_and_the_two_comparisons(tmp_path):
    config = load_config(CONFIGS[[p.stem for p in CONFIGS].index("kjv")], [], Config)

    def rows(arm, setting, seed, **values):
        return [
            ResultRow("block_diffusion", arm, setting, "h", seed, m.replace("_4", "/4"), v, 9, 1.0)
            for m, v in values.items()
        ]

    found = rows("full", "block 8", 0, ar_nll=1.0, nelbo_4=2.0, nelbo=6.0)
    found += rows("full", "block 8", 1, nelbo=9.0)  # not whole: no mean
    found += rows("full", "block 32", 0, ar_nll=4.0, nelbo_4=4.0, nelbo=7.0)
    means = [(r.setting, r.seed, r.metric, r.value) for r in module._block_means(found)]
    assert means == [("block 8", 0, "mean/1,4,B", 3.0), ("block 32", 0, "mean/1,4,B", 5.0)]
    found += rows("ar_continued", "block 1", 0, ar_nll=0.5) + rows("ar_continued@cost", "block 1", 0, ar_nll=0.25)
    _, tokens, cost, *rest = module._tables(config, found)
    assert len(rest) == 2
    assert "| full | 2 | 7.5000 ±" in tokens and "3.0000" in tokens and "5.0000" not in tokens
    assert "| ar_continued | 1 | – | – | 0.5000 |" in tokens and "@cost" not in tokens
    assert "| ar_continued@cost | 1 | – | – | 0.2500 |" in cost and "| full | 2 |" in cost


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_job_that_fails_is_named_and_the_rows_of_the_others_are_kept(tmp_path, capsys):
    """The jobs read files of rows, one of which is damaged: functions that a new process can import."""
    row = ResultRow("block_diffusion", "full", "block 4", "hash", 0, "nelbo", 1.5, 9, 1.0, {})
    for name, text in (
        ("good", json.dumps(asdict(row))),
        ("bad", "{"),
        ("last", json.dumps(asdict(row) | {"seed": 1})),
    ):
        (tmp_path / name).write_text(text + "\n")
    jobs = [Job(f"the {name} one", read_rows, (str(tmp_path / name),)) for name in ("good", "bad", "last")]
    out = tmp_path / "rows" / "out.jsonl"
    with pytest.raises(GenkitError, match=r"1 of 3 rows could not be measured.*\n  the bad one: ConfigError: .*line 1"):
        measure_rows(jobs, out, workers=1, minutes=20.0)
    assert sorted(r.seed for r in read_rows(out)) == [0, 1]
    told = capsys.readouterr().out
    assert "3 rows to train and measure, about 1.0 core-hours" in told
    assert "failed the bad one" in told and "measured the last one" in told
    measure_rows([], out, workers=1, minutes=1.0)
    assert len(read_rows(out)) == 2
