"""The pipeline: the common promises, checkpoints made ready for it, and what it says to impossible arguments."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import BlockRefinementScheduler
from pipeline_tester import ROOT, PipelineTesterMixin

import genkit
from genkit.errors import ConfigError, GenkitError
from genkit.pipelines.block_diffusion import BlockDiffusionPipeline
from genkit.pipelines.block_diffusion.tokens import character_tokenizer, choose_mask_token, encode_text, pad_left
from genkit.samplers.strategies import Threshold
from genkit.schedulers.masked import MaskedBlockScheduler
from genkit.serialization import load_tensors

ALPHABET = "abcdefgh =+0123456789"
PROMPTS = ["ab=", "abcdefgh", "1+2", "h", "00 11"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)


def untrained(tiny, kind="llama", seed=0, ends=False, **options):
    """A random network on characters; without an end token, so that all texts are equally long, unless asked for."""
    tokenizer = character_tokenizer(ALPHABET, 64)
    if not ends:
        tokenizer.eos_token = None
    options.setdefault("block_length", 4)
    model = tiny(kind, dtype=torch.float32, vocab=len(tokenizer), seed=seed)
    pipe = BlockDiffusionPipeline(model, tokenizer, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def words_tokenizer(count=12, **special):
    """Words w0, w1, … and nothing else: no padding, no end, no mask, no beginning."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = [f"w{i}" for i in range(count)] + list(special.values())
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", **special)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


_SCRIPT = """
import json, sys
import torch
torch.set_num_threads(1)
import genkit
for folder, out, options, seed in json.loads(sys.argv[1]):
    pipe = genkit.load(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe.write_samples(pipe(**options, generator=torch.Generator().manual_seed(seed)), out)
"""


class TestBlockDiffusionPipeline(PipelineTesterMixin):
    call_options = {"max_new_tokens": 10, "temperature": 1.0, "output_type": "pt"}

    @pytest.fixture(autouse=True)
    def _take(self, tiny):
        self.tiny = tiny

    def make_pipeline(self):
        return untrained(self.tiny)

    def replacement(self):
        return "model", untrained(self.tiny, seed=1).model

    def _call(self, pipe, num_samples=2, seed=5, **options):
        prompts = (PROMPTS * num_samples)[:num_samples] if "generator" not in options else [PROMPTS[0]] * num_samples
        options.setdefault("generator", seeded(seed))
        return pipe(prompts, **self.call_options | options)

    def test_saved_pipeline_gives_equal_output_in_a_fresh_process(self, tmp_path):
        """A plain one, one with LoRA layers inside, and one with diffusers' scheduler."""
        pipes = {"plain": self._pipe(), "lora": with_lora(self._pipe()), "diffusers": self._pipe()}
        pipes["diffusers"].scheduler = BlockRefinementScheduler(block_length=4, num_inference_steps=3)
        jobs = []
        for name, pipe in pipes.items():
            pipe.save_pretrained(tmp_path / name)
            loaded = genkit.load(tmp_path / name)
            assert type(loaded) is type(pipe) and type(loaded.scheduler) is type(pipe.scheduler)
            loaded.set_progress_bar_config(disable=True)
            self._assert_equal(self._call(pipe), self._call(loaded))
            jobs.append(
                [str(tmp_path / name), str(tmp_path / f"out-{name}"), self.call_options | {"prompt": PROMPTS[:2]}, 5]
            )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(
            [sys.executable, "-c", _SCRIPT, json.dumps(jobs)], check=True, cwd=ROOT, env=environment, timeout=100
        )
        for name, pipe in pipes.items():
            expected = self._tensors(self._call(pipe))
            got = load_tensors(tmp_path / f"out-{name}" / "samples.safetensors")
            assert got.keys() == expected.keys()
            assert all(torch.equal(got[key], expected[key]) for key in got)

    def test_tuple_equals_output_object(self):
        pipe = self._pipe()
        output, values = self._call(pipe, output_type="text"), self._call(pipe, output_type="text", return_dict=False)
        assert values[0] == output.text
        assert all(torch.equal(a, b) for a, b in zip(output.to_tuple()[1:], values[1:], strict=True))
        assert self._call(pipe, return_dict=False)[0] is None

    def test_callback_sees_every_step_and_can_change_latents(self):
        """It is called after every network call, and may replace the block."""
        pipe, seen = self._pipe(), []

        def write(pipe, call, timestep, tensors):
            seen.append((call, timestep, tensors["block"].clone()))
            assert set(tensors) == {"block", "done"}
            if call:
                return None
            block = tensors["block"].clone()
            block[:, 1] = 7
            return {"block": block}

        options = {"callback_on_step_end": write, "callback_on_step_end_tensor_inputs": ["block", "done"]}
        changed = self._call(pipe, strategy="sequential", **options)
        assert [call for call, _, _ in seen] == list(range(int(changed.calls.max())))
        assert (changed.tokens[:, 1] == 7).all()
        assert seen[0][1] == 750.0 and 0.0 in [timestep for _, timestep, _ in seen]
        plain = self._call(pipe, strategy="sequential")
        assert not torch.equal(plain.tokens, changed.tokens)
        assert int(plain.calls[0]) == int(changed.calls[0]) + 1  # one token was given
        for wrong, message in (({"blok": 1}, "Did you mean 'block'"), (3, "expected None or a mapping")):
            with pytest.raises(ConfigError, match=message):
                self._call(pipe, callback_on_step_end=lambda *_, wrong=wrong: wrong)
        with pytest.raises(GenkitError, match="latent"):
            self._call(pipe, callback_on_step_end=write, callback_on_step_end_tensor_inputs=["latent"])


def with_lora(pipe):
    """LoRA layers with random weights inside the network."""
    from genkit.pipelines.block_diffusion.config import LoraPart, add_lora

    pipe.model = add_lora(pipe.model, LoraPart(rank=2))
    with torch.no_grad():
        for name, parameter in pipe.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5, generator=seeded(1))
    return pipe


# --- block length 1 is the autoregressive model -----------------------------------------------------------------------


def greedy(model, row, count, end=None, mask=2):
    """Plain autoregressive decoding of one row, without a cache."""
    row, new = row.clone(), []
    for _ in range(count):
        with torch.no_grad():
            logits = model(row[None]).logits[0, -1]
        logits[mask] = -torch.inf
        new.append(int(logits.argmax()))
        row = torch.cat([row, torch.tensor(new[-1:])])
        if new[-1] == end:
            break
    return new


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_block_length_one_is_greedy_decoding(tiny, kind):
    pipe = untrained(tiny, kind, ends=True)
    out = pipe(PROMPTS, max_new_tokens=12, block_length=1)
    for prompt, row, calls in zip(PROMPTS, out.tokens, out.calls, strict=True):
        expected = greedy(pipe.model, encode_text(pipe.tokenizer, prompt), 12, end=1)
        assert row[: len(expected)].tolist() == expected and (row[len(expected) :] == 0).all()
        assert int(calls) == len(expected)
    assert out.text == [pipe.tokenizer.decode(row, skip_special_tokens=True) for row in out.tokens]


def test_block_length_one_is_transformers_generate(tiny):
    pipe = untrained(tiny)
    tokens, valid = pad_left([encode_text(pipe.tokenizer, prompt) for prompt in PROMPTS], 0)
    with torch.no_grad():
        expected = pipe.model.generate(
            tokens,
            attention_mask=valid.long(),
            max_new_tokens=12,
            do_sample=False,
            bad_words_ids=[[2]],
            pad_token_id=0,
        )
    got = pipe(PROMPTS, max_new_tokens=12, block_length=1, output_type="pt").tokens
    assert torch.equal(got, expected[:, tokens.shape[1] :])


# --- checkpoints made ready -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_a_mask_token_is_added_and_block_length_one_is_unchanged(tiny, kind, tied, tmp_path):
    """A tokenizer without any special token: the new one's embedding is the mean, all else stays."""
    model, tokenizer = tiny(kind, dtype=torch.float32, vocab=12, tied=tied), words_tokenizer()
    before = model.get_input_embeddings().weight.detach().clone()
    row = torch.tensor([3, 1, 4, 1, 5])
    with torch.no_grad():
        logits = model(row[None]).logits
    pipe = BlockDiffusionPipeline.from_ar(model, tokenizer, "<|mask|>", block_length=4)
    pipe.set_progress_bar_config(disable=True)
    mask = pipe.config["mask_token_id"]
    assert mask == 12 and tokenizer.mask_token == "<|mask|>" and tokenizer.mask_token_id == 12
    layers = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (layers[0] is layers[1]) == tied
    assert torch.equal(layers[0][:12], before)
    for layer in layers:
        assert layer.shape[0] == 13 == model.config.vocab_size
        torch.testing.assert_close(layer[12], layer[:12].mean(dim=0))
    with torch.no_grad():
        torch.testing.assert_close(model(row[None]).logits[..., :12], logits)
    out = pipe("w3 w1 w4 w1 w5", max_new_tokens=10, block_length=1)
    expected = greedy(model, row, 10, mask=12)
    assert out.tokens[0].tolist() == expected
    assert out.text[0].split() == [f"w{i}" for i in expected]
    assert (pipe(["w1 w2", "w3"], max_new_tokens=10).tokens < 12).all()
    pipe.save_pretrained(tmp_path / "pipe")
    loaded = genkit.load(tmp_path / "pipe")
    loaded.set_progress_bar_config(disable=True)
    assert loaded.tokenizer.mask_token_id == 12
    again = loaded(["w1 w2", "w3"], max_new_tokens=10).tokens
    assert torch.equal(again, pipe(["w1 w2", "w3"], max_new_tokens=10).tokens)


def test_which_token_is_the_mask(tiny):
    model = tiny(vocab=16)
    assert choose_mask_token(model, words_tokenizer(mask_token="<hole>")) == 12
    reserved = words_tokenizer(additional_special_tokens_0="<|fim_pad|>")
    assert choose_mask_token(model, reserved) == 12
    assert choose_mask_token(model, words_tokenizer(), "w7") == 7
    assert choose_mask_token(model, words_tokenizer(), 9) == 9
    assert model.get_input_embeddings().weight.shape[0] == 16
    assert choose_mask_token(model, words_tokenizer(), "[MASK]") == 12  # there was a spare row
    assert model.get_input_embeddings().weight.shape[0] == 16
    for wrong, message in (
        (None, "has no mask token and none of <mask>"),
        (16, "mask_token 16 is outside the model's vocabulary of 16"),
        (-1, "outside"),
        (True, "expected a token's text or id, or None"),
        (1.5, "expected a token's text or id, or None"),
        ("w77", "Did you mean 'w7'"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose_mask_token(model, words_tokenizer(), wrong)
    with pytest.raises(ConfigError, match="no mask token.*from_ar"):
        BlockDiffusionPipeline(model, words_tokenizer())


def test_a_model_that_ignores_masks_is_refused(tiny):
    import transformers

    model = tiny()
    forward = type(model).forward
    kind = type("Deaf", (type(model),), {"forward": lambda self, *a, attention_mask=None, **k: forward(self, *a, **k)})
    model.__class__ = kind
    with pytest.raises(ConfigError, match="ignores the 4-D attention mask"):
        BlockDiffusionPipeline(model, character_tokenizer(ALPHABET))
    window = transformers.Qwen2Config(
        vocab_size=13, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, use_sliding_window=True, sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="sliding_attention"):
        BlockDiffusionPipeline(transformers.Qwen2ForCausalLM(window), character_tokenizer("abc"), mask_token_id=2)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_options_reach_the_strategy(tiny):
    pipe = untrained(tiny)

    def call(**options):
        return pipe("ab=", max_new_tokens=9, block_length=8, output_type="pt", **options)

    sequential = call(strategy="sequential")
    assert int(sequential.calls[0]) == 9  # 1 + 7, then a commit whose token is the ninth
    assert float(sequential.tokens_per_call[0]) == 1.0
    assert int(call(num_inference_steps=2).calls[0]) == 4  # prefill, two passes, commit
    assert int(call(strategy="fixed_steps", num_inference_steps=7).calls[0]) == 9
    assert int(call(threshold=0.0).calls[0]) == 3
    assert int(call(strategy="threshold", threshold=1.5).calls[0]) == 9
    assert torch.equal(call(strategy=Threshold(threshold=0.0)).tokens, call(threshold=0.0).tokens)
    for cold in ({"temperature": 1e-6}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-9}):
        got = call(strategy="sequential", generator=seeded(), **cold)
        assert torch.equal(got.tokens, sequential.tokens)
    hot = [call(temperature=2.0, generator=seeded(seed)).tokens for seed in (1, 1, 2)]
    assert torch.equal(hot[0], hot[1]) and not torch.equal(hot[0], hot[2])
    parts = call(strategy="fixed_steps", num_inference_steps=1, sub_block_length=4)
    assert int(parts.calls[0]) == 4  # two sub-blocks of one pass each
    scheduler = MaskedBlockScheduler(mask_token_id=2, block_length=8, num_inference_steps=2, threshold=2.0)
    assert int(call(strategy=scheduler).calls[0]) == 4
    for name in ("entropy_bound", "margin"):
        assert (call(strategy=name).tokens != 2).all()
    assert (call(strategy="random", num_inference_steps=3, generator=seeded()).tokens != 2).all()


def test_the_scheduler_decides_by_default(tiny):
    pipe = untrained(tiny)
    slow = pipe(PROMPTS, max_new_tokens=13)
    pipe.scheduler = MaskedBlockScheduler(mask_token_id=2, block_length=4, num_inference_steps=1)
    fast = pipe(PROMPTS, max_new_tokens=13)
    assert int(fast.calls.max()) == 4 + 3 < int(slow.calls.max())
    theirs = untrained(tiny, scheduler=BlockRefinementScheduler(block_length=4, num_inference_steps=4, threshold=0.3))
    ours = untrained(
        tiny, scheduler=MaskedBlockScheduler(mask_token_id=2, block_length=4, num_inference_steps=4, threshold=0.3)
    )
    first, second = (pipe(PROMPTS, max_new_tokens=13, output_type="pt") for pipe in (theirs, ours))
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.calls, second.calls)


def test_rows_are_what_they_are_alone(tiny):
    pipe = untrained(tiny, ends=True)
    for options in ({}, {"temperature": 1.5}):
        generators = [seeded(i) for i in range(len(PROMPTS))]
        together = pipe(PROMPTS, max_new_tokens=11, generator=generators, **options)
        for i, prompt in enumerate(PROMPTS):
            alone = pipe(prompt, max_new_tokens=11, generator=[seeded(i)], **options)
            assert alone.text[0] == together.text[i] and alone.calls[0] == together.calls[i]


def test_texts_stop_at_the_end_tokens_of_tokenizer_and_model(tiny):
    pipe = untrained(tiny, ends=True)
    whole = untrained(tiny)(PROMPTS, max_new_tokens=12, block_length=1).tokens
    chosen = int(whole[0, 4])
    pipe.model.generation_config.eos_token_id = [chosen]
    got = pipe(PROMPTS, max_new_tokens=12, block_length=1)
    for row, full in zip(got.tokens, whole, strict=True):
        ends = (full == chosen) | (full == 1)
        n = int(ends.long().argmax()) + 1 if ends.any() else 12
        assert torch.equal(row[:n], full[:n]) and (row[n:] == 0).all()


def test_output_types(tiny):
    pipe = untrained(tiny)
    text, tensors, arrays = (pipe(PROMPTS, max_new_tokens=6, output_type=kind) for kind in ("text", "pt", "np"))
    assert tensors.text is None and arrays.text is None and len(text.text) == len(PROMPTS)
    assert isinstance(arrays.tokens, np.ndarray) and np.array_equal(arrays.tokens, tensors.tokens.numpy())
    assert isinstance(arrays.calls, np.ndarray) and isinstance(arrays.tokens_per_call, np.ndarray)
    assert torch.equal(text.tokens, tensors.tokens)
    with pytest.raises(ConfigError, match="output_type='latent'"):
        pipe("ab", output_type="latent")


def test_messages_go_through_the_chat_template(tiny):
    pipe = untrained(tiny)
    with pytest.raises(ConfigError, match="no chat template"):
        pipe([{"role": "b", "content": "1+1"}])
    pipe.tokenizer.chat_template = TEMPLATE
    message = [{"role": "b", "content": "1+1"}]
    one = pipe(message, max_new_tokens=6)
    assert one.text == pipe("b=1+1 a=", max_new_tokens=6).text
    two = pipe([message, [{"role": "c", "content": "2"}]], max_new_tokens=6)
    assert two.text == pipe(["b=1+1 a=", "c=2 a="], max_new_tokens=6).text
    mixed = pipe(["b=1+1 a=", message], max_new_tokens=6)
    assert mixed.text[0] == mixed.text[1]


def test_prompts_that_cannot_be_read_are_named(tiny):
    pipe = untrained(tiny)
    for prompt, options, message in (
        ("", {}, "prompt 0 is empty and the tokenizer has no token to begin a text with"),
        (["ab", ""], {}, "prompt 1 is empty"),
        ("abz", {}, "character 'z' at place 2 is not in this model's alphabet"),
        ("ab<mask>", {}, "prompts hold the mask token"),
        ("ab", {"max_new_tokens": 63}, "make 65, but the model reads 64"),
        ("ab", {"strategy": "treshold"}, "Did you mean 'threshold'"),
        ("ab", {"strategy": Threshold(), "threshold": 0.5}, "beside a strategy object"),
        ("ab", {"strategy": "sequential", "threshold": 0.5}, "no option 'threshold'"),
        ("ab", {"threshold": 0.5, "num_inference_steps": 3}, "no option 'steps'"),
        ("ab", {"block_length": 0}, "block_length=0"),
        ("ab", {"sub_block_length": 0}, "sub_block_length=0"),
        ("ab", {"temperature": -1.0}, "temperature"),
        ("ab", {"generator": [seeded(), seeded()]}, "list of 2 generators"),
    ):
        with pytest.raises(ConfigError, match=message):
            pipe(prompt, **{"max_new_tokens": 4} | options)


def test_an_empty_prompt_begins_with_the_beginning_token(tiny):
    model, tokenizer = tiny(dtype=torch.float32, vocab=14), words_tokenizer(bos_token="<s>", mask_token="<mask>")
    pipe = BlockDiffusionPipeline.from_ar(model, tokenizer, block_length=4)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.config["mask_token_id"] == tokenizer.mask_token_id
    out = pipe("", max_new_tokens=6, block_length=1)
    assert out.tokens[0].tolist() == greedy(
        model, torch.tensor([tokenizer.bos_token_id]), 6, mask=tokenizer.mask_token_id
    )


def test_no_prompts_and_no_tokens_are_empty_results(tiny):
    pipe = untrained(tiny)
    nothing = pipe([], max_new_tokens=4)
    assert nothing.text == [] and nothing.tokens.shape[0] == 0
    short = pipe(["ab", "c"], max_new_tokens=0)
    assert short.text == ["", ""] and short.tokens.shape == (2, 0) and (short.calls == 0).all()


def test_special_words_do_not_show_in_the_text(tiny):
    """End, padding and mask have no place in what is returned; the tokens keep the end."""
    pipe = untrained(tiny, ends=True)
    with torch.no_grad():
        pipe.model.lm_head.weight[1] = 8 * pipe.model.lm_head.weight[5]
    out = pipe(PROMPTS, max_new_tokens=12)
    assert (out.tokens == 1).any() and all("<" not in text for text in out.text)


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_characters_are_tokens_and_come_back():
    tokenizer = character_tokenizer("ab\n \té€", 32)
    text = "a\nb  \té €a"
    ids = encode_text(tokenizer, text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 1, 2)
    for alphabet in ("", "aba"):
        with pytest.raises(ConfigError, match="each character once"):
            character_tokenizer(alphabet)


def test_other_tokenizers_keep_their_unknown_token():
    assert encode_text(words_tokenizer(), "w3 what w4").tolist() == [3, 0, 4]
    assert encode_text(words_tokenizer(), "").shape == (0,)


def test_padding_is_on_the_left():
    tokens, valid = pad_left([torch.tensor([5, 6, 7]), torch.tensor([8])], 0)
    assert tokens.tolist() == [[5, 6, 7], [0, 0, 8]] and valid.tolist() == [[True] * 3, [False, False, True]]


def test_public_names_are_objects_and_not_modules_of_the_same_name():
    """Importing a module sets it as an attribute of its package, and would hide a function of its name."""
    import importlib
    import pkgutil
    from types import ModuleType

    import genkit.pipelines.block_diffusion as package

    modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
    assert not set(modules) & set(package.__all__)
    for name in modules:
        importlib.import_module(f"{package.__name__}.{name}")
    assert not any(isinstance(getattr(package, name), ModuleType) for name in package.__all__)
