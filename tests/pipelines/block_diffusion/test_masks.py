"""Who attends to whom: against a triple loop, and against what a network's gradients say."""

import itertools

import pytest
import torch

from genkit.errors import ConfigError
from genkit.models.attention import AttentionMask, additive, mask_for
from genkit.pipelines.block_diffusion.masks import BlockGrid, causal_mask, format_mask, one_pass_mask, print_mask

RULES = list(itertools.product(("causal", "block"), ("block", "causal", "full")))
PACKED = torch.tensor([[4, 4, 4, 7, 7, 7, 7, 7, -1, -1], [-1, -1, 0, 0, 0, 0, 1, 1, 1, 2], [3] * 10])


def may_attend(q, k, length, size, offset, document, clean_rule="causal", noise_rule="block"):
    """The rule, one pair at a time: ``document`` is a row's list of document numbers."""
    q_clean, k_clean, qi, ki = q >= length, k >= length, q % length, k % length
    if q == k:
        return True
    if document[qi] != document[ki] or document[ki] == -1:
        return False
    place = [0] * length
    for i in range(1, length):
        place[i] = place[i - 1] + 1 if document[i] == document[i - 1] else 0
    qb, kb = (place[qi] - offset) // size, (place[ki] - offset) // size
    if not q_clean and not k_clean:
        return {"block": qb == kb, "causal": qb == kb and ki <= qi, "full": True}[noise_rule]
    if not q_clean:
        return noise_rule != "full" and kb < qb
    return k_clean and (ki <= qi if clean_rule == "causal" else kb <= qb)


def by_hand(length, size, offset, document=None, rules=("causal", "block")):
    document = [0] * length if document is None else document
    pairs = range(2 * length)
    return torch.tensor([[may_attend(q, k, length, size, offset, document, *rules) for k in pairs] for q in pairs])


@pytest.mark.parametrize("rules", RULES)
def test_mask_is_the_triple_loop(rules):
    for length, size in itertools.product((1, 2, 5, 8, 12), range(1, 6)):
        for offset in range(size):
            grid = BlockGrid.make(length, size, offset=offset)
            got = one_pass_mask(grid, clean_rule=rules[0], noise_rule=rules[1]).dense
            assert torch.equal(got[0, 0], by_hand(length, size, offset, None, rules)), (length, size, offset)


@pytest.mark.parametrize("rules", RULES)
def test_packed_padded_rows_with_offsets_of_their_own(rules):
    for size in (1, 2, 3, 4):
        offsets = torch.tensor([0, 1, size - 1])
        grid = BlockGrid.make(10, size, offset=offsets, document=PACKED)
        got = one_pass_mask(grid, clean_rule=rules[0], noise_rule=rules[1])
        causal = causal_mask(grid, clean_rule=rules[0]).dense
        assert got.batch == 3
        for row in range(3):
            expected = by_hand(10, size, int(offsets[row]) % size, PACKED[row].tolist(), rules)
            assert torch.equal(got.dense[row, 0], expected), (size, row)
            assert torch.equal(causal[row, 0], expected[10:, 10:]), (size, row)
    # one row of offsets and many of documents, and the other way round
    one = one_pass_mask(BlockGrid.make(10, 3, offset=2, document=PACKED)).dense
    assert torch.equal(one[1, 0], by_hand(10, 3, 2, PACKED[1].tolist()))
    many = one_pass_mask(BlockGrid.make(6, 3, offset=torch.tensor([0, 2]))).dense
    assert torch.equal(many[1, 0], by_hand(6, 3, 2)) and not torch.equal(many[0, 0], many[1, 0])


def test_valid_and_document_state_padding_alike():
    valid = PACKED[:1] >= 0
    first = BlockGrid.make(10, 3, document=PACKED[:1], valid=valid)
    second = BlockGrid.make(10, 3, document=PACKED[:1])
    assert torch.equal(one_pass_mask(first).dense, one_pass_mask(second).dense)
    left = torch.tensor([[False, False, True, True, True, True]])
    grid = BlockGrid.make(6, 2, valid=left)
    assert torch.equal(grid.position, torch.tensor([[0, 1, 0, 1, 2, 3]]))
    assert torch.equal(one_pass_mask(grid).dense[0, 0], by_hand(6, 2, 0, [-1, -1, 0, 0, 0, 0]))


def test_positions_may_go_on_from_a_row_before():
    """A document that continues: its blocks follow its own positions, and its first token in the row is a block's
    first, because nothing in the row predicts it."""
    position = torch.tensor([[5, 6, 7, 8, 0, 1, 2, 3]])
    grid = BlockGrid.make(8, 4, document=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]]), position=position)
    assert grid.block.tolist() == [[1, 1, 1, 2, 0, 0, 0, 0]]
    assert grid.first.long().tolist() == [[1, 0, 0, 1, 1, 0, 0, 0]]
    assert grid.start.long().tolist() == [[1, 0, 0, 0, 1, 0, 0, 0]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_all_forms_of_a_mask_agree():
    from torch.nn.attention.flex_attention import create_mask, flex_attention

    grid = BlockGrid.make(10, 3, offset=torch.tensor([0, 1, 2]), document=PACKED)
    for mask in (one_pass_mask(grid), causal_mask(grid), one_pass_mask(BlockGrid.make(7, 4, offset=3))):
        dense = mask.dense
        shape = (mask.batch or 1, 1, mask.queries, mask.keys)
        assert torch.equal(create_mask(mask.predicate, *shape, device="cpu"), dense)
        assert torch.equal(additive(dense, torch.float32) == 0.0, dense)
        assert torch.equal(AttentionMask.of(dense).dense, dense)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(shape[0], 2, shape[2], 8, generator=generator) for _ in range(3))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
        with torch.no_grad():
            torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask.flex()), expected)
        plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=additive(dense, torch.float32))
        torch.testing.assert_close(plain, expected)


@pytest.mark.parametrize("rules", RULES)
def test_no_path_of_two_edges_leads_where_no_edge_leads(rules):
    """M∘M ⊆ M, so a network of any depth sees what one layer sees."""
    grids = [BlockGrid.make(12, size, offset=o) for size in (1, 3, 4, 12) for o in range(min(size, 4))]
    grids.append(BlockGrid.make(10, 3, offset=torch.tensor([0, 1, 2]), document=PACKED))
    for grid in grids:
        dense = one_pass_mask(grid, clean_rule=rules[0], noise_rule=rules[1]).dense[:, 0].double()
        assert not ((dense @ dense > 0) & (dense == 0)).any()
        assert (dense.diagonal(dim1=1, dim2=2) == 1).all()


def test_special_cases_are_the_known_models():
    length = 9
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    for size in (1, 4, length, 2 * length):
        assert torch.equal(one_pass_mask(BlockGrid.make(length, size)).dense[0, 0, length:, length:], lower)
        assert torch.equal(causal_mask(BlockGrid.make(length, size)).dense[0, 0], lower)
    one = one_pass_mask(BlockGrid.make(length, 1)).dense[0, 0]
    assert torch.equal(one[:length, :length], torch.eye(length, dtype=torch.bool))
    assert torch.equal(one[:length, length:], lower ^ torch.eye(length, dtype=torch.bool))
    for size in (length, 2 * length):  # a single block: masked diffusion of the row, and no look at the clean text
        whole = one_pass_mask(BlockGrid.make(length, size)).dense[0, 0]
        assert whole[:length, :length].all() and not whole[:length, length:].any()


def test_the_picture():
    expected = "██··│····\n██··│····\n··██│██··\n··██│██··\n────┼────\n····│█···\n····│██··\n····│███·\n····│████"
    assert format_mask(one_pass_mask(BlockGrid.make(4, 2))) == expected
    assert format_mask(causal_mask(BlockGrid.make(3, 2))) == "█··\n██·\n███"
    rows = one_pass_mask(BlockGrid.make(2, 2, offset=torch.tensor([0, 1])))
    assert format_mask(rows, 1, marks=".#") == "#.│..\n.#│#.\n──┼──\n..│#.\n..│##"


def test_print_mask_prints_it(capsys):
    mask = one_pass_mask(BlockGrid.make(4, 2))
    print_mask(mask)
    assert capsys.readouterr().out == format_mask(mask) + "\n"


def test_masks_are_kept_and_not_mixed_up():
    """Equal grids share one mask; another length, block, offset or rule is another mask."""
    seen = {}
    for length, size, offset, clean in itertools.product((6, 7), (2, 3), (0, 1, 2), ("causal", "block")):
        mask = one_pass_mask(BlockGrid.make(length, size, offset=offset), clean_rule=clean)
        assert torch.equal(mask.dense[0, 0], by_hand(length, size, offset % size, None, (clean, "block")))
        seen.setdefault((length, size, offset % size, clean), mask)
        assert seen[length, size, offset % size, clean] is mask
    assert len({id(mask) for mask in seen.values()}) == len(seen)
    packed = one_pass_mask(BlockGrid.make(6, 2, document=torch.zeros(1, 6, dtype=torch.int64)))
    assert packed is not seen[6, 2, 0, "causal"] and torch.equal(packed.dense, seen[6, 2, 0, "causal"].dense)


def test_a_repeated_grid_repeats_its_rows():
    grid = BlockGrid.make(10, 3, offset=torch.tensor([0, 1, 2]), document=PACKED)
    twice, once = one_pass_mask(grid.repeat(2)).dense, one_pass_mask(grid).dense
    assert torch.equal(twice, torch.cat([once, once]))
    assert BlockGrid.make(5, 2).repeat(3).rows is None
    assert torch.equal(grid.position_ids(3), torch.cat([grid.position, grid.position], dim=1))


def test_impossible_grids_and_rules_are_named():
    document = torch.zeros(2, 5, dtype=torch.int64)
    for arguments, options, message in (
        ((0, 2), {}, "length=0"),
        ((4, 0), {}, "block_length=0"),
        ((4, 2.0), {}, "block_length=2.0"),
        ((4, 2), {"document": document}, r"document has shape \(2, 5\); expected \(B, 4\)"),
        ((4, 2), {"position": document[0]}, "position has shape"),
        ((4, 2), {"valid": document}, "valid has shape"),
    ):
        with pytest.raises(ConfigError, match=message):
            BlockGrid.make(*arguments, **options)
    with pytest.raises(ConfigError, match="clean_rule='causl'; expected one of causal, block"):
        one_pass_mask(BlockGrid.make(4, 2), clean_rule="causl")
    with pytest.raises(ConfigError, match="noise_rule"):
        one_pass_mask(BlockGrid.make(4, 2), noise_rule="none")


# --- what the network makes of them -----------------------------------------------------------------------------------


def sensitivity(model, tokens, mask, positions):
    """Whether logits at q depend on the embedding at k: gradients of a random combination, bool (S, S)."""
    embeddings = model.get_input_embeddings()(tokens).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, attention_mask=mask_for(model, mask), position_ids=positions).logits[0]
    direction = torch.randn(logits.shape[-1], dtype=logits.dtype, generator=torch.Generator().manual_seed(1))
    rows = [
        torch.autograd.grad(logits[q] @ direction, embeddings, retain_graph=True)[0][0] for q in range(tokens.shape[1])
    ]
    return torch.stack(rows).abs().amax(dim=-1)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_a_network_depends_on_exactly_what_the_mask_allows(tiny, text, kind):
    model, grid = tiny(kind), BlockGrid.make(16, 4)
    mask = one_pass_mask(grid)
    got = sensitivity(model, text(1, 32), mask, grid.position_ids(1))
    allowed = mask.dense[0, 0]
    assert (got[~allowed] == 0.0).all()
    assert (got[allowed] > 1e-8).all()


def test_the_block_causal_clean_half_leaks_its_successors(tiny, text):
    """Control: 4 blocks x 6 pairs in which a clean logit sees a later token, the one it should predict among them."""
    model, grid = tiny(), BlockGrid.make(16, 4)
    leaks = []
    for rule in ("causal", "block"):
        mask = one_pass_mask(grid, clean_rule=rule)
        clean = sensitivity(model, text(1, 32), mask, grid.position_ids(1))[16:, 16:]
        leaks.append(int((clean.triu(1) > 0).sum()))
    assert leaks == [0, 24]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_clean_half_is_the_causal_model_whatever_the_noisy_half_holds(tiny, text, kind):
    model, clean = tiny(kind), text(2, 11)
    with torch.no_grad():
        expected = model(clean).logits
        for size, offset in ((1, 0), (3, 2), (4, 0), (11, 0), (64, 5)):
            grid = BlockGrid.make(11, size, offset=offset)
            for noisy in (text(2, 11, seed=9), torch.full_like(clean, 2)):
                mask = mask_for(model, one_pass_mask(grid))
                both = torch.cat([noisy, clean], dim=1)
                got = model(both, attention_mask=mask, position_ids=grid.position_ids(2)).logits[:, 11:]
                torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-12)


def test_noisy_logits_do_not_know_their_own_or_later_clean_blocks(tiny, text):
    """Bit for bit; and a change in an earlier clean block does change them."""
    model, size, length = tiny(dtype=torch.float32), 4, 16
    grid = BlockGrid.make(length, size)
    mask, noisy = mask_for(model, one_pass_mask(grid)), torch.full((1, length), 2)

    def logits(clean):
        with torch.no_grad():
            both = torch.cat([noisy, clean], dim=1)
            return model(both, attention_mask=mask, position_ids=grid.position_ids(1)).logits[0, :length]

    clean, other = text(1, length), text(1, length, seed=5)
    before = logits(clean)
    for block in range(length // size):
        changed = clean.clone()
        changed[:, block * size :] = other[:, block * size :]
        after = logits(changed)
        assert torch.equal(after[: (block + 1) * size], before[: (block + 1) * size])
        if block + 1 < length // size:
            assert not torch.equal(after[(block + 1) * size :], before[(block + 1) * size :])


def test_a_noisy_half_without_noise_is_the_decoder_s_view(tiny, text, oracle):
    """Training at (block, pattern) = a pass over the clean context and the partly masked block, all blocks at once."""
    model, clean = tiny(), text(1, 11)
    masked = torch.zeros(1, 11, dtype=torch.bool)
    for pattern in (masked, torch.arange(11)[None] % 3 == 1, ~masked):
        for size, offset in ((3, 0), (4, 1), (5, 2)):
            grid = BlockGrid.make(11, size, offset=offset)
            hidden = pattern & ~grid.first
            both = torch.cat([torch.where(hidden, 2, clean), clean], dim=1)
            with torch.no_grad():
                logits = model(
                    both, attention_mask=mask_for(model, one_pass_mask(grid)), position_ids=grid.position_ids(1)
                ).logits[0, :10]
                expected = oracle.noisy(model, clean[0], hidden[0], size, offset)
            logits[:, 2] = -torch.inf
            got = torch.nn.functional.cross_entropy(logits, clean[0, 1:], reduction="none")
            inside = ~grid.first[0, 1:]
            torch.testing.assert_close(got[inside], expected[1:][inside], rtol=0.0, atol=1e-12)
