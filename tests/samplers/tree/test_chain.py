"""The chain as a search walks it: levels, rows at steps of their own, and the log-ratios of its kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from genkit.errors import ConfigError
from genkit.samplers.noise import draw_keys
from genkit.samplers.tree.chain import Chain, put, stack_rows, take, where_rows
from genkit.samplers.tree.proposals import GuidedProposal
from genkit.schedulers import MaskedBlockScheduler, ProductScheduler, VPScheduler, WrappedScheduler
from tests.samplers.tree.gaussian_chain import Denoiser, base_law, float64_prior, gaussian_chain, kernels, seeded


def rows_at(step, count):
    return torch.full((count,), step)


def walk(chain, keys, steps, state=None, guided=None):
    state = chain.draw_stage(1, None, keys) if state is None else state
    total = torch.zeros(len(keys), dtype=torch.float64)
    for k in steps:
        state, ratio = chain.step(state, rows_at(k, len(keys)), guided, keys)
        total = total + ratio
    return state, total


# ---- levels ---------------------------------------------------------------------------------------------------------


def test_levels_are_cut_evenly_or_as_told():
    assert gaussian_chain(8, 4).levels == (2, 4, 6, 8)
    assert gaussian_chain(7, 3).levels == (3, 5, 7)
    chain = gaussian_chain(8, (1, 2, 4, 8), stages=[float64_prior, lambda keys, state, context: state])
    assert (chain.num_stages, chain.leaf_depth, chain.num_steps) == (2, 6, 8)
    assert [chain.first_step(depth) for depth in range(2, 7)] == [0, 1, 2, 4, 8]
    assert chain.depth_after(torch.arange(8)).tolist() == [3, 4, 0, 5, 0, 0, 0, 6]


@pytest.mark.parametrize("depth", [0, 1, 7])
def test_depths_without_a_micro_step_are_refused(depth):
    chain = gaussian_chain(8, 4, stages=[float64_prior, lambda keys, state, context: state])
    with pytest.raises(ConfigError, match=f"depth {depth} has no micro-step; expected 2 to 6"):
        chain.first_step(depth)


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (9, "levels=9; expected at most 8"),
        (0, "levels=0; expected a positive integer"),
        ((2, 4), "expected increasing micro-steps that end with 8"),
        ((4, 2, 8), "expected increasing"),
        ((), "expected increasing"),
        (None, "levels has type NoneType"),
    ],
)
def test_levels_that_do_not_fit_are_refused(levels, message):
    with pytest.raises(ConfigError, match=message):
        gaussian_chain(8, levels)


def test_chains_that_cannot_branch_are_refused():
    scheduler = VPScheduler("cosine", eta=0.0)
    with pytest.raises(ConfigError, match="eta=0 makes the kernel of VPScheduler deterministic"):
        Chain(Denoiser(scheduler), scheduler, num_inference_steps=4, levels=2, shape=(1,))
    both = ProductScheduler({"a": VPScheduler("cosine"), "b": scheduler})
    with pytest.raises(ConfigError, match="field 'b'"):
        Chain(Denoiser(scheduler), both, num_inference_steps=4, levels=2, shape={"a": (1,), "b": (1,)})
    with pytest.raises(ConfigError, match="give shape="):
        Chain(Denoiser(VPScheduler("cosine")), VPScheduler("cosine"), num_inference_steps=4, levels=2)


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_rows_of_states_with_parts():
    state = {"x": torch.arange(6.0).reshape(3, 2), "k": torch.tensor([1, 2, 3])}
    picked = take(state, torch.tensor([2, 0]))
    assert picked["k"].tolist() == [3, 1]
    assert stack_rows([picked, state])["k"].tolist() == [3, 1, 1, 2, 3]
    assert where_rows(torch.tensor([True, False]), picked, take(state, slice(0, 2)))["k"].tolist() == [3, 2]
    put(state, torch.tensor([1]), {"x": torch.full((1, 2), 9.0), "k": torch.tensor([7])})
    assert state["k"].tolist() == [1, 7, 3]
    assert state["x"][1].tolist() == [9.0, 9.0]


def test_the_walk_ends_in_the_law_of_its_kernels():
    chain, keys = gaussian_chain(), draw_keys(seeded(), 40_000)
    end, _ = walk(chain, keys, range(8))
    mean, var = base_law(chain)
    assert abs(float(end.mean()) - mean) < 4 * math.sqrt(var / len(end))
    assert abs(float(end.var()) - var) < 4 * var * math.sqrt(2 / len(end))


@pytest.mark.parametrize("shift", [None, 0.7])
def test_rows_at_steps_of_their_own_step_as_they_do_alone(shift):
    chain, keys = gaussian_chain(shift=shift), draw_keys(seeded(1), 9)
    state, step = torch.randn(9, 1, dtype=torch.float64, generator=seeded(2)), torch.tensor([0, 7, 3, 3, 1, 6, 0, 5, 2])
    guided = torch.tensor([True, False, True] * 3)
    together, ratio = chain.step(state, step, guided, keys)
    for i in range(9):
        alone, ratio_alone = chain.step(state[i : i + 1], step[i : i + 1], guided[i : i + 1], keys[i : i + 1])
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-12)
        torch.testing.assert_close(ratio_alone[0], ratio[i], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shift", [None, 0.7])
@pytest.mark.parametrize("size", [1, 4, 100])
def test_the_batch_size_of_the_network_changes_nothing(shift, size):
    keys = draw_keys(seeded(1), 10)
    whole, ratio = walk(gaussian_chain(shift=shift), keys, range(8))
    chain = gaussian_chain(shift=shift, batch_size=size)
    parts, ratio_of_parts = walk(chain, keys, range(8))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(ratio_of_parts, ratio, rtol=0, atol=1e-12)
    assert max(chain.denoiser.calls) == min(size, 10) * chain.calls_per_step
    assert sum(chain.denoiser.calls) == 8 * 10 * chain.calls_per_step


def test_a_row_draws_from_its_key_and_step_alone():
    chain, keys = gaussian_chain(), draw_keys(seeded(), 3)
    state = torch.zeros(3, 1, dtype=torch.float64)
    first, _ = chain.step(state, rows_at(2, 3), None, keys)
    again, _ = chain.step(state, rows_at(2, 3), None, keys)
    later, _ = chain.step(state, rows_at(3, 3), None, keys)
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert len(set(first[:, 0].tolist())) == 3


def test_stages_are_drawn_one_after_the_other():
    def size(keys, state, context):
        return {"n": 1 + (3 * keys.uniform()).long(), "x": torch.zeros(len(keys), 1)}

    def noise(keys, state, context):
        return {**state, "x": state["n"].unsqueeze(1) + keys.normal((1,))}

    chain, keys = gaussian_chain(stages=[size, noise]), draw_keys(seeded(), 600)
    first = chain.draw_stage(1, None, keys)
    second = chain.draw_stage(2, first, keys)
    assert torch.equal(first["n"], second["n"])
    assert set(first["n"].tolist()) == {1, 2, 3}
    residual = second["x"][:, 0] - first["n"]
    assert abs(float(residual.mean())) < 4 / math.sqrt(600)
    # the two stages read different numbers
    assert abs(float(torch.corrcoef(torch.stack((residual, first["n"].float())))[0, 1])) < 4 / math.sqrt(600)


# ---- log-ratios -----------------------------------------------------------------------------------------------------


def test_the_log_ratio_is_that_of_the_kernels_by_hand():
    chain, keys, shift = gaussian_chain(shift=0.7, scale=1.5), draw_keys(seeded(3), 50), 0.7 * 1.5
    state = torch.randn(50, 1, dtype=torch.float64, generator=seeded(4))
    for k, (a, b, std) in enumerate(kernels(chain)):
        drawn, ratio = chain.step(state, rows_at(k, 50), torch.arange(50) % 2 == 0, keys)
        if k == 7:
            assert torch.equal(ratio, torch.zeros(50, dtype=torch.float64))
            torch.testing.assert_close(drawn, a * state + b, rtol=0, atol=1e-7)  # the base's mean for all rows
            break
        p, q = a * state + b, a * state + b * (1 + shift / 0.5)
        by_hand = ((drawn - q).square() - (drawn - p).square()) / (2 * std * std)
        torch.testing.assert_close(ratio, by_hand[:, 0], rtol=1e-5, atol=1e-5)  # γ is a float32 number


def test_the_lattice_counts_six_numbers_not_nine():
    scheduler = VPScheduler("cosine")
    upper = torch.triu_indices(3, 3)
    shift = torch.randn(1, 6, generator=seeded(5)).double()

    def denoise(x, t, cond=None):
        return 0.3 * x + cond["shift"]

    chain = Chain(
        denoise,
        scheduler,
        num_inference_steps=8,
        levels=2,
        shape=(6,),
        proposal=GuidedProposal({"shift": shift}, guidance_scale=1.0),
    )
    state, keys = torch.randn(20, 6, dtype=torch.float64, generator=seeded(6)), draw_keys(seeded(7), 20)
    drawn, ratio = chain.step(state, rows_at(4, 20), None, keys)
    t, s = chain.times[4], chain.times[5]
    p = scheduler.transition(0.3 * state, t, s, state)
    q = scheduler.transition(0.3 * state + shift, t, s, state)
    cov = torch.eye(6, dtype=torch.float64) * p.std.square()
    exact = MultivariateNormal(p.mean, cov).log_prob(drawn) - MultivariateNormal(q.mean, cov).log_prob(drawn)
    torch.testing.assert_close(ratio, exact, rtol=1e-9, atol=1e-9)

    def nine(values):  # both triangles of the symmetric matrix
        full = torch.zeros(20, 3, 3, dtype=torch.float64)
        full[:, upper[0], upper[1]] = values
        return full + full.transpose(1, 2) - torch.diag_embed(full.diagonal(dim1=1, dim2=2))

    doubled = (nine(drawn - q.mean).square() - nine(drawn - p.mean).square()).sum(dim=(1, 2)) / (2 * p.std.square())
    assert float((doubled - exact).abs().median()) > 0.1


def masked_chain(base_logits, guided_logits, scale=1.0):
    """Three classes and the mask; logits that do not look at the state."""
    scheduler = MaskedBlockScheduler(mask_token_id=3)

    def denoise(x, t, cond=None):
        told = cond["told"].reshape(-1, 1, 1)
        return torch.where(told > 0, guided_logits, base_logits).expand(len(x), x.shape[1], 4)

    proposal = GuidedProposal({"told": torch.ones(1)}, guidance_scale=scale)
    return Chain(denoise, scheduler, num_inference_steps=5, levels=1, shape=(4,), proposal=proposal)


def explicit_posterior(s, t, clean):
    """p(x_s | x_t = mask) from the absorbing chain's matrices Q, with the clean token drawn from ``clean`` (3,)."""

    def noising(u):  # rows: from, columns: to
        matrix = torch.eye(4, dtype=torch.float64) * (1 - u)
        matrix[:, 3] += u
        matrix[3] = torch.tensor([0.0, 0.0, 0.0, 1.0])
        return matrix

    q_s, q_t = noising(s), noising(t)
    step = torch.linalg.solve(q_s, q_t) if s > 0 else q_t  # Q_t = Q_s Q_{t|s}
    joint = torch.stack([q_s[k] * step[:, 3] / q_t[k, 3] for k in range(3)])
    return (clean.unsqueeze(1) * joint).sum(dim=0)


def test_the_types_log_ratio_is_that_of_the_explicit_matrices():
    base = torch.tensor([0.4, -1.0, 0.3, -math.inf], dtype=torch.float64)
    guided = torch.tensor([-0.8, 1.2, 0.1, -math.inf], dtype=torch.float64)
    chain, keys = masked_chain(base, guided, scale=1.7), draw_keys(seeded(8), 400)
    state = torch.full((400, 4), 3)
    state[::2, 0] = 1  # a token that is there already
    drawn, ratio = chain.step(state, rows_at(2, 400), torch.arange(400) % 3 > 0, keys)
    t, s = float(chain.times[2]), float(chain.times[3])
    scale = float(torch.tensor(1.7))
    mixed = base[:3] + scale * (guided[:3] - base[:3])
    p, q = (explicit_posterior(s, t, logits.softmax(0)).log() for logits in (base[:3], mixed))
    moved = state == 3
    by_hand = torch.where(moved, (p - q)[drawn], 0.0).sum(dim=1)
    torch.testing.assert_close(ratio, by_hand, rtol=1e-6, atol=1e-6)
    untouched = (drawn == state).all(dim=1)
    assert int(untouched.sum()) > 20
    assert float(ratio[untouched].abs().max()) < 1e-12
    assert float(ratio[~untouched].abs().min()) > 1e-3


def crystal_like_chain():
    """Torus points and tokens that see one another through sums over the real atoms, and a six-number cell."""
    scheduler = ProductScheduler(
        {
            "cell": VPScheduler("cosine"),
            "sites": WrappedScheduler(),
            "types": MaskedBlockScheduler(mask_token_id=3),
        },
        masks={"sites": "mask", "types": "mask"},
    )

    def denoise(x, t, cond=None):
        told = cond["told"]
        real = x["mask"].double()
        pairs = x["sites"].unsqueeze(2) - x["sites"].unsqueeze(1)  # periodic, and blind to a shift of all
        pull = (torch.sin(2 * math.pi * pairs) * real[:, None, :, None]).sum(dim=2)
        seen = (torch.nn.functional.one_hot(x["types"], 4).double() * real[..., None]).sum(dim=1)
        logits = (
            seen[:, None] + torch.cos(pull).sum(dim=-1, keepdim=True) * torch.tensor([1.0, -0.5, 0.2, 0.0]).double()
        )
        shift = told.reshape(-1, 1).double()
        return {
            "cell": 0.2 * x["cell"] + shift + 0.1 * seen[:, :1],
            "sites": pull * (0.3 + shift[..., None]),
            "types": logits * (1 + shift[..., None]),
        }

    shapes = {"cell": (6,), "sites": (5, 3), "types": (5,)}
    proposal = GuidedProposal({"told": torch.ones(1)}, guidance_scale=1.3)
    return Chain(denoise, scheduler, num_inference_steps=6, levels=2, shape=shapes, proposal=proposal)


def crystal_like_state(count, atoms=3):
    generator = seeded(9)
    mask = torch.zeros(count, 5, dtype=torch.bool)
    mask[:, :atoms] = True
    types = torch.randint(0, 4, (count, 5), generator=generator).masked_fill(~mask, 3)
    sites = torch.rand(count, 5, 3, generator=generator, dtype=torch.float64).masked_fill(~mask[..., None], 0.0)
    cell = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return {"cell": cell, "sites": sites, "types": types, "mask": mask}


def log_ratio(chain, state, drawn, step=4):
    """The chain's log p − log q of a given next state."""
    at = rows_at(step, len(drawn["cell"]))
    t, s = chain.times[at], chain.times[at + 1]
    p, q = (chain.scheduler.transition(out, t, s, state) for out in chain.outputs(state, at))
    return p.log_prob(drawn) - q.log_prob(drawn)


def test_the_log_ratio_of_a_state_with_parts_is_their_sum_and_padding_adds_nothing():
    chain, state, keys = crystal_like_chain(), crystal_like_state(12), draw_keys(seeded(10), 12)
    drawn, ratio = chain.step(state, rows_at(4, 12), None, keys)
    torch.testing.assert_close(ratio, log_ratio(chain, state, drawn).double(), rtol=1e-9, atol=1e-9)
    at = rows_at(4, 12)
    t, s = chain.times[at], chain.times[at + 1]
    short = {name: value if name == "cell" else value[:, :3] for name, value in state.items()}
    p, q = (chain.scheduler.transition(out, t, s, short) for out in chain.outputs(short, at))
    parts = [
        p.parts[name].log_prob(drawn[name] if name == "cell" else drawn[name][:, :3])
        - q.parts[name].log_prob(drawn[name] if name == "cell" else drawn[name][:, :3])
        for name in ("cell", "sites", "types")
    ]
    torch.testing.assert_close(ratio, torch.stack(parts).sum(dim=0).double(), rtol=1e-9, atol=1e-9)


def test_log_ratios_do_not_see_shifts_lattice_vectors_or_the_order_of_atoms():
    chain, state, keys = crystal_like_chain(), crystal_like_state(12), draw_keys(seeded(10), 12)
    drawn, ratio = chain.step(state, rows_at(4, 12), None, keys)
    shift, whole = torch.tensor([0.31, 0.77, 0.13]).double(), torch.tensor([1.0, -2.0, 3.0]).double()
    order = torch.tensor([2, 0, 1, 3, 4])

    def shifted(x, by):
        return {**x, "sites": x["sites"] + by}

    def permuted(x):
        return {**x, "sites": x["sites"][:, order], "types": x["types"][:, order]}

    same = [
        log_ratio(chain, shifted(state, shift), shifted(drawn, shift)),
        log_ratio(chain, shifted(state, whole), drawn),
        log_ratio(chain, state, shifted(drawn, whole)),
        log_ratio(chain, permuted(state), permuted(drawn)),
    ]
    for value in same:
        torch.testing.assert_close(value.double(), ratio, rtol=1e-9, atol=1e-9)
    moved = log_ratio(chain, state, shifted(drawn, shift * torch.eye(5, 1).double())).double()
    assert float((moved - ratio).abs().median()) > 1e-2  # a shift of one atom alone is seen


def test_a_state_with_parts_does_not_depend_on_its_batch():
    chain, state, keys = crystal_like_chain(), crystal_like_state(7), draw_keys(seeded(10), 7)
    whole, ratio = chain.step(state, rows_at(4, 7), None, keys)
    for i in range(7):
        one = slice(i, i + 1)
        alone, ratio_alone = chain.step(take(state, one), rows_at(4, 1), None, keys[one])
        torch.testing.assert_close(ratio_alone, ratio[one], rtol=0, atol=1e-12)
        for name in whole:
            torch.testing.assert_close(alone[name], whole[name][one], rtol=0, atol=1e-12)


# ---- looking ahead --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [None, 0.7])
def test_the_clean_prediction_is_the_bases_posterior_mean(shift):
    chain, state = gaussian_chain(shift=shift), torch.randn(8, 1, dtype=torch.float64, generator=seeded(11))
    step = torch.arange(8)
    alpha, sigma = (c.unsqueeze(1) for c in chain.scheduler.alpha_sigma(chain.times[:-1]))
    exact = 0.5 + alpha * 0.49 / (alpha**2 * 0.49 + sigma**2) * (state - alpha * 0.5)
    torch.testing.assert_close(chain.clean(state, step), exact, rtol=1e-6, atol=1e-6)


def test_looking_ahead_and_stepping_share_one_evaluation():
    chain, keys = gaussian_chain(shift=0.7, batch_size=3), draw_keys(seeded(), 5)
    state, step = torch.randn(5, 1, dtype=torch.float64, generator=seeded(12)), rows_at(3, 5)
    outputs = chain.outputs(state, step)
    assert sum(chain.denoiser.calls) == 10
    shared = chain.clean(state, step, outputs=outputs), *chain.step(state, step, None, keys, outputs=outputs)
    assert sum(chain.denoiser.calls) == 10
    own = chain.clean(state, step), *chain.step(state, step, None, keys)
    assert sum(chain.denoiser.calls) == 30
    for a, b in zip(shared, own, strict=True):
        assert torch.equal(a, b)


def test_the_clean_prediction_of_tokens_commits_all_of_them():
    base = torch.tensor([0.4, -1.0, 0.3, 5.0], dtype=torch.float64)
    chain = masked_chain(base, base)
    state = torch.tensor([[3, 3, 2, 1]])
    assert chain.clean(state, rows_at(1, 1)).tolist() == [[0, 0, 2, 1]]
