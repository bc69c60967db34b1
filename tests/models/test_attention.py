"""Forms of a mask: equal logits from each backend, the traps as controls, and the check that a model reads it."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest
import torch
import transformers
from tiny_lms import ARCHITECTURES, VOCAB, seeded, shared_lm, tiny_lm
from torch import nn

from genkit.errors import ConfigError, MissingExtraError
from genkit.models import attention
from genkit.models.attention import AttentionMask, additive, check_attention, mask_for, register_xformers

N = 9


def block_predicate(b, h, q, k):
    """Blocks of 4 that see themselves and those before; row 1 does not see key 0."""
    return (k // 4 <= q // 4) & ((b == 0) | (k > 0) | (q == k))


def brute_force(predicate, batch: int, queries: int, keys: int) -> torch.Tensor:
    cells = [
        [[bool(predicate(*map(torch.tensor, (b, 0, q, k)))) for k in range(keys)] for q in range(queries)]
        for b in range(batch)
    ]
    return torch.tensor(cells).unsqueeze(1)


@pytest.fixture(autouse=True)
def eager_compiler():
    """FlexAttention as it is written: compiling it takes longer than all tests here."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, N), generator=seeded(3))


def logits(model: nn.Module, tokens: torch.Tensor, mask) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, attention_mask=mask, use_cache=False).logits


# ---- forms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 5, 7), (None, 9, 9), (1, 1, 3)])
def test_dense_is_the_predicate_cell_by_cell(batch, queries, keys):
    mask = AttentionMask(block_predicate, batch, queries, keys)
    assert torch.equal(mask.dense, brute_force(block_predicate, batch or 1, queries, keys))
    assert torch.equal(AttentionMask.of(mask.dense).dense, mask.dense)


def test_a_constant_predicate_fills_the_whole_mask():
    mask = AttentionMask(lambda b, h, q, k: q >= 0, 3, 4, 5)
    assert mask.dense.shape == (3, 1, 4, 5) and bool(mask.dense.all())


@pytest.mark.parametrize("batch", [2, None])
def test_flex_blocks_hold_the_same_cells(batch):
    mask = AttentionMask(block_predicate, batch, 130, 260)  # more than one block of 128, neither a multiple of it
    for stated in (mask, AttentionMask.of(mask.dense)):
        blocks = stated.flex()
        assert blocks.shape == (batch or 1, 1, 130, 260)
        index = [torch.arange(n).view(s) for n, s in ((batch or 1, (-1, 1, 1)), (130, (-1, 1)), (260, (-1,)))]
        cells = blocks.mask_mod(index[0], torch.zeros((), dtype=torch.int64), index[1], index[2])
        assert torch.equal(cells.expand(batch or 1, 130, 260), mask.dense[:, 0])
        coarse = mask.dense[:, 0, :, :].new_zeros(batch or 1, 256, 384)
        coarse[:, :130, :260] = mask.dense[:, 0]
        occupied = coarse.view(-1, 2, 128, 3, 128).any(dim=(2, 4))
        assert torch.equal(blocks.to_dense()[:, 0].bool(), occupied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_additive_is_zero_or_the_smallest_number(dtype):
    dense = AttentionMask(block_predicate, 2, 5, 5).dense
    bias = additive(dense, dtype)
    assert bias.dtype == dtype and bool(bias.isfinite().all())
    assert torch.equal(bias == 0, dense)
    assert bool((bias[~dense] == torch.finfo(dtype).min).all())


@pytest.mark.parametrize(
    "dense", [torch.ones(1, 1, 3, 3), torch.ones(3, 3, dtype=torch.bool), torch.ones(1, 2, 3, 3, dtype=torch.bool)]
)
def test_of_refuses_what_is_no_dense_mask(dense):
    with pytest.raises(ConfigError, match=r"expected bool \(B, 1, Q, K\)"):
        AttentionMask.of(dense)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_backend_gives_the_same_logits(name, tokens):
    mask = AttentionMask(block_predicate, 2, N, N)
    backends = ["sdpa", "eager"] + (["flex_attention"] if name != "gpt2" else [])
    models = [shared_lm(name, backend, torch.float32) for backend in backends]
    with torch.no_grad():
        forms = [mask_for(model, mask) for model in models]
    assert forms[0].dtype == torch.bool and forms[1].dtype == torch.float32
    reference = logits(models[0], tokens, forms[0])
    for model, form in zip(models[1:], forms[1:], strict=True):
        torch.testing.assert_close(logits(model, tokens, form), reference, rtol=0, atol=2e-5)
    # no mask at all gives another result, so the comparison above compares something
    assert float((logits(models[0], tokens, None) - reference).abs().max()) > 0.1


def test_the_additive_form_takes_the_dtype_of_the_weights(tokens):
    mask = AttentionMask(block_predicate, 2, N, N)
    exact = logits(shared_lm("llama"), tokens, mask.dense)
    eager = shared_lm("llama", "eager")
    assert mask_for(eager, mask).dtype == torch.float64
    # transformers takes the softmax of eager attention in float32
    torch.testing.assert_close(logits(eager, tokens, mask_for(eager, mask)), exact, rtol=0, atol=1e-5)


def test_a_bool_mask_misleads_eager_attention(tokens):
    """The trap for which the adapter exists: no error, other numbers."""
    mask = AttentionMask(block_predicate, 2, N, N)
    eager = shared_lm("qwen2", "eager")
    wrong = logits(eager, tokens, mask.dense)
    assert float((wrong - logits(eager, tokens, mask_for(eager, mask))).abs().max()) > 0.1


def test_flex_with_gradients_on_the_cpu_is_refused():
    model, mask = shared_lm("llama", "flex_attention", torch.float32), AttentionMask(block_predicate, 2, N, N)
    with pytest.raises(ConfigError, match="no backward pass on the CPU"):
        mask_for(model, mask)
    with torch.no_grad():
        assert mask_for(model, mask).shape == (2, 1, N, N)


@pytest.mark.parametrize("backend", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn", None])
def test_backends_without_dense_masks_are_refused(backend, monkeypatch):
    model = tiny_lm("gpt2")
    monkeypatch.setattr(model.config, "_attn_implementation_internal", backend)
    with pytest.raises(ConfigError, match="reads no 4-D mask"):
        mask_for(model, AttentionMask(block_predicate, 1, 4, 4))


# ---- does the model read it? ----------------------------------------------------------------------------------------


class IgnoresMasks(transformers.LlamaForCausalLM):
    def forward(self, tokens, attention_mask=None, **options):
        return super().forward(tokens, **options)


class SeesEverything(transformers.LlamaForCausalLM):
    def forward(self, tokens, attention_mask=None, **options):
        full = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        return super().forward(tokens, attention_mask=full if attention_mask is None else attention_mask, **options)


def as_class(kind: type) -> nn.Module:
    model = tiny_lm("llama")
    model.__class__ = kind
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("backend", ["sdpa", "eager", "flex_attention"])
def test_check_passes_the_models_of_transformers(name, backend):
    if (name, backend) != ("gpt2", "flex_attention"):  # transformers has no such GPT-2
        check_attention(tiny_lm(name, attention=backend, dtype=torch.float32))


def test_check_passes_half_precision_and_a_fresh_initialisation():
    config = transformers.LlamaConfig(
        vocab_size=3, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with torch.random.fork_rng(devices=[]):
        fresh = transformers.LlamaForCausalLM(config)  # three tokens, weights of 0.02
    for model in (fresh, tiny_lm("qwen3", dtype=torch.bfloat16), tiny_lm("gpt2", dtype=torch.bfloat16)):
        check_attention(model.to(torch.bfloat16))


def test_check_refuses_a_model_that_ignores_the_mask():
    with pytest.raises(ConfigError, match="ignores the 4-D attention mask"):
        check_attention(as_class(IgnoresMasks))


def test_check_refuses_a_model_that_reads_a_causal_mask_otherwise():
    with pytest.raises(ConfigError, match="misreads a 4-D causal mask"):
        check_attention(as_class(SeesEverything))


def test_check_refuses_sliding_windows():
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    with pytest.raises(ConfigError, match=r"sliding_attention.*use_sliding_window=False"):
        check_attention(tiny_lm("qwen2", **window))
    check_attention(tiny_lm("qwen2", **{**window, "use_sliding_window": False}))


def test_check_refuses_what_is_no_language_model():
    with pytest.raises(ConfigError, match="Linear is no language model"):
        check_attention(nn.Linear(2, 2))


@pytest.mark.parametrize("refused", [False, True])
def test_check_leaves_every_module_in_its_mode(refused):
    model = as_class(IgnoresMasks) if refused else tiny_lm("gpt2", attn_pdrop=0.5, resid_pdrop=0.5)
    model.train()
    frozen = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
    frozen.eval()
    before = [module.training for module in model.modules()]
    if refused:
        with pytest.raises(ConfigError):
            check_attention(model)
    else:
        check_attention(model)  # dropout would fail the comparison
    assert [module.training for module in model.modules()] == before
    assert model.training and not frozen.training


def test_check_runs_once_a_backend_and_keeps_no_model_alive():
    model, calls = tiny_lm("llama"), []
    model.register_forward_hook(lambda *_: calls.append(1))
    check_attention(model)
    check_attention(model)
    assert len(calls) == 3
    model.set_attn_implementation("eager")
    check_attention(model)
    assert len(calls) == 6
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# ---- xformers -------------------------------------------------------------------------------------------------------


class LowerTriangularMask:
    pass


@pytest.fixture
def xformers(monkeypatch):
    """``xformers.ops`` with attention in plain torch, (B, M, H, K) as there; records each call's bias."""
    seen = []

    def memory_efficient_attention(q, k, v, attn_bias=None, p=0.0, scale=None):
        seen.append(attn_bias)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
        if isinstance(attn_bias, LowerTriangularMask):
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        elif attn_bias is not None:
            assert attn_bias.shape == scores.shape and attn_bias.dtype == q.dtype
            scores = scores + attn_bias
        return (scores.softmax(-1) @ v).transpose(1, 2)

    package, ops = types.ModuleType("xformers"), types.ModuleType("xformers.ops")
    package.ops, ops.seen = ops, seen
    ops.memory_efficient_attention, ops.LowerTriangularMask = memory_efficient_attention, LowerTriangularMask
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    yield ops
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop(attention.XFORMERS, None)


def test_register_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers", None)
    with pytest.raises(MissingExtraError, match=r"genkit-diffusion\[xformers\]"):
        register_xformers()


def rows_are_aligned(bias: torch.Tensor) -> bool:
    """Every row starts at a multiple of 8 elements (a stride of 0 is a row that is shared)."""
    return bias.stride(-1) == 1 and all(step % 8 == 0 for step in bias.stride()[:-1])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_xformers_equals_sdpa(name, tokens, xformers):
    model, reference = tiny_lm(name), shared_lm(name)
    model.set_attn_implementation(register_xformers())
    check_attention(model)
    xformers.seen.clear()
    for batch in (2, None):
        mask = AttentionMask(block_predicate, batch, N, N)
        got, expected = logits(model, tokens, mask_for(model, mask)), logits(reference, tokens, mask.dense)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert len(xformers.seen) == 4 and all(map(rows_are_aligned, xformers.seen))
    # the model's own masks: none, and a padded batch
    padded = torch.ones(2, N, dtype=torch.int64)
    padded[1, :3] = 0
    for plain in (None, padded):
        torch.testing.assert_close(
            logits(model, tokens, plain)[:, 3:], logits(reference, tokens, plain)[:, 3:], rtol=0, atol=1e-12
        )


def test_xformers_bias_stays_finite_and_aligned_where_queries_are_in_half_precision(xformers):
    q, k, v = (torch.randn(2, 4, N, 8, generator=seeded(i)).to(torch.bfloat16) for i in range(3))
    mask = AttentionMask(block_predicate, 2, N, N)
    outputs = []
    for bias in (mask.dense, attention._aligned(mask.dense, torch.float32), attention._aligned(mask.dense, q.dtype)):
        outputs.append(attention._xformers_attention(nn.Module(), q, k, v, bias)[0])
        assert rows_are_aligned(xformers.seen[-1]) and bool(xformers.seen[-1].isfinite().all())
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[2])
