"""Pictures say what the numbers say: cells, intervals, calls and bands are read back from the figures."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from genkit.errors import ConfigError
from genkit.metrics.text import wilson_interval
from genkit.models.attention import AttentionMask
from genkit.models.causal_lm import CachedCausalLM
from genkit.pipelines.block_diffusion.masks import BlockGrid, one_pass_mask
from genkit.pipelines.block_diffusion.pipeline import BlockDiffusionPipeline
from genkit.pipelines.block_diffusion.plots import (
    RevealRecorder,
    TradeoffPoint,
    draw_adaptation,
    draw_mask,
    draw_timeline,
    draw_tradeoff,
)
from genkit.pipelines.block_diffusion.tokens import character_tokenizer
from genkit.samplers.blockwise import decode_blocks
from genkit.training.step_log import StepLog

EOS, MASK = 1, 2


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


# --- masks ------------------------------------------------------------------------------------------------------------


def cells(axis):
    return np.asarray(axis.images[0].get_array())


@pytest.mark.parametrize("rules", [{}, {"clean_rule": "block"}, {"noise_rule": "full"}, {"noise_rule": "causal"}])
def test_dark_cells_are_the_masks(rules):
    mask = one_pass_mask(BlockGrid.make(7, 3, offset=2), **rules)
    picture = cells(draw_mask(mask).axes[0])
    assert (picture > 0).sum() == int(mask.dense.sum())
    assert np.array_equal(picture > 0, mask.dense[0, 0].numpy())
    halves = [set(np.unique(part)) - {0} for part in (picture[:7, :7], picture[:7, 7:], picture[7:, 7:])]
    assert halves == [{1}, set() if rules.get("noise_rule") == "full" else {2}, {3}]  # a colour for each pair of halves


def test_the_row_of_a_batch_is_chosen():
    grid = BlockGrid.make(4, 2, valid=torch.tensor([[True] * 4, [True] * 2 + [False] * 2]))
    mask = one_pass_mask(grid)
    sums = [int((cells(draw_mask(mask, row=row, grid=grid).axes[0]) > 0).sum()) for row in (0, 1)]
    assert sums == mask.dense.sum(dim=(1, 2, 3)).tolist()
    assert sums[0] > sums[1]


def test_lines_stand_between_blocks_and_halves():
    axis = draw_mask(one_pass_mask(BlockGrid.make(7, 3, offset=2)), grid=BlockGrid.make(7, 3, offset=2)).axes[0]
    edges = sorted({float(path[0, 0]) for lines in axis.collections for path in lines.get_segments() if upright(path)})
    assert edges == [1.5, 4.5, 6.5, 8.5, 11.5]  # blocks of 2, 3, 2; the halves meet at 6.5
    plain = draw_mask(one_pass_mask(BlockGrid.make(7, 3))).axes[0]
    assert {float(path[0, 0]) for lines in plain.collections for path in lines.get_segments() if upright(path)} == {6.5}


def upright(path):
    return path[0, 0] == path[1, 0]


def test_labels_name_the_tokens_of_both_halves():
    mask = one_pass_mask(BlockGrid.make(3, 2))
    axis = draw_mask({"one": mask, "two": mask}, list("abc")).axes[1]
    assert axis.get_title() == "two"
    assert [label.get_text() for label in axis.get_xticklabels()] == list("abcabc")
    with pytest.raises(ConfigError, match="there are 4 labels for a mask of 6 keys"):
        draw_mask(mask, list("abcd"))


def test_a_mask_that_is_not_square_is_drawn_whole():
    dense = torch.ones(1, 1, 2, 5, dtype=torch.bool).tril(3)
    assert (cells(draw_mask(AttentionMask.of(dense)).axes[0]) > 0).sum() == int(dense.sum())


# --- timelines --------------------------------------------------------------------------------------------------------


WAYS = {
    "threshold": {"strategy": "threshold", "block_length": 4},
    "one by one": {"strategy": "sequential", "block_length": 1},
    "parts": {"strategy": "threshold", "block_length": 6, "sub_block_length": 2},
    "short last block": {"strategy": "sequential", "block_length": 5},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_timeline_has_the_decoders_calls(tiny, way):
    recorder, prompt = RevealRecorder(MASK), torch.tensor([[5, 9, 7]])
    options = {"mask_token_id": MASK, "max_new_tokens": 12, "callback": recorder, **WAYS[way]}
    output = decode_blocks(CachedCausalLM(tiny()), prompt, **options)
    known = recorder.known
    assert known.shape == output.tokens.shape
    assert len(recorder.kinds) == int(known.max()) + 1 == int(output.calls[0])
    commits = [0, *(call for call, kind in enumerate(recorder.kinds) if kind == "commit")]
    assert known[0, :: WAYS[way]["block_length"]].tolist() == commits  # a commit gives the next block's first token
    text = [str(token) for token in output.tokens[0].tolist()]
    axis = draw_timeline(known[0], text, kinds=recorder.kinds, block_length=WAYS[way]["block_length"]).axes[0]
    assert len(axis.get_yticks()) == int(output.calls[0])
    revealed = [patch for patch in axis.patches if patch.get_gid() == "token"]
    places = sorted((round(p.get_x() + 0.46), round(p.get_y() + 0.42)) for p in revealed)
    assert places == sorted(enumerate(known[0].tolist()))


def test_the_recorder_sees_what_a_callback_puts_back(tiny):
    """The token that is masked again counts from its last reveal."""
    recorder, masked_again = RevealRecorder(MASK), []

    def callback(step):
        block = step.block.clone()
        if step.kind == "denoise" and not masked_again:
            masked_again.append(step.call)
            block[:, 1] = MASK
        recorder(type(step)(step.kind, step.call, step.start, block, step.done))
        return {"block": block}

    decode_blocks(
        CachedCausalLM(tiny()),
        torch.tensor([[5, 9]]),
        mask_token_id=MASK,
        block_length=4,
        max_new_tokens=4,
        strategy="sequential",
        callback=callback,
    )
    assert recorder.known.tolist() == [[0, 2, 3, 4]]


def test_a_pipeline_fills_the_recorder_as_the_decoder_does(tiny):
    """Several rows that end at different places: what is no padding is known at the same calls."""
    pipe = BlockDiffusionPipeline(tiny(), character_tokenizer("abcdefghij", 64), block_length=4)
    pipe.set_progress_bar_config(disable=True)
    prompts, through_pipe, direct = ["ab", "cd", "ef", "ha"], RevealRecorder(MASK), RevealRecorder(MASK)
    options = {"max_new_tokens": 14, "block_length": 4, "strategy": "threshold"}
    hook = {"callback_on_step_end": through_pipe.on_step_end, "output_type": "pt"}
    output = pipe(prompts, **options, **hook, callback_on_step_end_tensor_inputs=("block", "done"))
    tokens = torch.tensor([pipe.tokenizer(prompt)["input_ids"] for prompt in prompts])
    again = decode_blocks(
        CachedCausalLM(pipe.model),
        tokens,
        mask_token_id=MASK,
        eos_token_id=EOS,
        pad_token_id=0,
        callback=direct,
        **options,
    )
    assert output.tokens.tolist() == again.tokens.tolist()
    assert through_pipe.kinds == direct.kinds
    assert len(set(again.lengths.tolist())) > 1
    for row, length in enumerate(again.lengths.tolist()):
        known = direct.known[row, :length]
        assert known.min() >= 0
        assert known.tolist() == through_pipe.known[row, :length].tolist()
    with pytest.raises(ConfigError, match=r"callback_on_step_end_tensor_inputs=\('block', 'done'\)"):
        pipe("ab", callback_on_step_end=RevealRecorder(MASK).on_step_end, max_new_tokens=2)


def test_masks_and_earlier_tokens_fill_the_timeline():
    """Block 1 is known at calls 0, 2, 1, block 2 at 3, 3."""
    axis = draw_timeline([0, 2, 1, 3, 3], "abcde", block_length=3).axes[0]
    masks = sorted((round(p.get_x() + 0.46), round(p.get_y() + 0.42)) for p in axis.patches if p.get_gid() == "mask")
    assert masks == [(1, 0), (1, 1), (2, 0)]
    written = {(*text.get_position(), text.get_text()) for text in axis.texts}
    assert {(1, 2, "b"), (1, 3, "b"), (2, 1, "c"), (3, 3, "d"), (4, 3, "e")} <= written
    assert len(axis.texts) == 4 + 2 + 3 + 1 + 1  # each token once in colour, and below it in grey
    shades = {round(p.get_y() + 0.42): to_hex(p.get_facecolor()) for p in axis.patches if p.get_gid() == "token"}
    assert len(set(shades.values())) == 4  # a colour a call


def test_a_timeline_that_cannot_be_drawn_is_refused():
    with pytest.raises(ConfigError, match="for 3 tokens of text"):
        draw_timeline([0, 1], "abc")
    with pytest.raises(ConfigError, match="expected the call"):
        draw_timeline([0, -1], "ab")
    with pytest.raises(ConfigError, match="nothing was recorded"):
        _ = RevealRecorder(MASK).known


# --- trade-off --------------------------------------------------------------------------------------------------------


def test_the_tradeoff_shows_wilsons_intervals_and_the_reference():
    points = [
        TradeoffPoint("ar", "", 190, 200, 1.0),
        TradeoffPoint("threshold", "0.9", 180, 200, 2.5),
        TradeoffPoint("threshold", "0.5", 120, 200, 4.0),
    ]
    axis = draw_tradeoff(points).axes[0]
    (bars,) = axis.containers
    line, _, (vertical,) = bars.lines
    assert line.get_xdata().tolist() == [2.5, 4.0]
    assert np.allclose(line.get_ydata(), [0.9, 0.6])
    for segment, point in zip(vertical.get_segments(), points[1:], strict=True):
        share = wilson_interval(point.right, point.problems)
        assert np.allclose(segment, [(point.tokens_per_call, share.low), (point.tokens_per_call, share.high)])
    reference = next(line for line in axis.lines if "token by token" in str(line.get_label()))
    assert np.allclose(reference.get_ydata(), 0.95)
    (band,) = axis.patches
    share = wilson_interval(190, 200)
    assert np.allclose([band.get_y(), band.get_y() + band.get_height()], [share.low, share.high])
    assert {text.get_text() for text in axis.texts} == {"0.9", "0.5"}
    assert "200" in axis.get_title(loc="left")
    for wrong in ([], [TradeoffPoint(str(i), "", 1, 2, 1.0) for i in range(7)]):
        with pytest.raises(ConfigError, match="at least one, and at most six"):
            draw_tradeoff(wrong)


# --- adaptation -------------------------------------------------------------------------------------------------------


def log_row(step, block_length, skipped=False):
    logs = {} if skipped else {"nelbo": 2.0 / step, "ar_nll": 1.0 / step, "block_length": block_length}
    return StepLog(step, "blocks", "model", 3.0 / step, 1e-3, 1.0, 0.1, logs, skipped)


def test_the_adaptation_has_its_curves_and_a_band_a_block_length():
    sizes = [1, 1, 1, 2, 1, 2, 2, 4, 2, 4, 4]  # where blocks grow, the size before comes back for a step
    rows = [log_row(step, size) for step, size in enumerate(sizes, start=1)] + [log_row(12, 4, skipped=True)]
    axis = draw_adaptation(rows, window=1).axes[0]
    curves = {line.get_label(): line for line in axis.lines}
    steps = np.arange(1, 12)
    for name, factor in (("bound", 2.0), ("next-token", 1.0), ("loss that", 3.0)):
        curve = next(line for label, line in curves.items() if label.startswith(name))
        assert np.array_equal(curve.get_xdata(), steps)
        assert np.allclose(curve.get_ydata(), factor / steps)
    assert [text.get_text() for text in axis.texts] == ["next token", "block 2", "block 4"]
    (band,) = axis.patches
    assert (band.get_x(), band.get_x() + band.get_width()) == (4, 8)


def test_curves_are_means_of_the_last_steps():
    rows = [log_row(step, 2) for step in range(1, 8)]
    line = draw_adaptation(rows, window=3).axes[0].lines[0]
    values = [2.0 / step for step in range(1, 8)]
    assert np.allclose(line.get_ydata(), [np.mean(values[max(i - 2, 0) : i + 1]) for i in range(7)])
    with pytest.raises(ConfigError, match="no step has the logs"):
        draw_adaptation([log_row(1, 2, skipped=True)])
