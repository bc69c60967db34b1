"""Masked chains: the kernel beside brute force, the step beside diffusers, draws that nothing can push out of range."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from diffusers import BlockRefinementScheduler

import genkit
from genkit import _components
from genkit.errors import ConfigError
from genkit.samplers import draw_keys
from genkit.schedulers import MaskedBlockScheduler, masked
from tests.toy_pipeline import ToyPipeline, tiny_unet

MASK = 4
SCHEDULER = MaskedBlockScheduler(MASK)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits_of(seed: int, *shape: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- the kernel -----------------------------------------------------------------------------------------------------


def kernel_matrix(output: torch.Tensor, t: float, s: float) -> torch.Tensor:
    """p(x_s | x_t) of one position, (V, V), row = x_t, by scoring every state."""
    size = len(output)
    rows = SCHEDULER.transition(output.expand(size, 1, size), t, s, torch.arange(size).unsqueeze(1))
    scores = [rows.log_prob(torch.full((size, 1), v)) for v in range(size)]
    return torch.stack(scores, dim=1).exp()


@pytest.mark.parametrize(("t", "s"), [(1.0, 0.6), (0.7, 0.1), (0.5, 0.0), (0.3, 0.3), (1.0, 0.0), (0.0, 0.0)])
def test_the_kernel_is_the_absorbing_posterior(t, s):
    output = logits_of(0, MASK + 1)
    stay = 1.0 if s == t else s / t
    expected = torch.eye(MASK + 1, dtype=torch.float64)
    expected[MASK, :MASK] = (1 - stay) * output[:MASK].softmax(0)
    expected[MASK, MASK] = stay
    close(kernel_matrix(output, t, s), expected)


def test_steps_compose_for_a_fixed_denoiser():
    output = logits_of(1, MASK + 1)
    for t, u, s in [(1.0, 0.5, 0.2), (0.9, 0.4, 0.0), (0.6, 0.6, 0.1)]:
        close(kernel_matrix(output, t, u) @ kernel_matrix(output, u, s), kernel_matrix(output, t, s))
    wrong = kernel_matrix(output, 1.0, 0.5) @ kernel_matrix(output, 1.0, 0.2)  # the second step does not start at u
    assert float((wrong - kernel_matrix(output, 1.0, 0.2)).abs().max()) > 0.05


def test_the_density_of_a_block_is_a_product_that_sums_to_1():
    output, x = logits_of(2, 1, 3, MASK + 1), torch.tensor([[MASK, 2, MASK]])
    states = torch.tensor(list(itertools.product(range(MASK + 1), repeat=3)))
    kernel = SCHEDULER.transition(output.expand(len(states), -1, -1), 0.8, 0.3, x.expand(len(states), -1))
    p = kernel.log_prob(states).exp()
    close(p.sum(), torch.tensor(1.0, dtype=torch.float64))
    single = [kernel_matrix(output[0, i], 0.8, 0.3)[x[0, i]] for i in range(3)]
    close(p, torch.stack([single[i][states[:, i]] for i in range(3)]).prod(0))


def test_every_row_has_its_own_times():
    output, x = logits_of(3, 3, 2, MASK + 1), torch.full((3, 2), MASK)
    t, s = torch.tensor([1.0, 0.5, 0.25]), torch.tensor([0.5, 0.125, 0.0])
    together = SCHEDULER.transition(output, t, s, x).logits
    for i in range(3):
        alone = SCHEDULER.transition(output[i : i + 1], float(t[i]), float(s[i]), x[i : i + 1]).logits
        close(together[i : i + 1], alone)


def test_keyed_draws_follow_the_kernel():
    n = 40_000
    output, keys = logits_of(4, MASK + 1), draw_keys(seeded(), n)
    drawn = SCHEDULER.transition(output.expand(n, 1, -1), 0.8, 0.2, torch.full((n, 1), MASK)).sample(keys)
    share = torch.bincount(drawn[:, 0], minlength=MASK + 1).double() / n
    p = kernel_matrix(output, 0.8, 0.2)[MASK]
    assert bool(((share - p).abs() <= 3 * (p * (1 - p) / n).sqrt()).all())
    assert bool(((share - p.roll(1)).abs() > 3 * (p * (1 - p) / n).sqrt()).any())


def test_the_last_step_leaves_no_mask_whatever_its_logit():
    output = logits_of(5, 500, 3, MASK + 1)
    output[..., MASK] = 100.0
    x = torch.full((500, 3), MASK)
    x[:, 1] = 2
    clean = SCHEDULER.transition(output, 0.1, 0.0, x).sample(draw_keys(seeded(), 500))
    assert int((clean == MASK).sum()) == 0 and bool((clean[:, 1] == 2).all())
    assert torch.equal(SCHEDULER.transition(output, 0.4, 0.4, x).sample(draw_keys(seeded(), 500)), x)


def test_the_density_has_the_gradient_of_the_log_softmax():
    output = logits_of(6, 2, 3, MASK + 1).requires_grad_()
    x, x_s = torch.tensor([[MASK, MASK, 1], [0, MASK, MASK]]), torch.tensor([[2, MASK, 1], [0, 3, 1]])
    SCHEDULER.transition(output, 0.5, 0.2, x).log_prob(x_s).sum().backward()
    plain = output.detach().clone().requires_grad_()
    moved = (x == MASK) & (x_s != MASK)
    plain[..., :MASK].log_softmax(-1).gather(-1, x_s.clamp(max=MASK - 1).unsqueeze(-1))[moved].sum().backward()
    close(output.grad, plain.grad)


def test_half_precision_logits_are_scored_in_float32():
    kernel = SCHEDULER.transition(logits_of(7, 1, 2, MASK + 1).bfloat16(), 0.5, 0.2, torch.full((1, 2), MASK))
    assert kernel.logits.dtype == torch.float32


def test_times_fall_evenly_from_1_to_0():
    close(SCHEDULER.times(4), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0], dtype=torch.float64))


X, OUTPUT = torch.full((2, 3), MASK), torch.zeros(2, 3, MASK + 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SCHEDULER.transition(OUTPUT, 0.2, 0.5, X), "s=0.5 is after t=0.2"),
        (lambda: SCHEDULER.transition(OUTPUT, 1.5, 0.5, X), r"t=1.5; expected a number from 0 \(data\)"),
        (lambda: SCHEDULER.transition(OUTPUT, -0.5, -0.6, X), "t=-0.5"),
        (lambda: SCHEDULER.transition(OUTPUT, math.nan, 0.0, X), "t=nan"),
        (lambda: SCHEDULER.transition(OUTPUT, torch.ones(3), 0.0, X), r"shape \(3,\); expected \(\) or \(2,\)"),
        (lambda: SCHEDULER.transition(OUTPUT, 0.5, 0.2, X, eta=0.5), "eta=0.5; expected None or 1"),
        (lambda: SCHEDULER.transition(OUTPUT, 0.5, 0.2, X[:1]), r"expected logits \(B, n, V\)"),
        (lambda: SCHEDULER.transition(OUTPUT[..., :4], 0.5, 0.2, X), "mask_token_id=4, but model_output has 4 classes"),
        (lambda: MaskedBlockScheduler().transition(OUTPUT, 0.5, 0.2, X), "no mask_token_id is known"),
        (lambda: MaskedBlockScheduler().step(OUTPUT, 0, X), "no mask_token_id is known"),
        (lambda: SCHEDULER.step(OUTPUT, -1, X), "timestep=-1"),
        (lambda: SCHEDULER.step(OUTPUT, 0, X[:, :2]), r"expected logits \(B, n, V\)"),
        (lambda: SCHEDULER.step(OUTPUT, 0, X, temperature=-1.0), "temperature=-1.0"),
        (lambda: SCHEDULER.step(OUTPUT, 0, X, threshold=math.nan), "threshold=nan"),
        (lambda: SCHEDULER.step(OUTPUT, 0, X, temperature=1.0, generator=0), "generator=0; expected a torch.Generator"),
        (lambda: SCHEDULER.step(OUTPUT, 0, X, temperature=1.0, generator=[seeded()]), "a list of 1; expected one per"),
        (
            lambda: SCHEDULER.step(OUTPUT, 0, X, temperature=1.0, generator=draw_keys(seeded(), 1)),
            "expected one stream per row",
        ),
        (lambda: SCHEDULER.set_timesteps(0), "num_inference_steps=0"),
        (lambda: SCHEDULER.times(0), "num_inference_steps=0"),
        (lambda: SCHEDULER.add_noise(X, X[:1], prompt_length=0, block_length=2), r"attention_mask has shape \(1, 3\)"),
        (lambda: SCHEDULER.add_noise(X, X, prompt_length=-1, block_length=2), "prompt_length=-1"),
        (lambda: MaskedBlockScheduler(-1), "mask_token_id=-1"),
        (lambda: MaskedBlockScheduler(threshold=-0.1), "threshold=-0.1"),
        (lambda: MaskedBlockScheduler(minimal_topk=0), "minimal_topk=0"),
        (lambda: MaskedBlockScheduler(block_length=2.5), "block_length=2.5"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


# ---- the step, beside diffusers -------------------------------------------------------------------------------------


def ragged_block(seed: int, rows: int, n: int) -> torch.Tensor:
    """Blocks whose rows have 0, 1, 2, … masks."""
    tokens = torch.randint(0, MASK, (rows, n), generator=seeded(seed))
    order = torch.rand(rows, n, generator=seeded(seed + 1)).argsort(1)
    return tokens.masked_fill(order < torch.arange(rows).unsqueeze(1) % (n + 1), MASK)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9, 1.5])
@pytest.mark.parametrize(("n", "steps"), [(8, 8), (8, 3), (4, 7), (7, 5), (6, 1)])
def test_the_greedy_step_is_that_of_diffusers(threshold, n, steps):
    ours, theirs = MaskedBlockScheduler(MASK, threshold=threshold), BlockRefinementScheduler(threshold=threshold)
    for scheduler in (ours, theirs):
        scheduler.set_timesteps(steps, block_length=n)
    assert torch.equal(ours.timesteps, theirs.timesteps)
    for seed, step in enumerate((*range(steps), steps + 3)):
        output, x = logits_of(seed, 12, n, MASK + 1).float(), ragged_block(seed, 12, n)
        a = ours.step(output, step, x)
        b = theirs.step(output, torch.tensor(step), x, mask_token_id=MASK)
        plain = ours.step(output, step, x, return_dict=False)
        for name in a:
            assert torch.equal(a[name], b[name]), name
        assert all(torch.equal(p, q) for p, q in zip(a.to_tuple(), plain, strict=True))


@pytest.mark.parametrize(("n", "steps"), [(8, 8), (8, 3), (4, 7), (32, 5)])
def test_the_quotas_are_those_of_diffusers_and_sum_to_the_block(n, steps):
    quotas = SCHEDULER.get_num_transfer_tokens(n, steps)
    assert torch.equal(quotas, BlockRefinementScheduler().get_num_transfer_tokens(n, steps)) and int(quotas.sum()) == n


def test_minimal_topk_is_the_least_quota():
    scheduler = MaskedBlockScheduler(MASK, minimal_topk=3, threshold=2.0)
    scheduler.set_timesteps(8, block_length=8)
    x = torch.full((1, 8), MASK)
    done = [int(scheduler.step(logits_of(0, 1, 8, MASK + 1), step, x).transfer_index.sum()) for step in range(8)]
    assert done == [3] * 8


def test_a_finished_row_is_never_overwritten_while_others_have_masks():
    x, output = torch.tensor([[0, 1, 2], [MASK, MASK, 1]]), logits_of(0, 2, 3, MASK + 1)
    output[..., MASK] = -math.inf
    out = SCHEDULER.step(output, 0, x, threshold=2.0)
    assert torch.equal(out.prev_sample[0], x[0]) and int((out.prev_sample[1] == MASK).sum()) == 1
    # the control: without the guard the largest of −∞, −∞, −∞ is position 0
    confidence = out.sampled_probs.masked_fill(x != MASK, -math.inf)
    unguarded = x.scatter(1, confidence.argmax(1, keepdim=True), out.sampled_tokens[:, :1])
    assert not torch.equal(unguarded[0], x[0]) or int(out.sampled_tokens[0, 0]) == 0


def test_a_rows_draws_depend_on_its_own_stream_alone():
    output, x = logits_of(1, 5, 6, MASK + 1), torch.full((5, 6), MASK)
    output[..., MASK] = -math.inf
    options = {"temperature": 0.8, "top_k": 3, "top_p": 0.9}
    keys = draw_keys(seeded(), 5)
    together = SCHEDULER.step(output, 0, x, generator=keys, **options)
    listed = SCHEDULER.step(output, 0, x, generator=[seeded(i) for i in range(5)], **options)
    single = SCHEDULER.step(output, 0, x, generator=seeded(3), **options)
    for i in (0, 3):
        part = slice(i, i + 1)
        alone = SCHEDULER.step(output[part], 0, x[part], generator=keys[part], **options)
        assert torch.equal(alone.prev_sample, together.prev_sample[part])
        alone = SCHEDULER.step(output[part], 0, x[part], generator=[seeded(i)], **options)
        assert torch.equal(alone.sampled_tokens, listed.sampled_tokens[part])
    # the control: one generator for all is read in order, so that row 3 has another part of it than alone
    assert not torch.equal(alone.sampled_tokens, single.sampled_tokens[3:])


# ---- noise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "size"), [(0, 4), (3, 4), (5, 2), (3, 50), (11, 4)])
def test_the_noisy_views_are_those_of_diffusers(prompt, size):
    x = torch.randint(0, MASK, (6, 11), generator=seeded())
    valid = torch.rand(6, 11, generator=seeded(1)) < 0.8
    options = {"prompt_length": prompt, "block_length": size, "mask_token_id": MASK}
    ours = MaskedBlockScheduler().add_noise(x, valid.long(), generator=seeded(2), **options)
    theirs = BlockRefinementScheduler().add_noise(x, valid.long(), generator=seeded(2), **options)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    either = valid & (torch.arange(11) >= prompt)
    assert torch.equal(ours[2] ^ ours[3], either) and not bool((ours[2] & ours[3]).any())


def test_noise_of_a_list_of_generators_is_each_rows_own():
    x = torch.zeros(3, 9, dtype=torch.int64)
    options = {"prompt_length": 1, "block_length": 4}
    together = SCHEDULER.add_noise(x, x + 1, generator=[seeded(i) for i in range(3)], **options)
    alone = SCHEDULER.add_noise(x[:1], x[:1] + 1, generator=[seeded(2)], **options)
    assert torch.equal(together[2][2:], alone[2])


# ---- draws ----------------------------------------------------------------------------------------------------------

VOCABULARY = 49_152
EDGES = torch.tensor([0.0, 2.0**-53, 1e-9, 0.3, 0.999999, 1 - 2.0**-24, 1 - 2.0**-53], dtype=torch.float64)


def hard_laws() -> dict[str, torch.Tensor]:
    flat = torch.zeros(VOCABULARY)
    holes = logits_of(0, VOCABULARY, scale=1.0).float()
    holes[:1000], holes[-1000:], holes[::3] = -math.inf, -math.inf, -math.inf
    peaked = torch.full((VOCABULARY,), -80.0)
    peaked[12_345] = 80.0
    first, last = flat.clone().fill_(-math.inf), flat.clone().fill_(-math.inf)
    first[0], last[-1] = 0.0, 0.0
    return {
        "flat": flat,
        "holes": holes,
        "peaked": peaked,
        "first": first,
        "last": last,
        "steep": -1e-2 * flat.cumsum(0),
    }


@pytest.mark.parametrize("name", hard_laws())
def test_no_draw_is_out_of_range_or_impossible(name):
    law = hard_laws()[name]
    tokens, probs = masked.draw_tokens(law.expand(1, len(EDGES), -1), EDGES.unsqueeze(0))
    assert bool((probs > 0).all()) and int(tokens.min()) >= 0 and int(tokens.max()) < VOCABULARY
    close(probs[0], law.softmax(0)[tokens[0]])
    p = law.double().softmax(0)
    upper = p.cumsum(0)[tokens[0]]
    slack = torch.maximum(EDGES - upper, (upper - p[tokens[0]]) - EDGES)  # how far u lies outside its token's interval
    assert float(slack.max()) < 1e-5  # the float32 sums move a border by no more


def test_draws_follow_the_softmax():
    n, law = 40_000, logits_of(1, 6, scale=1.0)
    tokens, _ = masked.draw_tokens(law.expand(n, -1), draw_keys(seeded(), n).uniform())
    share, p = torch.bincount(tokens, minlength=6).double() / n, law.softmax(0)
    assert bool(((share - p).abs() < 4 * (p * (1 - p) / n).sqrt()).all())


def kept_by_brute_force(z: list[float], k: int | None, p: float | None) -> set[int]:
    order = sorted(range(len(z)), key=lambda v: (-z[v], v))[:k]
    weights = [math.exp(z[v]) for v in order]
    kept, mass = set(), 0.0
    for v, weight in zip(order, weights, strict=True):
        if p is not None and mass >= p * sum(weights) - 1e-9:
            break
        kept.add(v)
        mass += weight
    return kept


@pytest.mark.parametrize(
    ("k", "p"), [(1, None), (3, None), (50, None), (None, 0.05), (None, 0.7), (4, 0.6), (None, 1.0)]
)
def test_filters_keep_the_most_probable_tokens_and_of_equal_ones_the_first(k, p):
    ties = torch.randint(-2, 3, (20, 8), generator=seeded(2)).double()
    for z in (logits_of(3, 20, 8, scale=1.0), ties, torch.zeros(20, 8, dtype=torch.float64)):
        kept = masked.sampling_logits(z, 1.0, k, p) > -math.inf
        for row, chosen in zip(z.tolist(), kept, strict=True):
            assert set(chosen.nonzero().flatten().tolist()) == kept_by_brute_force(row, k, p)


def test_a_temperature_divides_before_the_nucleus_is_taken():
    z = logits_of(4, 5, 8, scale=1.0)
    close(masked.sampling_logits(z, 0.5, None, None).softmax(-1).double(), (z / 0.5).softmax(-1), 1e-6)
    a, b = masked.sampling_logits(z, 0.5, None, 0.6), masked.sampling_logits(z / 0.5, 1.0, None, 0.6)
    close(a, b, 1e-5)
    for tiny in (1e-30, 1e-300):
        law = masked.sampling_logits(z, tiny, None, 0.9).softmax(-1)
        assert torch.equal(law.argmax(-1), z.argmax(-1)) and bool((law.amax(-1) == 1).all())


@pytest.mark.parametrize("scale", [0.5, 20.0])  # a nucleus beyond the tokens looked at first, and one within
def test_the_short_cut_for_a_large_vocabulary_changes_nothing(scale, monkeypatch):
    z = logits_of(5, 3, 5000, scale=scale)
    quick = masked.sampling_logits(z, 1.0, None, 0.9)
    monkeypatch.setattr(masked, "_HEAD", 10**9)
    assert torch.equal(quick, masked.sampling_logits(z, 1.0, None, 0.9))


# ---- configuration --------------------------------------------------------------------------------------------------


def test_configurations_survive_and_unknown_keys_are_refused(tmp_path):
    scheduler = MaskedBlockScheduler(7, 16, 4, threshold=0.8, minimal_topk=2)
    scheduler.save_pretrained(tmp_path)
    for again in (MaskedBlockScheduler.from_pretrained(tmp_path), MaskedBlockScheduler.from_config(scheduler.config)):
        assert dict(again.config) == dict(scheduler.config) and again.mask_token_id == 7 and again.threshold == 0.8
    with pytest.raises(ConfigError, match="no option 'treshold'. Did you mean 'threshold'"):
        MaskedBlockScheduler.from_config({"treshold": 0.5})
    theirs = BlockRefinementScheduler(block_length=8, threshold=0.7)
    assert MaskedBlockScheduler.from_config(theirs.config).config.threshold == 0.7


def test_a_pipeline_saves_and_loads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(_components, "ALLOWED_PACKAGES", (*_components.ALLOWED_PACKAGES, "tests"))
    pipe = ToyPipeline(tiny_unet(), MaskedBlockScheduler(7, block_length=4))
    loaded = genkit.load(pipe.save_pretrained(tmp_path / "pipe"))
    assert type(loaded.scheduler) is MaskedBlockScheduler and loaded.scheduler.mask_token_id == 7
    assert dict(loaded.scheduler.config) == dict(pipe.scheduler.config)


def test_a_scheduler_steps_with_its_configured_schedule_before_set_timesteps():
    x = torch.full((1, 8), MASK)
    scheduler = MaskedBlockScheduler(MASK, block_length=8, num_inference_steps=2, threshold=2.0)
    assert int(scheduler.step(logits_of(0, 1, 8, MASK + 1), 0, x).transfer_index.sum()) == 4
