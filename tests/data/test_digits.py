from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from genkit.data import digits as module
from genkit.data.digits import Digits
from genkit.data.long_tail import exponential_profile
from genkit.errors import ConfigError, MissingExtraError

datasets = pytest.importorskip("sklearn.datasets")
CLASSES = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def pixels(data: Digits) -> set[bytes]:
    return {image.tobytes() for image in data.images.numpy()}


def test_all_digits_are_those_of_scikit_learn():
    data, found = Digits("all"), datasets.load_digits()
    batch = data[torch.arange(1797)]
    assert np.array_equal((batch["sample"].double().numpy()[:, 0] + 1) * 8, found.images)
    assert np.array_equal(batch["label"].numpy(), found.target)
    assert data.class_counts.tolist() == CLASSES
    assert len(pixels(data)) == 1797  # no image twice, so splits by pixels are splits by row


def test_grey_levels_are_exact():
    sample = Digits("all")[torch.arange(1797)]["sample"]
    assert sample.dtype == torch.float32 and sample.shape == (1797, 1, 8, 8)
    assert sample.unique().tolist() == [v / 8 - 1 for v in range(17)]


@pytest.mark.parametrize("holdout", [0.5, 0.1, 0.9])
def test_splits_are_disjoint_and_stratified(holdout):
    train, test = (Digits(split, holdout=holdout) for split in ("train", "test"))
    assert test.class_counts.tolist() == [int(n * holdout) for n in CLASSES]
    assert (train.class_counts + test.class_counts).tolist() == CLASSES
    assert not pixels(train) & pixels(test)
    for data in (train, test):
        assert torch.equal(data[torch.arange(len(data))]["label"].bincount(), data.class_counts)


def test_the_split_is_a_function_of_the_pixels(monkeypatch):
    whole = pixels(Digits("test"))
    images, label = module._digits()
    order = torch.arange(1796, -1, -1)
    monkeypatch.setattr(module, "_digits", lambda: (images[order], label[order]))
    assert pixels(Digits("test")) == whole  # though the file is read backwards
    assert pixels(Digits("test", seed=5)) == whole
    assert pixels(Digits("test", holdout=0.2)) < whole


def test_the_halves_look_alike():
    means = [data[torch.arange(len(data))]["sample"].double().mean(0) for data in (Digits("train"), Digits("test"))]
    assert float((means[0] - means[1]).abs().max()) < 5 * 0.75 * (4 / 1797) ** 0.5  # std of a pixel is at most .75


def test_the_long_tail_follows_the_profile():
    full = Digits()
    fewest = int(full.class_counts.min())
    assert fewest == 87
    for factor in (1, 10, 50):
        data = Digits(imbalance=factor)
        assert data.class_counts.tolist() == exponential_profile(87, 10, factor)
        assert pixels(data) <= pixels(full)
    assert pixels(Digits(imbalance=50)) < pixels(Digits(imbalance=10))
    assert pixels(Digits(imbalance=10)) == pixels(Digits(imbalance=10))
    assert pixels(Digits(imbalance=10, seed=1)) != pixels(Digits(imbalance=10))
    assert torch.equal(Digits("test", imbalance=50).images, Digits("test").images)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "trian"}, "Did you mean 'train'"),
        ({"holdout": 0.0}, r"holdout=0.0; expected a share in \(0, 1\)"),
        ({"holdout": 0.001}, "leaves digit 0 without a test image; at least 0.0057 is needed"),
        ({"imbalance": 0.1}, "factor=0.1; expected a number, at least 1"),
        ({"imbalance": 100}, "leaves class 9 without a sample: the first class has 87; lower the factor to at most 87"),
        ({"split": "all", "imbalance": 10}, "is for the training split, got split='all'"),
        ({"seed": -1}, "seed=-1; expected an integer"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Digits(**options)


def test_indices_out_of_range_are_named():
    data = Digits("test")
    with pytest.raises(ConfigError, match=f"Digits has {len(data)} samples"):
        data[torch.tensor([-1])]


def test_a_missing_scikit_learn_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    module._digits.cache_clear()
    with pytest.raises(MissingExtraError, match="pip install scikit-learn"):
        Digits()
