"""Configurations, and the whole path from a configuration to a table."""

import json
from pathlib import Path

import pytest
import torch

import genkit
from genkit.errors import ConfigError
from genkit.metrics.feature_network import FeaturePipeline
from genkit.models.features import FeatureNetwork
from genkit.pipelines.rmmd.arms import ARMS, make_arm, unit_strength
from genkit.pipelines.rmmd.baselines import DiffInstructObjective, DMD2Objective
from genkit.pipelines.rmmd.config import Config, build
from genkit.pipelines.rmmd.evaluate import evaluate
from genkit.pipelines.rmmd.forecast_evaluate import FORECAST_ARMS
from genkit.pipelines.rmmd.orders import ORDERS
from genkit.pipelines.rmmd.parts import RewardPart, RewardTerm, build_reward
from genkit.rewards import Symmetry, WeightedSum
from genkit.training import Trainer, load_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "rmmd"
TINY = [
    "model.width=16",
    "model.blocks=1",
    "teacher.steps=4",
    "distil.steps=6",
    "reward.steps=4",
    "max_steps=14",
    "save_steps=3",
    "batch_size=16",
]


def tiny(tmp_path, *changes, name="run"):
    return load_config(CONFIGS / "digits.yaml", [*TINY, f"output_dir={tmp_path}/{name}", *changes], Config)


def trained(config, stop=None):
    recipe = build(config)
    logs = []
    for entry in Trainer(recipe.objective, config, recipe.data, recipe.save_pipeline).train():
        logs.append(entry)
        if entry.step == stop:
            break
    return logs


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.widht=8", "width"),
        ("eta=0.0", "eta"),
        ("teacher.steps=0", "where the teacher comes from"),
        ("teacher.source=somewhere", "one of the two"),
        ("init_from=somewhere", "where the teacher comes from"),
        ("distil.weight=mdm", "distil.weight"),
        ("distil.objective=dmd3", "distil.objective"),
        ("reward.terms=[{name: symetry}]", "symetry"),
        ("reward.terms=[{name: class_entropy}]", "needs network"),
        ("reward.terms=[{name: symmetry}, {name: symmetry}]", "twice"),
        ("reward.terms=[{name: crps}]", "sample has shape"),
        ("reward.terms=[{name: grey_scale}]", "one channel"),
        ("data={name: weather}", "sample|images"),
        ("scheduler.prediction_type=epsilon", "epsilon"),
        ("classifier={name: x}", "trained alone"),
    ],
)
def test_mistakes_are_named(override, message, tmp_path):
    with pytest.raises((ConfigError, ValueError), match=message):
        build(tiny(tmp_path, override))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_configuration_loads(path):
    config = load_config(path, [], Config)
    steps = config.teacher.steps + config.distil.steps + (config.reward.steps if config.reward else 0)
    assert steps == config.max_steps or config.classifier is not None


def test_phases_follow_one_another_and_each_trains_what_it_says(tmp_path):
    """The teacher's weights are those of its phase's end from then on, and student and auxiliary start from them."""
    config = tiny(tmp_path)
    recipe = build(config)
    frozen, logs = None, []
    for entry in Trainer(recipe.objective, config, recipe.data, recipe.save_pipeline).train():
        logs.append((entry.phase, entry.turn))
        teacher = recipe.objective.teacher.denoiser.mlp.input.weight
        if entry.step == 4:
            frozen = teacher.detach().clone()
    assert logs[:4] == [("teacher", "teacher")] * 4
    assert logs[4:10] == [("distil", "auxiliary"), ("distil", "student")] * 3
    assert logs[10:] == [("reward", "auxiliary"), ("reward", "student")] * 2
    assert torch.equal(frozen, teacher)
    pipe = genkit.load(tmp_path / "run" / "pipeline")
    assert torch.equal(pipe.teacher.mlp.input.weight, frozen)
    moved = (pipe.student.mlp.input.weight.detach() - frozen).abs().max()
    assert 0.0 < float(moved) < 0.01
    assert not torch.equal(pipe.student.mlp.input.weight, pipe.auxiliary.mlp.input.weight)


@pytest.mark.parametrize("stop", [3, 6, 9, 12])
def test_a_run_resumed_in_any_phase_or_turn_ends_in_the_same_bits(tmp_path, stop):
    """Steps 6 and 12 lie between the auxiliary's and the student's turn: the turn is part of the state."""
    trained(tiny(tmp_path, name="whole"))
    trained(tiny(tmp_path, name="broken"), stop)
    trained(tiny(tmp_path, "resume_from_checkpoint=latest", name="broken"))
    whole, broken = (genkit.load(tmp_path / name / "pipeline") for name in ("whole", "broken"))
    for name in ("student", "auxiliary", "teacher"):
        ours, theirs = (getattr(p, name).state_dict() for p in (whole, broken))
        assert all(torch.equal(ours[k], theirs[k]) for k in ours), name


def test_weights_depend_on_the_seed_alone(tmp_path):
    first, again, other = (build(tiny(tmp_path, f"seed={s}")).objective.teacher.denoiser for s in (0, 0, 1))
    weights = [net.mlp.input.weight for net in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_run_goes_on_from_another_and_refuses_one_of_other_settings(tmp_path):
    trained(tiny(tmp_path, "reward=null", "max_steps=10"))
    source = [f"init_from={tmp_path}/run/pipeline", "teacher.steps=0", "distil.steps=0", "max_steps=4"]
    logs = trained(tiny(tmp_path, *source, name="more"))
    assert [log.phase for log in logs] == ["reward"] * 4
    for change in ("eta=0.5", "num_inference_steps=5", "scheduler.schedule=linear"):
        with pytest.raises(ConfigError, match=change.partition("=")[0]):
            build(tiny(tmp_path, *source, change))


def test_a_baseline_is_an_objective_of_the_same_configuration(tmp_path):
    dmd = build(tiny(tmp_path, "distil.objective=dmd2", "distil.aux_steps_per_student=5", "reward=null"))
    assert isinstance(dmd.objective.then, DMD2Objective)
    one = build(tiny(tmp_path, "distil.objective=diff_instruct", "num_inference_steps=1", "reward=null"))
    assert isinstance(one.objective.then, DiffInstructObjective)
    with pytest.raises(ConfigError, match="trains one step"):
        build(tiny(tmp_path, "distil.objective=diff_instruct", "reward=null"))


def test_rewards_are_summed_with_their_weights():
    one = build_reward(RewardPart(terms=[RewardTerm(name="symmetry")]))
    assert isinstance(one, Symmetry)
    both = build_reward(RewardPart(terms=[RewardTerm(name="symmetry", weight=2.0), RewardTerm(name="laplacian")]))
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert isinstance(both, WeightedSum)
    torch.testing.assert_close(both(x).values, 2.0 * one(x).values + both.rewards["laplacian"](x).values)


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        FeaturePipeline(FeatureNetwork(1, 8, 10, [8], 8), "test").save_pretrained(folder / "pipe")
    return folder / "pipe"


def test_every_arm_starts_from_the_same_student_and_trains_what_it_should(tmp_path):
    trained(tiny(tmp_path, "reward=null", "max_steps=10"))
    pipe = genkit.load(tmp_path / "run" / "pipeline")
    data = tiny(tmp_path).data.load("train")
    reward, labels = Symmetry(), {"class_labels": torch.arange(4)}
    plain = pipe(4, class_labels=labels["class_labels"], generator=torch.Generator().manual_seed(3)).samples
    for name, arm in ARMS.items():
        unit = unit_strength(arm, pipe, data, reward, 32)
        objective, sample = make_arm(arm, pipe, data, reward, 4, 1, unit)
        start = sample(labels, 4, torch.Generator().manual_seed(3))
        if arm.base == "student":
            assert torch.allclose(start, plain, atol=1e-6), name
        config = tiny(tmp_path, "max_steps=4", "learning_rate=1e-2", name=name)
        for _ in Trainer(objective, config, data).train():
            pass
        assert not torch.equal(sample(labels, 4, torch.Generator().manual_seed(3)), start), name
        again = pipe(4, class_labels=labels["class_labels"], generator=torch.Generator().manual_seed(3)).samples
        assert torch.equal(again, plain), f"{name} changed the pipeline it started from"


def test_rows_are_measured_once_and_become_tables(tmp_path, features, monkeypatch):
    changes = [f"evaluation.features={features}", "evaluation.seeds=1", "evaluation.workers=1"]
    changes += ["evaluation.student_steps=[2]", "evaluation.steps=4", "evaluation.num_samples=40"]
    changes += ["evaluation.repeats=1", "evaluation.rewards=[symmetry]"]
    changes += ["evaluation.arms=[teacher, mmd, dmd2, rmmd, draft_1]", "evaluation.phases=[]"]
    config = tiny(tmp_path, "num_inference_steps=2", "teacher.num_inference_steps=3", *changes)
    monkeypatch.setattr("genkit.pipelines.rmmd.arms.LEARNING_RATES", (1e-3,))
    monkeypatch.setattr("genkit.pipelines.rmmd.evaluate.measure_rows", _here)
    text = evaluate(config, results_dir=tmp_path / "results")
    assert "2 steps:" in text and "3 steps:" in text and "reward symmetry:" in text
    path = tmp_path / "results" / "rmmd" / "digits.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(r["arm"], r["setting"]) for r in rows} == {
        ("teacher", "2 steps"), ("mmd", "2 steps"), ("dmd2", "2 steps"), ("teacher", "3 steps"),
        ("rmmd", "reward symmetry"), ("draft_1", "reward symmetry"),
    }  # fmt: skip
    evaluate(config, results_dir=tmp_path / "results")
    assert len(path.read_text().splitlines()) == len(rows)
    assert evaluate(config, table_only=True, results_dir=tmp_path / "results") == text
    with pytest.raises(ConfigError, match="holds no rows"):
        evaluate(tiny(tmp_path, *changes, "eta=0.9"), table_only=True, results_dir=tmp_path / "results")


def test_orders_of_distillation_and_reward_are_compared(tmp_path, features, monkeypatch):
    """Each ends in a student of K steps for every strength, whatever it did on the way; the base stays as it was."""
    changes = [f"evaluation.features={features}", "evaluation.seeds=1", "evaluation.student_steps=[2]"]
    changes += ["evaluation.steps=4", "evaluation.num_samples=40", "evaluation.repeats=1", "evaluation.rewards=[]"]
    changes += ["num_inference_steps=2", "teacher.num_inference_steps=3", "evaluation.phases=[symmetry]"]
    config = tiny(tmp_path, *changes, f"evaluation.arms=[{', '.join(ORDERS)}]")
    monkeypatch.setattr("genkit.pipelines.rmmd.evaluate.measure_rows", _here)
    text = evaluate(config, results_dir=tmp_path / "results")
    assert "phases symmetry:" in text and all(f"| {arm} | 1 |" in text for arm in ORDERS)
    lines = (tmp_path / "results" / "rmmd" / "digits.jsonl").read_text().splitlines()
    found = {(r["arm"], r["metric"]): r["value"] for r in map(json.loads, lines)}
    rewards = {arm: [found[arm, f"point/{i}/reward"] for i in range(3)] for arm in ORDERS}
    assert all(len(set(values)) == 3 for values in rewards.values())
    assert len({tuple(values) for values in rewards.values()}) == 4
    assert len({found[arm, "base/reward"] for arm in ORDERS}) == 1


@pytest.mark.parametrize("data", ["{name: weather}", "{name: lorenz96, num_samples: 100}"], ids=["weather", "lorenz96"])
def test_forecasts_of_all_arms_become_a_table(tmp_path, monkeypatch, data):
    """The whole path at a tiny size; simple forecasts have known spreads: climatology's spread matches its error."""
    monkeypatch.setattr("genkit.pipelines.rmmd.evaluate.measure_rows", _here)
    changes = [f"data={data}", "evaluation.seeds=1", "evaluation.members=8", "evaluation.leads=2", "evaluation.block=2"]
    changes += ["evaluation.starts=40", "teacher.steps=4", "distil.steps=4", "reward.steps=4", "max_steps=12"]
    changes += ["model.width=16", "model.blocks=1", "batch_size=32", f"output_dir={tmp_path}/run"]
    config = load_config(CONFIGS / "weather.yaml", changes, Config)
    text = evaluate(config, results_dir=tmp_path / "results")
    assert all(f"| {arm} | 1 |" in text for arm in FORECAST_ARMS)
    path = next((tmp_path / "results" / "rmmd").glob("*.jsonl"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(r["arm"], r["setting"], r["metric"]): r["value"] for r in rows}
    first = "12 h" if "weather" in data else "lead 0.6"
    assert 0.6 < found["climatology", first, "spread_skill"] < 1.4
    shares = [found["persistence", first, name] for name in ("better", "tied", "worse")]
    assert sum(shares) == pytest.approx(1.0)
    assert ("teacher_59", first, "better") not in found  # it is what the others are held against


def _here(jobs, path, **options):
    """Rows in this process, so that the patched grid holds."""
    from genkit.metrics.results import append_rows

    for job in jobs:
        append_rows(path, job.measure(*job.arguments))
