"""The likelihood bound: exact at block sizes 1 and 2, and against all sets of masks beyond."""

import math

import pytest
import torch

from genkit.data.text import PackedDocuments
from genkit.errors import ConfigError
from genkit.pipelines.block_diffusion.likelihood import _per_token, ar_nll, nelbo
from genkit.samplers.noise import training_keys

MASK = 2


def bound(model, batch, size, **options):
    return nelbo(model, batch, mask_token_id=MASK, block_length=size, **options)


def copies(row, count):
    """One row many times: each copy has masks of its own."""
    return {"tokens": row.expand(count, -1)}


def agrees(estimate, expected, rows):
    """Within 3 standard errors over rows, which must be small enough to mean something."""
    error = estimate.half_width / 1.96
    assert 0.0 < error < 0.02 * abs(expected)
    assert estimate.value == pytest.approx(expected, abs=3 * error)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_block_size_one_is_the_next_token_loss(tiny, text, kind):
    model, tokens = tiny(kind), text(5, 9)
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1].index_fill(2, torch.tensor([MASK]), -torch.inf)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    got = bound(model, {"tokens": tokens}, 1, batch_size=2)
    assert got.nelbo.value == pytest.approx(float(expected), rel=1e-12)
    assert got.ar_nll == got.nelbo and got.gap == 0.0
    assert got.nelbo.tokens == 40
    assert ar_nll(model, {"tokens": tokens}, mask_token_id=MASK, batch_size=3).value == pytest.approx(
        float(expected), rel=1e-12
    )


def test_block_size_two_is_exact(tiny, text, oracle):
    """One maskable token a block: nothing is random, and every draw gives the same number."""
    model, tokens = tiny(), text(3, 9)
    for offset in (0, 1):
        expected = sum(oracle.bound(model, row, 2, offset) for row in tokens) / 24
        for draws, seed in ((None, 0), (None, 1), (1, 0), (3, 7)):
            got = bound(model, {"tokens": tokens}, 2, offset=offset, draws=draws, seed=seed)
            assert got.nelbo.value == pytest.approx(expected, rel=1e-12)
        assert got.nelbo.value != pytest.approx(got.ar_nll.value, rel=1e-3)


@pytest.mark.parametrize(("size", "offset"), [(3, 0), (4, 0), (4, 3), (4, 1), (9, 0)])
@pytest.mark.parametrize("draws", [None, 1, 5])
def test_draws_agree_with_every_set_of_masks(tiny, text, oracle, size, offset, draws):
    """Short first and last blocks, one block of everything; a sweep over k, one k, and more draws than tokens."""
    model, row = tiny(), text(1, 7)
    expected = oracle.bound(model, row[0], size, offset) / 6
    got = bound(model, copies(row, 1500), size, offset=offset, draws=draws, batch_size=1500, seed=1)
    agrees(got.nelbo, expected, 1500)


def test_a_sweep_over_k_has_less_variance_than_one_k(tiny, text):
    model, rows = tiny(), copies(text(1, 9), 400)
    sweep, one = (bound(model, rows, 4, draws=draws).nelbo.half_width for draws in (None, 1))
    assert sweep < 0.7 * one


@pytest.mark.parametrize("weight", ["1/t", "1/k"])
@pytest.mark.parametrize("options", [{}, {"antithetic": False}, {"complementary": True}])
def test_the_objective_s_log_estimates_the_bound(tiny, text, oracle, make_objective, weight, options):
    """Monte-Carlo over t, or over k: the mean over batches of the logged bound is the enumerated one."""
    model, row = tiny(), text(1, 9)
    expected = oracle.bound(model, row[0], 4) / 8
    objective = make_objective(model, 4, weight=weight, t_range=(1e-4, 1.0), **options)
    values = []
    with torch.no_grad():
        for step in range(40):
            keys = training_keys(0, step, torch.arange(100))
            values.append(objective.loss("model", copies(row, 100), step=step, keys=keys).logs["nelbo"])
    values = torch.stack(values)
    error = float(values.std()) / math.sqrt(len(values))
    assert 0.0 < error < 0.03 * expected
    assert float(values.mean()) == pytest.approx(expected, abs=3.5 * error)


def test_a_clipped_range_of_t_misses_the_bound(tiny, text, oracle, make_objective):
    """Control for the test above."""
    model, row = tiny(), text(1, 9)
    expected = oracle.bound(model, row[0], 4) / 8
    objective = make_objective(model, 4, weight="1/t", t_range=(0.9, 1.0))
    values = []
    with torch.no_grad():
        for step in range(40):
            keys = training_keys(0, step, torch.arange(100))
            values.append(objective.loss("model", copies(row, 100), step=step, keys=keys).logs["nelbo"])
    values = torch.stack(values)
    assert abs(float(values.mean()) - expected) > 6 * float(values.std()) / math.sqrt(40)


def test_other_recipes_have_bounds_of_their_own(tiny, text, oracle):
    """Without shift, with a block-causal clean half, and one block of everything that attends in full."""
    model, row = tiny(), text(1, 6)
    for rule in ("causal", "block"):
        expected = oracle.bound(model, row[0], 3, shift=False, rule=rule) / 5
        got = bound(model, copies(row, 1500), 3, shift=False, clean_rule=rule, batch_size=1500)
        agrees(got.nelbo, expected, 1500)
    whole = bound(model, copies(row, 1500), 6, batch_size=1500)
    full = bound(model, copies(row, 1500), 6, noise_rule="full", batch_size=1500)
    assert full.nelbo == whole.nelbo
    blocks = bound(model, {"tokens": row}, 2, noise_rule="full").nelbo.value
    assert blocks != pytest.approx(bound(model, {"tokens": row}, 2).nelbo.value, rel=1e-3)


def test_prompts_padding_and_offsets_of_rows(tiny, text, oracle):
    """Responses alone count, the grid begins with each; block size 2 makes it exact."""
    model, tokens, sizes = tiny(), text(3, 10), [(3, 4), (4, 6), (1, 5)]
    place = torch.arange(10)
    starts, ends = (torch.tensor(x)[:, None] for x in zip(*((p, p + r) for p, r in sizes), strict=True))
    batch = {
        "tokens": tokens,
        "document": torch.where(place < ends, 0, -1),
        "loss_mask": (place >= starts) & (place < ends),
    }
    for size in (1, 2):
        total = sum(
            oracle.bound(model, tokens[i, : p + r], size, p, torch.arange(p + r) >= p) for i, (p, r) in enumerate(sizes)
        )
        for rows in (1, 3):
            got = bound(model, batch, size, offset=starts[:, 0], batch_size=rows)
            assert got.nelbo.value == pytest.approx(total / 15, rel=1e-12)
            assert got.nelbo.tokens == 15
            clean = [oracle.clean(model, tokens[i, : p + r])[p:].sum().detach() for i, (p, r) in enumerate(sizes)]
            assert got.ar_nll.value == pytest.approx(float(sum(clean)) / 15, rel=1e-12)


def test_packed_documents_are_their_own(tiny, text, oracle):
    model, sizes = tiny(), (4, 7, 1, 3)
    documents = [text(1, n, seed=n)[0] for n in sizes]
    data = PackedDocuments(documents, 18, pad=0)
    total = sum(oracle.bound(model, d, 2) for d in documents if len(d) > 1)
    got = bound(model, data[torch.arange(1)], 2)
    assert got.nelbo.value == pytest.approx(total / 11, rel=1e-12) and got.nelbo.tokens == 11


def test_masks_do_not_depend_on_the_batch_size(tiny, text):
    model, batch = tiny(), {"tokens": text(7, 9)}
    first = bound(model, batch, 4)
    for rows in (1, 3):
        again = bound(model, batch, 4, batch_size=rows)
        assert again.nelbo.value == pytest.approx(first.nelbo.value, rel=1e-12)
        assert again.nelbo.half_width == pytest.approx(first.nelbo.half_width, rel=1e-9)
    assert bound(model, batch, 4, seed=1).nelbo.value != first.nelbo.value
    assert model.training is False
    model.train()
    bound(model, batch, 4)
    assert model.training is True


def test_the_interval_covers_the_mean_in_19_of_20_experiments():
    """Rows of unequal length whose loss a token differs from row to row; the mean is Σ losses over Σ tokens."""
    generator = torch.Generator().manual_seed(0)
    hits, values, widths = 0, [], []
    for _ in range(2000):
        counts = torch.randint(5, 40, (60,), generator=generator)
        means = 2.0 + 0.5 * torch.randn(60, generator=generator, dtype=torch.float64)
        got = _per_token(means * counts, counts)
        hits += abs(got.value - 2.0) < got.half_width
        values.append(got.value)
        widths.append(got.half_width / 1.96)
    assert hits / 2000 == pytest.approx(0.95, abs=0.025)
    spread = float(torch.tensor(values).std())
    assert sum(widths) / 2000 == pytest.approx(spread, rel=0.07)


def test_one_row_has_no_interval_and_no_token_is_refused(tiny, text):
    model = tiny(layers=1)
    assert math.isnan(bound(model, {"tokens": text(1, 5)}, 2).nelbo.half_width)
    for batch in ({"tokens": text(2, 1)}, {"tokens": text(1, 5), "loss_mask": torch.zeros(1, 5, dtype=torch.bool)}):
        with pytest.raises(ConfigError, match="no predicted token"):
            bound(model, batch, 2)
    with pytest.raises(ConfigError, match="draws=0"):
        bound(model, {"tokens": text(1, 5)}, 2, draws=0)
