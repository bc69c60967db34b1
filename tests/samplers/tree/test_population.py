"""The baselines of a search: Z and averages against closed forms, exact potentials, invariances, refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from genkit.errors import ConfigError
from genkit.rewards import FunctionReward, reward_output
from genkit.samplers.noise import draw_keys
from genkit.samplers.tree.chain import Chain
from genkit.samplers.tree.particles import Scale, Twist, draw_by_weight
from genkit.samplers.tree.population import beam, best_of_n, self_normalised, smc
from genkit.samplers.tree.proposals import GuidedProposal
from genkit.schedulers import MaskedBlockScheduler, ProductScheduler
from tests.samplers.tree.gaussian_chain import (
    CENTRE,
    LAM,
    MEAN,
    VAR,
    base_law,
    gaussian_chain,
    kernels,
    quadratic,
    seeded,
    tilted,
)
from tests.samplers.tree.toys import Mixture, MixtureChain


def z_score(values, exact):
    return abs(float(values.mean()) - exact) / float(values.std() / math.sqrt(len(values)))


def counted(reward):
    """The reward, and how many samples it was asked to judge in each call."""
    asked = []

    def judge(x, context):
        asked.append(len(next(iter(x.values())) if isinstance(x, dict) else x))
        return reward(x, context)

    return judge, asked


def ratio_z_score(result, of, exact):
    """|Σ w f / Σ w − exact| in standard errors, from the groups' sums (independent, and unbiased for Z E f, Z)."""
    everyone = result.population
    weights, values = everyone.log_weights.exp(), of(everyone.samples).double()
    count = int(everyone.groups.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add(0, everyone.groups, weights * (values - exact))
    totals = torch.zeros(count, dtype=torch.float64).index_add(0, everyone.groups, weights)
    return abs(float(sums.mean() / totals.mean())) / float(sums.std() / math.sqrt(count) / totals.mean())


def first(x):
    return x[:, 0]


# ---- independent walks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shift", "share"), [(None, 0.3), (0.6, 0.3), (0.25, 0.0)])
def test_self_normalised_weights_estimate_z_and_the_tilted_law(shift, share):
    chain = gaussian_chain(levels=2, shift=shift, base_probability=share)
    result = self_normalised(chain, quadratic(), 30_000, lam=LAM, generator=seeded(), slots=10_000)
    log_z, mean, var = tilted(chain)
    weights = result.log_weights.exp()
    assert z_score(weights, math.exp(log_z)) < 4
    assert abs(result.log_z - log_z) < 4 * result.log_z_error
    assert result.log_z_error == pytest.approx(float(weights.std() / weights.mean()) / math.sqrt(30_000))
    spread = result.expectation(lambda x: (x[:, 0] - mean).square())
    residual = weights * (result.samples[:, 0] - mean) / weights.mean()
    assert abs(float(result.expectation(first)) - mean) < 4 * float(residual.std()) / math.sqrt(30_000)
    assert float(spread) == pytest.approx(var, rel=0.05)
    assert result.network_calls == 30_000 * 8 * chain.calls_per_step == sum(chain.denoiser.calls)
    if shift:  # without the path's weights the guided law is averaged
        plain = (LAM * result.rewards[:, 0].double()).exp()
        assert z_score(plain, math.exp(log_z)) > 8


def test_resampled_rows_follow_the_tilted_law():
    chain = gaussian_chain(shift=0.6)
    result = self_normalised(chain, quadratic(), 20_000, 2_000, lam=LAM, generator=seeded(), slots=10_000)
    _, mean, var = tilted(chain)
    assert len(result) == 2_000
    assert len(result.population) == 20_000
    assert abs(float(result.samples.mean()) - mean) < 4 * math.sqrt(var / 2_000)
    assert torch.equal(result.log_weights, torch.full((2_000,), result.log_z, dtype=torch.float64))
    assert float(result.expectation(first)) == float(result.population.expectation(first))
    torch.testing.assert_close(result.expectation(result.samples)[0], result.samples.mean())


def test_best_of_n_takes_the_best_of_each_group():
    chain = gaussian_chain()
    result = best_of_n(chain, quadratic(), 60, 12, generator=seeded(), slots=7)
    rewards = result.population.rewards.reshape(12, 5)
    assert torch.equal(result.rewards[:, 0], rewards.amax(dim=1))
    assert result.groups.tolist() == list(range(12))
    assert torch.equal(result.population.groups, torch.arange(60) // 5)
    torch.testing.assert_close(result.rewards[:, 0], -0.5 * (result.samples[:, 0] - 1.5).square())
    everyone = best_of_n(chain, quadratic(), 60, generator=seeded(), slots=60)
    torch.testing.assert_close(everyone.samples, result.population.samples, rtol=0, atol=1e-12)
    assert (result.network_calls, result.reward_calls, result.log_z, result.ess) == (480, 60, None, (1.0,) * 4)


def test_weighted_walks_average_to_the_base_and_unweighted_ones_are_fully_guided():
    chain, shift = gaussian_chain(levels=2, shift=0.6), 0.6
    mean, _ = base_law(chain)
    both = {
        w: best_of_n(chain, quadratic(), 20_000, weighted=w, generator=seeded(), slots=20_000) for w in (True, False)
    }
    weights = both[True].log_weights.exp()
    assert z_score(weights, 1.0) < 4
    assert float(weights.max()) <= 0.3**-2 * (1 + 1e-9)
    assert z_score(weights * (both[True].samples[:, 0] - mean), 0.0) < 4
    assert bool((both[False].log_weights == 0).all())
    # the last micro-step is the base's for all: take the shift out of it
    last_step = base_law(chain, shift)[0] - last_constant(chain, shift)
    assert z_score(both[False].samples[:, 0], last_step) < 4
    assert z_score(both[False].samples[:, 0], mean) > 8
    assert both[True].ess[0] > both[True].ess[1] > 0.3


def last_constant(chain, shift):
    return kernels(chain)[-1][1] * shift / MEAN


# ---- particles ------------------------------------------------------------------------------------------------------

OPTIONS = [
    {"potential": "difference"},
    {"potential": "difference", "resampling": "multinomial", "ess_threshold": 1.0},
    {"potential": "difference", "ess_threshold": 0.0},
    {"potential": "difference", "schedule": (0.0, 0.3, 0.8, 1.0), "ess_threshold": 1.0},
    {"potential": "max", "schedule": (0.1, 0.3, 0.5, 1.0), "ess_threshold": 0.9},
    {"potential": "max", "resampling": "multinomial", "ess_threshold": 1.0},
    {"potential": "final"},
]


@pytest.mark.parametrize("shift", [None, 0.5])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_particles_are_unbiased_for_z_and_the_tilted_law(options, shift):
    chain, groups, particles = gaussian_chain(shift=shift), 2_000, 6
    result = smc(
        chain,
        quadratic(),
        particles,
        lam=LAM,
        num_groups=groups,
        generator=seeded(),
        slots=groups * particles,
        **options,
    )
    log_z, mean, var = tilted(chain)
    assert z_score(result.log_z_groups.exp(), math.exp(log_z)) < 4
    assert abs(result.log_z - log_z) < 4 * result.log_z_error
    assert result.log_z == pytest.approx(float(result.population.log_weights.exp().mean().log()), abs=1e-12)
    assert ratio_z_score(result, first, mean) < 4
    assert ratio_z_score(result, lambda x: (x[:, 0] - mean).square(), var) < 4
    assert result.network_calls == groups * particles * 8 * chain.calls_per_step == sum(chain.denoiser.calls)
    if options.get("ess_threshold") == 1.0:  # control: without the division by Π G the average is another one
        plain = (LAM * result.rewards[:, 0].double()).exp().reshape(groups, particles).mean(dim=1)
        assert z_score(plain, math.exp(log_z)) > 8


def test_potentials_pay_for_far_targets_and_with_the_posteriors_width():
    """exp(λ r) of a clean prediction overshoots, as it does not know how wide x_0 still is around it.

    For the quadratic reward E[exp(λ r) | x_t] is the potential of λ / (1 + λ v_t), with v_t = Var[x_0 | x_t].
    """
    chain, lam = gaussian_chain(), 6.0
    alpha, sigma = chain.scheduler.alpha_sigma(chain.times[torch.tensor(chain.levels)])
    left = VAR * sigma**2 / (alpha**2 * VAR + sigma**2)
    arms = {
        "none": {"potential": "final"},
        "plain": {"potential": "difference"},
        "matched": {"potential": "difference", "schedule": (1 / (1 + lam * left)).tolist()},
    }

    def errors(centre):
        options = {"lam": lam, "num_groups": 400, "slots": 12_800}
        found = {n: smc(chain, quadratic(centre), 32, generator=seeded(), **options, **o) for n, o in arms.items()}
        assert all(abs(r.log_z - tilted(chain, lam, centre)[0]) < 4 * r.log_z_error for r in found.values())
        return {name: result.log_z_error for name, result in found.items()}

    near, far = errors(1.5), errors(3.0)
    assert far["matched"] < far["plain"] < 0.7 * far["none"]
    assert near["plain"] > 1.1 * near["none"]
    assert near["matched"] < 1.1 * near["none"]


def test_without_intermediate_potentials_particles_are_the_self_normalised_walks():
    chain = gaussian_chain(shift=0.5)
    steered = smc(chain, quadratic(), 50, lam=LAM, potential="final", ess_threshold=0.0, generator=seeded())
    plain = self_normalised(chain, quadratic(), 50, lam=LAM, generator=seeded())
    torch.testing.assert_close(steered.samples, plain.samples, rtol=0, atol=1e-12)
    torch.testing.assert_close(steered.log_weights, plain.log_weights, rtol=0, atol=1e-9)
    assert steered.log_z == pytest.approx(plain.log_z, abs=1e-9)
    assert steered.log_z_error is None


def test_each_group_delivers_its_part_with_the_weight_of_its_z():
    chain = gaussian_chain()
    result = smc(chain, quadratic(), 8, 6_000, lam=LAM, num_groups=3_000, generator=seeded(), slots=24_000)
    _, mean, _ = tilted(chain)
    assert torch.equal(result.groups, torch.arange(3_000).repeat_interleave(2))
    torch.testing.assert_close(result.log_weights, result.log_z_groups.repeat_interleave(2))
    pairs = (result.log_weights.exp() * (result.samples[:, 0] - mean)).reshape(3_000, 2).mean(dim=1)
    assert z_score(pairs, 0.0) < 4  # properly weighted draws
    assert set(result.samples[:, 0].tolist()) <= set(result.population.samples[:, 0].tolist())


@pytest.mark.parametrize("how", ["systematic", "multinomial"])
def test_draws_by_weight_have_the_expected_counts_and_never_take_zero_weights(how):
    weights = torch.tensor([[0.0, 0.5, 0.2, 0.3, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0], [0.0] * 5]).double()
    keys, counts = draw_keys(seeded(), 3), torch.zeros(3, 5)
    for step in range(500):
        drawn = draw_by_weight(weights.log(), 7, keys.at(step=step), how)
        row = torch.nn.functional.one_hot(drawn, 5).sum(dim=1)
        counts += row
        if how == "systematic":
            assert bool(((row[0] - 7 * weights[0]).abs() < 1).all())
    share = counts / 3_500
    assert share[0, 0] == share[0, 4] == 0
    assert float((share[0] - weights[0]).abs().max()) < 4 * math.sqrt(0.25 / 3_500)
    assert share[1].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert float((share[2] - 0.2).abs().max()) < 4 * math.sqrt(0.16 / 3_500)  # no weight at all: all alike


def test_potentials_by_hand():
    """Two groups of two particles; the second group's first prediction is invalid, then all of it."""
    first, second = (
        torch.tensor([[1.0], [2.0], [math.nan], [5.0]]),
        torch.tensor([[0.5], [4.0], [math.nan], [math.nan]]),
    )
    for kind, potentials, total in (
        ("difference", ([1.0, 2.0, 5.0, 5.0], [1.0 - 2.0, 8.0 - 1.0, -5.0, -5.0]), [1.0, 8.0, 0.0, 0.0]),
        ("max", ([1.0, 2.0, 5.0, 5.0], [4.0, 8.0, 10.0, 10.0]), [6.0, 9.0, 15.0, 15.0]),
    ):
        twist = Twist(kind, [1.0, 2.0], Scale(None, -math.inf), 2, 2, "cpu")
        assert twist.potential(0, first, ~first[:, 0].isnan()).tolist() == potentials[0]
        twist.follow(torch.tensor([1, 0, 2, 3]))  # the first two change places
        assert twist.potential(1, second, ~second[:, 0].isnan()).tolist() == potentials[1]
        assert twist.total.tolist() == total
        rest = twist.last(torch.ones(4, 1), torch.tensor([True, True, True, False]), 2.0)
        assert rest.tolist() == [2.0 - total[0], 2.0 - total[1], 2.0 - total[2], -math.inf]


class SteeredMixture(MixtureChain):
    """The exact chain of a two-humped mixture; a clean prediction is the posterior mean."""

    def draw_stage(self, depth, state, keys, context=None):
        return self.mixture.prior(keys.at(step=1_000, purpose="prior"))  # not the numbers of a micro-step

    def outputs(self, state, step, cond=None):
        self.calls += len(state)
        return (state,)

    def clean(self, state, step, cond, context, outputs):
        t = 8 - step
        log_w, mean, _ = self.mixture.posterior(state, t, torch.zeros_like(t))
        return (log_w.exp() * mean).sum(dim=-1)

    def step(self, state, step, guided, keys, cond=None, context=None, outputs=None):
        self.calls -= 0 if outputs is None else len(state)
        return super().step(state, step, guided, keys, cond, context)


@pytest.mark.parametrize(
    ("shift", "share", "levels"), [(0.0, 0.0, None), (0.1, 0.3, (2, 4, 6, 8)), (0.05, 0.0, (4, 8))]
)
@pytest.mark.parametrize("arm", ["self_normalised", "difference", "max", "final"])
def test_a_mixture_with_exact_kernels(arm, shift, share, levels):
    chain, mixture = SteeredMixture(shift=shift, levels=levels, base_probability=share), Mixture()
    options = {"lam": mixture.lam, "generator": seeded(1), "slots": 16_000}
    if arm == "self_normalised":
        result = self_normalised(chain, mixture.reward, 16_000, **options)
        terms = result.log_weights.exp()
    else:
        # the maxima of all edges multiply: with λ itself on each of eight, their product leaves no usable weights
        schedule = [0.2] * (len(chain.levels) - 1) + [1.0] if arm == "max" else None
        result = smc(chain, mixture.reward, 8, num_groups=2_000, potential=arm, schedule=schedule, **options)
        terms = result.log_z_groups.exp()
        assert ratio_z_score(result, lambda x: x < 0, mixture.tilted_negative()) < 4
    assert z_score(terms, math.exp(mixture.lam * mixture.root_value())) < 4
    assert float(result.expectation(lambda x: (x < 0).double())) == pytest.approx(mixture.tilted_negative(), abs=0.01)
    assert result.network_calls == chain.calls == 16_000 * 8


def test_states_that_are_not_finite_have_no_weight():
    chain = gaussian_chain(shift=0.5)
    network = chain.denoiser

    def broken(x, t, cond=None):
        return torch.where(x > 1.5, math.nan, network(x, t, cond))

    chain.denoiser = broken
    for result in (
        self_normalised(chain, quadratic(), 200, lam=LAM, generator=seeded()),
        smc(chain, quadratic(), 10, lam=LAM, num_groups=20, generator=seeded()),
    ):
        lost = result.samples[:, 0].isnan()
        assert bool(lost.any())
        assert not result.valid[lost].any()
        assert not result.log_weights.isnan().any()
        assert bool((result.log_weights[lost] == -math.inf).all())
        assert math.isfinite(result.log_z)


# ---- beams ----------------------------------------------------------------------------------------------------------


def test_a_beam_keeps_the_best_clean_predictions():
    """Replayed with the chain alone, for one group."""
    chain, reward = gaussian_chain(), quadratic()
    result = beam(chain, reward, 3, branch=2, generator=seeded(), slots=4)
    keys = draw_keys(seeded(), 1)
    keys = type(keys)(keys.key.expand(6), torch.arange(6), keys.step)
    state = chain.draw_stage(1, None, keys)
    for k in range(8):
        state, _ = chain.step(state, torch.full((6,), k), None, keys)
        if k in (1, 3, 5):
            score = reward(chain.clean(state, torch.full((6,), k + 1))).values
            state = state[score.argsort(descending=True, stable=True)[:3].repeat_interleave(2)]
    torch.testing.assert_close(result.population.samples, state, rtol=0, atol=1e-12)
    best = reward(state).values.sort(descending=True)[0][:3]
    torch.testing.assert_close(result.rewards[:, 0], best, rtol=0, atol=1e-12)
    assert (result.network_calls, result.reward_calls, len(result)) == (48, 24, 3)


def test_a_beam_finds_more_reward_than_as_many_walks():
    options = {"generator": seeded(), "slots": 3_200}
    found = beam(gaussian_chain(), quadratic(), 4, 100, branch=4, num_groups=100, **options)
    walks = best_of_n(gaussian_chain(), quadratic(), 1_600, 100, **options)
    assert found.network_calls == walks.network_calls
    assert len(found) == len(walks) == 100
    assert float(found.rewards.mean()) > float(walks.rewards.mean())


# ---- what all share -------------------------------------------------------------------------------------------------

ARMS = {
    "best_of_n": lambda chain, reward, **o: best_of_n(chain, reward, 24, 6, **o),
    "guided": lambda chain, reward, **o: best_of_n(chain, reward, 24, 6, weighted=False, **o),
    "self_normalised": lambda chain, reward, **o: self_normalised(chain, reward, 24, 6, lam=LAM, **o),
    "smc": lambda chain, reward, **o: smc(chain, reward, 4, 6, lam=LAM, num_groups=6, ess_threshold=0.9, **o),
    "max": lambda chain, reward, **o: smc(
        chain, reward, 4, 6, lam=LAM, num_groups=6, potential="max", resampling="multinomial", **o
    ),
    "beam": lambda chain, reward, **o: beam(chain, reward, 2, 6, branch=2, num_groups=6, **o),
}


@pytest.mark.parametrize(("arm", "shift"), [*((arm, 0.5) for arm in ARMS), ("smc", None)])
def test_results_do_not_depend_on_slots_or_the_networks_batch(arm, shift):
    whole = ARMS[arm](gaussian_chain(shift=shift), quadratic(), generator=seeded(3), slots=24)
    for slots, size in ((7, None), (24, 1), (10, 3)):
        chain = gaussian_chain(shift=shift, batch_size=size)
        parts = ARMS[arm](chain, quadratic(), generator=seeded(3), slots=slots)
        torch.testing.assert_close(parts.samples, whole.samples, rtol=0, atol=1e-12)
        torch.testing.assert_close(parts.log_weights, whole.log_weights, rtol=0, atol=1e-12)
        torch.testing.assert_close(parts.population.log_weights, whole.population.log_weights, rtol=0, atol=1e-12)
        assert parts.network_calls == whole.network_calls == sum(chain.denoiser.calls)
    other = ARMS[arm](gaussian_chain(shift=shift), quadratic(), generator=seeded(4), slots=24)
    assert not torch.equal(other.samples, whole.samples)


@pytest.mark.parametrize("arm", ARMS)
def test_calls_are_counted_and_equal_for_all_arms(arm):
    chain, (reward, asked) = gaussian_chain(shift=0.5), counted(quadratic())
    result = ARMS[arm](chain, reward, generator=seeded())
    assert result.network_calls == sum(chain.denoiser.calls) == 24 * 8 * 2
    assert result.reward_calls == sum(asked) == 24 * (4 if arm in ("smc", "max", "beam") else 1)
    assert len(result) == 6
    assert set(result.seconds) == {"network", "reward", "total"}
    assert result.seconds["total"] >= result.seconds["network"] + result.seconds["reward"]


def test_the_reward_is_not_asked_where_the_schedule_is_zero():
    reward, asked = counted(quadratic())
    smc(gaussian_chain(), reward, 4, lam=LAM, schedule=(0.0, 0.0, 1.0, 1.0), generator=seeded())
    assert sum(asked) == 8


@pytest.mark.parametrize("arm", ARMS)
def test_every_group_is_told_its_own_row(arm):
    def reward(x, context):
        return reward_output(-(x[:, 0] - context["goal"]).square())

    goals = torch.linspace(-3, 3, 6).double()
    if arm == "self_normalised":
        with pytest.raises(ConfigError, match=r"context\['goal'\] has shape .6,.; expected a tensor with one row"):
            ARMS[arm](gaussian_chain(), reward, generator=seeded(), context={"goal": goals})
        return
    result = ARMS[arm](gaussian_chain(), reward, generator=seeded(), context={"goal": goals}, slots=5)
    exact = -(result.samples[:, 0] - goals[result.groups]).square()
    torch.testing.assert_close(result.rewards[:, 0], exact)
    told = ARMS[arm](gaussian_chain(), quadratic(), generator=seeded(), cond={"shift": 50 * goals}, slots=5)
    assert torch.equal(told.samples[:, 0].argsort(), torch.arange(6))


# ---- invalid rewards, tokens, several objectives --------------------------------------------------------------------


def token_chain(told=None):
    """Three positions of three classes, each with its own law, whatever the rest: 27 states of known probability."""
    logits = torch.tensor([[0.2, -0.5, 1.0], [0.0, 0.3, -1.0], [-0.4, 0.9, 0.1]], dtype=torch.float64)
    padded = torch.cat((logits, torch.full((3, 1), -math.inf)), dim=1)
    other = torch.cat((logits.flip(1), torch.full((3, 1), -math.inf)), dim=1)

    def denoise(x, t, cond=None):
        state = x["tokens"]
        if cond is None:
            return {"tokens": padded.expand(len(state), 3, 4)}
        return {"tokens": torch.where(cond["told"].reshape(-1, 1, 1) > 0, other, padded)}

    scheduler = ProductScheduler({"tokens": MaskedBlockScheduler(mask_token_id=3)})
    proposal = None if told is None else GuidedProposal({"told": torch.ones(1)}, guidance_scale=told)
    chain = Chain(
        denoise, scheduler, num_inference_steps=6, levels=3, shape={"tokens": (3,)}, proposal=proposal, batch_size=4_000
    )
    return chain, logits.log_softmax(dim=1)


def token_reward(x, context):
    """The number of distinct tokens; sequences that begin with 2, 1 cannot be judged."""
    tokens = x["tokens"]
    values = torch.stack([(tokens == k).any(dim=1) for k in range(3)]).sum(dim=0).float()
    return torch.where((tokens[:, 0] == 2) & (tokens[:, 1] == 1), math.nan, values)


def token_law(log_probs, lam, floor):
    """Z, and the tilted probability that the last token is 0, by enumeration."""
    states = torch.tensor(list(itertools.product(range(3), repeat=3)))
    values = token_reward({"tokens": states}, None).double()
    values = torch.where(values.isnan(), floor, values)
    weights = (sum(log_probs[i, states[:, i]] for i in range(3)) + lam * values).exp()
    return float(weights.sum()), float(weights[states[:, 2] == 0].sum() / weights.sum())


@pytest.mark.parametrize("floor", [-math.inf, 0.5])
@pytest.mark.parametrize("told", [None, 0.4])
@pytest.mark.parametrize("arm", ["self_normalised", "difference", "max"])
def test_invalid_samples_count_as_the_floor(arm, told, floor):
    chain, log_probs = token_chain(told)
    z, share = token_law(log_probs, 1.5, floor)
    options = {"lam": 1.5, "floor": floor, "generator": seeded(7), "slots": 4_000}
    reward = FunctionReward(token_reward)
    if arm == "self_normalised":
        result = self_normalised(chain, reward, 8_000, **options)
        terms = result.log_weights.exp()
    else:
        result = smc(chain, reward, 5, num_groups=1_600, potential=arm, ess_threshold=0.9, **options)
        terms = result.log_z_groups.exp()
        assert ratio_z_score(result, lambda x: x["tokens"][:, 2] == 0, share) < 4
    assert z_score(terms, z) < 4
    assert int((~result.valid).sum()) > 100
    assert bool(result.rewards[~result.valid].isnan().all())
    invalid = result.log_weights[~result.valid]
    assert bool((invalid == -math.inf).all()) if floor == -math.inf else bool(invalid.isfinite().all())
    assert bool(result.log_weights[result.valid].isfinite().all())
    assert float(result.expectation(lambda x: (x["tokens"][:, 2] == 0).double())) == pytest.approx(share, abs=0.04)


def nothing_valid(x, context):
    return torch.full((len(x),), math.nan)


@pytest.mark.parametrize("arm", ARMS)
def test_where_nothing_can_be_judged_nothing_has_weight(arm):
    result = ARMS[arm](gaussian_chain(), FunctionReward(nothing_valid), generator=seeded())
    assert len(result) == 6
    assert not result.valid.any()
    assert not result.log_weights.isnan().any()
    if result.log_z is not None:
        assert (result.log_z, result.log_z_error) == (-math.inf, None)
        assert result.ess[-1] == 0.0
        with pytest.raises(ConfigError, match="no sample has a weight above 0"):
            result.expectation(first)


@pytest.mark.parametrize("arm", ARMS)
def test_infinite_rewards_are_invalid_and_never_win(arm):
    reward = FunctionReward(lambda x, context: torch.where(x[:, 0] > 0.8, math.inf, x[:, 0]))
    result = ARMS[arm](gaussian_chain(), reward, generator=seeded())
    assert bool((result.population.samples[~result.population.valid, 0] > 0.8).all())
    assert float(result.population.valid.double().mean()) < 1
    if arm in ("self_normalised", "smc", "max"):
        assert bool(result.valid.all())


@pytest.mark.parametrize("arm", ARMS)
def test_what_a_reward_raises_surfaces_as_it_is(arm):
    def broken(x, context):
        raise ZeroDivisionError("the oracle's own")

    with pytest.raises(ZeroDivisionError, match="the oracle's own"):
        ARMS[arm](gaussian_chain(), FunctionReward(broken), generator=seeded())


@pytest.mark.parametrize("arm", ARMS)
def test_several_objectives_need_a_preference(arm):
    reward = FunctionReward(lambda x, context: torch.stack((-0.5 * (x[:, 0] - 1.5).square(), x[:, 0]), dim=1))
    with pytest.raises(ConfigError, match="the reward has 2 objectives; give preference="):
        ARMS[arm](gaussian_chain(), reward, generator=seeded())
    with pytest.raises(ConfigError, match="expected 2 finite weights, one an objective"):
        ARMS[arm](gaussian_chain(), reward, generator=seeded(), preference=[1.0])
    found = ARMS[arm](gaussian_chain(), reward, generator=seeded(), preference=[1.0, 0.0])
    alone = ARMS[arm](gaussian_chain(), quadratic(), generator=seeded())
    assert torch.equal(found.samples, alone.samples)
    assert found.rewards.shape == (6, 2)


def test_unranked_walks_need_no_preference():
    reward = FunctionReward(lambda x, context: torch.cat((x, -x), dim=1))
    assert best_of_n(gaussian_chain(), reward, 5, generator=seeded()).rewards.shape == (5, 2)


def test_several_stages_and_a_scale_per_edge():
    """The prior's variance is drawn first; Z is then a mixture's, and the guidance differs from edge to edge."""
    spread = torch.tensor([0.5, 1.5]).double()

    def size(keys, state, context):
        return (keys.uniform() < 0.25).long().unsqueeze(1)

    def noise(keys, state, context):
        return spread[state] * keys.normal((1,), torch.float64)

    chain = gaussian_chain(levels=2, shift=0.6, scale=[0.0, 1.2], stages=[size, noise])
    result = smc(chain, quadratic(), 5, lam=LAM, num_groups=3_000, generator=seeded(), slots=15_000)
    z = 0.0
    for share, std in ((0.75, 0.5), (0.25, 1.5)):
        mean, var = 0.0, std**2
        for a, b, width in kernels(chain):
            mean, var = a * mean + b, a * a * var + width * width
        z += share * math.exp(-0.5 * LAM * (mean - CENTRE) ** 2 / (1 + LAM * var)) / math.sqrt(1 + LAM * var)
    assert z_score(result.log_z_groups.exp(), z) < 4


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, r: best_of_n(c, r, 10, 4), "num_rollouts=10; expected a multiple of num_samples=4"),
        (lambda c, r: best_of_n(c, r, 0), "num_rollouts=0; expected a positive integer"),
        (lambda c, r: best_of_n("chain", r, 4), r"chain has type str; expected a Chain"),
        (lambda c, r: best_of_n(c, None, 4), "reward has type NoneType; expected a genkit.rewards.Reward"),
        (lambda c, r: best_of_n(c, r, 4, slots=0), "slots=0; expected a positive integer"),
        (lambda c, r: best_of_n(c, r, 4, 2, floor=math.nan), "floor=nan; expected a number, or −inf"),
        (lambda c, r: best_of_n(c, r, 4, cond={"a": torch.zeros(3)}), "expected a tensor with one row, or 4"),
        (lambda c, r: best_of_n(c, r, 4, context=[1]), "context has type list; expected a mapping"),
        (lambda c, r: self_normalised(c, r, 4, lam=-1.0), "lam=-1.0; expected a finite number, at least 0"),
        (lambda c, r: self_normalised(c, r, 4, lam=1.0, resampling="sistematic"), "Did you mean 'systematic'"),
        (lambda c, r: smc(c, r, 4, lam=1.0, potential="diference"), "Did you mean 'difference'"),
        (lambda c, r: smc(c, r, 4, 3, lam=1.0, num_groups=2), "num_samples=3; expected a multiple of num_groups=2"),
        (lambda c, r: smc(c, r, 4, lam=1.0, ess_threshold=1.5), "ess_threshold=1.5; expected a share from 0 to 1"),
        (lambda c, r: smc(c, r, 4, lam=1.0, schedule=(1.0,)), "expected 4 numbers, one a macro-edge"),
        (lambda c, r: smc(c, r, 4, lam=1.0, schedule=(1.0, 1.0, 1.0, 0.5)), "the last one 1"),
        (lambda c, r: beam(c, r, 2, 5, branch=2), "num_samples=5; expected at most 4 for each of 1 groups"),
        (lambda c, r: beam(c, r, 2, branch=0), "branch=0; expected a positive integer"),
        (lambda c, r: best_of_n(c, r, 4).expectation(torch.zeros(3)), "expected 4 of them, one a sample"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call(gaussian_chain(), quadratic())
