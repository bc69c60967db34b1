"""MatterGen's conventions, by a stand-in for its module whose scores are exact for one known crystal."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from genkit.errors import ConfigError, MissingExtraError
from genkit.pipelines.crystal_tree_search.adapters import MatterGenAdapter, MatterGenCodec
from genkit.samplers.noise import draw_keys
from genkit.samplers.tree.chain import Chain
from genkit.samplers.tree.proposals import GuidedProposal
from genkit.schedulers import VPScheduler
from genkit.schedulers.wrapped import wrapped_normal_score

RHO = 0.05
CELL = torch.tensor([[4.0, 0.3, 0.1], [0.3, 5.0, -0.2], [0.1, -0.2, 3.6]])
PLACES = torch.tensor([[0.1, 0.2, 0.3], [0.6, 0.7, 0.8], [0.35, 0.9, 0.05]])
NUMBERS = torch.tensor([22, 8, 100])


def log_a(t: Tensor) -> Tensor:
    """MatterGen's mean coefficient, written out."""
    return -0.25 * t**2 * 19.9 - 0.05 * t


def marginal(t: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(a_t, std of the cell, limit cube, std of the coordinates) of MatterGen's corruptions."""
    a, size = log_a(t).exp(), n.double() ** (1 / 3)
    return a, (1 - a**2).sqrt() * 0.5 * size, size / RHO ** (1 / 3), 0.01 * 500.0**t / size


class Graph(dict):
    """What the module sees of a ChemGraph."""

    @property
    def batch(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self["num_atoms"])), self["num_atoms"])


def make_graph(fields: Any, conditions: Any) -> Graph:
    return Graph(**fields, **conditions)


class Exact:
    """score_fn of the chain that ends in CELL, PLACES, NUMBERS: n <= 3 of its atoms, cells scaled by n."""

    def __init__(self, known: tuple[str, ...] = (), offset: int = 1) -> None:
        self.model = SimpleNamespace(cond_fields_model_was_trained_on=list(known))
        self.seen: list[Graph] = []
        self.offset = offset

    def score_fn(self, x: Graph, t: Tensor) -> dict[str, Tensor]:
        self.seen.append(x)
        batch, n = x.batch, x["num_atoms"]
        a, std, cube, sigma = marginal(t.double(), n)
        spread = a[:, None, None]
        mean = spread * CELL.double() + (1 - spread) * cube[:, None, None] * torch.eye(3)
        cell = -(x["cell"].double() - mean) / std[:, None, None] ** 2
        place = torch.cat([torch.arange(k) for k in n.tolist()])
        score = wrapped_normal_score(x["pos"].double() - PLACES[place].double(), sigma[batch])
        logits = torch.full((len(batch), 101), -1e10)
        logits[torch.arange(len(batch)), NUMBERS[place] - self.offset] = 0.0
        twist = torch.tensor([[0.0, 1, 0], [-1, 0, 0], [0, 0, 0]])  # what a network's stress may have, and must not act
        return {"cell": cell.float() + twist, "pos": score.float(), "atomic_numbers": logits}


def adapter(module: Any = None, **options: Any) -> MatterGenAdapter:
    codec = MatterGenCodec(density=RHO, max_atoms=4, num_atoms=[0, 1, 1, 0])
    return MatterGenAdapter(module or Exact(**options), codec, graph=make_graph)


def walked(made: MatterGenAdapter, rows: int = 4, steps: int = 60) -> dict[str, Tensor]:
    """Crystals at the end of the codec's chain."""
    chain = Chain(made, made.codec.scheduler(), num_inference_steps=steps, levels=4, stages=made.codec.stages())
    keys = draw_keys(torch.Generator().manual_seed(0), rows)
    state: Any = made.codec.prior(keys)
    for step in range(steps):
        state, _ = chain.step(state, torch.full((rows,), step), None, keys)
    return made.codec.decode(state)


def test_noise_levels_are_those_of_mattergen() -> None:
    levels = MatterGenCodec(density=RHO).scheduler().schedulers
    t, n = torch.linspace(0, 1, 21, dtype=torch.float64), torch.arange(1, 22)
    a, _, _, sigma = marginal(t, n)
    alpha, noise = levels["lattice"].alpha_sigma(t)
    torch.testing.assert_close(alpha, a, rtol=1e-12, atol=0)
    torch.testing.assert_close(noise, (1 - a**2).sqrt(), rtol=1e-9, atol=0)
    ours = levels["coordinates"].alpha_sigma(t, {"num_atoms": n})[1]
    torch.testing.assert_close(ours[1:], sigma[1:], rtol=1e-12, atol=0)
    discrete = VPScheduler("linear").alpha_sigma(t)[0]  # the control: DDPM's factors with the same β
    assert abs(float(discrete[-1] / a[-1]) - 1) > 0.02
    # the rate is the derivative of the level: v = dx/dt of a straight walk needs it
    lattice, x = levels["lattice"], torch.ones(1, 6, dtype=torch.float64)
    step, noise = 1e-5, torch.full((1, 6), 0.3, dtype=torch.float64)
    clean = lattice.to_x0(noise, 0.4, x)
    slope = (lattice.add_noise(clean, noise, 0.4 + step) - lattice.add_noise(clean, noise, 0.4 - step)) / (2 * step)
    torch.testing.assert_close(lattice.velocity(noise, 0.4, x), slope, rtol=1e-6, atol=1e-8)


def test_a_step_has_the_mean_and_width_of_mattergens_predictor() -> None:
    """mean = x / a + σ²_{t|s} / a · score + (1 - 1/a) μ, std = σ_{t|s} σ_s / σ_t, in its own variables."""
    made = adapter()
    codec, code = made.codec, made.codec.lattice_code
    state = codec.prior(draw_keys(torch.Generator().manual_seed(1), 3))
    t, s = torch.tensor([0.9, 0.5, 0.2]), torch.tensor([0.8, 0.3, 0.1])
    step = codec.scheduler().transition(made(state, t), t, s, state)
    n = state["mask"].sum(1)
    (a_t, std_t, cube, sigma_t), (a_s, std_s, _, sigma_s) = marginal(t.double(), n), marginal(s.double(), n)
    ratio = (a_t / a_s)[:, None, None]
    x, eye = code.decode(state["lattice"], n).double(), torch.eye(3)
    limit = cube[:, None, None] * eye
    target = a_t[:, None, None] * CELL.double() + (1 - a_t[:, None, None]) * limit
    score = -(x - target) / std_t[:, None, None] ** 2
    between = std_t[:, None, None] ** 2 - std_s[:, None, None] ** 2 * ratio**2
    mean = x / ratio + between / ratio * score + (1 - 1 / ratio) * limit
    lattice = step.parts["lattice"]
    torch.testing.assert_close(code.decode(lattice.mean, n).double(), mean, rtol=0, atol=2e-4)
    width = (between.squeeze().sqrt() * std_s / std_t) / (0.5 * n.double() ** (1 / 3))
    torch.testing.assert_close(lattice.std.double().flatten(), width, rtol=1e-3, atol=0)
    wide = (sigma_t**2 - sigma_s**2).sqrt() * sigma_s / sigma_t
    torch.testing.assert_close(step.parts["coordinates"].std.double().flatten(), wide, rtol=1e-4, atol=0)


def test_exact_scores_lead_to_the_crystal_that_they_are_of() -> None:
    found = walked(adapter())
    assert set(found["mask"].sum(1).tolist()) == {2, 3}
    for row, count in enumerate(found["mask"].sum(1).tolist()):
        torch.testing.assert_close(found["lattice"][row], CELL, rtol=0, atol=1e-3)
        apart = found["coordinates"][row, :count] - PLACES[:count]
        assert float((apart - apart.round()).abs().max()) < 1e-3
        assert torch.equal(found["numbers"][row, :count], NUMBERS[:count])


def test_another_offset_of_the_atomic_numbers_gives_other_elements() -> None:
    """The control: a module that counts its classes from zero is not MatterGen's."""
    found = walked(adapter(offset=2), rows=2, steps=12)
    assert not torch.equal(found["numbers"][0, :2], NUMBERS[:2])


def test_what_the_module_is_given() -> None:
    made = adapter()
    state = made.codec.prior(draw_keys(torch.Generator().manual_seed(2), 3))
    made(state, torch.ones(3))
    seen = made.module.seen[0]
    assert set(seen) == {"pos", "cell", "atomic_numbers", "num_atoms"}
    assert (seen["atomic_numbers"] == 101).all()  # the mask, counted from 1
    assert torch.equal(seen["cell"], seen["cell"].mT) and len(seen["pos"]) == int(state["mask"].sum())
    assert (seen["pos"] >= 0).all() and (seen["pos"] < 1).all()


def test_rows_do_not_see_one_another_and_padding_is_zero() -> None:
    made = adapter()
    state = made.codec.prior(draw_keys(torch.Generator().manual_seed(3), 4))
    t = torch.tensor([0.2, 0.4, 0.6, 0.8])
    together = made(state, t)
    broken = {**state, "lattice": state["lattice"].clone(), "coordinates": state["coordinates"].clone()}
    broken["lattice"][1, 0] = torch.nan
    broken["coordinates"][2, 0, 0] = torch.inf
    found = made(broken, t)
    for row in range(4):
        alone = made({name: value[row : row + 1] for name, value in state.items()}, t[row : row + 1])
        for name in ("lattice", "coordinates", "types"):
            torch.testing.assert_close(alone[name][0], together[name][row], rtol=1e-5, atol=1e-5)
            if row in (0, 3):
                torch.testing.assert_close(found[name][row], together[name][row])
    assert (together["coordinates"][~state["mask"]] == 0).all()
    for row in (1, 2):
        assert found["lattice"][row].isnan().all() and (found["types"][row] == 0).all()
        assert found["coordinates"][row][state["mask"][row]].isnan().all()


def test_conditions_are_told_or_refused() -> None:
    made = adapter(known=("space_group", "dft_mag_density"))
    state, t = made.codec.prior(draw_keys(torch.Generator().manual_seed(4), 2)), torch.ones(2)
    density = torch.tensor([0.15, float("nan")])
    made(state, t, {"space_group": torch.tensor([0, 225]), "dft_mag_density": density})
    seen = made.module.seen[0]
    untold = seen["_USE_UNCONDITIONAL_EMBEDDING"]
    assert untold["space_group"].tolist() == [[True], [False]] and untold["dft_mag_density"].tolist() == [
        [False],
        [True],
    ]
    assert seen["space_group"][1] == 225 and seen["dft_mag_density"][0] == pytest.approx(0.15)
    assert torch.isfinite(seen["dft_mag_density"]).all()
    with pytest.raises(ConfigError, match="Did you mean 'space_group'"):
        made(state, t, {"space_groups": torch.tensor([1, 1])})
    with pytest.raises(ConfigError, match="unknown to this model"):
        adapter()(state, t, {"space_group": torch.tensor([1, 1])})
    with pytest.raises(ConfigError, match="expected \\(2,\\)"):
        made(state, t, {"space_group": torch.tensor([1])})


def test_a_guided_chain_weighs_its_steps_with_finite_ratios() -> None:
    """Where both branches give one score, guidance changes nothing, and every ratio is 0."""
    made = adapter(known=("space_group",))
    proposal = GuidedProposal({"space_group": torch.tensor([225])}, guidance_scale=2.0)
    codec = made.codec
    chain = Chain(made, codec.scheduler(), num_inference_steps=8, levels=2, stages=codec.stages(), proposal=proposal)
    keys = draw_keys(torch.Generator().manual_seed(5), 2)
    state: Any = codec.prior(keys)
    for step in range(8):
        state, ratio = chain.step(state, torch.full((2,), step), torch.tensor([True, False]), keys)
        torch.testing.assert_close(ratio, torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-3)
    assert torch.isfinite(state["lattice"]).all()


def test_without_mattergen_the_message_says_what_it_pins() -> None:
    codec = MatterGenCodec(density=RHO, max_atoms=4)
    state = codec.prior(draw_keys(torch.Generator().manual_seed(6), 2))
    with pytest.raises(MissingExtraError, match="no extra of genkit.*torch 2.2.1.*MIT"):
        MatterGenAdapter(Exact(), codec)(state, torch.ones(2))
    with pytest.raises(ConfigError, match="DiffusionModule"):
        MatterGenAdapter(torch.nn.Linear(1, 1), codec)


def test_chemical_graphs_are_made_by_mattergens_own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class ChemGraph:
        def __init__(self, **fields: Any) -> None:
            made.append(fields)

    class Batch(Graph):
        def replace(self, **conditions: Any) -> Batch:
            return Batch(**{**self, **conditions})

    def collate(graphs: list[ChemGraph]) -> Batch:
        assert len(graphs) == len(made)
        names = ("pos", "cell", "atomic_numbers", "num_atoms")
        return Batch(**{name: torch.cat([one[name] for one in made]) for name in names})

    for name, members in (("chemgraph", {"ChemGraph": ChemGraph}), ("collate", {"collate": collate})):
        module = types.ModuleType(f"mattergen.common.data.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for parent in ("mattergen", "mattergen.common", "mattergen.common.data"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    codec = MatterGenCodec(density=RHO, max_atoms=4, num_atoms=[0, 1, 1, 0])
    state, t = codec.prior(draw_keys(torch.Generator().manual_seed(7), 3)), torch.full((3,), 0.5)
    exact = Exact(known=("space_group",))
    ours = MatterGenAdapter(exact, codec, graph=make_graph)(state, t)
    theirs = MatterGenAdapter(exact, codec)(state, t, {"space_group": torch.tensor([1, 2, 3])})
    assert [one["num_nodes"] for one in made] == state["mask"].sum(1).tolist()
    assert all(one["cell"].shape == (1, 3, 3) for one in made) and "space_group" in exact.seen[1]
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value)
