"""Decoding strategies beside plain loops over rows, each rule with a control that breaks it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from diffusers import BlockRefinementScheduler, DiscreteDDIMScheduler
from torch.distributions import Categorical

from genkit.errors import ConfigError
from genkit.samplers import (
    DecodingStrategy,
    EntropyBound,
    FixedSteps,
    Margin,
    Random,
    SchedulerStrategy,
    Sequential,
    Threshold,
    draw_keys,
    make_strategy,
)
from genkit.schedulers import MaskedBlockScheduler, masked

V, MASK = 11, 10
DRAWN = {"temperature": 0.9, "top_p": 0.95, "top_k": 8}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def keys_of(rows: int, seed: int = 0):
    return draw_keys(seeded(seed), rows)


def logits_of(seed: int, rows: int, n: int, scale: float = 2.0) -> torch.Tensor:
    z = scale * torch.randn(rows, n, V, generator=seeded(seed))
    z[..., MASK] = -math.inf
    return z


def ragged(seed: int, rows: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and masks of rows with 0, 1, 2, … masks."""
    tokens = torch.randint(0, MASK, (rows, n), generator=seeded(seed))
    order = torch.rand(rows, n, generator=seeded(seed + 1)).argsort(1)
    hidden = order < torch.arange(rows).unsqueeze(1) % (n + 1)
    return tokens.masked_fill(hidden, MASK), hidden


def all_strategies(**options) -> dict[str, DecodingStrategy]:
    return {
        "sequential": Sequential(**options),
        "fixed_steps": FixedSteps(3, **options),
        "threshold": Threshold(0.6, **options),
        "entropy_bound": EntropyBound(1.0, **options),
        "margin": Margin(0.3, **options),
        "random": Random(3, **options),
        "scheduler": SchedulerStrategy(MaskedBlockScheduler(threshold=0.6), steps=3, **options),
        "diffusers": SchedulerStrategy(BlockRefinementScheduler(threshold=0.6), steps=3, **options),
    }


NAMES = list(all_strategies())


# ---- the rules, beside loops ----------------------------------------------------------------------------------------


def chosen_by_loop(name: str, z: torch.Tensor, confidence: list[float], hidden: list[int], step: int) -> set[int]:
    """The positions that the rule reveals in one row; ``z`` are the logits of the law, ``hidden`` its masks."""
    law = z.double().softmax(-1)
    if not hidden:
        return set()
    if name == "sequential":
        return {hidden[0]}
    if name == "fixed_steps":
        return set(sorted(hidden, key=lambda i: -confidence[i])[: math.ceil(len(hidden) / (3 - step))])
    if name == "entropy_bound":
        entropy = Categorical(law).entropy().tolist()
        rising = sorted(hidden, key=lambda i: entropy[i])
        sums = itertools.accumulate(entropy[i] for i in rising)
        return {rising[0]} | {i for i, total in zip(rising, sums, strict=True) if total <= 1.0}
    score, limit = {
        "threshold": (confidence, 0.6),
        "margin": ((law.sort(-1)[0][:, -1] - law.sort(-1)[0][:, -2]).tolist(), 0.3),
    }[name]
    return {i for i in hidden if score[i] > limit} | {max(hidden, key=lambda i: score[i])}


@pytest.mark.parametrize("options", [{}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", ["sequential", "fixed_steps", "threshold", "entropy_bound", "margin"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_each_rule_is_its_loop(name, options, step):
    strategy = all_strategies(**options)[name]
    counts = set()
    for seed in range(4):
        z, keys = logits_of(seed, 14, 6), keys_of(14, seed)
        tokens, hidden = ragged(seed, 14, 6)
        after = strategy.reveal(z, tokens, hidden, step, keys)
        proposed, confidence = strategy.propose(z, keys)
        law = z if not options else masked.sampling_logits(z, 0.9, 8, 0.95)
        for i in range(14):
            positions = hidden[i].nonzero().flatten().tolist()
            chosen = chosen_by_loop(name, law[i], confidence[i].tolist(), positions, step)
            expected = [int(proposed[i, j] if j in chosen else tokens[i, j]) for j in range(6)]
            assert after[i].tolist() == expected
            counts.add(len(chosen))
    assert {0, 1} < counts or name == "sequential"  # rows of several kinds were seen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, DRAWN], ids=["greedy", "drawn"])
def test_only_masks_change_and_every_row_loses_one(name, options):
    strategy = all_strategies(**options)[name]
    for seed in range(5):
        z, (tokens, hidden) = logits_of(seed, 14, 6), ragged(seed, 14, 6)
        after = strategy.reveal(z, tokens, hidden, 1, keys_of(14, seed))
        assert torch.equal(after[~hidden], tokens[~hidden])
        changed = (after != tokens).any(1)
        assert name == "random" or torch.equal(changed, hidden.any(1))
        assert after.dtype == torch.int64 and int((after[after != tokens] == MASK).sum()) == 0


def test_the_control_without_a_guard_overwrites_finished_rows():
    """The known error: the largest of nothing but −∞ is position 0, a token that is already there."""
    z, (tokens, hidden) = logits_of(0, 14, 6), ragged(0, 14, 6)
    proposed, confidence = Threshold(2.0).propose(z)
    best = confidence.masked_fill(~hidden, -math.inf).argmax(1, keepdim=True)
    unguarded = tokens.scatter(1, best, proposed.gather(1, best))
    full = ~hidden.any(1)
    assert not torch.equal(unguarded[full], tokens[full])
    assert torch.equal(Threshold(2.0).reveal(z, tokens, hidden)[full], tokens[full])
    assert torch.equal(Threshold(2.0).reveal(z, tokens, hidden)[~full], unguarded[~full])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, DRAWN], ids=["greedy", "drawn"])
def test_a_row_in_a_batch_is_that_row_alone(name, options):
    strategy, keys = all_strategies(**options)[name], keys_of(14).at(step=torch.arange(14))
    z, (tokens, hidden) = logits_of(1, 14, 6), ragged(1, 14, 6)
    together = strategy.reveal(z, tokens, hidden, 1, keys)
    first = strategy.sample(z[:, 0], keys)
    for i in range(14):
        part = slice(i, i + 1)
        assert torch.equal(strategy.reveal(z[part], tokens[part], hidden[part], 1, keys[part]), together[part])
        assert torch.equal(strategy.sample(z[part, 0], keys[part]), first[part])
    flipped = strategy.reveal(z.flip(0), tokens.flip(0), hidden.flip(0), 1, keys[torch.arange(13, -1, -1)])
    assert torch.equal(flipped.flip(0), together)
    other = strategy.reveal(z, tokens, hidden, 1, keys.at(step=99))
    assert torch.equal(other, together) == (not options and name != "random")  # draws are read where there are any


# ---- how many passes ------------------------------------------------------------------------------------------------


def passes(strategy: DecodingStrategy, n: int = 7, scale: float = 2.0, limit: int = 50) -> int:
    """Passes until three fully masked rows are filled in, each pass with other logits."""
    tokens, count = torch.full((3, n), MASK), 0
    while bool((tokens == MASK).any()) and count < limit:
        z, keys = logits_of(count, 3, n, scale), keys_of(3).at(step=count)
        tokens = strategy.reveal(z, tokens, tokens == MASK, count, keys)
        count += 1
    return count


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Sequential(), 7),
        (FixedSteps(1), 1),
        (FixedSteps(3), 3),
        (FixedSteps(7), 7),
        (FixedSteps(20), 7),
        (Threshold(0.0), 1),
        (Threshold(1.5), 7),
        (EntropyBound(0.0), 7),
        (EntropyBound(1e6), 1),
        (Margin(1.5), 7),
        (Random(1), 1),
        (SchedulerStrategy(MaskedBlockScheduler(threshold=2.0), steps=3), 3),
        (SchedulerStrategy(BlockRefinementScheduler(threshold=2.0), steps=3), 3),
        (SchedulerStrategy(BlockRefinementScheduler(threshold=2.0), steps=32), 7),
        (SchedulerStrategy(MaskedBlockScheduler(threshold=2.0)), 7),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_number_of_passes_is_exact(strategy, expected):
    assert passes(strategy) == expected


def test_one_position_a_pass_where_all_are_equally_certain():
    """With a probability of exactly 1 everywhere; taking all that equal the largest would take seven."""
    z = torch.full((1, 7, V), -math.inf)
    z[..., 3] = 5.0
    tokens = torch.full((1, 7), MASK)
    assert bool((Threshold().propose(z).confidence == 1.0).all())
    for strategy in (
        Threshold(1.5),
        Margin(1.5),
        FixedSteps(7),
        SchedulerStrategy(MaskedBlockScheduler(threshold=2.0)),
    ):
        after = strategy.reveal(z, tokens, tokens == MASK)
        assert after.tolist() == [[3] + [MASK] * 6]
    assert Threshold(0.9).reveal(z, tokens, tokens == MASK).tolist() == [[3] * 7]


def test_fixed_steps_spread_each_rows_own_masks():
    z, (tokens, hidden) = logits_of(0, 8, 7), ragged(0, 8, 7)
    for step in range(3):
        left = hidden.sum(1)
        after = FixedSteps(3).reveal(z, tokens, hidden, step)
        hidden = hidden & (after == tokens)
        tokens = after
        assert torch.equal(left - hidden.sum(1), (left + 2 - step) // (3 - step))
    assert not bool(hidden.any())


# ---- tokens and confidences -----------------------------------------------------------------------------------------


def test_greedy_confidence_is_untempered_and_drawn_confidence_is_of_the_law():
    z = logits_of(2, 4, 5)
    tokens, confidence = Threshold(top_k=1, top_p=0.1).propose(z)  # neither acts at temperature 0
    assert torch.equal(tokens, z.argmax(-1))
    torch.testing.assert_close(confidence, z.softmax(-1).amax(-1))
    tokens, confidence = Threshold(temperature=0.5, top_k=4).propose(z, keys_of(4))
    top = z.topk(4)
    law = torch.zeros_like(z).scatter(-1, top.indices, (top.values / 0.5).softmax(-1))
    torch.testing.assert_close(confidence, law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
    assert bool((confidence > 0).all()) and not torch.equal(tokens, z.argmax(-1))


def test_greedy_tokens_are_those_of_the_logits_where_probabilities_round_together():
    z = torch.tensor([[[0.0, 2.0**-26, -1.0]]])
    assert float(z.softmax(-1)[0, 0, 0]) == float(z.softmax(-1)[0, 0, 1])  # the control: equal as probabilities
    assert Threshold().propose(z).tokens.tolist() == [[1]] and Sequential().sample(z[0]).tolist() == [1]


def test_first_tokens_follow_the_tempered_softmax():
    n, z = 40_000, logits_of(3, 1, 1, scale=1.0)[0, 0]
    tokens = Threshold(temperature=0.7).sample(z.expand(n, V), keys_of(n))
    share, p = torch.bincount(tokens, minlength=V).double() / n, (z.double() / 0.7).softmax(-1)
    assert bool(((share - p).abs() <= 4 * (p * (1 - p) / n).sqrt()).all()) and float(share[MASK]) == 0.0
    flat = z.double().softmax(-1)
    assert bool(((share - flat).abs() > 4 * (flat * (1 - flat) / n).sqrt()).any())


def test_streams_of_a_first_token_and_of_proposals_differ():
    n, z = 2000, torch.zeros(1, 1, 2)
    strategy, keys = Threshold(temperature=1.0), keys_of(n)
    first, proposed = strategy.sample(z[0].expand(n, 2), keys), strategy.propose(z.expand(n, 1, 2), keys).tokens[:, 0]
    assert abs(float((first == proposed).double().mean()) - 0.5) < 4 * 0.5 / math.sqrt(n)


def test_the_entropy_bound_of_logits_with_holes_is_finite():
    z = torch.full((1, 3, V), -math.inf)
    z[0, 0, :2], z[0, 1, 4], z[0, 2, :] = 0.0, 80.0, torch.linspace(-300, 80, V)
    tokens = torch.full((1, 3), MASK)
    hidden = tokens == MASK
    assert EntropyBound(0.1).reveal(z, tokens, hidden).tolist() == [[MASK, 4, 10]]
    assert EntropyBound(math.log(2) - 1e-3).reveal(z, tokens, hidden)[0, 0] == MASK
    assert EntropyBound(math.log(2) + 1e-3).reveal(z, tokens, hidden)[0, 0] == 0


def test_random_is_the_ancestral_kernel():
    n, z = 30_000, logits_of(4, 1, 1, scale=1.0)
    tokens = torch.full((n, 1), MASK)
    for step, steps in [(0, 4), (2, 4), (3, 4)]:
        after = Random(steps, temperature=1.0).reveal(z.expand(n, 1, V), tokens, tokens == MASK, step, keys_of(n))
        t, s = 1 - step / steps, 1 - (step + 1) / steps
        law = MaskedBlockScheduler(MASK).transition(z, t, s, tokens[:1])
        p = law.logits[0, 0].double().softmax(-1)
        share = torch.bincount(after[:, 0], minlength=V).double() / n
        assert bool(((share - p).abs() <= 4 * (p * (1 - p) / n).sqrt()).all())


def test_random_ends_with_its_last_step():
    z, tokens = logits_of(5, 40, 6), torch.full((40, 6), MASK)
    for step in range(3):
        assert bool((tokens == MASK).any())
        tokens = Random(3).reveal(z, tokens, tokens == MASK, step, keys_of(40).at(step=step))
    assert torch.equal(tokens, z.argmax(-1))


# ---- schedulers as strategies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.3, 0.6, 2.0])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_the_two_schedulers_are_one_strategy_when_greedy(threshold, steps):
    ours = SchedulerStrategy(MaskedBlockScheduler(threshold=threshold), steps=steps)
    theirs = SchedulerStrategy(BlockRefinementScheduler(threshold=threshold), steps=steps)
    for step in range(steps):
        z, (tokens, hidden) = logits_of(step, 14, 6), ragged(step, 14, 6)
        after = ours.reveal(z, tokens, hidden, step)
        assert torch.equal(after, theirs.reveal(z, tokens, hidden, step))
        direct = BlockRefinementScheduler(threshold=threshold)
        direct.set_timesteps(steps, block_length=6)
        assert torch.equal(after, direct.step(z, step, tokens, mask_token_id=MASK).prev_sample)


@pytest.mark.parametrize("kind", [MaskedBlockScheduler, BlockRefinementScheduler])
def test_a_late_pass_of_a_long_schedule_still_reveals(kind):
    z, (tokens, hidden) = logits_of(0, 7, 6), ragged(0, 7, 6)
    after = SchedulerStrategy(kind(threshold=2.0), steps=32).reveal(z, tokens, hidden, 20)
    assert torch.equal((after != tokens).sum(1), hidden.any(1).long())
    bare = kind(threshold=2.0)  # the control: the schedule's own quota is 0 there, and a walk would never end
    bare.set_timesteps(32, block_length=6)
    assert torch.equal(bare.step(z, 20, tokens, mask_token_id=MASK).prev_sample, tokens)


def test_a_token_with_the_masks_id_that_is_no_mask_stays():
    z, tokens = logits_of(0, 1, 3), torch.tensor([[MASK, MASK, 1]])
    hidden = torch.tensor([[False, True, False]])
    for scheduler in (MaskedBlockScheduler(MASK), BlockRefinementScheduler()):
        assert SchedulerStrategy(scheduler).reveal(z, tokens, hidden).tolist() == [[MASK, int(z[0, 1].argmax()), 1]]


def test_the_users_scheduler_is_left_alone():
    scheduler = BlockRefinementScheduler()
    scheduler.set_timesteps(5)
    z, (tokens, hidden) = logits_of(0, 3, 6), ragged(0, 3, 6)
    SchedulerStrategy(scheduler, steps=2).reveal(z, tokens, hidden)
    assert len(scheduler.timesteps) == 5


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Threshold(temperature=-0.1), "temperature=-0.1; expected 0"),
        (lambda: Threshold(temperature=math.nan), "temperature=nan"),
        (lambda: Threshold(temperature=math.inf), "temperature=inf"),
        (lambda: Sequential(temperature="1"), "temperature='1'"),
        (lambda: Sequential(top_p=0.0), "top_p=0.0; expected a number above 0"),
        (lambda: Sequential(top_p=1.01), "top_p=1.01"),
        (lambda: Sequential(top_p=math.nan), "top_p=nan"),
        (lambda: Sequential(top_k=0), "top_k=0"),
        (lambda: Sequential(top_k=2.0), "top_k=2.0"),
        (lambda: FixedSteps(0), "steps=0"),
        (lambda: FixedSteps(True), "steps=True"),
        (lambda: Random(1.5), "steps=1.5"),
        (lambda: Threshold(-0.1), "threshold=-0.1"),
        (lambda: Threshold(math.nan), "threshold=nan"),
        (lambda: Margin(None), "threshold=None"),
        (lambda: EntropyBound(-1), "bound=-1"),
        (lambda: SchedulerStrategy(BlockRefinementScheduler(editing_threshold=0.5)), "editing_threshold=0.5 edits"),
        (lambda: SchedulerStrategy(DiscreteDDIMScheduler()), "its step lacks mask_token_id, top_p, top_k"),
        (lambda: SchedulerStrategy(MaskedBlockScheduler), "no scheduler of masked blocks"),
        (lambda: SchedulerStrategy(MaskedBlockScheduler(), steps=0), "steps=0"),
        (lambda: make_strategy("treshold"), "strategy='treshold' is unknown.*Did you mean 'threshold'"),
        (lambda: make_strategy("threshold", treshold=0.5), "no option 'treshold'.*Did you mean 'threshold'"),
        (lambda: make_strategy("fixed_steps"), r"needs steps: make_strategy\('fixed_steps', steps="),
        (lambda: make_strategy(None), "type NoneType is no scheduler"),
        (lambda: make_strategy(MaskedBlockScheduler(), scheduler=1), "no option 'scheduler'"),
    ],
)
def test_what_makes_no_sense_is_refused_at_construction(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_missing_keys_and_tensors_that_do_not_fit_are_refused():
    z, (tokens, hidden) = logits_of(0, 3, 6), ragged(0, 3, 6)
    for strategy in (*all_strategies(temperature=1.0).values(), Random(3)):
        with pytest.raises(ConfigError, match="draws numbers, but keys is None"):
            strategy.reveal(z, tokens, hidden)
    with pytest.raises(ConfigError, match="draws numbers, but keys is None"):
        Sequential(temperature=1.0).sample(z[:, 0])
    for strategy in all_strategies().values():
        for wrong in ((z[:, :5], tokens, hidden), (z, tokens, hidden[:1]), (z, tokens, hidden.long())):
            with pytest.raises(ConfigError, match=r"expected logits \(B, n, V\)"):
                strategy.reveal(*wrong, 0, keys_of(3))


def test_strategies_are_made_from_names_schedulers_and_themselves():
    assert make_strategy("threshold", threshold=0.5, temperature=1.0) == Threshold(0.5, temperature=1.0)
    assert make_strategy("fixed_steps", steps=4) == FixedSteps(4)
    for name, kind in [("sequential", Sequential), ("entropy_bound", EntropyBound), ("margin", Margin)]:
        assert make_strategy(name) == kind()
    ready = Threshold(0.5)
    assert make_strategy(ready) is ready and make_strategy(ready, top_k=3) == Threshold(0.5, top_k=3)
    assert make_strategy(BlockRefinementScheduler(num_inference_steps=4)).steps == 4
    with pytest.raises(TypeError):
        DecodingStrategy()
