"""Guided proposals: weights that bring averages back to the base, their bound, and how much guidance they bear."""

from __future__ import annotations

import math

import pytest
import torch

from genkit.errors import ConfigError
from genkit.samplers.noise import draw_keys
from genkit.samplers.tree.chain import Chain
from genkit.samplers.tree.proposals import GuidedProposal, effective_share, tune_guidance
from genkit.schedulers import VPScheduler
from tests.samplers.tree.gaussian_chain import Denoiser, base_law, gaussian_chain, seeded, separations


def weighted_walk(chain, count, seed=0):
    """Ends (n,), and the log-weights of each edge (n, edges)."""
    keys, edges = draw_keys(seeded(seed), count), []
    state = chain.draw_stage(1, None, keys)
    for edge, end in enumerate(chain.levels):
        guided, total = chain.draw_branch(keys, 1 + edge), torch.zeros(count, dtype=torch.float64)
        for k in range((0, *chain.levels)[edge], end):
            state, ratio = chain.step(state, torch.full((count,), k), guided, keys)
            total = total + ratio
        edges.append(chain.edge_log_weight(total))
    return state[:, 0], torch.stack(edges, dim=1)


def z_score(values, exact):
    return abs(float(values.mean()) - exact) / float(values.std() / math.sqrt(len(values)))


def mixture_share(separation, share):
    """1 / E_mixture[w²] = 1 / E_p[w] of one edge whose log-ratio is N(D²/2, D²) under p, by quadrature."""
    z = torch.linspace(-12.0, 12.0, 20_001, dtype=torch.float64)
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    ratio = 0.5 * separation**2 + separation * z
    weight = 1.0 / (share + (1 - share) * torch.exp(-ratio))
    return 1.0 / float(torch.trapezoid(density * weight, z))


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_the_weight_of_an_edge_is_that_against_the_mixture(share):
    proposal = GuidedProposal({"shift": torch.ones(1)}, base_probability=share)
    ratio = torch.tensor([-3.0, -0.4, 0.0, 1.2, 5.0], dtype=torch.float64)
    exact = 1.0 / (share + (1.0 - share) * torch.exp(-ratio))
    torch.testing.assert_close(proposal.edge_log_weight(ratio).exp(), exact)
    far = proposal.edge_log_weight(torch.tensor([-math.inf, -800.0, 800.0], dtype=torch.float64))
    assert far[0] == -math.inf
    assert far[1] < -799
    assert float(far[2]) == pytest.approx(-math.log(share) if share else 800.0)


@pytest.mark.parametrize(("share", "levels", "shift"), [(0.3, 1, 0.8), (0.3, 8, 0.8), (0.2, 2, 1.6), (0.0, 2, 0.35)])
def test_weighted_averages_are_the_bases_and_plain_ones_are_not(share, levels, shift):
    chain = gaussian_chain(levels=levels, shift=shift, base_probability=share)
    x, log_weights = weighted_walk(chain, 40_000)
    mean, var = base_law(chain)
    weights = log_weights.sum(dim=1).exp()
    if share:
        assert float(log_weights.max()) <= -math.log(share) + 1e-12
    for of, exact in ((torch.ones_like(x), 1.0), (x, mean), (x * x, var + mean**2), ((x > 1).double(), None)):
        exact = 0.5 * math.erfc((1 - mean) / math.sqrt(2 * var)) if exact is None else exact
        assert z_score(weights * of, exact) < 4
    assert z_score(x, mean) > 20
    for edge in range(levels):  # the mean of each edge's weight is 1 given the past, so also by itself
        assert z_score(log_weights[:, : edge + 1].sum(dim=1).exp(), 1.0) < 4


def test_the_shares_are_those_of_the_closed_form():
    """Plain: exp(−D²) with D² = Σ (Δm/std)²; the mixture's is larger, and long edges do better than short ones."""
    shift = 0.8
    plain = gaussian_chain(levels=1, shift=shift, base_probability=0.0)
    squared = sum(d * d for d in separations(plain, shift))
    _, log_weights = weighted_walk(plain, 40_000)
    assert effective_share(log_weights[:, 0]) == pytest.approx(math.exp(-squared), rel=0.1)
    assert mixture_share(math.sqrt(squared), 0.0) == pytest.approx(math.exp(-squared), rel=1e-6)
    mixed = gaussian_chain(levels=1, shift=shift, base_probability=0.3)
    _, log_weights = weighted_walk(mixed, 40_000)
    one_edge = effective_share(log_weights[:, 0])
    assert one_edge == pytest.approx(mixture_share(math.sqrt(squared), 0.3), rel=0.03)
    _, log_weights = weighted_walk(gaussian_chain(levels=8, shift=shift, base_probability=0.3), 40_000)
    assert math.exp(-squared) < effective_share(log_weights.sum(dim=1)) < one_edge


def test_branches_are_drawn_with_the_proposals_share():
    chain, keys = gaussian_chain(shift=0.5, base_probability=0.2), draw_keys(seeded(), 10_000)
    drawn = torch.stack([chain.draw_branch(keys, depth) for depth in (1, 2)]).double()
    assert float((drawn.mean(dim=1) - 0.8).abs().max()) < 4 * math.sqrt(0.16 / 10_000)
    assert abs(float(torch.corrcoef(drawn)[0, 1])) < 4 / 100
    assert not gaussian_chain().draw_branch(keys, 1).any()
    assert gaussian_chain(shift=0.5, base_probability=0.0).draw_branch(keys, 1).all()
    per_row = chain.draw_branch(keys, torch.arange(10_000) % 2 + 1)  # rows at depths of their own
    assert torch.equal(per_row, torch.where(torch.arange(10_000) % 2 == 0, drawn[0], drawn[1]).bool())


def test_effective_shares():
    assert effective_share(torch.full((7,), -300.0)) == pytest.approx(1.0)
    assert effective_share(torch.tensor([0.0, -math.inf, -math.inf, -math.inf])) == pytest.approx(0.25)
    assert effective_share(torch.full((3,), -math.inf)) == 0.0


# ---- outputs --------------------------------------------------------------------------------------------------------


def test_guidance_extrapolates_from_the_null_to_the_conditional_output():
    told = []

    def denoise(x, t, cond):
        told.append({name: value.tolist() for name, value in cond.items()})
        return x * 0 + cond["a"].double().reshape(-1, 1) + 10.0 * cond["other"].double().reshape(-1, 1)

    proposal = GuidedProposal({"a": torch.tensor([4])}, null={"a": torch.tensor([1])}, guidance_scale=[0.0, 2.5])
    x, t, edge = torch.zeros(3, 1, dtype=torch.float64), torch.ones(3), torch.tensor([1, 0, 1])
    cond = {"other": torch.tensor([0, 1, 2]), "a": torch.tensor([7, 7, 7])}
    base, guided = proposal.outputs(denoise, x, t, cond, edge)
    assert base[:, 0].tolist() == [1.0, 11.0, 21.0]
    assert guided[:, 0].tolist() == [1 + 2.5 * 3, 11.0, 21 + 2.5 * 3]
    assert told == [{"other": [0, 1, 2] * 2, "a": [1, 1, 1, 4, 4, 4]}]
    assert proposal.calls_per_step == 2


def test_another_network_as_the_base_costs_a_third_evaluation():
    def other(x, t, cond):
        return x + 100.0

    proposal = GuidedProposal({"a": torch.tensor([4])}, base=other, guidance_scale=1.0)
    base, guided = proposal.outputs(
        lambda x, t, cond: x + cond["a"].reshape(-1, 1), torch.zeros(2, 1), torch.ones(2), None, torch.zeros(2).long()
    )
    assert (base[:, 0].tolist(), guided[:, 0].tolist()) == ([100.0, 100.0], [4.0, 4.0])
    assert proposal.calls_per_step == 3


def test_classes_that_neither_output_has_stay_without_mass():
    def denoise(x, t, cond):
        return torch.tensor([0.0, 1.0, -math.inf]) * (1 + cond["a"].reshape(-1, 1))

    proposal = GuidedProposal({"a": torch.tensor([1.0])}, guidance_scale=2.0)
    _, guided = proposal.outputs(denoise, torch.zeros(2, 1), torch.ones(2), None, torch.zeros(2).long())
    assert guided.tolist() == [[0.0, 3.0, -math.inf]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cond": {}}, "needs a condition; got none"),
        ({"guidance_scale": 0.0}, "guidance_scale=0 ignores the condition"),
        ({"guidance_scale": [0.0, 0.0]}, "guidance_scale=0 ignores the condition"),
        ({"guidance_scale": -1.0}, "guidance_scale=-1.0; expected a number, at least 0"),
        ({"base_probability": 1.0}, "base_probability=1.0; expected a probability"),
        ({"null": {"b": torch.zeros(1)}}, r"null has the entries \['b'\]; expected those of cond, \['a'\]"),
    ],
)
def test_proposals_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        GuidedProposal(**{"cond": {"a": torch.ones(1)}, **options})


def test_a_list_of_scales_or_a_condition_that_does_not_fit_is_refused():
    chain = gaussian_chain(shift=0.5, scale=[1.0, 1.0])
    keys = draw_keys(seeded(), 2)
    with pytest.raises(ConfigError, match="guidance_scale has 2 entries; expected a number, or one a macro-edge"):
        chain.step(torch.zeros(2, 1).double(), torch.tensor([0, 7]), None, keys)
    scheduler = VPScheduler("cosine")
    proposal = GuidedProposal({"shift": torch.ones(3)})
    chain = Chain(Denoiser(scheduler), scheduler, num_inference_steps=4, levels=2, shape=(1,), proposal=proposal)
    with pytest.raises(ConfigError, match="condition 'shift' has shape .3,.; expected one row for all"):
        chain.step(torch.zeros(2, 1), torch.tensor([0, 1]), None, keys)


# ---- tuning ---------------------------------------------------------------------------------------------------------


def edge_separations(chain, shift):
    steps, starts = [*separations(chain, shift), 0.0], (0, *chain.levels)
    return [math.sqrt(sum(d * d for d in steps[a:b])) for a, b in zip(starts, chain.levels, strict=False)]


def test_tuning_finds_the_largest_guidance_that_the_weights_bear():
    target, shift, top = 0.6, 1.0, 4.0
    chain = gaussian_chain(levels=4, shift=shift, scale=top)
    tuned, evaluations = tune_guidance(chain, target=target, num_samples=4000, iterations=8, generator=seeded())
    distances = edge_separations(chain, shift)
    for scale, distance in zip(tuned.scales, distances, strict=True):
        if mixture_share(top * distance, 0.3) > target + 0.02:
            assert scale == top
            continue
        assert mixture_share(scale * distance, 0.3) == pytest.approx(target, abs=0.03)
    assert 0 < tuned.scales[0]
    assert min(tuned.scales) < 0.5 * top  # somewhere the target binds
    _, log_weights = weighted_walk(chain.with_proposal(tuned), 4000, seed=5)
    for edge in range(4):
        assert effective_share(log_weights[:, edge]) > target - 0.05
    assert evaluations == sum(chain.denoiser.calls) - 2 * 4000 * 8
    assert chain.proposal.scales == (top,)


def test_a_guidance_whose_weights_are_fine_is_kept():
    chain = gaussian_chain(levels=2, shift=0.1, scale=1.5)
    tuned, evaluations = tune_guidance(chain, target=0.9, num_samples=100, generator=seeded())
    assert tuned.scales == (1.5, 1.5)
    assert evaluations == 2 * 100 * 8
    assert tuned.describe() == {
        "base": "the network without its condition",
        "guidance_scale": [1.5, 1.5],
        "base_probability": 0.3,
    }


def test_tuning_that_cannot_mean_anything_is_refused():
    with pytest.raises(ConfigError, match="got a chain without a proposal"):
        tune_guidance(gaussian_chain())
    with pytest.raises(ConfigError, match=r"target=0.3; expected a share above base_probability=0.3"):
        tune_guidance(gaussian_chain(shift=1.0), target=0.3)
    with pytest.raises(ConfigError, match="no guidance keeps the effective share 0.999 on any edge"):
        tune_guidance(
            gaussian_chain(levels=1, shift=40.0, base_probability=0.0), target=0.999, iterations=2, generator=seeded()
        )
