"""The pipeline: every mode on a toy base, what it delivers and writes, guidance and fixed compositions, bad input."""

from __future__ import annotations

import json

import pytest
import torch

import genkit
from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search.pipeline import POPULATIONS
from genkit.pipelines.crystal_tree_search.structures import read_extxyz
from genkit.pipelines.crystal_tree_search.validity import check_validity
from genkit.rewards import FunctionReward
from genkit.samplers.tree import Directions


def volume(crystals, context):
    """Minus the logarithm of the volume an atom; never invalid."""
    return -(torch.linalg.det(crystals["lattice"]).clamp(0.1, 1e4) / crystals["mask"].sum(1)).log()


def lithium(crystals, context):
    """The share of lithium."""
    return (crystals["numbers"] == 3).sum(1) / crystals["mask"].sum(1)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


SMALL = {"num_inference_steps": 6, "levels": 3, "slots": 4, "output_type": "pt"}


@pytest.mark.parametrize("mode", ["dts", "dts_star", "unbiased", *POPULATIONS])
def test_every_mode_delivers_distinct_judged_crystals(toy_pipe, mode):
    output = toy_pipe(32, 8, mode=mode, objectives=volume, lam=1.0, generator=seeded(), **SMALL)
    assert len(output.ids) == len(set(output.ids)) == len(output.rewards) == 8
    again = volume(output.crystals, None).double()
    valid = check_validity(output.crystals).mask
    assert torch.equal(output.valid, valid)
    torch.testing.assert_close(output.rewards[valid, 0], again[valid], rtol=0.0, atol=0.0)
    json.dumps(output.diagnostics, allow_nan=True)
    assert output.diagnostics["network_calls"] <= 32 * 6


def test_a_seed_decides_everything(toy_pipe):
    one, same = (toy_pipe(32, 4, objectives=volume, lam=1.0, generator=seeded(3), **SMALL) for _ in range(2))
    assert one.ids == same.ids
    for name, value in one.crystals.items():
        torch.testing.assert_close(value, same.crystals[name], rtol=0.0, atol=0.0)
    other = toy_pipe(32, 4, objectives=volume, lam=1.0, generator=seeded(4), **SMALL)
    assert not torch.equal(one.rewards, other.rewards)


def test_searches_move_the_mean_to_the_tilted_law(toy_pipe):
    """E_p[r exp(λ r)] / E_p[exp(λ r)] of many plain samples; the search's estimate is within its own noise of it."""
    lam = 4.0
    options = {"objectives": lithium, **SMALL}
    plain = toy_pipe(2048, 2048, mode="snis", lam=0.0, generator=seeded(1), **options | {"slots": 512})
    everyone = plain.tree.population
    rewards = everyone.rewards[everyone.valid, 0]  # an invalid crystal has no weight in either law
    weights = (lam * rewards).softmax(0)
    tilted, error = float((weights * rewards).sum()), float((weights.square() * (rewards - rewards.mean()) ** 2).sum())
    found = [toy_pipe(512, 8, lam=lam, generator=seeded(seed), **options | {"slots": 32}) for seed in range(6)]
    means = torch.stack([output.tree.expectation(output.tree.leaves.rewards[:, 0])[0] for output in found])
    spread = 3.0 * float(torch.sqrt(means.var() / len(means) + error))
    assert abs(float(means.mean()) - tilted) < spread + 0.02
    untilted = float(rewards.mean()) + 3.0 * float(rewards.std()) / len(rewards) ** 0.5
    assert float(means.mean()) > untilted + spread  # control


def test_guided_searches_keep_weights_of_mean_one(toy_pipe):
    output = toy_pipe(
        512, 8, objectives=volume, lam=0.0, condition={"space_group": 225, "stability": 1}, guidance_scale=2.0,
        generator=seeded(), **SMALL | {"slots": 32},
    )  # fmt: skip
    weights = torch.tensor([w for w in output.diagnostics["mean_weight_by_level"] if w == w])
    assert torch.allclose(weights, torch.ones_like(weights), atol=0.1)
    shares = torch.tensor(output.diagnostics["effective_share_by_level"])
    assert float(shares[torch.isfinite(shares)].min()) < 1.0 - 1e-6  # control: the condition changed the kernel
    assert output.diagnostics["proposal"]["guidance_scale"] == [2.0]
    assert output.diagnostics["proposal"]["base"] == "the network without its condition"
    assert output.diagnostics["network_calls"] == 2 * 6 * 512 - _saved(output, 6)


def _saved(output, steps):
    """Calls that rollouts did not make because they left the tree below its root."""
    store, chain_levels = output.tree.store, (0, 2, 4, 6)
    made = 0
    for depth in (3, 4, 5):
        made += int((store.depth[: store.size] == depth).sum()) * (chain_levels[depth - 2] - chain_levels[depth - 3])
    return 2 * (steps * 512 - made)


def test_guidance_is_chosen_by_effective_share(toy_pipe):
    options = {"condition": {"space_group": 225}, "objectives": volume, "lam": 0.0}
    output = toy_pipe(16, 4, guidance_scale="auto", generator=seeded(), **options, **SMALL)
    scales = output.diagnostics["proposal"]["guidance_scale"]
    assert len(scales) == 3 and all(0.0 <= scale <= 2.0 for scale in scales) and output.diagnostics["pilot_calls"] > 0
    with pytest.raises(ConfigError, match="on its pilot, max_network_calls=20 leaves none"):
        toy_pipe(16, 4, guidance_scale="auto", max_network_calls=20, **options, **SMALL)


def test_a_formula_is_kept(toy_pipe):
    output = toy_pipe(16, 4, objectives=volume, lam=1.0, formula={"Na": 1, "Cl": 2}, generator=seeded(), **SMALL)
    assert output.crystals["numbers"][output.crystals["mask"]].reshape(4, 3).tolist() == [[11, 17, 17]] * 4


def test_several_objectives_have_an_archive(toy_pipe):
    options = {"objectives": [FunctionReward(volume, name="volume"), FunctionReward(lithium, name="lithium")]}
    output = toy_pipe(48, 6, lam=1.0, generator=seeded(), **options, **SMALL)
    assert output.rewards.shape[1] == 2 and len(output.archive) == output.diagnostics["leaves"]
    values = output.archive.values
    for row in output.archive.front.tolist():
        assert not ((values >= values[row]).all(1) & (values > values[row]).any(1)).any()
    single = toy_pipe(48, 6, lam=1.0, scalarisation=Directions(2, [[0.0, 1.0]]), generator=seeded(), **options, **SMALL)
    assert single.archive.values.shape[1] == 2


def test_calls_are_limited(toy_pipe):
    output = toy_pipe(1000, 8, objectives=volume, lam=1.0, max_network_calls=100, generator=seeded(), **SMALL)
    assert 100 - 6 < output.diagnostics["network_calls"] <= 100


def test_files_have_the_same_ids_and_another_search_is_refused(toy_pipe, tmp_path):
    options = {"objectives": volume, "lam": 1.0, "generator": seeded(), "save_dir": tmp_path / "found", **SMALL}
    output = toy_pipe(32, 8, **options)
    crystals, ids, columns = read_extxyz(tmp_path / "found" / "structures.extxyz")
    assert ids == output.ids
    assert sorted(p.stem for p in (tmp_path / "found" / "cif").glob("*.cif")) == sorted(ids)
    torch.testing.assert_close(crystals["lattice"], output.crystals["lattice"], rtol=0.0, atol=1e-4)
    again = toy_pipe(32, 8, **options | {"generator": None, "resume": True})
    assert again.ids == output.ids and again.diagnostics["network_calls"] == output.diagnostics["network_calls"]
    others = [("objectives", lithium), ("formula", {"Na": 1}), ("condition", {"space_group": 225})]
    for name, value in others:  # another search is not taken for the saved one
        with pytest.raises(ConfigError, match=name):
            toy_pipe(32, 8, **options | {"generator": None, "resume": True, name: value})


def test_a_killed_search_goes_on(toy_pipe, tmp_path, monkeypatch):
    calls = []

    def mortal(crystals, context):
        calls.append(len(crystals["mask"]))
        if sum(calls) > 5:
            raise KeyboardInterrupt
        return volume(crystals, context)

    mortal.__name__ = "volume"
    options = {"lam": 1.0, "save_dir": tmp_path / "found", "save_every": 4, **SMALL}
    with pytest.raises(KeyboardInterrupt):
        toy_pipe(48, 8, objectives=mortal, generator=seeded(), **options)
    resumed = toy_pipe(48, 8, objectives=volume, resume=True, **options)
    whole = toy_pipe(48, 8, objectives=volume, generator=seeded(), lam=1.0, **SMALL)
    assert resumed.ids == whole.ids and torch.equal(resumed.rewards, whole.rewards)


def test_functions_are_asked_about_valid_crystals_only(toy_pipe):
    seen = []

    def function(crystals, context):
        seen.append(check_validity(crystals).mask)
        return volume(crystals, context)

    output = toy_pipe(32, 32, mode="best_of_n", objectives=function, generator=seeded(), **SMALL)
    assert torch.cat(seen).all()
    assert torch.equal(output.valid, check_validity(output.crystals).mask) and not output.valid.all()


def test_the_archive_has_the_numbers_of_the_names(toy_pipe):
    options = {"objectives": [FunctionReward(volume, name="volume"), FunctionReward(lithium, name="lithium")]}
    output = toy_pipe(96, 6, lam=1.0, widening=(1.0, 0.4), generator=seeded(), **options, **SMALL)
    row = {number: i for i, number in enumerate(output.archive.ids.tolist())}
    for name, rewards in zip(output.ids, output.rewards, strict=True):
        torch.testing.assert_close(output.archive.values[row[int(name.removeprefix("leaf-"))]], rewards)


def test_objects_of_pymatgen_and_ase(toy_pipe):
    for kind, name in (("pymatgen", "Structure"), ("ase", "Atoms")):
        output = toy_pipe(16, 2, objectives=volume, lam=1.0, generator=seeded(), **SMALL | {"output_type": kind})
        assert {type(one).__name__ for one in output.structures} <= {name, "NoneType"}
        whole = [one for one in output.structures if one is not None]
        assert all(len(one) == int(output.crystals["mask"][i].sum()) for i, one in enumerate(whole) if len(whole) == 2)


def test_a_reward_that_raises_costs_its_own_crystals(toy_pipe):
    def picky(crystals, context):
        if bool((crystals["numbers"] == 37).any()):
            raise RuntimeError("rubidium")
        return volume(crystals, context)

    output = toy_pipe(64, 16, objectives=picky, lam=1.0, generator=seeded(), **SMALL)
    crystals = toy_pipe.codec.decode(output.tree.leaves.states)
    sound, rubidium = check_validity(crystals).mask, (crystals["numbers"] == 37).any(1)
    assert (sound & rubidium).any() and (sound & ~rubidium).any()
    assert torch.equal(output.tree.leaves.valid, sound & ~rubidium)
    assert {failure["kind"] for failure in output.diagnostics["reward_failures"]} == {"raised"}
    assert torch.isfinite(torch.as_tensor(output.tree.log_z_tree)).all()  # no NaN reached the root


def test_saved_and_loaded(toy_pipe, tmp_path):
    toy_pipe.save_pretrained(tmp_path / "pipe")
    loaded = genkit.load(tmp_path / "pipe")
    loaded.set_progress_bar_config(disable=True)
    one, two = (p(16, 4, objectives=volume, lam=1.0, generator=seeded(), **SMALL) for p in (toy_pipe, loaded))
    torch.testing.assert_close(one.rewards, two.rewards, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "dst"}, "Did you mean 'dts'"),
        ({"objectives": "stabilty"}, "Did you mean 'stability'"),
        ({"objectives": []}, "expected at least one"),
        ({"objectives": ["density", "density"]}, "each once"),
        ({"objectives": "space_group"}, "has no target"),
        ({"condition": {"space_grup": 1}}, "Did you mean 'space_group'"),
        ({"condition": {"space_group": 231}}, "1 to 230"),
        ({"condition": {"stability": 0}}, "stability"),
        ({"condition": {"space_group": 1}, "space_group": 2}, "give one of them"),
        ({"formula": {"Xx": 1}}, "unknown"),
        ({"formula": {"H": 1}}, "not among the elements"),
        ({"formula": {"Na": 9}}, "at most"),
        ({"output_type": "np"}, "'pymatgen', 'ase' or 'pt'"),
        ({"mode": "smc", "save_dir": "somewhere"}, "does not save"),
        ({"resume": True}, "save_dir"),
        ({"guidance_scale": "automatic"}, "'auto'"),
        ({"mode": "smc", "max_network_calls": 9}, "leave max_network_calls out"),
        ({"search_options": {"explor": 0.1}}, "Did you mean 'explore'"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_rollouts": 0}, "num_rollouts"),
        ({"slots": 0}, "slots"),
        ({"levels": 7}, "levels"),
    ],
)
def test_bad_arguments(toy_pipe, options, message):
    given = {"num_rollouts": 8, "objectives": volume, **SMALL, **options}
    with pytest.raises(ConfigError, match=message):
        toy_pipe(**given)
