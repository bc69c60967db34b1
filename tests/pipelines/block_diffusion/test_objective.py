"""The objective: block size 1 is the autoregressive loss; every other size is the loss written out block by block."""

import math

import pytest
import scipy.stats
import torch
from training.toys import config

from genkit.data.text import PackedDocuments, PromptResponses, TextWindows
from genkit.errors import ConfigError
from genkit.pipelines.block_diffusion.baselines.annealing import AnnealingObjective
from genkit.pipelines.block_diffusion.curriculum import BlockCurriculum
from genkit.pipelines.block_diffusion.objective import BlockDiffusionObjective, corrupt, mask_times, masked_ranks
from genkit.samplers.noise import training_keys
from genkit.training import Trainer

EOS, MASK = 1, 2
SFT = [(3, 4), (5, 2), (1, 7), (6, 6)]  # tokens of prompt and response
BERNOULLI = ("1/t", "none")


def keys_of(count, step=0, seed=0):
    return training_keys(seed, step, torch.arange(count))


def loss_of(objective, batch, step=0, ids=None, seed=0):
    ids = torch.arange(len(batch["tokens"])) if ids is None else torch.as_tensor(ids)
    return objective.loss("model", batch, step=step, keys=training_keys(seed, step, ids))


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(first, second, tolerance=1e-12):
    assert first.keys() == second.keys() and any(value.abs().max() > 1e-6 for value in first.values())
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=tolerance, atol=tolerance)


def responses(text, sizes=SFT, length=16):
    """Rows of prompt and response that end with the end token, padded on the right with noise to be ignored."""
    stream = text(len(sizes), length, seed=4)
    pairs = [
        (row[:p], torch.cat([row[p : p + r - 1], torch.tensor([EOS])]))
        for row, (p, r) in zip(stream, sizes, strict=True)
    ]
    return PromptResponses(pairs, length, pad=0)


# --- block size 1 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [True, False], ids=["clean half alone", "with the noisy half"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_block_size_one_is_the_autoregressive_loss(tiny, text, make_objective, watch, kind, skip):
    tokens = text(3, 9)
    for weight in (0.0, 0.5, 3.0):
        model = tiny(kind)
        objective = make_objective(model, 1, ar_weight=weight, skip_clean_only=skip)
        calls = watch(objective)
        output = loss_of(objective, {"tokens": tokens})
        loss, got = output.loss.detach(), gradients(model, output.loss)
        assert [call[0].shape for call in calls] == [(3, 9 if skip else 18)]
        logits = model(tokens).logits[:, :-1].index_fill(2, torch.tensor([MASK]), -torch.inf)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        for value in (loss, output.logs["nelbo"], output.logs["ar_nll"]):
            torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
        assert_same_gradients(got, gradients(model, expected))


def test_block_size_one_is_transformers_own_loss_where_the_mask_token_is_out_of_reach(tiny, text, make_objective):
    """``model(tokens, labels=tokens).loss`` counts the mask token's probability; make it nil, and the losses agree."""
    model, tokens = tiny(), text(2, 8)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(13, dtype=torch.float64))
    with torch.no_grad():
        model.lm_head.bias[MASK] = -1e4
    got = loss_of(make_objective(model, 1, skip_clean_only=False), {"tokens": tokens}).loss
    expected = model(tokens, labels=tokens).loss  # in float32
    torch.testing.assert_close(got.float(), expected.float(), rtol=1e-6, atol=0.0)


def test_other_block_sizes_are_not_the_autoregressive_loss(tiny, text, make_objective):
    """Control."""
    batch = {"tokens": text(3, 9)}
    model = tiny()
    one, four = (loss_of(make_objective(model, size), batch).loss.detach() for size in (1, 4))
    assert float((one - four).abs()) > 0.01


# --- any block size, written out --------------------------------------------------------------------------------------


def written_out(oracle, model, tokens, masked, size, offset, wanted, weight, **options):
    """Sums over one document of [first] CE_clean + [masked] CE_noisy + λ [not first] CE_clean."""
    shift = options.get("shift", True)
    noisy = oracle.noisy(model, tokens, masked, size, offset, **options)
    total = noisy[masked].sum()
    if shift or weight:
        clean = oracle.clean(model, tokens)
        first = torch.zeros(len(tokens), dtype=torch.bool)
        first[[start for start, _ in oracle.blocks(len(tokens), size, offset)]] = shift
        total = total + clean[first & wanted].sum() + weight * clean[~first & wanted].sum()
    return total


def masked_in(calls, length):
    """Which tokens the last network call hid, bool (B, L)."""
    return calls[-1][0][:, :length] == MASK


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_loss_is_written_out_block_by_block(tiny, text, make_objective, watch, oracle, kind):
    model, tokens = tiny(kind), text(3, 11)
    wanted = torch.arange(11) > 0
    for size in (2, 3, 4, 11, 64):
        objective = make_objective(model, size, weight="none", ar_weight=0.5, random_offset=True)
        calls = watch(objective)
        for step in range(3):
            output = loss_of(objective, {"tokens": tokens}, step=step)
            mask = calls[-1][1].dense[0, 0, :11, :11]
            offset = int(mask[0].sum()) % size  # the first block's length
            masked = masked_in(calls, 11)
            assert not masked[:, 0].any() and masked.any()
            sums = [written_out(oracle, model, tokens[i], masked[i], size, offset, wanted, 0.5) for i in range(3)]
            torch.testing.assert_close(output.loss, sum(sums) / 30, rtol=1e-12, atol=1e-12)


def test_complementary_views_are_averaged(tiny, text, make_objective, watch, oracle):
    model, tokens, wanted = tiny(), text(2, 10), torch.arange(10) > 0
    objective = make_objective(model, 4, weight="none", ar_weight=0.5, complementary=True)
    calls = watch(objective)
    loss = loss_of(objective, {"tokens": tokens}).loss
    views = masked_in(calls, 10).view(2, 2, 10)
    total = sum(
        written_out(oracle, model, tokens[i], views[v, i], 4, 0, wanted, 0.5) for i in range(2) for v in range(2)
    )
    torch.testing.assert_close(loss, total / 2 / 18, rtol=1e-12, atol=1e-12)


def test_without_shift_every_token_is_predicted_at_its_own_place(tiny, text, make_objective, watch, oracle):
    model, tokens, wanted = tiny(), text(2, 10), torch.arange(10) > 0
    for rule in ("causal", "block"):
        objective = make_objective(model, 4, weight="none", ar_weight=0.0, shift=False, clean_rule=rule)
        calls = watch(objective)
        hidden_firsts = 0
        for step in range(4):
            loss = loss_of(objective, {"tokens": tokens}, step=step).loss
            masked = masked_in(calls, 10)
            hidden_firsts += int(masked[:, 4].sum())
            sums = [
                written_out(oracle, model, tokens[i], masked[i], 4, 0, wanted, 0.0, shift=False, rule=rule)
                for i in range(2)
            ]
            torch.testing.assert_close(loss, sum(sums) / 18, rtol=1e-12, atol=1e-12)
        assert hidden_firsts


def test_supervised_rows_are_written_out_with_the_grid_at_the_response(tiny, text, make_objective, watch, oracle):
    model, data = tiny(), responses(text)
    batch = data[torch.arange(4)]
    for size in (2, 4, 8):
        objective = make_objective(model, size, weight="none", ar_weight=0.5)
        calls = watch(objective)
        loss = loss_of(objective, batch).loss
        masked, total = masked_in(calls, 16), 0.0
        assert not (masked & ~batch["loss_mask"]).any()  # prompts and padding are never hidden
        for i, (prompt, response) in enumerate(SFT):
            n, tokens = prompt + response, batch["tokens"][i]
            wanted = torch.arange(n) >= prompt
            assert not masked[i, prompt]  # the response begins a block
            total += written_out(oracle, model, tokens[:n], masked[i, :n], size, prompt, wanted, 0.5)
        torch.testing.assert_close(loss, total / sum(r for _, r in SFT), rtol=1e-12, atol=1e-12)


def test_a_filled_last_block_ends_in_end_tokens_that_are_not_counted(tiny, text, make_objective, watch, oracle):
    model, batch, size = tiny(), responses(text)[torch.arange(4)], 4
    objective = make_objective(model, size, weight="none", ar_weight=0.5, fill_token_id=EOS)
    calls = watch(objective)
    hidden_fill = 0
    for step in range(4):
        loss = loss_of(objective, batch, step=step).loss
        length, total = calls[-1][0].shape[1] // 2, 0.0
        masked = masked_in(calls, length)
        for i, (prompt, response) in enumerate(SFT):
            n = prompt + -(-response // size) * size
            tokens = torch.cat([batch["tokens"][i, : prompt + response], torch.full((n - prompt - response,), EOS)])
            wanted = (torch.arange(n) >= prompt) & (torch.arange(n) < prompt + response)
            hidden_fill += int(masked[i, prompt + response :].sum())
            assert not masked[i, n:].any()
            total += written_out(oracle, model, tokens, masked[i, :n], size, prompt, wanted, 0.5)
        torch.testing.assert_close(loss, total / sum(r for _, r in SFT), rtol=1e-12, atol=1e-12)
    assert hidden_fill


def test_packed_rows_are_their_documents(tiny, text, make_objective, watch, oracle):
    model, sizes = tiny(), (5, 7, 1, 3)
    documents = [text(1, n, seed=n)[0] for n in sizes]
    batch = PackedDocuments(documents, 20, pad=0)[torch.arange(1)]
    objective = make_objective(model, 3, weight="none", ar_weight=0.5)
    calls = watch(objective)
    loss, total, start = loss_of(objective, batch).loss, 0.0, 0
    masked = masked_in(calls, 20)[0]
    for tokens in documents:
        n = len(tokens)
        if n > 1:
            part = masked[start : start + n]
            total += written_out(oracle, model, tokens, part, 3, 0, torch.arange(n) > 0, 0.5)
        start += n
    assert not masked[16:].any()
    torch.testing.assert_close(loss, total / sum(n - 1 for n in sizes), rtol=1e-12, atol=1e-12)


def test_a_document_that_goes_on_is_not_predicted_from_the_row_above(tiny, text, make_objective, watch):
    """Positions that begin at 5: the first token of the row has no predecessor here, whatever its position says."""
    batch = {
        "tokens": text(2, 8),
        "document": torch.zeros(2, 8, dtype=torch.int64),
        "position": torch.arange(5, 13).expand(2, -1),
    }
    objective = make_objective(tiny("gpt2"), 4)
    calls = watch(objective)
    assert objective.weight(batch) == 14.0
    loss_of(objective, batch)
    assert not masked_in(calls, 8)[:, 0].any()


@pytest.mark.parametrize("size", [1, 4])
def test_padded_rows_equal_unpadded_ones(tiny, text, make_objective, size):
    """Rows alone and cut to their tokens, and all of them together: sums over tokens agree."""
    data = responses(text)
    objective = make_objective(tiny(), size, fill_token_id=EOS, antithetic=False)  # strata depend on the row's length
    whole = data[torch.arange(4)]
    together = loss_of(objective, whole).loss * objective.weight(whole)
    apart = 0.0
    for i, (prompt, response) in enumerate(SFT):
        batch = data[torch.tensor([i])]
        row = {name: x[:, : prompt + response] if x.ndim == 2 else x for name, x in batch.items()}
        apart = apart + loss_of(objective, row, ids=[i]).loss * objective.weight(row)
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", range(1, 9))
def test_every_prompt_length_and_every_amount_of_padding_has_enough_blocks(tiny, make_objective, start):
    """Responses and padding each begin and end with parts of blocks, so a row can have more blocks than L/B + 2."""
    objective = make_objective(tiny(layers=1), 4)
    for length in range(start + 1, 13):
        for end in range(start + 1, length + 1):
            place = torch.arange(length)
            batch = {
                "tokens": 3 + place[None] % 9,
                "document": torch.where(place < end, 0, -1)[None],
                "loss_mask": ((place >= start) & (place < end))[None],
                "response_start": torch.tensor([start]),
            }
            assert torch.isfinite(loss_of(objective, batch).loss)


def test_a_batch_without_masks_still_trains_and_a_batch_without_targets_weighs_nothing(tiny, text, make_objective):
    model = tiny()
    objective = make_objective(model, 4, shift=False, ar_weight=0.0)
    batch = {"tokens": text(1, 4), "loss_mask": torch.zeros(1, 4, dtype=torch.bool)}
    assert objective.weight(batch) == 0.0
    output = loss_of(objective, batch)
    assert float(output.loss) == 0.0
    assert all((g == 0).all() for g in gradients(model, output.loss).values())


# --- the masks' law ---------------------------------------------------------------------------------------------------

ROWS = 20_000
FIRST = torch.tensor([[True, False, False, False, True, False, False, False, True, False]])
COUNTS = (3, 3, 1)  # maskable tokens of the three blocks


def views_of(weight="1/t", rows=ROWS, **options):
    maskable = ~FIRST.expand(rows, -1)
    options.setdefault("antithetic", False)
    return corrupt(keys_of(rows), maskable, FIRST, 3, weight=weight, **options)


def within(values, expected, dim=0, sigmas=3.5):
    """Means of independent rows agree with ``expected``."""
    error = values.std(dim=dim) / math.sqrt(values.shape[dim])
    assert ((values.mean(dim=dim) - expected).abs() <= sigmas * error + 1e-12).all(), (values.mean(dim=dim), expected)


def pair_statistic(view):
    """Σ over masked tokens of weight x (masks in the block): it depends on how many are masked, as losses do.

    Its expectation is Σ_k (1/k) k·k = n(n+1)/2 in a block of n, for every unbiased estimate."""
    block = FIRST.long().cumsum(dim=1) - 1
    masked = view.masked.double()
    count = torch.zeros(len(masked), 3, dtype=torch.float64).scatter_add(1, block.expand(len(masked), -1), masked)
    terms = view.weight.double() * masked * count.gather(1, block.expand(len(masked), -1))
    return torch.zeros(len(masked), 3, dtype=torch.float64).scatter_add(1, block.expand(len(masked), -1), terms)


TRIANGLES = torch.tensor([6.0, 6.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("weight", ["1/t", "1/k"])
@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("complementary", [False, True])
def test_each_token_counts_once_on_average(weight, antithetic, complementary):
    views = views_of(weight, antithetic=antithetic, complementary=complementary)
    assert len(views) == 1 + complementary
    for view in views:
        assert not view.masked[:, FIRST[0]].any()
        within((view.weight * view.masked).double()[:, ~FIRST[0]], 1.0)
        within(pair_statistic(view), TRIANGLES)


def test_a_clipped_range_is_biased_and_says_by_how_much():
    """Control: with t on (0.3, 0.8) the statistic's mean is n(1 − 0.55) + 0.55 n², and not n(n+1)/2."""
    statistic = pair_statistic(views_of(t_range=(0.3, 0.8))[0])
    n = torch.tensor([float(c) for c in COUNTS], dtype=torch.float64)
    within(statistic, 0.45 * n + 0.55 * n**2)
    assert (statistic.mean(dim=0) - TRIANGLES)[:2].min() > 5 * (statistic.std(dim=0) / ROWS**0.5)[:2].max()


def test_even_weights_count_masked_tokens_alike():
    view = views_of("none")[0]
    assert (view.weight == 1.0).all()
    within(view.masked.double()[:, ~FIRST[0]], (1.0 + 1e-3) / 2)


def test_counting_masks_has_less_variance_than_dividing_by_t():
    """Var of a token's weight is H_n − 1 against ln(1/ε) − 1 (to first order): a loss of 1 a token has none at all."""
    one, other = (views_of(w, t_range=(1e-3, 1.0))[0] for w in ("1/k", "1/t"))
    few, many = ((v.weight * v.masked).double()[:, 1] for v in (one, other))
    assert scipy.stats.f.sf(float(many.var() / few.var()), ROWS - 1, ROWS - 1) < 1e-6
    assert float(few.var()) == pytest.approx(1 + 1 / 2 + 1 / 3 - 1, rel=0.05)
    assert float(many.var()) == pytest.approx(math.log(1e3) / 0.999 - 1, rel=0.2)
    sums = (one.weight * one.masked).double().sum(dim=1)
    torch.testing.assert_close(sums, torch.full_like(sums, 7.0), rtol=1e-6, atol=0.0)


def test_one_count_is_drawn_evenly_and_then_every_set_of_that_size():
    view = views_of("1/k")[0]
    codes = (view.masked[:, 1:4] * torch.tensor([1, 2, 4])).sum(dim=1)
    expected = [ROWS / 3 / math.comb(3, bin(c).count("1")) for c in range(1, 8)]
    observed = torch.bincount(codes, minlength=8)[1:].tolist()
    assert int((codes == 0).sum()) == 0
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-3


def test_strata_lower_the_variance_of_a_row_s_mean():
    times = {a: mask_times(keys_of(ROWS), 8, (0.0, 1.0), a) for a in (True, False)}
    for t in times.values():  # each t alone is uniform
        for column in (0, 7):
            assert scipy.stats.kstest(t[:, column].numpy(), "uniform").pvalue > 1e-3
    variances = {a: float(t.mean(dim=1).var()) for a, t in times.items()}
    assert variances[True] == pytest.approx(1 / (12 * 8**3), rel=0.1)
    assert variances[False] == pytest.approx(1 / (12 * 8), rel=0.1)
    first, maskable = torch.arange(32)[None] % 4 == 0, (torch.arange(32)[None] % 4 > 0).expand(ROWS, -1)
    shares = {}
    for antithetic in (True, False):
        (view,) = corrupt(keys_of(ROWS), maskable, first, 8, antithetic=antithetic)
        shares[antithetic] = float(view.masked.double().mean(dim=1).var())
    assert scipy.stats.f.sf(shares[False] / shares[True], ROWS - 1, ROWS - 1) < 1e-6


@pytest.mark.parametrize("weight", ["1/t", "1/k", "none"])
def test_complementary_views_share_out_the_tokens(weight):
    first, second = views_of(weight, complementary=True, rows=500)
    assert not (first.masked & second.masked).any()
    assert torch.equal(first.masked | second.masked, ~FIRST.expand(500, -1))


def test_ranks_are_places_among_a_block_s_maskable_tokens():
    generator = torch.Generator().manual_seed(0)
    maskable = torch.rand(50, 10, generator=generator) < 0.6
    ranks, counts = masked_ranks(keys_of(50), maskable, FIRST)
    block = FIRST[0].long().cumsum(dim=0) - 1
    for row in range(50):
        for b in range(3):
            inside = maskable[row] & (block == b)
            assert sorted(ranks[row, inside].tolist()) == list(range(int(inside.sum())))
            assert (counts[row, block == b] == inside.sum()).all()
    assert (ranks[~maskable] == 10).all()


@pytest.mark.parametrize("options", [{"weight": "1/k"}, {"weight": "1/t"}, {"weight": "1/t", "complementary": True}])
@pytest.mark.parametrize("supervised", [False, True])
def test_masks_depend_on_seed_step_and_sample_alone(tiny, text, make_objective, watch, options, supervised):
    """Not on the order of a batch, its size, or the longest row in it."""
    data = responses(text, SFT + [(2, 3), (9, 7)]) if supervised else TextWindows(text(1, 96)[0], 16)
    objective = make_objective(tiny(), 4, random_offset=True, fill_token_id=EOS, **options)
    calls = watch(objective)

    def masks(ids, step=0, seed=0):
        loss_of(objective, data[torch.tensor(ids)], step, ids, seed)
        length = calls[-1][0].shape[1] // 2
        rows = (calls[-1][0][:, :length] == MASK).chunk(1 + options.get("complementary", False))
        hidden = torch.stack(rows, dim=1)
        return {i: torch.nn.functional.pad(row, (0, 24 - length)) for i, row in zip(ids, hidden, strict=True)}

    whole = masks([0, 1, 2, 3, 4, 5])
    for part in ([5, 3, 1, 0, 2, 4], [4, 0], [3], [2, 5, 1]):
        assert all(torch.equal(row, whole[i]) for i, row in masks(part).items())
    for other in (masks([0, 1, 2, 3, 4, 5], step=1), masks([0, 1, 2, 3, 4, 5], seed=1)):
        assert any(not torch.equal(other[i], whole[i]) for i in range(6))


# --- in the trainer ---------------------------------------------------------------------------------------------------


class CountsRows(BlockDiffusionObjective):
    """Control: micro-batches weighed by their rows, as if all rows had equally many tokens."""

    def weight(self, batch):
        return float(len(batch["tokens"]))


def trained(kind, model, data, folder, steps=3, size=4, **changes):
    options = {"ar_weight": 0.5, "fill_token_id": EOS if kind is BlockDiffusionObjective else None}
    objective = kind(model, MASK, BlockCurriculum([size], steps), **options)
    settings = config(folder, max_steps=steps, learning_rate=1e-3, max_grad_norm=None, **changes)
    log = list(Trainer(objective, settings, data).train())
    return [entry.loss for entry in log], [entry.grad_norm for entry in log], dict(model.named_parameters())


@pytest.mark.parametrize("supervised", [True, False], ids=["responses", "packed"])
def test_accumulation_does_not_change_the_gradient(tiny, text, tmp_path, supervised):
    """One batch of 4 rows with unequal numbers of targets, or 4 micro-batches of one row."""
    if supervised:
        data = responses(text)
    else:
        data = PackedDocuments([text(1, n, seed=n)[0] for n in (11, 2, 2, 5, 9, 1, 1, 1, 1, 1)], 9, pad=0)
    whole = trained(BlockDiffusionObjective, tiny(), data, tmp_path / "1", batch_size=4)
    parts = trained(BlockDiffusionObjective, tiny(), data, tmp_path / "4", batch_size=1, gradient_accumulation_steps=4)
    assert whole[0] == pytest.approx(parts[0], rel=1e-9)
    assert whole[1] == pytest.approx(parts[1], rel=1e-9)
    for name, value in whole[2].items():
        torch.testing.assert_close(parts[2][name], value, rtol=1e-7, atol=1e-9)


def test_weighing_rows_instead_of_tokens_would_change_it(tiny, text, tmp_path):
    data = responses(text)
    norms = [
        trained(CountsRows, tiny(), data, tmp_path / str(n), batch_size=4 // n, gradient_accumulation_steps=n)[1]
        for n in (1, 4)
    ]
    assert abs(norms[0][0] / norms[1][0] - 1) > 1e-3


def test_the_random_offset_is_one_for_all_micro_batches_of_a_step(tiny, text, watch, tmp_path):
    data = TextWindows(text(1, 64)[0], 8)
    objective = BlockDiffusionObjective(tiny(layers=1), MASK, BlockCurriculum([5], 12))
    calls = watch(objective)
    settings = config(tmp_path, max_steps=12, batch_size=2, gradient_accumulation_steps=4)
    list(Trainer(objective, settings, data).train())
    masks = [call[1] for call in calls]
    steps = [masks[i : i + 4] for i in range(0, 48, 4)]
    assert all(mask is step[0] for step in steps for mask in step)
    assert len({id(step[0]) for step in steps}) >= 4  # of five offsets, in twelve steps


def test_phases_begin_with_next_token_training(tiny, text, watch, tmp_path):
    from genkit.training import Phase

    phases = (Phase("ar", 2), Phase("blocks", 4))
    objective = BlockDiffusionObjective(tiny(layers=1), MASK, BlockCurriculum([2, 4], 4, 0.5), phases=phases)
    calls = watch(objective)
    settings = config(tmp_path, max_steps=6, batch_size=2)
    log = list(Trainer(objective, settings, TextWindows(text(1, 64)[0], 8)).train())
    assert [entry.phase for entry in log] == ["ar"] * 2 + ["blocks"] * 4
    assert [entry.logs["block_length"] for entry in log] == [1, 1, 2, 2, 4, 4]
    assert [call[0].shape[1] for call in calls] == [8, 8, 16, 16, 16, 16]


def test_options_that_exclude_each_other_are_refused(tiny, make_objective):
    model = tiny(layers=1)
    for options, message in (
        ({"clean_rule": "block"}, "leak"),
        ({"clean_rule": "block", "ar_weight": 0.5, "shift": False}, "leak; got ar_weight=0.5, shift=False"),
        ({"clean_rule": "block", "ar_weight": 0.0, "shift": True}, "leak"),
        ({"ar_weight": -1.0}, "ar_weight"),
        ({"weight": "1/n"}, "expected one of 1/t, 1/k, none"),
        ({"t_range": (0.0, 1.0)}, "0 < low < high"),
        ({"t_range": (0.5, 0.5)}, "0 < low < high"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_objective(model, 4, **options)


# --- the annealing baseline -------------------------------------------------------------------------------------------


def annealing(model, steps=10, ramp=0.5, **options):
    return AnnealingObjective(model, MASK, BlockCurriculum([4], steps), ramp=ramp, **options)


def test_annealing_opens_the_mask_and_has_no_clean_half(tiny, text, watch):
    model, tokens = tiny(), text(3, 9)
    objective = annealing(model)
    calls = watch(objective)
    shares = []
    for step in (0, 2, 5, 9):
        output = loss_of(objective, {"tokens": tokens}, step=step)
        assert torch.isfinite(output.loss) and calls[-1][0].shape == (3, 9)
        dense = calls[-1][1].dense.expand(3, -1, -1, -1)
        future = torch.ones(9, 9, dtype=torch.bool).triu(1)
        assert dense[..., ~future].all()
        shares.append(float(dense[..., future].double().mean()))
    assert shares[0] == 0.0 and shares[2:] == [1.0, 1.0]
    assert 0.1 < shares[1] < 0.7 and objective.open_share(2) == 0.4


def test_annealing_is_masked_diffusion_with_the_shift(tiny, text, watch):
    """Its loss from the masks that it drew, at share 0 (causal) and 1 (full attention)."""
    model, tokens = tiny(), text(3, 9)
    objective = annealing(model, weight="none")
    calls = watch(objective)
    for step, full in ((0, False), (9, True)):
        got = loss_of(objective, {"tokens": tokens}, step=step).loss
        masked = calls[-1][0] == MASK
        assert masked.any() and not masked[:, 0].any()
        ones = torch.ones(1, 1, 9, 9, dtype=torch.bool)
        logits = model(calls[-1][0], attention_mask=ones if full else ones.tril()).logits[:, :-1]
        logits = logits.index_fill(2, torch.tensor([MASK]), -torch.inf)
        ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        expected = (ce * masked[:, 1:].flatten()).sum() / 24
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weight", ["1/t", "1/k", "none"])
def test_annealing_takes_packed_and_supervised_rows(tiny, text, watch, weight):
    model = tiny()
    packed = PackedDocuments([text(1, n, seed=n)[0] for n in (5, 7, 3)], 18, pad=0)[torch.arange(1)]
    objective = annealing(model, weight=weight, fill_token_id=EOS)
    calls = watch(objective)
    assert torch.isfinite(loss_of(objective, packed, step=9).loss)
    same = packed["document"][0][:, None] == packed["document"][0]
    allowed = (same & (packed["document"][0] >= 0)) | torch.eye(18, dtype=torch.bool)
    assert torch.equal(calls[-1][1].dense[0, 0], allowed)
    assert torch.isfinite(loss_of(objective, responses(text)[torch.arange(4)], step=9).loss)


def test_annealing_pretrains_as_the_other_does(tiny, text, make_objective):
    from genkit.training import Phase

    model, batch = tiny(), {"tokens": text(3, 9)}
    objective = annealing(model, phases=(Phase("ar", 2), Phase("blocks", 10)))
    expected = loss_of(make_objective(model, 1), batch).loss
    torch.testing.assert_close(loss_of(objective, batch, step=1).loss, expected)
    assert not torch.isclose(loss_of(objective, batch, step=2).loss, expected)
    with pytest.raises(ConfigError, match="ramp"):
        annealing(model, ramp=1.5)
