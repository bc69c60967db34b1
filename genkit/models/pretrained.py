"""Pretrained autoregressive language models: one call gives the transformers model and tokenizer.

Facts about transformers 5.24 that this module rests on (each is held by a test or was measured):

* A model read from GGUF counts as quantized, though all its weights were unpacked: ``save_pretrained`` refuses it and
  peft would take it for one. Its weights are therefore moved into a network built afresh from its configuration.
* Reading a GGUF file may keep the weights packed, or fetch an attention kernel from the hub, where the package
  ``kernels`` is installed. Unpacking and the attention are both asked for by name here.
* Its tokenizer converter writes GPT-2's pre-tokenizer whatever the file says. This file says ``smollm``: digits are
  split off first, so that the line breaks before a number stay one token. That is put back.
* ``AutoTokenizer`` picks a class by the *model's* type, and some (Qwen2's, Llama's) build their own pre-tokenizer in
  place of the one in ``tokenizer.json``; with another vocabulary they give wrong tokens, or none, without a word. Where
  there is a ``tokenizer.json``, it is taken as it is.
* A folder with ``adapter_config.json`` makes ``from_pretrained`` load the base model that this file names, also from
  the hub. Such a folder is refused, and so are quantized weights, remote code and pickles.
* Tied embeddings are written once, as ``model.embed_tokens.weight``, and tied again when loaded.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from genkit._assets import asset_path, cache_folder, find_asset
from genkit.errors import CheckpointError, ConfigError, GenkitError, MissingExtraError, nearest
from genkit.serialization import file_sha256, load_json, verify_folder, write_folder

__all__ = ["SUPPORTED_ARCHITECTURES", "load_causal_lm"]

#: ``model_type`` of the configurations that `load_causal_lm` accepts.
SUPPORTED_ARCHITECTURES: tuple[str, ...] = ("llama", "qwen2", "qwen3", "gpt2")

_ASSET = "smollm2"
#: Raised when the conversion changes, so that what an older one left in the cache is not used.
_CONVERSION = 1
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: One of these holds a tokenizer's vocabulary; without any, transformers makes up an empty one.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LOAD_ERRORS = (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError)


def load_causal_lm(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    attn_implementation: str = "sdpa",
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> tuple[Any, Any]:
    """A pretrained causal language model and its tokenizer.

    ``"smollm2"`` is SmolLM2-135M-Instruct (Llama; 30 layers, width 576, 9 query and 3 key-value heads, 49,152 tokens,
    tied embeddings, 134.5 million parameters), read from the package that ``genkit assets smollm2`` installs. Its 4-bit
    weights are unpacked once to float32 and kept as safetensors (538 MB) in the cache folder (``$GENKIT_CACHE``, else
    ``~/.cache/genkit``): the first load takes some 20 s, each later one verifies and reads that copy. A damaged copy is
    made anew, with a warning.

    What a caller must know about tokens. SmolLM2 puts no token before a text (Llama tokenizers from the hub do) and has
    no mask token. Ids 5 and 7-16 (``<file_sep>``, ``<gh_stars>`` … ``<empty_output>``) are special tokens that ordinary
    text never gives and whose embedding rows are equal to 0.3 % (training left them alone): one of them can serve. Its
    pad token is its end token, ``<|im_end|>``, and the configuration names it, so that ``nn.Embedding`` gives this
    token's *input* row no gradient. GPT-2 tokenizers have no pad token; none is made up here.

    Args:
        source: ``"smollm2"``, a folder (safetensors, configuration and tokenizer; write ``"./smollm2"`` for a folder of
            that name), or a hub id ``"owner/name"``, which is downloaded first and then loaded as a folder.
        dtype: type of the parameters, float32 by default, whatever type the file has.
        attn_implementation: transformers' name of the attention, ``"sdpa"`` or ``"eager"``, or one registered with
            ``transformers.AttentionInterface``. Names of kernels on the hub are refused.
        revision, token, cache_dir, local_files_only: of the download.

    Returns:
        ``(model, tokenizer)`` of transformers, the model on the CPU and in eval mode. The global generator of torch is
        left where it was.

    Raises:
        MissingExtraError: transformers (or gguf, at the first load of ``"smollm2"``) or the package is not installed.
        ConfigError: ``dtype`` or ``attn_implementation`` is not one of those above, or the architecture is not one of
            `SUPPORTED_ARCHITECTURES`.
        CheckpointError: no such folder, a pipeline's folder, no tokenizer, only pickles, remote code, quantized
            weights, an adapter without its base, or weights that do not match the network name by name.
    """
    dtype = torch.float32 if dtype is None else dtype
    _check_options(dtype, attn_implementation)
    _transformers()
    if source == _ASSET:
        folder = _asset_folder()
    else:
        folder = _find_folder(source, revision, token, cache_dir, local_files_only)
        _check_folder(folder)
    # Building a network draws its initial weights; the caller's random state must not move.
    with torch.random.fork_rng(devices=[]):
        return _load(folder, dtype, attn_implementation)


def _check_options(dtype: torch.dtype, attn_implementation: str) -> None:
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype}, expected one of {', '.join(str(d) for d in _DTYPES)}.")
    if not isinstance(attn_implementation, str) or "/" in attn_implementation:
        raise ConfigError(
            f"attn_implementation={attn_implementation!r}: expected 'sdpa', 'eager' or a name registered with "
            "transformers.AttentionInterface; kernels are not fetched from the hub."
        )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("Language models need transformers; install genkit-diffusion[lm].") from error
    return transformers


# --- folders and hub ids ----------------------------------------------------------------------------------------------


def _find_folder(
    source: str | os.PathLike[str],
    revision: str | None,
    token: str | None,
    cache_dir: str | os.PathLike[str] | None,
    local_files_only: bool,
) -> Path:
    text = os.fspath(source)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(text) or isinstance(source, Path):
        raise CheckpointError(
            f"{text}: no such folder; expected {_ASSET!r}, a folder or a hub id 'owner/name'.{nearest(text, [_ASSET])}"
        )
    from genkit.pipeline import _download

    return _download(text, revision, token, cache_dir, local_files_only)[0]


def _check_folder(folder: Path) -> None:
    """Refuse what must not or cannot be loaded, before anything is."""
    from genkit._components import _refuse_code_references

    if (folder / "model_index.json").is_file():
        raise CheckpointError(
            f"{folder}: is a pipeline, not a model; open it with genkit.load, train on from its weights with "
            "init_from, or put the files of its model/ and tokenizer/ into one folder and give that."
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: has no config.json; expected a model that transformers' save_pretrained wrote."
        )
    _refuse_code_references(folder)
    _check_config(load_json(folder / "config.json"), folder)
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder}: holds an adapter, and its adapter_config.json may name any base model; load the base with "
            "load_causal_lm and put the adapter on it with peft."
        )
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder}: {_no_weights(folder)}")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise CheckpointError(
            f"{folder}: no tokenizer in this folder; expected one of {', '.join(_TOKENIZERS)}. Save the model's "
            "tokenizer there with its save_pretrained."
        )


def _check_config(config: Any, folder: Path) -> None:
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ConfigError(
            f"{folder}: model_type {kind!r} is not supported; expected one of {known}."
            f"{nearest(str(kind), SUPPORTED_ARCHITECTURES)}"
        )
    if config.get("quantization_config"):
        raise CheckpointError(
            f"{folder}: holds quantized weights, which cannot be adapted or compared; give the folder of the model "
            "in float32, float16 or bfloat16."
        )


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in _PICKLES)
    if not pickles:
        return "holds no .safetensors file; expected a model with its weights."
    return (
        f"holds its weights only as pickle ({', '.join(pickles[:3])}), which can run any code and is not loaded; "
        "convert it to safetensors where you trust it, or take a revision that has model.safetensors."
    )


# --- the installed package --------------------------------------------------------------------------------------------


def _asset_folder() -> Path:
    """The verified safetensors copy of the installed package; made now when it is absent or damaged."""
    package = asset_path(_ASSET)
    folder = cache_folder() / _cache_name()
    if _is_whole(folder):
        return folder
    with _locked(folder.parent / f"{folder.name}.lock"):
        if not _is_whole(folder, warn=True):  # another process may have made it while this one waited
            _rebuild(package, folder)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One converter at a time: `write_folder` allows one writer per folder."""
    from filelock import FileLock

    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise CheckpointError(
            f"{path.parent}: cannot be written ({error}); set GENKIT_CACHE to a folder that can."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _cache_name() -> str:
    name = find_asset(_ASSET).package
    major = importlib.metadata.version("transformers").partition(".")[0]
    return f"{name}-{importlib.metadata.version(name)}-transformers{major}-v{_CONVERSION}"


def _is_whole(folder: Path, *, warn: bool = False) -> bool:
    try:
        verify_folder(folder)
    except CheckpointError as error:
        if warn and folder.exists():
            warnings.warn(f"The cached model is damaged and is made anew: {error}", stacklevel=4)
        return False
    return True


def _rebuild(package: Path, folder: Path) -> None:
    files = sorted(package.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"{package}: has {len(files)} .gguf files, expected one; its layout has changed.")
    if folder.is_dir() and not folder.is_symlink():  # what failed to verify may lack its manifest: not replaced else
        shutil.rmtree(folder)
    meta = {"kind": "causal-lm", "from": files[0].name, "sha256": file_sha256(files[0])}
    with torch.random.fork_rng(devices=[]):
        write_folder(folder, lambda stage: _convert_gguf(files[0], stage), meta=meta)


def _convert_gguf(file: Path, folder: Path) -> None:
    """Read a GGUF file with transformers and write it as a plain float32 model with its tokenizer."""
    from genkit._components import save_component

    try:
        model, tokenizer = _plain_model(file), _gguf_tokenizer(file)
    except GenkitError:
        raise
    except ImportError as error:
        raise MissingExtraError(f"Reading {file.name} needs gguf ({error}); install genkit-diffusion[lm].") from error
    except Exception as error:  # the reader of a damaged file fails in any way
        raise CheckpointError(f"{file}: could not be read ({error}); reinstall its package.") from error
    tokenizer.model_max_length = model.config.max_position_embeddings
    save_component(model, folder)
    save_component(tokenizer, folder)


def _plain_model(file: Path) -> Any:
    """The model of a GGUF file as an ordinary network, without transformers' mark of a quantized one."""
    transformers = _transformers()
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    if hasattr(transformers, "GgufConfig"):  # since version 5, weights may stay packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    read, info = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True, **options
    )
    _check_loaded(info, file.parent)
    config = read.config
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    return model.eval()


def _gguf_tokenizer(file: Path) -> Any:
    from tokenizers import pre_tokenizers

    tokenizer = _transformers().AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
    )
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


# --- loading ----------------------------------------------------------------------------------------------------------


def _load(folder: Path, dtype: torch.dtype, attn_implementation: str) -> tuple[Any, Any]:
    transformers = _transformers()
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = _tokenizer_class(folder).from_pretrained(folder, **options)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except _LOAD_ERRORS as error:
        raise CheckpointError(f"{folder}: the model or its tokenizer could not be loaded ({error}).") from error
    _check_loaded(info, folder)
    return model.eval(), tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """The class that takes tokenizer.json as it is, where there is one."""
    transformers = _transformers()
    whole = (folder / "tokenizer.json").is_file()
    return transformers.PreTrainedTokenizerFast if whole else transformers.AutoTokenizer


def _check_loaded(info: Mapping[str, Any], folder: Path) -> None:
    from genkit._components import _check_keys

    _check_keys(info, of=str(folder))
