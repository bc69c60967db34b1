"""The losses beside their formulas, what a crystal's loss depends on, and that a small network learns structures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search.config import (
    Config,
    CrystalData,
    Proto8Data,
    build,
    build_codec,
    build_denoiser,
)
from genkit.pipelines.crystal_tree_search.model import CrystalTransformer
from genkit.pipelines.crystal_tree_search.objective import CrystalDiffusionObjective
from genkit.pipelines.crystal_tree_search.state import fit_codec
from genkit.samplers import draw_keys, rollout, training_keys
from genkit.schedulers import VPScheduler, WrappedScheduler
from genkit.training import Trainer, load_config
from tests.toy_crystals import alkali_halides, bond_errors, random_crystals

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "crystal_tree_search"
FAMILIES = ("matter", "diffcsp")
SMALL = {"width": 32, "blocks": 2, "pair_width": 8}


def objective_of(
    crystals, family: str = "matter", seed: int = 0, model=None, powers=None, **options
) -> CrystalDiffusionObjective:
    codec = fit_codec(crystals, family, time_powers=powers)
    if model is None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            fitted = {name: codec.config[name] for name in ("density", "lattice_std", "family")}
            model = CrystalTransformer(len(codec.elements), **fitted, **SMALL)
    return CrystalDiffusionObjective(model, codec, **options)


def tiny(kind, crystals):
    """The smallest network, for tests that do not look at its outputs."""
    config = fit_codec(crystals).config
    return kind(len(config["elements"]), config["density"], config["lattice_std"], width=8, blocks=1, heads=1)


def loss_of(objective, crystals, rows=slice(None), step: int = 0, ids: torch.Tensor | None = None):
    ids = torch.arange(len(crystals["mask"]))[rows] if ids is None else ids
    batch = {name: value[rows] for name, value in crystals.items()}
    return objective.loss("denoiser", batch, step=step, keys=training_keys(7, step, ids))


# ---- the losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("powers", [{}, {"lattice": 4.0, "types": 6.0}], ids=["one time", "own times"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_losses_of_a_network_that_says_nothing(family, powers):
    """A new network's outputs are 0, so each loss is the size of its target, written out here."""
    crystals = random_crystals(400)
    objective = objective_of(crystals, family, powers=powers, given_types=0.0)
    logs = loss_of(objective, crystals, step=3).logs
    keys, mask = training_keys(7, 3, torch.arange(400)), crystals["mask"]
    t = keys.at(purpose="time").uniform().to(torch.float32)
    alpha, sigma = (c.float()[:, None] for c in VPScheduler().alpha_sigma(t ** powers.get("lattice", 1.0)))
    clean = objective.codec.encode(crystals)
    v = alpha * keys.at(purpose="noise/lattice").normal((6,)) - sigma * clean["lattice"]
    assert float(logs["lattice"]) == pytest.approx(float(v.square().mean()), rel=1e-5)

    noise = keys.at(purpose="noise/coordinates").normal((5, 3))
    target = WrappedScheduler().target(clean["coordinates"], noise, t)
    per_crystal = []
    for row in range(400):
        real = target[row][mask[row]]
        per_crystal.append((real - real.mean(0)).square().mean())
    assert float(logs["coordinates"]) == pytest.approx(float(torch.stack(per_crystal).mean()), rel=1e-4)

    if family == "matter":
        power = powers.get("types", 1.0)
        hidden = (keys.at(purpose="noise/types").uniform((5,)) < (t**power).double()[:, None]) & mask
        expected = math.log(3.0) * hidden.sum(1) / mask.sum(1) * power / t.clamp(min=0.1)
    else:
        alpha, sigma = (c.float()[:, None] for c in VPScheduler().alpha_sigma(t ** powers.get("types", 1.0)))
        one_hot = alpha[..., None] * keys.at(purpose="noise/types").normal((5, 3)) - sigma[..., None] * clean["types"]
        expected = (one_hot.square().mean(-1) * mask).sum(1) / mask.sum(1)
    assert float(logs["types"]) == pytest.approx(float(expected.mean()), rel=1e-4)


def test_the_weights_add_the_parts_up():
    crystals = random_crystals(50)
    output = loss_of(objective_of(crystals, weights={"lattice": 2.0, "types": 0.5}), crystals)
    expected = 2.0 * output.logs["lattice"] + output.logs["coordinates"] + 0.5 * output.logs["types"]
    assert float(output.loss.detach()) == pytest.approx(float(expected), rel=1e-6)


def test_the_weight_of_masked_types_is_that_of_the_likelihood():
    """E[1(masked)/max(t, .1)] over t is .9 + .05: every atom counts alike, but for the bound at small t."""
    crystals = random_crystals(500)
    objective = objective_of(crystals, given_types=0.0, model=tiny(CrystalTransformer, crystals))
    with torch.no_grad():
        parts = torch.stack([loss_of(objective, crystals, step=step).logs["types"] for step in range(16)])
    found = parts / math.log(3.0)
    assert abs(float(found.mean()) - 0.95) < 4.5 * float(found.std()) / 4.0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crystals_loss_is_its_own(family):
    """The batch's loss is the mean of the losses alone; padding and the order of the batch do not matter."""
    crystals = {**random_crystals(6), "space_group": torch.arange(1, 7), "stability": torch.tensor([1, 2, 3, 1, 2, 3])}
    model = objective_of(crystals, family).denoiser
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    objective = objective_of(crystals, family, model=model)
    whole = loss_of(objective, crystals).loss.detach()
    alone = [loss_of(objective, crystals, slice(i, i + 1)).loss.detach() for i in range(6)]
    torch.testing.assert_close(whole, torch.stack(alone).mean(), rtol=1e-4, atol=1e-5)
    order = torch.tensor([3, 1, 0, 5, 4, 2])
    torch.testing.assert_close(
        loss_of(objective, crystals, order, ids=order).loss.detach(), whole, rtol=1e-4, atol=1e-5
    )
    dirty = {**crystals, "coordinates": torch.where(crystals["mask"][..., None], crystals["coordinates"], 0.4)}
    torch.testing.assert_close(loss_of(objective, dirty).loss.detach(), whole, rtol=1e-5, atol=1e-6)
    assert abs(float(loss_of(objective, crystals, step=1).loss.detach() - whole)) > 1e-3  # another step, other noise


class Listener(CrystalTransformer):
    """Keeps what it hears."""

    def forward(self, x, t, cond=None):
        self.heard = (x, t, cond)
        return super().forward(x, t, cond)


def test_conditions_are_dropped_together_and_types_are_sometimes_given():
    crystals = random_crystals(3000) | {"space_group": torch.full((3000,), 225), "stability": torch.full((3000,), 2)}
    model = tiny(Listener, crystals)
    objective = objective_of(crystals, model=model, drop_conditions=0.2, given_types=0.1)
    loss_of(objective, crystals)
    x, t, cond = model.heard
    dropped = cond["space_group"] == 0
    assert torch.equal(dropped, cond["stability"] == 0)
    assert abs(float(dropped.float().mean()) - 0.2) < 4.5 * math.sqrt(0.16 / 3000)
    late = t > 0.9  # with at least three atoms all clean by chance: one in a thousand
    many = late & (crystals["mask"].sum(1) >= 3)
    given = (torch.where(x["mask"], x["types"], 0) != objective.codec.mask_id).all(1)
    share = float(given[many].float().mean())
    assert abs(share - 0.1) < 4.5 * math.sqrt(0.09 / int(many.sum())) + 1e-3
    assert abs(float((dropped & given)[many].float().mean()) - 0.02) < 0.04  # one has nothing to do with the other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"latice": 1.0}}, "Did you mean 'lattice'"),
        ({"weights": {"lattice": -1.0}}, "at least 0"),
        ({"drop_conditions": 1.0}, "below 1"),
        ({"given_types": "all"}, "given_types"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        objective_of(random_crystals(5), **options)


def test_a_network_of_other_crystals_is_refused():
    crystals = random_crystals(5)
    codec = fit_codec(crystals)
    with pytest.raises(ConfigError, match="density"):
        CrystalDiffusionObjective(CrystalTransformer(3, 1.0, codec.config["lattice_std"], **SMALL), codec)
    right = {name: codec.config[name] for name in ("density", "lattice_std")}
    with pytest.raises(ConfigError, match="num_elements=2"):
        CrystalDiffusionObjective(CrystalTransformer(2, **right, **SMALL), codec)


# ---- configurations -------------------------------------------------------------------------------------------------


@pytest.fixture
def toy_data(monkeypatch):
    monkeypatch.setattr(Proto8Data, "load", lambda self, split=None: CrystalData(alkali_halides(64)))


@pytest.mark.parametrize("name", ["proto8", "proto8_diffcsp"])
def test_a_configuration_trains(name, toy_data, tmp_path):
    overrides = ["max_steps=2", "batch_size=8", "model.width=32", "model.blocks=1", f"output_dir={tmp_path}/run"]
    config = load_config(
        CONFIGS / f"{name}.yaml", [*overrides, "warmup_steps=0", "device=cpu", "ema_start_step=0"], Config
    )
    recipe = build(config)
    steps = list(Trainer(recipe.objective, config, recipe.data).train())
    assert len(steps) == 2 and recipe.objective.codec.family == config.family


def test_the_shipped_network_fits_the_budget_and_depends_on_the_seed_alone(toy_data):
    configs = [load_config(CONFIGS / "proto8.yaml", [f"seed={seed}"], Config) for seed in (0, 0, 1)]
    codec = build_codec(configs[0], CrystalData(alkali_halides(64), range(3, 30)))
    first, again, other = (build_denoiser(config, codec).to_lattice.weight.sum() + build_denoiser(config, codec)
                           .types.weight.sum() for config in configs)  # fmt: skip
    assert first == again and first != other
    assert sum(p.numel() for p in build_denoiser(configs[0], codec).parameters()) <= 1_400_000


@pytest.mark.parametrize(
    ("override", "message"),
    [("familly=matter", "family"), ("loss.typs=1.0", "types"), ("model.width=4", "width"), ("data.split=3", "split")],
)
def test_mistakes_in_a_configuration_are_named(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIGS / "proto8.yaml", [override], Config)


# ---- learning -------------------------------------------------------------------------------------------------------


def train(objective, crystals, steps: int, rate: float = 2e-3, batch: int = 64) -> None:
    optimizer = torch.optim.AdamW(objective.denoiser.parameters(), lr=rate)
    for step in range(steps):
        ids = torch.randint(0, len(crystals["mask"]), (batch,), generator=torch.Generator().manual_seed(step))
        loss_of(objective, crystals, ids, step, ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(objective.denoiser.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def measured(objective, crystals) -> dict[str, float]:
    """The losses under noise that training has not seen."""
    logs = [loss_of(objective, crystals, step=10_000 + step).logs for step in range(6)]
    return {name: sum(float(row[name]) for row in logs) / len(logs) for name in logs[0]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_steps_lower_every_loss(family):
    crystals = alkali_halides(256, max_atoms=2)
    objective = objective_of(crystals, family)
    before = measured(objective, crystals)
    train(objective, crystals, 120, rate=5e-3, batch=32)
    after = measured(objective, crystals)
    limits = {"lattice": 0.7, "coordinates": 0.12, "types": {"matter": 1.45, "diffcsp": 0.6}[family]}
    for name, limit in limits.items():
        assert after[name] < limit < before[name], f"{name}: {before[name]:.3f} to {after[name]:.3f}"


def sampled(objective, count: int = 128, cond=None) -> dict[str, torch.Tensor]:
    codec = objective.codec
    start = codec.prior(draw_keys(torch.Generator().manual_seed(1), count))
    output = rollout(objective.denoiser.eval(), codec.scheduler(), start, num_inference_steps=40, solver="ancestral",
                     cond=cond, generator=torch.Generator().manual_seed(2))  # fmt: skip
    return codec.decode(output.sample)


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_of_a_trained_network_have_the_bonds_of_the_data(family):
    crystals = alkali_halides(512)
    objective = objective_of(crystals, family)
    before = sampled(objective)
    train(objective, crystals, 1200)
    after = sampled(objective)

    def good(found):
        pairs = torch.isin(found["numbers"], torch.tensor([3, 11, 19, 37])).sum(1) == 1
        return float(((bond_errors(found) < 0.1) & pairs).float().mean())

    assert good(before) < 0.15 and good(after) > 0.6
    fcc = sampled(objective, cond={"space_group": torch.full((128,), 225)})["lattice"]
    told = float((fcc[:, 0, 1].abs() > 0.1).float().mean())  # the primitive cell of rocksalt is no cube, CsCl's is one
    cubic = sampled(objective, cond={"space_group": torch.full((128,), 221)})["lattice"]
    assert told > 0.85 and float((cubic[:, 0, 1].abs() > 0.1).float().mean()) < 0.15
