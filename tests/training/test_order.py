"""The order of the data, and what a batch may hold."""

from __future__ import annotations

import pytest
import torch

from genkit.errors import ConfigError
from genkit.training import TensorData
from genkit.training.batches import BatchReader
from genkit.training.order import DataOrder, epoch_permutation


def test_permutations_depend_on_seed_and_epoch_alone_and_look_uniform():
    assert torch.equal(epoch_permutation(3, 1, 50), epoch_permutation(3, 1, 50))
    assert not torch.equal(epoch_permutation(3, 1, 50), epoch_permutation(3, 2, 50))
    assert not torch.equal(epoch_permutation(3, 1, 50), epoch_permutation(4, 1, 50))
    first = torch.stack([epoch_permutation(0, e, 5) for e in range(2000)])
    assert torch.equal(first.sort(dim=1).values, torch.arange(5).expand(2000, 5))
    counts = torch.stack([torch.bincount(first[:, i], minlength=5) for i in range(5)])
    assert (counts - 400).abs().max() < 5 * (400 * 0.8) ** 0.5  # each sample at each place, five standard errors


@pytest.mark.parametrize("size", [7, 12, 13, 23])
@pytest.mark.parametrize(("batch", "accumulation", "world"), [(1, 1, 1), (2, 3, 1), (2, 1, 3), (1, 2, 2), (3, 2, 2)])
def test_every_epoch_has_each_sample_once_over_ranks_and_micro_batches(size, batch, accumulation, world):
    order = DataOrder(5, size, batch, accumulation, world)
    for epoch in range(2):
        seen: list[int] = []
        for step in range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch):
            assert order.place(step)[0] == epoch
            ranks = [order.micro_batches(step, rank) for rank in range(world)]
            assert len({len(r) for r in ranks}) == 1  # equally many backward passes everywhere
            step_ids = [i for r in ranks for m in r if m.real for i in m.indices.tolist()]
            assert sorted(step_ids) == sorted(order.window(step).tolist())
            assert all(len(m.indices) >= 1 for r in ranks for m in r)
            seen += step_ids
        assert sorted(seen) == list(range(size))


def test_the_window_is_the_same_however_it_is_cut():
    whole = DataOrder(1, 26, 8)
    for batch, accumulation, world in ((4, 2, 1), (2, 2, 2), (1, 2, 4)):
        cut = DataOrder(1, 26, batch, accumulation, world)
        assert cut.steps_per_epoch == whole.steps_per_epoch
        assert all(torch.equal(cut.window(s), whole.window(s)) for s in range(8))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((0, 0, 1), ["empty", "0 samples"]),
        ((0, 5, 6), ["batch_size 6", "has 5"]),
        ((0, 5, 3, 1, 2), ["batch_size 3", "2 process", "6 samples"]),
        ((0, 10, 2, 6), ["gradient_accumulation_steps 6", "5 micro-batches", "10 samples"]),
    ],
)
def test_impossible_sizes_are_refused_with_their_counts(arguments, parts):
    with pytest.raises(ConfigError) as caught:
        DataOrder(*arguments)
    assert all(part in str(caught.value) for part in parts)


class PerSample(torch.utils.data.Dataset):
    """A torch data set of dicts; ``odd`` samples have another shape."""

    def __init__(self, size: int, odd: tuple[int, ...] = (), word: bool = False) -> None:
        self.size, self.odd, self.word = size, odd, word

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, object]:
        shape = (3, 5) if int(index) in self.odd else (3, 4)
        sample = {"image": torch.full(shape, float(index)), "label": int(index)}
        return sample | ({"text": f"sample {index}"} if self.word else {})


def test_tensor_and_per_sample_data_give_the_same_batch():
    ids = torch.tensor([4, 0, 2])
    one = BatchReader(PerSample(5, word=True)).read(ids)
    two = BatchReader(
        TensorData({"image": torch.arange(5.0)[:, None, None].expand(5, 3, 4), "label": torch.arange(5)})
    ).read(ids)
    assert torch.equal(one["image"], two["image"]) and torch.equal(one["label"], two["label"])
    assert one["text"] == ["sample 4", "sample 0", "sample 2"]
    assert torch.equal(one["sample_id"], ids) and torch.equal(two["sample_id"], ids)


def test_bad_data_is_refused_by_name():
    ids = torch.tensor([0, 1, 2])
    spoiled = torch.zeros(4, 2)
    spoiled[1, 1], spoiled[3, 0] = float("nan"), float("inf")
    cases = [
        (lambda: BatchReader(TensorData({"x": torch.zeros(0, 2)})), "empty"),
        (lambda: TensorData({"x": torch.zeros(3), "y": torch.zeros(4)}), "common length"),
        (lambda: TensorData({}), "no fields"),
        (lambda: BatchReader([torch.zeros(2)] * 4), "expected a dict"),
        (lambda: BatchReader(TensorData({"x": spoiled})).read(ids), r"'x': NaN or infinity in the samples \[1\]"),
        (lambda: BatchReader(TensorData({"sample_id": torch.zeros(4)})).read(ids), "sample_id"),
        (lambda: BatchReader(PerSample(4, odd=(2,))).read(ids), r"\(3, 4\), \(3, 5\)"),
    ]
    for make, message in cases:
        with pytest.raises(ConfigError, match=message):
            make()


def test_a_field_may_say_that_nan_is_a_missing_value():
    spoiled = torch.zeros(4, 2)
    spoiled[1, 1], spoiled[3, 0] = float("nan"), float("inf")
    data = TensorData({"x": torch.zeros(4, 2), "y": spoiled})
    data.missing = ("y",)
    read = BatchReader(data).read
    assert torch.isnan(read(torch.tensor([0, 1]))["y"]).sum() == 1
    with pytest.raises(ConfigError, match=r"'y': NaN or infinity in the samples \[3\]"):
        read(torch.tensor([1, 3]))
    data.missing = ("x",)
    with pytest.raises(ConfigError, match=r"'y': NaN or infinity in the samples \[1\]"):
        BatchReader(data).read(torch.tensor([0, 1]))


def test_fields_that_look_like_a_batch_are_still_stacked():
    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"pair": torch.tensor([1.0, 2.0])}

    assert BatchReader(Pairs()).read(torch.tensor([0, 1])).get("pair").shape == (2, 2)
    assert BatchReader(Pairs()).read(torch.tensor([0, 1, 2])).get("pair").shape == (3, 2)


def test_a_single_sample_and_integer_images_are_fine():
    assert BatchReader(PerSample(1)).read(torch.tensor([0]))["image"].shape == (1, 3, 4)
    images = torch.randint(0, 255, (3, 5, 7), dtype=torch.uint8)
    assert BatchReader(TensorData({"x": images})).read(torch.tensor([1]))["x"].dtype == torch.uint8
