"""The evidence: equal budgets, what is measured and how often, hits and averages by hand, the tables."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from genkit.errors import ConfigError
from genkit.metrics.results import ResultRow, append_rows
from genkit.pipelines.crystal_tree_search import evaluate as module
from genkit.pipelines.crystal_tree_search.config import Config
from genkit.pipelines.crystal_tree_search.crystal_metrics import CrystalEvaluation
from genkit.pipelines.crystal_tree_search.evaluate import ARMS, METHOD, evaluate, measure, row_hash, run_arm
from genkit.pipelines.crystal_tree_search.pipeline import CrystalTreeSearchOutput
from genkit.pipelines.crystal_tree_search.potentials import PotentialOutput
from genkit.pipelines.crystal_tree_search.proto8 import Proto8
from genkit.pipelines.crystal_tree_search.structures import take
from genkit.rewards import FunctionReward
from genkit.training import load_config
from tests.toy_crystals import alkali_halides

CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs" / "crystal_tree_search").glob("*.yaml"))
BUDGET = {"rollouts": 32, "num_samples": 8, "num_inference_steps": 6, "levels": 3, "slots": 4, "relax_steps": 0}


def make(**evaluation):
    chosen = {"seeds": 2, "space_groups": [225], "base": "somewhere", "workers": 1, **BUDGET, **evaluation}
    return Config.model_validate({"output_dir": "out/none", "max_steps": 2, "evaluation": chosen})


@pytest.fixture
def cheap(toy_pipe, monkeypatch):
    """The toy base, with minus the logarithm of the volume in place of the stability."""

    def small(crystals, context):
        return -0.05 * torch.linalg.det(crystals["lattice"]).clamp(0.1, 1e5).log()

    volume = FunctionReward(small)
    given = toy_pipe.reward

    def reward(objective, space_group=None):
        return volume if objective in ("stability", "novel_stability") else given(objective, space_group)

    monkeypatch.setattr(toy_pipe, "reward", reward)
    return toy_pipe


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm not in ("dts_multi", "dts_single", "reference")])
def test_no_arm_exceeds_the_budget_and_searches_use_it(cheap, arm, monkeypatch):
    """The pilot that finds the guidance of ``dts_guided`` is paid from the same budget."""
    monkeypatch.setattr("genkit.pipelines.crystal_tree_search.pipeline.PILOT_SAMPLES", 2)
    monkeypatch.setattr("genkit.pipelines.crystal_tree_search.pipeline.PILOT_ITERATIONS", 1)
    output = run_arm(cheap, make(), arm, "stability", 0)
    calls, budget = output.diagnostics["network_calls"] + output.diagnostics.get("pilot_calls", 0), 32 * 6
    assert (output.diagnostics.get("pilot_calls", 0) > 0) is (arm == "dts_guided")
    assert len(output.ids) == 8
    if arm in ("base", "cfg"):
        assert calls == 8 * 6 * (1 + (arm == "cfg"))  # what is delivered, and nothing else
    else:
        assert budget - 2 * 6 <= calls <= budget
    assert (output.diagnostics["proposal"] is not None) is (arm in module.GUIDED)


def test_the_reference_has_eight_times_as_many_samples(cheap):
    numbers = {name: value for name, value, _ in measure(cheap, make(), "reference", "stability", 0)}
    assert numbers["network_calls"] == 8 * 32 * 6
    assert {"tilted/log_z", "tilted/reward", "tilted/num_atoms"} <= numbers.keys() and "reward" not in numbers


def test_fronts_are_measured_from_the_same_calls(cheap):
    found = {}
    for arm in module.PARETO_ARMS:
        numbers = {name: value for name, value, _ in measure(cheap, make(), arm, "pareto", 0)}
        assert 32 * 6 - 2 * 6 <= numbers["network_calls"] <= 32 * 6
        found[arm] = numbers["hypervolume"]
    assert len(found) == 2 and all(value > 0.0 for value in found.values())


def test_averages_under_the_tilted_law_are_those_of_the_weights(cheap):
    output = run_arm(cheap, make(), "snis", "stability", 0)
    everyone = output.tree.population
    weights = everyone.log_weights.double().exp()
    by_hand = float((weights * everyone.rewards[:, 0]).sum() / weights.sum())
    numbers = {name: value for name, value, _ in module._tilted_numbers(output, 1.0)}
    assert numbers["tilted/reward"] == pytest.approx(by_hand, abs=1e-9)
    assert numbers["tilted/log_z"] == pytest.approx(float(weights.mean().log()), abs=1e-6)


def test_hits_by_hand():
    crystals = alkali_halides(40)
    group = torch.where(crystals["lattice"][:, 0, 1].abs() > 1e-3, 225, 221)
    assert 5 < int((group == 225).sum()) < 35
    valid = torch.ones(40, dtype=torch.bool)
    valid[group.eq(225).nonzero()[0, 0]] = False  # one of the hits was not judged
    physical = {name: crystals[name] for name in ("lattice", "coordinates", "numbers", "mask")}
    output = CrystalTreeSearchOutput(None, [], None, valid, [], physical, None, None, {"network_calls": 500})
    numbers = {name: value for name, value, _ in module._hit_numbers(output, 225, 50, 500.0)}
    hits = int((group == 225).sum()) - 1
    assert numbers["share/hits"] == pytest.approx(hits / 50)  # ten were not delivered
    assert numbers["hits_per_1000_calls"] == pytest.approx(2.0 * hits)
    assert 1 <= numbers["share/formulas"] * 50 <= min(hits, 12)


class Heavy:
    """A potential of closed form: minus a thousandth of the mean atomic number, eV per atom; it counts its calls."""

    name, version = "Heavy", "1"
    asked = 0

    def energies(self, crystals, select=None):
        self.asked += len(crystals["mask"])
        energy = -1e-3 * crystals["numbers"].double().sum(1) / crystals["mask"].sum(1)
        return PotentialOutput(energy, torch.ones(len(energy), dtype=torch.bool))


def test_a_second_potential_judges_with_its_own_hull(monkeypatch, tmp_path):
    """An energy that is linear in the composition has a flat hull: every mixture lies on it."""
    made = []
    monkeypatch.setattr(module, "SevenNetPotential", lambda: made.append(Heavy()) or made[-1])
    module._second_judge.cache_clear()
    config = make(judge="sevennet", judged=4).model_copy(update={"output_dir": str(tmp_path / "run")})
    known = Proto8("test", augment=False)
    crystals = take(known[torch.arange(6)], slice(None))
    flags = {"stable": torch.tensor([True, False] * 3), "sun": torch.zeros(6, dtype=torch.bool)}
    found = CrystalEvaluation({}, "", flags, None, torch.arange(6), [str(i) for i in range(6)], None)
    numbers = {name: (value, n) for name, value, n in module._judge_numbers(crystals, found, config)}
    assert numbers["judge/stable"] == (1.0, 4) and numbers["judge/of_stable"] == (1.0, 2)
    assert numbers["judge/above_hull"][0] == pytest.approx(0.0, abs=1e-9) and "judge/of_sun" not in numbers
    module._second_judge.cache_clear()
    list(module._judge_numbers(crystals, found, config))
    assert made[0].asked > 3000 and made[1].asked == 4  # the hull was kept
    module._second_judge.cache_clear()


def test_rows_are_told_apart_by_what_decides_them():
    name = row_hash(make())
    assert name == row_hash(make(seeds=5, arms=["base"], workers=2, minutes=9.0, space_groups=[1, 2]))
    assert len({name, row_hash(make(rollouts=64)), row_hash(make(lam=3.0)), row_hash(make(base=None))}) == 4
    other = make().model_copy(update={"learning_rate": 0.5})
    assert row_hash(other) != name


def test_cells():
    cells = list(module._cells(make()))
    assert len(cells) == len(set(cells)) == 2 * (8 + 5 + 2) + 1
    assert ("reference", "stability", 0) in cells and ("dts_guided", "space_group 225", 1) in cells
    assert list(module._cells(make(arms=["dts"], space_groups=[]))) == [("dts", "stability", s) for s in range(2)]
    with pytest.raises(ConfigError, match="expected some of base"):
        evaluate(make(arms=["dtss"]))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_committed_configurations_keep_few_slots_for_their_leaves(path):
    budget = load_config(path, [], Config).evaluation
    assert budget.slots <= budget.rollouts / 16 and budget.seeds >= 5 and budget.rollouts % budget.num_samples == 0


def test_tables_from_rows(tmp_path):
    config = make()
    rows = []

    def add(arm, setting, seed, metric, value):
        rows.append(ResultRow(METHOD, arm, setting, row_hash(config), seed, metric, value, 8, 1.0))

    for seed, (share, z) in enumerate(((0.25, -1.0), (0.75, -2.0))):
        add("dts", "stability", seed, "share/sun", share)
        for metric, value in (("tilted/log_z", z), ("tilted/reward", 0.5), ("tilted/num_atoms", 4.0)):
            add("dts", "stability", seed, metric, value)
        add("base", "space_group 225", seed, "share/hits", 0.125)
        add("dts_multi", "pareto", seed, "hypervolume", 1.5)
    for metric, value in (("tilted/log_z", -1.0), ("tilted/reward", 0.25), ("tilted/num_atoms", 4.0)):
        add("reference", "stability", 0, metric, value)
    stale = ResultRow(METHOD, "dts", "stability", "another", 0, "share/sun", 9.0, 8, 1.0)
    path = tmp_path / METHOD / "proto8-matter.jsonl"
    append_rows(path, [*rows, stale])
    text = evaluate(config, table_only=True, results_dir=tmp_path)
    assert "192 network calls an arm" in text and "0.500 ± 3.177" in text  # t(1) = 12.706 times .25
    assert "space_group 225" in text and "1.500 ± 0.000" in text and "9.0" not in text
    assert f"-1.5000, {math.sqrt(0.5):.4f}" in text and "0.5000, 0.2500" in text
    with pytest.raises(ConfigError, match="holds no rows"):
        evaluate(make(rollouts=64), table_only=True, results_dir=tmp_path)
