from __future__ import annotations

import numpy as np
import pytest
import torch

from genkit.data import long_tail
from genkit.data.long_tail import Cifar10LT, exponential_profile
from genkit.data.splits import first_of_each_class, keyed_unit
from genkit.errors import ConfigError

ROWS = 50  # of a small file; the real ones have 10,000


def test_the_profile_is_that_of_cifar10_lt():
    counts = exponential_profile(5000, 10, 100)
    assert counts == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert sum(counts) == 12406


def test_the_profile_at_other_factors():
    assert exponential_profile(5000, 10, 1) == [5000] * 10
    assert exponential_profile(8, 4, 8) == [8, 4, 2, 1]
    ten = exponential_profile(5000, 10, 10)
    assert (ten[0], ten[-1], sum(ten)) == (5000, 500, 20431)
    assert sum(exponential_profile(5000, 10, 50)) == 13996
    assert sum(exponential_profile(500, 100, 100)) == 10847  # CIFAR-100-LT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 10, 10), "n_max=0; expected a positive integer"),
        ((10, 1, 10), "num_classes=1; expected an integer, at least 2"),
        ((10, 10, 0.5), "factor=0.5; expected a number, at least 1"),
        ((10, 10, float("nan")), "factor=nan"),
        ((10, 10, 100), "leaves class 5 without a sample: the first class has 10; lower the factor to at most 10"),
    ],
)
def test_impossible_profiles_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        exponential_profile(*arguments)


def test_keyed_numbers_are_uniform_and_differ_by_purpose():
    units = torch.tensor([[keyed_unit(p, str(i).encode()) for i in range(4000)] for p in ("a", "b")])
    assert bool(((units >= 0) & (units < 1)).all())
    steps = torch.arange(1, 4001) / 4000
    assert float((units.sort(1).values - steps).abs().max()) < 1.95 / 4000**0.5  # Kolmogorov-Smirnov at 0.1 %
    assert abs(float(torch.corrcoef(units)[0, 1])) < 4 / 4000**0.5


def test_the_least_of_each_class_are_taken_in_order():
    label = torch.tensor([0, 1, 0, 1, 0])
    rows = first_of_each_class(label, [2, 1], [0.3, 0.9, 0.1, 0.2, 0.2])
    assert rows.tolist() == [2, 3, 4]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files of CIFAR-10 in small: every image is filled with its label, its row and its file."""
    monkeypatch.setattr(long_tail, "_FILE_ROWS", ROWS)
    for number, name in enumerate([f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]):
        rows = np.zeros((ROWS, 3073), np.uint8)
        rows[:, 0] = (np.arange(ROWS) + number) % 10
        rows[:, 1:1025] = rows[:, :1]
        rows[:, 1025:2049] = np.arange(ROWS)[:, None]
        rows[:, 2049:] = number
        rows[:, 1 + 32] = 255  # red, first pixel of the second line
        rows.tofile(tmp_path / name)
    return tmp_path


def test_images_are_planes_of_lines_and_labels_are_theirs(folder):
    data = Cifar10LT(folder, factor=1.0)
    assert len(data) == 250 and data.class_counts.tolist() == [25] * 10
    batch = data[torch.arange(250)]
    red, green, blue = ((batch["sample"][:, c, 9, 9] + 1) * 127.5 for c in range(3))
    assert torch.equal(red.round().long(), batch["label"])
    assert torch.allclose(green, torch.arange(ROWS).repeat(5).float(), atol=1e-4)
    assert torch.allclose(blue, torch.arange(5).repeat_interleave(ROWS).float(), atol=1e-4)
    assert batch["sample"][:, 0, 1, 0].unique().tolist() == [1.0]
    assert float(batch["sample"].min()) == -1.0
    assert data.classes[3] == "cat"


def test_the_training_split_has_the_tail_and_the_test_split_is_whole(folder):
    data = Cifar10LT(folder, factor=25)
    assert data.class_counts.tolist() == exponential_profile(25, 10, 25)
    test = Cifar10LT(folder, factor=25, split="test")
    assert test.class_counts.tolist() == [5] * 10 and int(test.images[:, 2].min()) == 5


def identities(data):
    """(row, file) of every image."""
    return {tuple(pair) for pair in data.images[:, 1:, 5, 5].tolist()}


def test_the_choice_is_nested_repeatable_and_depends_on_the_seed(folder):
    small, large = Cifar10LT(folder, factor=10), Cifar10LT(folder, factor=25)
    assert identities(large) < identities(small)
    assert identities(Cifar10LT(folder, factor=10)) == identities(small)
    assert identities(Cifar10LT(folder, factor=10, seed=1)) != identities(small)


def test_missing_short_and_foreign_files_are_named(folder):
    with pytest.raises(ConfigError, match="no folder .*gone; get the binary version"):
        Cifar10LT(folder / "gone")
    with pytest.raises(ConfigError, match="is a file, expected a folder"):
        Cifar10LT(folder / "test_batch.bin")
    third = folder / "data_batch_3.bin"
    raw = third.read_bytes()
    third.write_bytes(raw[:-1])
    with pytest.raises(ConfigError, match=r"data_batch_3.bin has 153,649 bytes, expected 153,650 \(50 rows of 3073\)"):
        Cifar10LT(folder, factor=2)
    assert len(Cifar10LT(folder, split="test")) == ROWS  # which needs its own file only
    third.write_bytes(raw[: 3073 * 7] + b"\x0a" + raw[3073 * 7 + 1 :])
    with pytest.raises(ConfigError, match="data_batch_3.bin, row 7: label 10, expected 0 to 9"):
        Cifar10LT(folder, factor=2)
    third.unlink()
    with pytest.raises(ConfigError, match="no file data_batch_3.bin in"):
        Cifar10LT(folder, factor=2)


def test_real_files_have_ten_thousand_rows(tmp_path):
    (tmp_path / "test_batch.bin").write_bytes(bytes(3073))
    with pytest.raises(ConfigError, match="has 3,073 bytes, expected 30,730,000"):
        Cifar10LT(tmp_path, split="test")


def test_the_python_version_is_refused_unread(tmp_path):
    python = tmp_path / "cifar-10-batches-py"
    python.mkdir()
    for name in ("data_batch_1", "test_batch"):
        (python / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")  # a pickle that would run a command
    for split in ("train", "test"):
        with pytest.raises(ConfigError, match="holds the Python version .*pickles.*get the binary version"):
            Cifar10LT(python, split=split)


def test_the_folder_above_is_recognised(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    with pytest.raises(ConfigError, match="one folder further down: give .*cifar-10-batches-bin"):
        Cifar10LT(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "tran"}, "split must be one of train, test, got 'tran'. Did you mean 'train'"),
        ({"factor": 0.5}, "factor=0.5; expected a number, at least 1"),
        ({"factor": 30.0}, "leaves class 9 without a sample: the first class has 25"),
        ({"seed": -1}, "seed=-1; expected an integer, at least 0"),
    ],
)
def test_bad_options_are_named(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        Cifar10LT(folder, **options)
    with pytest.raises(ConfigError, match="index 50 is out of range: Cifar10LT has 50 samples"):
        Cifar10LT(folder, split="test")[torch.tensor([50])]
