"""Crystals as states: the inverse, the prior in stages, and the kernels' log-ratios beside brute force."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from genkit.errors import ConfigError
from genkit.pipelines.crystal_tree_search.state import (
    CrystalCodec,
    LatticeCode,
    fit_codec,
    symmetric_entries,
    symmetric_matrix,
)
from genkit.samplers import draw_keys
from genkit.schedulers import MaskedBlockScheduler, VPScheduler
from tests.toy_crystals import alkali_halides, random_crystals

FAMILIES = ("matter", "diffcsp")


def keys_of(count: int, seed: int = 0):
    return draw_keys(torch.Generator().manual_seed(seed), count)


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def codec_of(family: str = "matter", **options) -> CrystalCodec:
    given = {"elements": [3, 8, 22], "density": 0.06, "lattice_std": 0.5, "max_atoms": 5} | options
    return CrystalCodec(**given, family=family)


# ---- lattices -------------------------------------------------------------------------------------------------------


def test_the_six_entries_and_their_order():
    entries = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    matrix = symmetric_matrix(entries)
    assert matrix[0].tolist() == [[1.0, 6.0, 5.0], [6.0, 2.0, 4.0], [5.0, 4.0, 3.0]]
    assert torch.equal(symmetric_entries(matrix), entries)


def test_the_encoding_of_a_cube_by_hand():
    """8 atoms in a cube of 6 Å at ρ = 1/8 per Å³: μ = 4 Å, so (6 − 4)/(s · 2), or log(6/4)/s."""
    cube, count = 6.0 * torch.eye(3)[None], torch.tensor([8])
    close(LatticeCode(0.125, 0.5).encode(cube, count)[0], torch.tensor([2.0, 2.0, 2.0, 0.0, 0.0, 0.0]), 1e-6)
    expected = math.log(1.5) / 0.5 * torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    close(LatticeCode(0.125, 0.5, "diffcsp").encode(cube, count)[0], expected, 1e-6)


def test_the_logarithm_is_the_matrix_logarithm():
    crystals = random_crystals(20)
    cells, count = crystals["lattice"].double(), crystals["mask"].sum(1)
    code = LatticeCode(0.06, 0.3, "diffcsp")
    y = code.encode(cells, count)
    logarithm = symmetric_matrix(y.double() * 0.3) + torch.eye(3).double() * code.cube(count).log()[:, None, None]
    close(torch.matrix_exp(logarithm), cells, 2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lattice_that_is_not_finite_stays_so(family):
    entries = torch.zeros(2, 6)
    entries[0, 1] = math.nan
    decoded = LatticeCode(0.06, 0.5, family).decode(entries, torch.tensor([2, 2]))
    assert bool(decoded[0].isnan().any()) and bool(torch.isfinite(decoded[1]).all())


# ---- crystals ↔ states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_inverts_encoding(family):
    crystals, codec = random_crystals(100), codec_of(family)
    state = codec.encode(crystals)
    again = codec.decode(state)
    for name in ("numbers", "mask"):
        assert torch.equal(again[name], crystals[name])
    close(again["coordinates"], crystals["coordinates"], 1e-7)
    close(again["lattice"], crystals["lattice"], 1e-5)
    shapes = {name: tuple(value.shape[1:]) for name, value in state.items() if name != "mask"}
    assert shapes == codec.shapes


def test_padding_holds_nothing_whatever_was_there():
    crystals = random_crystals(20)
    mask = crystals["mask"]
    dirty = {**crystals, "coordinates": crystals["coordinates"] + 3.7 * (~mask)[..., None]}
    dirty["numbers"] = torch.where(mask, crystals["numbers"], 118)
    for family in FAMILIES:
        codec = codec_of(family)
        for name, value in codec.encode(crystals).items():
            assert torch.equal(codec.encode(dirty)[name], value)
    matter = codec_of().encode(dirty)
    assert bool((matter["types"][~mask] == 3).all()) and not bool(matter["coordinates"][~mask].any())


def test_crystals_of_another_width_are_filled_up_or_cut():
    crystals = random_crystals(20, max_atoms=3)
    wide = codec_of(max_atoms=6).encode(crystals)
    assert wide["types"].shape == (20, 6) and torch.equal(wide["mask"].sum(1), crystals["mask"].sum(1))
    narrow = codec_of(max_atoms=3).encode(codec_of(max_atoms=6).decode(wide))
    assert torch.equal(narrow["types"], wide["types"][:, :3])
    with pytest.raises(ConfigError, match="up to 3 atoms; expected at most 2"):
        codec_of(max_atoms=2).encode(crystals)


def test_a_type_that_is_still_masked_has_no_number():
    codec = codec_of()
    state = codec.encode(random_crystals(4))
    state["types"][:, 0] = codec.mask_id
    assert not bool(codec.decode(state)["numbers"][:, 0].any())


def test_the_codec_of_a_data_set():
    crystals = alkali_halides(200)
    for family in FAMILIES:
        codec = fit_codec(crystals, family)
        assert codec.elements == (3, 9, 11, 17, 19, 35, 37) and codec.num_atoms == (0.0, 1.0, 0.0, 0.0)
        volume = float(torch.linalg.det(crystals["lattice"].double()).mean())
        assert abs(codec.lattice_code.density - 2.0 / volume) < 1e-6
        assert abs(float(codec.encode(crystals)["lattice"].square().mean()) - 1.0) < 1e-4  # unit size


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_is_plain_and_survives(family, tmp_path):
    codec = CrystalCodec([3, 8], 0.06, 0.5, family, num_atoms=[1.0, 3.0], max_atoms=2)  # given by position, too
    codec.save_config(tmp_path)
    again = CrystalCodec.from_config(CrystalCodec.load_config(tmp_path))
    assert dict(again.config) | {} == json.loads(json.dumps(dict(again.config)))
    assert again.elements == (3, 8) and again.num_atoms == (0.25, 0.75) and again.lattice_code == codec.lattice_code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elements": [8, 3]}, "increasing"),
        ({"elements": []}, "increasing"),
        ({"family": "mater"}, "Did you mean 'matter'"),
        ({"density": 0.0}, "density=0.0"),
        ({"num_atoms": [1.0]}, "5 probabilities"),
        ({"sigma_min": 2.0}, "sigma_min"),
        ({"schedule": "cosin"}, "cosine"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        CrystalCodec(**({"elements": [3], "density": 0.06, "lattice_std": 0.5, "max_atoms": 5} | options))


def test_crystals_are_checked():
    crystals, codec = random_crystals(3), codec_of()
    with pytest.raises(ConfigError, match="atomic numbers"):
        codec_of(elements=[3, 8]).encode(crystals)
    turned = {**crystals, "lattice": torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]]) @ crystals["lattice"]}
    with pytest.raises(ConfigError, match="polar_lattice"):
        codec.encode(turned)
    with pytest.raises(ConfigError, match="'lattice'"):
        codec.encode({"numbers": crystals["numbers"]})


def test_the_number_of_atoms_of_a_space_group_is_weighed_back_to_the_prior():
    """E_q[w f(n)] = E_p[f(n)] exactly, with w at most 1/π₀ and q between the prior's law and the group's."""
    crystals = random_crystals(60) | {"space_group": torch.arange(60) % 3}
    codec = fit_codec(crystals, max_atoms=5)
    counts = torch.bincount(crystals["mask"].sum(1)[crystals["space_group"] == 2], minlength=6)[1:].double()
    assert set(codec.num_atoms_by_group) == {1, 2}  # 0 is no group
    torch.testing.assert_close(torch.tensor(codec.num_atoms_by_group[2]).double(), counts / counts.sum())
    stage = codec.stages(space_group=2, base_probability=0.25)[0]
    law, prior = (torch.tensor(p, dtype=torch.float64) for p in (stage.law, codec.num_atoms))
    torch.testing.assert_close(law, 0.25 * prior + 0.75 * counts / counts.sum())
    empty = codec.empty_state(torch.arange(5) < torch.arange(1, 6).unsqueeze(1))
    seen = prior > 0.0
    weight = stage.log_weight(empty).exp()[seen]
    torch.testing.assert_close(law[seen] * weight, prior[seen])
    assert float(weight.max()) <= 4.0 + 1e-9
    drawn = stage(keys_of(4000))["mask"].sum(1)
    share = torch.bincount(drawn, minlength=6)[1:].double() / 4000
    assert float((share - law).abs().max()) < 4.5 * 0.5 / 4000**0.5
    for plain in (codec.stages(), codec.stages(space_group=99)):
        assert plain[0].law == codec.num_atoms and not bool(plain[0].log_weight(empty)[seen].any())


# ---- the prior ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prior_in_two_stages(family):
    codec = codec_of(family, num_atoms=[0.1, 0.0, 0.4, 0.5, 0.0])
    n = 20_000
    first, second = codec.stages()
    empty = first(keys_of(n), None, None)
    share = torch.bincount(empty["mask"].sum(1), minlength=6).double() / n
    expected = torch.tensor([0.0, 0.1, 0.0, 0.4, 0.5, 0.0]).double()
    assert bool(((share - expected).abs() <= 4.5 * (expected * (1 - expected) / n).sqrt()).all())
    assert not bool(empty["lattice"].any()) and not bool(empty["coordinates"].any())
    noise = second(keys_of(n, 1), empty, None)
    layout = {name: (value.shape, value.dtype) for name, value in noise.items()}
    assert {name: (value.shape, value.dtype) for name, value in empty.items()} == layout  # one store holds both
    assert torch.equal(noise["mask"], empty["mask"])
    assert abs(float(noise["lattice"].mean())) < 0.02 and abs(float(noise["lattice"].std()) - 1.0) < 0.02
    if family == "matter":
        assert bool((noise["types"] == codec.mask_id).all())


def test_the_prior_is_each_rows_own_and_can_be_told_its_size():
    codec, keys = codec_of(), keys_of(6)
    whole, part = codec.prior(keys), codec.prior(keys[2:4])
    for name, value in whole.items():
        assert torch.equal(value[2:4], part[name])
    told = codec.prior(keys, context={"num_atoms": torch.tensor([1, 2, 3, 4, 5, 1])})
    assert told["mask"].sum(1).tolist() == [1, 2, 3, 4, 5, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fixed_composition_stays(family):
    codec = codec_of(family)
    state = codec.prior(keys_of(7), formula={"O": 2, "Ti": 1})
    assert codec.decode(state)["numbers"][:, :3].tolist() == [[8, 8, 22]] * 7
    scheduler = codec.scheduler(fixed_types=True)
    output = {"lattice": torch.ones(7, 6), "coordinates": torch.ones(7, 5, 3), "types": None}
    kernel = scheduler.transition(output, 0.5, 0.4, state)
    drawn = kernel.sample(keys_of(7))
    assert torch.equal(drawn["types"], state["types"]) and drawn.keys() == state.keys()
    assert bool(torch.isfinite(kernel.log_prob(drawn)).all()) and len(codec.stages({"O": 1})) == 1


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ({"Na": 1}, "atomic numbers"),
        ({"Xx": 1}, "unknown"),
        ({"O": 6}, "at most 5"),
        ({}, "symbols and counts"),
        ({"O": 0}, "O"),
    ],
)
def test_formulas_are_checked(formula, message):
    with pytest.raises(ConfigError, match=message):
        codec_of().prior(keys_of(1), formula=formula)


# ---- kernels --------------------------------------------------------------------------------------------------------


def test_the_lattice_log_ratio_is_that_of_the_upper_triangle():
    """A kernel on the six numbers is one on symmetric matrices in Å with unit noise on the upper triangle."""
    generator = torch.Generator().manual_seed(0)
    y, out_p, out_q, drawn = torch.randn(4, 10, 6, generator=generator, dtype=torch.float64)
    scheduler, count = VPScheduler(), torch.arange(1, 11)
    kernels = [scheduler.transition(output, 0.6, 0.5, y) for output in (out_p, out_q)]
    ratio = kernels[0].log_prob(drawn) - kernels[1].log_prob(drawn)
    width = 0.5 * count.double().pow(1 / 3)  # Å of one unit
    physical = [symmetric_matrix(width[:, None] * v) for v in (kernels[0].mean, kernels[1].mean, drawn)]
    upper = [torch.stack([m[:, i, j] for i in range(3) for j in range(i, 3)], -1) for m in physical]
    covariance = (width * kernels[0].std).square()[:, None, None] * torch.eye(6, dtype=torch.float64)
    laws = [MultivariateNormal(mean, covariance) for mean in upper[:2]]
    close(ratio, laws[0].log_prob(upper[2]) - laws[1].log_prob(upper[2]), 1e-9)
    squares = [(physical[2] - mean).square().sum((1, 2)) for mean in physical[:2]]
    nine = -0.5 * (squares[0] - squares[1]) / (width * kernels[0].std).square()
    assert float((nine - ratio).abs().min()) > 1e-3  # all nine entries count the off-diagonals twice


def test_symmetric_noise_has_unit_variance_on_all_six():
    noise = torch.randn(100_000, 3, 3, generator=torch.Generator().manual_seed(0))
    tied = torch.where(torch.eye(3) == 1, noise, (noise + noise.mT) / math.sqrt(2))
    entries = symmetric_entries(tied)
    close(torch.cov(entries.T), torch.eye(6), 0.02)
    everywhere = symmetric_entries((noise + noise.mT) / math.sqrt(2))
    assert abs(float(everywhere[:, 0].var()) - 2.0) < 0.05  # the diagonal must be left out


def test_the_absorbing_kernel_is_the_posterior_of_the_chains_matrices():
    """Σ_x0 p(x0) q(x_s | x_t, x0) with q by Bayes' rule from explicit one-step matrices."""
    k, steps = 3, 10
    eye, to_mask = torch.eye(k + 1).double(), torch.zeros(k + 1, k + 1).double()
    to_mask[:, k] = 1.0

    def one_step(i: int) -> torch.Tensor:  # 'standard' schedule: β = 1/(T − i + 1), a linear survival
        beta = 1.0 / (steps - i + 1)
        return (1 - beta) * eye + beta * to_mask

    until = [eye]
    for i in range(1, steps + 1):
        until.append(until[-1] @ one_step(i))
    assert float(until[4][0, 0]) == pytest.approx(0.6)
    logits = torch.tensor([0.3, -1.0, 2.0, 5.0]).double()  # the mask's own is not read
    believed = logits[:k].softmax(0)
    scheduler = MaskedBlockScheduler(mask_token_id=k)
    for i in range(1, steps + 1):
        joint = until[i - 1][:k, :] * one_step(i)[:, k]  # q(x_s | x0) q(x_t = mask | x_s)
        posterior = believed @ (joint / joint.sum(1, keepdim=True))
        kernel = scheduler.transition(logits.expand(1, 1, -1), i / steps, (i - 1) / steps, torch.tensor([[k]]))
        close(kernel.logits[0, 0].softmax(0), posterior, 1e-9)


def test_types_that_stay_masked_add_nothing_to_the_log_ratio():
    generator = torch.Generator().manual_seed(0)
    p_out, q_out = torch.randn(2, 5, 4, 4, generator=generator, dtype=torch.float64)
    scheduler, x = MaskedBlockScheduler(mask_token_id=3), torch.tensor([[3, 3, 1, 3]]).expand(5, 4)
    p, q = (scheduler.transition(output, 0.6, 0.3, x) for output in (p_out, q_out))
    assert torch.equal(p.log_prob(x), q.log_prob(x))
    moved = torch.tensor([[2, 3, 1, 3]]).expand(5, 4)
    expected = p_out[:, 0, :3].log_softmax(-1)[:, 2] - q_out[:, 0, :3].log_softmax(-1)[:, 2]
    close(p.log_prob(moved) - q.log_prob(moved), expected, 1e-9)
    kept_logit = p_out[:, 0].log_softmax(-1)[:, 2] - q_out[:, 0].log_softmax(-1)[:, 2]
    assert float((kept_logit - expected).abs().min()) > 1e-3  # with the mask among the classes the ratio is wrong


def test_masked_noise():
    scheduler, n = MaskedBlockScheduler(mask_token_id=3), 20_000
    x0 = torch.tensor([[0, 1, 2]]).expand(n, 3)
    t = torch.linspace(0.0, 1.0, n)
    noisy = scheduler.mask_tokens(x0, keys_of(n).uniform((3,)), t)
    masked = noisy == 3
    assert torch.equal(noisy[~masked], x0[~masked])
    for low in (0.0, 0.5, 0.9):
        part = (t >= low) & (t < low + 0.1)
        assert abs(float(masked[part].double().mean()) - (low + 0.05)) < 0.03
    assert not bool(masked[0].any()) and bool(masked[-1].all())
    assert torch.equal(scheduler.prior(keys_of(2), (3,)), torch.full((2, 3), 3))
    logits = torch.tensor([[[0.0, 1.0, 0.5, 9.0], [0.0, 1.0, 0.5, 9.0]]])
    assert scheduler.to_x0(logits, 0.5, torch.tensor([[3, 2]])).tolist() == [[1, 2]]
    with pytest.raises(ConfigError, match="mask_token_id"):
        MaskedBlockScheduler().prior(keys_of(1), (3,))
