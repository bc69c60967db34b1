"""The pipeline of a feature network: its files, its batches, and what it refuses to judge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import genkit
from genkit.errors import ConfigError
from genkit.metrics import FeatureOutput, FeaturePipeline, frechet_distance
from genkit.models import FeatureNetwork


def images(n: int = 7, seed: int = 0) -> Tensor:
    return 2.0 * torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) - 1.0


def pipeline(seed: int = 0) -> FeaturePipeline:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = FeatureNetwork(3, 8, 4, widths=[8, 16], feature_channels=5, dropout=0.5)
    pipe = FeaturePipeline(network, name="features-test")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_output_is_the_networks_without_dropout_or_gradient() -> None:
    pipe, x = pipeline(), images()
    pipe.network.train()
    output = pipe(x)
    assert isinstance(output, FeatureOutput) and pipe.network.training
    assert all(p.requires_grad for p in pipe.network.parameters())
    network = pipe.network.eval()
    assert torch.equal(output.features, network.features(x)) and torch.equal(output.logits, network(x))
    assert output.features.shape == (7, 5) and output.logits.shape == (7, 4)
    assert not output.features.requires_grad and output.features.dtype == torch.float32
    features, logits = pipe(x, return_dict=False)
    assert torch.equal(features, output.features) and torch.equal(logits, output.logits)
    arrays = pipe(x, output_type="np")
    assert isinstance(arrays.features, np.ndarray) and (arrays.logits == output.logits.numpy()).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_give_float32(dtype: torch.dtype) -> None:
    pipe, x = pipeline(), images()
    expected = pipe(x).features
    pipe.network.to(dtype)
    got = pipe(x)
    assert got.features.dtype == got.logits.dtype == torch.float32
    torch.testing.assert_close(got.features, expected, rtol=0.1, atol=1e-5 if dtype == torch.float64 else 0.05)


def test_the_batch_size_changes_rounding_only() -> None:
    pipe, x = pipeline(), images()
    whole = pipe(x)
    for size in (1, 3, 7):
        part = pipe(x, batch_size=size)
        torch.testing.assert_close(part.features, whole.features, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(part.logits, whole.logits, rtol=1e-5, atol=1e-6)


def test_saved_and_loaded_it_gives_equal_features(tmp_path) -> None:
    pipe, x = pipeline(), images()
    state = torch.get_rng_state()
    pipe.save_pretrained(tmp_path / "pipe")
    loaded = genkit.load(tmp_path / "pipe")
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is FeaturePipeline and loaded.config.name == "features-test"
    assert not loaded.network.training
    assert torch.equal(loaded(x).features, pipe(x).features) and torch.equal(loaded(x).logits, pipe(x).logits)
    loaded.save_pretrained(tmp_path / "again")
    for name in ("model_index.json", "network/config.json"):
        assert (tmp_path / "pipe" / name).read_text() == (tmp_path / "again" / name).read_text()
    assert torch.equal(state, torch.get_rng_state())
    pipe.save_pretrained(tmp_path / "half", dtype=torch.float16)  # as the zoo keeps it
    half = genkit.load(tmp_path / "half")
    half.set_progress_bar_config(disable=True)
    torch.testing.assert_close(half(x).features, pipe(x).features, rtol=0.02, atol=2e-3)
    other = FeaturePipeline.from_pretrained(tmp_path / "pipe", network=pipeline(seed=1).network)
    other.set_progress_bar_config(disable=True)
    assert not torch.equal(other(x).features, pipe(x).features)


def test_features_tell_two_laws_of_images_apart() -> None:
    pipe = pipeline()
    same = frechet_distance(pipe(images(200)).features, pipe(images(200, seed=1)).features)
    darker = frechet_distance(pipe(images(200)).features, pipe(0.5 * images(200, seed=1) - 0.5).features)
    assert darker > 10 * same


def test_the_progress_bar_can_be_seen(capsys) -> None:
    pipe = pipeline()
    pipe(images())
    assert capsys.readouterr().err == ""
    pipe.set_progress_bar_config(disable=False)
    pipe(images(), batch_size=3)
    assert "3/3" in capsys.readouterr().err


def spoilt(value: float) -> Tensor:
    x = images()
    x[1, 0, 0, 0] = value
    return x


REFUSED = {
    "shape": ({"images": images()[:, :1]}, r"shape \(7, 1, 8, 8\); expected a tensor \(n, 3, 8, 8\)"),
    "one image": ({"images": images()[0]}, "expected a tensor"),
    "no image": ({"images": images()[:0]}, "n >= 1"),
    "array": ({"images": images().numpy()}, "type ndarray; expected a tensor"),
    "bytes": ({"images": images().to(torch.uint8)}, "images / 127.5 - 1"),
    "nan": ({"images": spoilt(float("nan"))}, "1 of 7 images hold NaN"),
    "range": ({"images": 127.5 * images() + 127.5}, r"pixels from .* to .*; expected \[-1, 1\].*clamp"),
    "a little out": ({"images": spoilt(1.1)}, "to 1.1; expected"),
    "output": ({"images": images(), "output_type": "pil"}, "output_type='pil'; expected 'pt' or 'np'"),
    "batch": ({"images": images(), "batch_size": 0}, "batch_size=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_is_wrong(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        pipeline()(**options)
