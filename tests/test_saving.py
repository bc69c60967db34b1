"""GenkitPipeline on disk: equal output, damage named, hostile folders refused, nothing lost when the disk fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler
from pipeline_tester import PipelineTesterMixin
from torch import nn

import genkit
from genkit import _components, serialization
from genkit.errors import CheckpointError, ConfigError
from genkit.pipeline import GenkitPipeline
from genkit.serialization import file_sha256, load_json, load_tensors, save_json, save_tensors, verify_folder
from tests.toy_pipeline import ToyPipeline, tiny_unet, toy_pipeline


@pytest.fixture(autouse=True)
def _allow_test_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_components, "ALLOWED_PACKAGES", (*_components.ALLOWED_PACKAGES, "tests"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return toy_pipeline().save_pretrained(tmp_path / "pipe")


def reseal(folder: Path) -> None:
    """Make the manifest true again, as an attacker who wrote the folder would."""
    meta = load_json(folder / "manifest.json")["meta"]
    (folder / "manifest.json").unlink()
    serialization._seal(folder, meta)


def edit_index(folder: Path, **entries: object) -> None:
    save_json(folder / "model_index.json", load_json(folder / "model_index.json") | entries)
    reseal(folder)


def sample(pipe: GenkitPipeline) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    return pipe(2, generator=torch.Generator().manual_seed(1)).samples


class TestToyPipeline(PipelineTesterMixin):
    subprocess_preamble = "from genkit import _components; _components.ALLOWED_PACKAGES += ('tests',)"

    def make_pipeline(self):
        return toy_pipeline()

    def replacement(self):
        return "unet", tiny_unet(seed=1)


# --- round trips ------------------------------------------------------------------------------------------------------


def test_plain_values_card_and_class_survive(saved: Path) -> None:
    pipe = genkit.load(saved)
    assert type(pipe) is ToyPipeline
    assert pipe.config.offset == 0.25
    assert list(pipe.config.levels) == [0.5, 1.0]
    card = (saved / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\nlibrary_name: genkit\n")
    assert "Toy scale" in card
    assert pipe.model_card()["seed"] == 0
    with pytest.raises(ConfigError, match="Did you mean 'metrics'"):
        pipe.save_pretrained(saved, card={"metric": 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_storage_is_computed_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    pipe = toy_pipeline()
    folder = pipe.save_pretrained(tmp_path / "half", dtype=dtype)
    loaded = genkit.load(folder)
    for (name, a), b in zip(pipe.unet.named_parameters(), loaded.unet.parameters(), strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a.to(dtype).to(torch.float32), b), name
    assert pipe.unet.dtype == torch.float32
    assert {t.dtype for t in load_tensors(folder / "unet" / "diffusion_pytorch_model.safetensors").values()} == {dtype}
    assert genkit.load(folder, torch_dtype=torch.float64).unet.dtype == torch.float64


def test_float64_network_and_buffers_keep_their_type(tmp_path: Path) -> None:
    pipe = toy_pipeline()
    pipe.unet.double()
    assert torch.equal(sample(pipe), sample(genkit.load(pipe.save_pretrained(tmp_path / "double"))))
    values = {"w": torch.randn(3, dtype=torch.float16), "b": torch.tensor([1 / 3], dtype=torch.float64)}
    save_tensors(tmp_path / "x.safetensors", values)
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.zeros(3)))
    module.register_buffer("b", torch.zeros(1))
    _components._restore_buffers(module, tmp_path)
    assert module.b.dtype == torch.float64
    assert module.b.item() == 1 / 3
    assert module.w.dtype == torch.float32


def test_values_beyond_half_and_nonfinite_weights_are_refused(tmp_path: Path) -> None:
    pipe = toy_pipeline()
    with torch.no_grad():
        pipe.unet.conv_in.bias[0] = 1e6
    with pytest.raises(CheckpointError, match=r"conv_in\.bias.*1e\+06.*bfloat16"):
        pipe.save_pretrained(tmp_path / "pipe", dtype=torch.float16)
    with torch.no_grad():
        pipe.unet.conv_in.bias[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"unet: parameter conv_in\.bias holds NaN"):
        pipe.save_pretrained(tmp_path / "pipe")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["injected", "wrapped"])
def test_lora_adapter_is_saved_beside_its_base(tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    pipe, plain = toy_pipeline(), tiny_unet()
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False, lora_dropout=0.1)
    if kind == "wrapped":
        pipe.unet = peft.get_peft_model(pipe.unet, config).eval()
    else:
        peft.inject_adapter_in_model(config, pipe.unet).eval()
    x, t = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.ones(2)
    folder = pipe.save_pretrained(tmp_path / "lora")
    loaded = genkit.load(folder)
    assert type(loaded.unet) is type(pipe.unet)
    assert torch.equal(loaded.unet(x, t).sample, pipe.unet(x, t).sample)
    assert not torch.equal(loaded.unet(x, t).sample, plain(x, t).sample)
    base = type(plain).from_pretrained(folder / "unet")  # the base alone, by diffusers, without peft
    assert torch.equal(base(x, t).sample, plain(x, t).sample)

    stored = load_tensors(folder / "adapter" / "unet" / "adapter_model.safetensors")
    stored.pop(sorted(stored)[0])
    save_tensors(folder / "adapter" / "unet" / "adapter_model.safetensors", stored)
    reseal(folder)
    with pytest.raises(CheckpointError, match=r"lora_A.*has shape None"):
        genkit.load(folder)
    adapter = folder / "adapter" / "unet" / "adapter_config.json"
    save_json(adapter, load_json(adapter) | {"megatron_core": "os"})
    reseal(folder)
    with pytest.raises(ConfigError, match="megatron_core"):
        genkit.load(folder)


def test_transformers_components_round_trip(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=11
    )
    with torch.random.fork_rng():
        model = transformers.LlamaForCausalLM(config).eval()
    _components.save_component(model, tmp_path / "lm", dtype=torch.bfloat16)
    cls = _components.allowed_class(*_components.class_entry(type(model), of="lm"), of="lm")
    loaded = _components.load_component(cls, tmp_path / "lm", dtype=torch.float32, keep_buffers=True)
    tokens = torch.arange(5)[None]
    expected = model.bfloat16().float()(tokens).logits
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-5, atol=1e-6)
    save_json(tmp_path / "lm" / "config.json", load_json(tmp_path / "lm" / "config.json") | {"auto_map": {"A": "x.B"}})
    with pytest.raises(CheckpointError, match="auto_map"):
        _components.load_component(cls, tmp_path / "lm", dtype=None, keep_buffers=True)


def test_null_and_foreign_components_are_errors(tmp_path: Path) -> None:
    pipe = toy_pipeline()
    pipe.scheduler = None
    with pytest.raises(CheckpointError, match=r"scheduler is None and would be saved as null"):
        pipe.save_pretrained(tmp_path / "pipe")
    pipe.scheduler = object()
    with pytest.raises(CheckpointError, match="scheduler: builtins.object"):
        pipe.save_pretrained(tmp_path / "pipe")
    pipe.scheduler = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"torch\.nn.*could not be loaded again|cannot be saved"):
        pipe.save_pretrained(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pickle"):
        toy_pipeline().save_pretrained(tmp_path / "pipe", safe_serialization=False)
    assert os.listdir(tmp_path) == []


def test_optional_component_may_be_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    edit_index(saved, scheduler=[None, None])
    with pytest.raises(CheckpointError, match="scheduler was saved as null"):
        genkit.load(saved)
    assert isinstance(ToyPipeline.from_pretrained(saved, scheduler=DDIMScheduler()).scheduler, DDIMScheduler)
    monkeypatch.setattr(ToyPipeline, "_optional_components", ["scheduler"])
    pipe = genkit.load(saved)
    assert pipe.scheduler is None
    assert genkit.load(pipe.save_pretrained(tmp_path / "again")).scheduler is None


def test_unknown_argument_names_the_nearest(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"'schedular'.*Did you mean 'scheduler'"):
        ToyPipeline.from_pretrained(saved, schedular=DDIMScheduler())


# --- damage -----------------------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("damage", [_flip, _truncate, Path.unlink])
def test_every_damaged_file_is_named_and_nothing_is_built(saved: Path, damage, monkeypatch) -> None:
    built = []
    monkeypatch.setattr("genkit.pipeline.load_component", lambda *a, **k: built.append(1))
    names = [p.relative_to(saved) for p in saved.rglob("*") if p.is_file()]
    assert len(names) == 6
    for name in names:
        content = (saved / name).read_bytes()
        damage(saved / name)
        with pytest.raises(CheckpointError, match=name.name):
            genkit.load(saved)
        (saved / name).write_bytes(content)
    assert built == []
    verify_folder(saved)


def test_weights_of_another_network_are_refused(saved: Path) -> None:
    path = saved / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_tensors(path)
    save_tensors(path, {k.replace("conv_in", "conv_inn"): v for k, v in tensors.items()})
    reseal(saved)
    with pytest.raises(CheckpointError, match=r"unet: 2 missing keys \(conv_in\.bias, conv_in\.weight\)"):
        genkit.load(saved)


# --- hostile folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        ["os", "system"],
        ["genkit_evil.x", "Net"],
        ["genkitx", "Net"],
        ["diffusers_x", "UNet2DModel"],
        ["../x", "Net"],
        ["genkit..x", "Net"],
        ["genkit.__main__", "Net"],
        ["subprocess", "Popen"],
        ["diffusers", "DiffusionPipeline"],
        ["genkit.serialization", "shutil"],
        ["genkit.serialization", "Path"],
        ["transformers", "pipeline"],
        ["transformers", "AutoModel"],
        "diffusers",
        ["diffusers", None],
    ],
)
def test_component_classes_outside_the_allow_list_are_refused(saved: Path, entry: object) -> None:
    edit_index(saved, unet=entry)
    with pytest.raises(CheckpointError, match="unet"):
        genkit.load(saved)


def test_evil_module_is_not_even_imported(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "genkit_evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\nclass Net: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    edit_index(saved, unet=["genkit_evil", "Net"])
    for change in ({}, {"_genkit_class": "genkit_evil", "_class_name": "Net"}):
        edit_index(saved, **change)
        with pytest.raises(CheckpointError, match="genkit_evil"):
            genkit.load(saved)
    assert not (tmp_path / "owned").exists()


def test_index_entries_that_the_class_does_not_know(saved: Path) -> None:
    index = load_json(saved / "model_index.json")
    for entries, pattern in (
        ({"../x": ["diffusers", "UNet2DModel"]}, "'../x' is not known"),
        ({"unett": ["diffusers", "UNet2DModel"]}, "Did you mean 'unet'"),
        ({"_genkit_class": "diffusers", "_class_name": "DDPMPipeline"}, "is not a GenkitPipeline"),
        ({"_genkit_class": "genkit.pipeline", "_class_name": "../GenkitPipeline"}, r"expected \[module, class\]"),
        ({"_genkit_class": None}, r"expected \[module, class\]"),
    ):
        save_json(saved / "model_index.json", index)
        edit_index(saved, **entries)
        with pytest.raises(CheckpointError, match=pattern):
            genkit.load(saved)
    del index["_genkit_class"]
    save_json(saved / "model_index.json", index)
    reseal(saved)
    with pytest.raises(CheckpointError, match="not saved by genkit"):
        genkit.load(saved)


@pytest.mark.parametrize("name", ["unet/modeling_toy.py", "unet/pytorch_model.bin", "x.pkl", "unet/evil.json", "a.so"])
def test_planted_files_are_refused(saved: Path, name: str) -> None:
    (saved / name).write_bytes(b"import os; os.abort()")
    with pytest.raises(CheckpointError, match=f"{Path(name).name} is not listed"):
        genkit.load(saved)
    reseal(saved)
    pattern = "not a readable JSON" if name.endswith(".json") else "files of this type are not loaded"
    with pytest.raises(CheckpointError, match=pattern):
        genkit.load(saved)


def test_pickled_weights_under_any_name_are_never_opened(saved: Path) -> None:
    path = saved / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(b"cos\nabort\n(tR.")  # a pickle that would call os.abort()
    reseal(saved)
    with pytest.raises(CheckpointError, match="unet: UNet2DModel could not be loaded"):
        genkit.load(saved)
    path.unlink()
    reseal(saved)
    with pytest.raises(CheckpointError, match="has weights, but the folder holds no .safetensors"):
        genkit.load(saved)


# --- sources ----------------------------------------------------------------------------------------------------------


def test_sources_that_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        genkit.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"expected a folder, 'zoo:<name>' or a hub id"):
        genkit.load("none")
    with pytest.raises(CheckpointError, match=r"nobody/none.*could not be downloaded.*Check the path"):
        genkit.load("nobody/none", local_files_only=True, cache_dir=tmp_path)


def test_hub_snapshot_with_links_into_its_cache(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--me--toy"
    snapshot = repository / "snapshots" / "abc"
    for path in (p for p in saved.rglob("*") if p.is_file()):
        blob, link = repository / "blobs" / file_sha256(path), snapshot / path.relative_to(saved)
        for target in (blob, link):
            target.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(path.read_bytes())
        link.symlink_to(blob)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **options: str(snapshot))
    assert torch.equal(sample(genkit.load("me/toy")), sample(genkit.load(saved)))
    with pytest.raises(CheckpointError, match="symbolic link"):
        genkit.load(snapshot)
    (snapshot / "README.md").unlink()
    (snapshot / "README.md").symlink_to(saved / "README.md")
    with pytest.raises(CheckpointError, match="README.md is or passes a symbolic link"):
        genkit.load("me/toy")


def test_write_samples(tmp_path: Path) -> None:
    pipe = toy_pipeline()
    output = pipe(2, generator=torch.Generator().manual_seed(1))
    folder = pipe.write_samples(output, tmp_path / "out", call={"num_samples": 2})
    tensors = load_tensors(folder / "samples.safetensors")
    assert torch.equal(tensors["samples"], output.samples)
    assert torch.equal(tensors["scales"], output.scales)
    facts = json.loads((folder / "samples.json").read_text())
    assert facts["tensors"]["samples"] == {"shape": [2, 1, 8, 8], "dtype": "torch.float32"}
    assert facts["call"] == {"num_samples": 2}
