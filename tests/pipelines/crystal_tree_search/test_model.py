"""The network's symmetries, alone and in the log-densities of a step, and its geometry beside brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from genkit._components import load_component, save_component
from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search.model import CrystalTransformer, PairGeometry, without_drift
from genkit.pipelines.crystal_tree_search.state import CrystalCodec
from genkit.samplers import draw_keys, rollout
from genkit.schedulers.wrapped import score_size
from tests.toy_crystals import polar_cells

FAMILIES = ("matter", "diffcsp")
COND = {"space_group": torch.tensor([225, 1, 0, 62, 8, 10]), "stability": torch.tensor([1, 0, 2, 3, 2, 1])}
TIMES = torch.tensor([0.05, 0.3, 0.5, 0.7, 0.95, 1.0])


def keys_of(count: int, seed: int = 0):
    return draw_keys(torch.Generator().manual_seed(seed), count)


def close(a, b, tolerance=2e-4):
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=tolerance, atol=tolerance)


def codec_of(family: str = "matter") -> CrystalCodec:
    return CrystalCodec([3, 8, 22], 0.06, 0.3, family, max_atoms=5)


def model_of(family: str = "matter", seed: int = 0, **options) -> CrystalTransformer:
    """A small network whose heads do something."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        given = {"width": 32, "blocks": 2, "heads": 4} | options
        model = CrystalTransformer(3, 0.06, 0.3, family, **given)
        for parameter in model.parameters():
            if parameter.ndim == 2 or not parameter.any():
                torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def state_of(family: str = "matter", count: int = 6) -> dict[str, torch.Tensor]:
    """States between noise and data, of 1 to 5 atoms."""
    codec = codec_of(family)
    state = codec.prior(keys_of(count), context={"num_atoms": torch.tensor([1, 2, 3, 4, 5, 5])[:count]})
    if family == "matter":
        known = torch.tensor([True, False, True, False, False])
        state["types"] = torch.where(known & state["mask"], 1, state["types"])
    return state


def moved(state, output, kind: str):
    """The state after a symmetry operation, and what the outputs must become."""
    order = torch.arange(state["mask"].shape[1])
    coordinates = state["coordinates"]
    if kind == "shift":
        coordinates = coordinates + torch.tensor([0.31, 0.77, 0.05])
    elif kind == "wrapped shift":
        coordinates = torch.remainder(coordinates + torch.tensor([0.31, 0.77, 0.05]), 1.0)
    elif kind == "integers":
        coordinates = coordinates + torch.tensor([[1.0, -2.0, 3.0], [0.0, 4.0, 0.0], [-1.0, 0.0, 0.0]] * 2)[:5]
    else:
        order = torch.tensor([1, 0, 2, 4, 3])
        keep = state["mask"].sum(1) == 5  # padding must stay last
        state, output = ({k: v[keep] for k, v in d.items()} for d in (state, output))
        coordinates = state["coordinates"]
    permuted = {k: v[:, order] if k in ("types", "mask") else v for k, v in state.items()}
    expected = {k: v[:, order] if k != "lattice" else v for k, v in output.items()}
    return permuted | {"coordinates": coordinates[:, order]}, expected


# ---- symmetries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["shift", "wrapped shift", "integers", "permutation"])
def test_symmetries_of_the_outputs(family, kind):
    model, state = model_of(family), state_of(family)
    output = model(state, TIMES, COND)
    changed, expected = moved(state, output, kind)
    rows = slice(4, 6) if kind == "permutation" else slice(0, 6)
    close(model(changed, TIMES[rows], {k: v[rows] for k, v in COND.items()}), expected)
    assert all(float(v.detach().abs().max()) > 0.05 for v in output.values())  # an output of zeros would pass as well


@torch.no_grad()
def test_what_is_no_symmetry_changes_the_outputs():
    model, state = model_of(), state_of()
    output = model(state, TIMES, COND)
    stretched = {**state, "coordinates": state["coordinates"] * 1.1}
    assert float((model(stretched, TIMES, COND)["lattice"] - output["lattice"])[1:].abs().max()) > 1e-3
    for name in ("space_group", "stability"):
        other = model(state, TIMES, {**COND, name: COND[name].roll(1)})
        assert float((other["lattice"] - output["lattice"]).abs().max()) > 1e-3
    assert float((model(state, TIMES.roll(1), COND)["types"] - output["types"]).abs().max()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_crystal_does_not_see_its_batch_or_its_padding(family):
    model, state = model_of(family), state_of(family)
    output = model(state, TIMES, COND)
    for row in range(6):
        n = int(state["mask"][row].sum())
        one = slice(row, row + 1)
        cut = {k: v[one] if k == "lattice" else v[one, :n] for k, v in state.items()}
        alone = model(cut, TIMES[one], {k: v[one] for k, v in COND.items()})
        close(alone, {k: v[one] if k == "lattice" else v[one, :n] for k, v in output.items()})
    poisoned = dict(state)
    padding = ~state["mask"]
    poisoned["coordinates"] = torch.where(padding[..., None], 0.77, state["coordinates"])
    fill = torch.zeros_like(state["types"]) if family == "matter" else 5.0 + 0.0 * state["types"]
    hidden = padding if family == "matter" else padding[..., None]
    poisoned["types"] = torch.where(hidden, fill, state["types"])
    again = model(poisoned, TIMES, COND)
    for name, value in output.items():
        real = state["mask"] if name != "lattice" else slice(None)
        torch.testing.assert_close(again[name][real], value[real], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_score_has_no_drift_and_vanishes_for_one_atom():
    output, state = model_of()(state_of(), TIMES, COND), state_of()
    scores = output["coordinates"]
    assert float(scores.sum(1).abs().max()) < 1e-5 and not bool(scores[~state["mask"]].any())
    assert float(scores[0].abs().max()) < 1e-6 and float(scores[1].abs().max()) > 1e-3
    vectors = without_drift(torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0)), state["mask"])
    assert float(vectors.sum(1).abs().max()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["shift", "integers", "permutation"])
def test_log_weights_of_a_guided_step_have_the_same_symmetries(family, kind):
    """log p(x_s | x_t) − log q(x_s | x_t), with p without and q with the condition."""
    model, scheduler, state = model_of(family), codec_of(family).scheduler(), state_of(family)
    t, s = torch.tensor([0.5, 0.6, 0.4, 0.7, 0.55, 0.65]), torch.tensor([0.45, 0.5, 0.35, 0.6, 0.5, 0.6])

    def ratio(x, x_s, rows):
        told = {k: v[rows] for k, v in COND.items()}
        kernels = [scheduler.transition(model(x, t[rows], c), t[rows], s[rows], x) for c in (None, told)]
        return kernels[0].log_prob(x_s) - kernels[1].log_prob(x_s), kernels[1]

    every = slice(0, 6)
    drawn = ratio(state, state, every)[1].sample(keys_of(6, 3))
    rows = slice(4, 6) if kind == "permutation" else every
    expected = ratio(state, drawn, every)[0].detach()
    assert bool(torch.isfinite(expected).all()) and float(expected[1:].abs().min()) > 1e-4
    changed, _ = moved(state, {"lattice": state["lattice"]}, kind)
    drawn_changed, _ = moved(drawn, {"lattice": state["lattice"]}, kind)
    torch.testing.assert_close(ratio(changed, drawn_changed, rows)[0], expected[rows], rtol=2e-3, atol=2e-3)
    for row in range(6):
        one = slice(row, row + 1)
        alone = ratio({k: v[one] for k, v in state.items()}, {k: v[one] for k, v in drawn.items()}, one)[0]
        torch.testing.assert_close(alone, expected[one], rtol=2e-3, atol=2e-3)


# ---- geometry -------------------------------------------------------------------------------------------------------


def test_distances_are_those_of_the_nearest_image():
    generator = torch.Generator().manual_seed(0)
    cells = polar_cells(4.0 * torch.eye(3) + 0.6 * torch.randn(8, 3, 3, generator=generator))
    f = torch.rand(8, 4, 3, generator=generator)
    delta = f.unsqueeze(1) - f.unsqueeze(2)
    found = PairGeometry().distances(delta - delta.round(), cells)
    images = torch.tensor(list(itertools.product(range(-3, 4), repeat=3)), dtype=torch.float32)
    brute = ((delta.unsqueeze(-2) + images).unsqueeze(-2) @ cells[:, None, None, None]).squeeze(-2).norm(dim=-1)
    brute = torch.where(brute < 1e-4, math.inf, brute).amin(-1)  # an atom's distance to itself: the next image
    torch.testing.assert_close(found, brute, rtol=1e-4, atol=1e-4)


def test_features_tell_a_distance_from_a_special_position_at_the_scale_of_the_noise():
    geometry = PairGeometry()
    f = torch.tensor([[[0.0, 0.0, 0.0], [0.504, 0.0, 0.0]]])
    for sigma, steep in ((0.004, True), (0.4, False)):
        odd = geometry(f, 4.0 * torch.eye(3)[None], torch.tensor([sigma]))[1][0, 0, 1, 0]
        assert (abs(float(odd[5])) > 0.3) == steep and abs(float(odd[0])) < 0.05


def test_the_outputs_of_the_score_have_the_size_of_their_target():
    model = model_of()
    t = torch.linspace(0.0, 1.0, 40)
    sigma, size = model.levels(t)
    torch.testing.assert_close(size.double(), score_size(sigma.double()), rtol=2e-3, atol=1e-4)
    assert abs(float(sigma[0]) - 0.005) < 1e-8 and abs(float(sigma[-1]) - 0.5) < 1e-6


# ---- the module -----------------------------------------------------------------------------------------------------


def test_it_starts_at_zero_and_fits_the_budget():
    model = CrystalTransformer(27, 0.06, 0.5)
    assert sum(p.numel() for p in model.parameters()) <= 1_400_000
    state = CrystalCodec(list(range(3, 30)), 0.06, 0.5).prior(keys_of(2))
    assert not any(bool(v.any()) for v in model(state, torch.ones(2)).values())


def test_a_missing_condition_is_the_null_one():
    model, state = model_of(), state_of()
    null = {name: torch.zeros(6, dtype=torch.int64) for name in COND}
    close(model(state, TIMES, None), model(state, TIMES, null), 1e-6)
    half = {"space_group": COND["space_group"]}
    close(model(state, TIMES, half), model(state, TIMES, {**null, **half}), 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_gradient(family):
    model, state = model_of(family), state_of(family)
    sum(v.square().sum() for v in model(state, TIMES, COND).values()).backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_saving_and_loading(family, tmp_path):
    model, state = model_of(family), state_of(family)
    save_component(model, tmp_path / "net")
    again = load_component(CrystalTransformer, tmp_path / "net", dtype=None, keep_buffers=True)
    close(again(state, TIMES, COND), model(state, TIMES, COND), 0.0)


def test_half_precision_keeps_the_geometry():
    model, state = model_of(), state_of()
    half = model_of().to(torch.bfloat16)
    assert half.levels.size.dtype == torch.float32 and half.geometry.centres.dtype == torch.float32
    output, exact = half(state, TIMES, COND), model(state, TIMES, COND)
    assert all(v.dtype == torch.float32 for v in output.values())
    assert float((output["lattice"] - exact["lattice"]).norm() / exact["lattice"].norm()) < 0.2


def test_sizes_are_checked():
    with pytest.raises(ConfigError, match="heads=3"):
        CrystalTransformer(3, 0.06, 0.3, width=32, heads=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_walk_does_not_depend_on_the_batch(family):
    model, codec = model_of(family), codec_of(family)
    for parameter in model.parameters():
        parameter.data.mul_(0.3)
    keys = keys_of(4)

    def walk(rows):
        start = codec.prior(keys[rows])
        seeds = [torch.Generator().manual_seed(i) for i in range(4)][rows]
        output = rollout(model, codec.scheduler(), start, num_inference_steps=8, solver="ancestral", generator=seeds)
        return codec.decode(output.sample)

    whole, part = walk(slice(0, 4)), walk(slice(1, 3))
    assert torch.equal(whole["numbers"][1:3], part["numbers"])
    torch.testing.assert_close(whole["lattice"][1:3], part["lattice"], rtol=1e-3, atol=1e-3)
    turn = 2.0 * math.pi * (whole["coordinates"][1:3] - part["coordinates"])
    assert float((1.0 - turn.cos()).max()) < 1e-4
    assert not bool(whole["coordinates"][~whole["mask"]].any())
