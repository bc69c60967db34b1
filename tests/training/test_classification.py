"""Cross entropy with keyed shifts and mirror images: by hand, reproducible, and good enough to read digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from genkit.data import Digits
from genkit.errors import ConfigError
from genkit.models import FeatureNetwork
from genkit.samplers.noise import training_keys
from genkit.training import Trainer, TrainerConfig
from genkit.training.objectives import ClassificationObjective
from genkit.training.objectives.classification import shifted

N = 40


def linear() -> nn.Sequential:
    net = nn.Sequential(nn.Flatten(), nn.Linear(2 * 3 * 4, 5))
    with torch.no_grad():
        net[1].weight.copy_(images(5, seed=9).flatten(1))
    return net


def images(n: int = N, seed: int = 0) -> Tensor:
    return torch.randn(n, 2, 3, 4, generator=torch.Generator().manual_seed(seed))


def batch(n: int = N) -> dict[str, Tensor]:
    return {"sample": images(n), "class_labels": torch.arange(n) % 5, "sample_id": torch.arange(n)}


def loss(objective: ClassificationObjective, given: dict[str, Tensor], seed: int = 3, step: int = 0):
    return objective.loss("network", given, step=step, keys=training_keys(seed, step, given["sample_id"]))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_accuracy_by_hand(smoothing: float) -> None:
    net, given = linear(), batch()
    output = loss(ClassificationObjective(net, label_smoothing=smoothing), given)
    log_p = net(given["sample"]).log_softmax(dim=1)
    right = log_p[torch.arange(N), given["class_labels"]]
    expected = -((1 - smoothing) * right + smoothing * log_p.mean(dim=1)).mean()
    torch.testing.assert_close(output.loss, expected)
    assert float(output.logs["accuracy"]) == pytest.approx((log_p.argmax(1) == given["class_labels"]).float().mean())
    assert not output.logs["accuracy"].requires_grad
    named = ClassificationObjective(net, label="label", label_smoothing=smoothing)
    renamed = {"label": given["class_labels"].to(torch.int32), **given}
    del renamed["class_labels"]
    torch.testing.assert_close(loss(named, renamed).loss, expected)


def test_shifts_repeat_the_border() -> None:
    image = torch.arange(12.0).reshape(1, 1, 3, 4)
    moved = shifted(image.expand(3, 1, 3, 4), torch.tensor([[0, 0], [1, 0], [-1, 2]]))
    assert torch.equal(moved[0], image[0])
    assert moved[1, 0].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert moved[2, 0].tolist() == [[4, 4, 4, 5], [8, 8, 8, 9], [8, 8, 8, 9]]
    assert torch.equal(shifted(images(), torch.zeros(N, 2, dtype=torch.int64)), images())


def test_shifts_and_mirror_images_are_uniform() -> None:
    n = 4000
    given = torch.zeros(n, 1, 7, 7)
    given[:, :, 3, 2] = 1.0
    seen = ClassificationObjective(linear(), shift=2).augmented(given, training_keys(0, 0, torch.arange(n)))
    place = seen.flatten(1).argmax(dim=1)
    counts = torch.bincount(place, minlength=49).reshape(7, 7)[1:6, :5]
    assert int(counts.sum()) == n and float((counts - n / 25).abs().max()) < 5 * (n / 25) ** 0.5
    seen = ClassificationObjective(linear(), flip=True).augmented(given, training_keys(0, 0, torch.arange(n)))
    columns = torch.bincount(seen.sum(dim=(1, 2)).argmax(dim=1), minlength=7)
    assert columns.nonzero().flatten().tolist() == [2, 4] and abs(int(columns[2]) - n / 2) < 5 * (n / 4) ** 0.5


def test_augmentation_is_a_function_of_seed_step_and_sample() -> None:
    objective, x, ids = ClassificationObjective(linear(), shift=1, flip=True), images(), torch.arange(N)
    state = torch.get_rng_state()
    first = objective.augmented(x, training_keys(3, 5, ids))
    assert torch.equal(first, objective.augmented(x, training_keys(3, 5, ids)))
    part = torch.tensor([7, 2, 30])  # of another batch, in another order
    assert torch.equal(first[part], objective.augmented(x[part], training_keys(3, 5, ids[part])))
    for seed, step, moved in ((4, 5, ids), (3, 6, ids), (3, 5, ids + 1)):
        assert not torch.equal(first, objective.augmented(x, training_keys(seed, step, moved)))
    assert not torch.equal(first, x) and torch.equal(state, torch.get_rng_state())
    plain = ClassificationObjective(linear())
    assert plain.augmented(x, training_keys(3, 5, ids)) is x
    assert float(loss(objective, batch()).loss) != float(loss(plain, batch()).loss)


def test_the_trainer_reads_digits(tmp_path) -> None:
    """About 200 steps on half of the digits: 9 of 10 of the other half are read."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = FeatureNetwork(1, 8, 10, widths=[12, 24], feature_channels=32)
    test = Digits("test")
    held = test[torch.arange(len(test))]

    def accuracy() -> float:
        with torch.no_grad():
            return float((net.eval()(held["sample"]).argmax(dim=1) == held["label"]).float().mean())

    assert accuracy() < 0.3
    config = TrainerConfig(
        output_dir=str(tmp_path), max_steps=200, save_steps=1000, batch_size=64, learning_rate=5e-3,
        lr_scheduler="cosine", warmup_steps=20, progress=False, device="cpu",
    )  # fmt: skip
    objective = ClassificationObjective(net.train(), label="label", label_smoothing=0.05)
    entries = list(Trainer(objective, config, Digits("train")).train())
    assert accuracy() > 0.9
    assert entries[-1].logs["accuracy"] > 0.9 > entries[0].logs["accuracy"]


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in batch().items() if key != name}


REFUSED = {
    "smoothing": (
        lambda: ClassificationObjective(linear(), label_smoothing=1.0),
        r"label_smoothing=1.0; expected .*\[0",
    ),
    "shift": (lambda: ClassificationObjective(linear(), shift=-1), "shift=-1; expected whole pixels"),
    "half a pixel": (lambda: ClassificationObjective(linear(), shift=0.5), "shift=0.5"),
    "no images": (lambda: loss(ClassificationObjective(linear()), without("sample")), "expected 'sample' too"),
    "no labels": (
        lambda: loss(ClassificationObjective(linear(), label="class_label"), batch()),
        "expected 'class_label' too.*Did you mean 'class_labels'",
    ),
    "vectors": (
        lambda: loss(ClassificationObjective(linear()), batch() | {"sample": torch.zeros(N, 3)}),
        r"sample has shape \(40, 3\); expected images",
    ),
    "float labels": (
        lambda: loss(ClassificationObjective(linear()), batch() | {"class_labels": torch.zeros(N)}),
        r"torch.float32; expected integers \(40,\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_is_wrong(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        call()
