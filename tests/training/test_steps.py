"""A step is the update one would write by hand on the whole window, however it is cut up and whoever's turn it is."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from torch import nn
from training import toys

from genkit.errors import ConfigError, GenkitError
from genkit.samplers.noise import training_keys
from genkit.training import LossOutput, Phase, TensorData, Trainer
from genkit.training.accelerator import check_world_size, step_rng
from genkit.training.order import DataOrder

DOUBLE = torch.float64


def by_hand(nets: dict[str, nn.Module], steps: int, window, turn, loss, rate: float = 1e-2) -> list[float]:
    """Full-batch updates: forward, backward, clip at 1, AdamW."""
    optimizers = {n: torch.optim.AdamW(m.parameters(), lr=rate, weight_decay=0.0) for n, m in nets.items()}
    losses = []
    for step in range(steps):
        name = turn(step)
        value = loss(name, window(step), step)
        losses.append(value.item())
        parameters = list(nets[name].parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizers[name].step()
    return losses


def close(a: nn.Module, b: nn.Module, tolerance: float = 1e-9) -> None:
    for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def full_windows(data: TensorData, size: int):
    order = DataOrder(0, len(data), size)
    return lambda step: (order.window(step), data[order.window(step)])


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (4, 2), (2, 4), (1, 8), (3, 3)])
@pytest.mark.parametrize("size", [16, 19])  # 19: windows of 8, 8, 3
def test_accumulation_equals_the_full_batch(tmp_path, batch, accumulation, size):
    data, net = toys.make_data(size, DOUBLE), toys.make_net(dtype=DOUBLE)
    objective = toys.Regression(toys.make_net(dtype=DOUBLE))
    settings = {"batch_size": batch, "gradient_accumulation_steps": accumulation}
    logs = list(Trainer(objective, toys.config(tmp_path, **settings), data).train())

    def loss(name, window, step):
        ids, values = window
        noise = 0.1 * training_keys(0, step, ids).normal((3,)).double()
        return (net(values["x"] + noise) - values["y"]).square().mean()

    losses = by_hand({"net": net}, 12, full_windows(data, batch * accumulation), lambda s: "net", loss)
    close(objective.net_, net)
    assert [entry.loss for entry in logs] == pytest.approx(losses, rel=1e-9)
    micro = len([s for s, _ in objective.seen if s == 0])
    assert micro == accumulation  # it was cut up


def test_the_mean_runs_over_the_objectives_own_units(tmp_path):
    lengths = torch.tensor([1.0, 9, 2, 5, 1, 1, 7, 3, 4, 2, 6], dtype=DOUBLE)
    data = TensorData(toys.make_data(11, DOUBLE).tensors | {"length": lengths})
    nets = []
    for i, (batch, accumulation) in enumerate([(8, 1), (4, 2), (2, 4), (1, 8)]):
        objective = toys.TokenRegression(toys.make_net(dtype=DOUBLE))
        settings = {"batch_size": batch, "gradient_accumulation_steps": accumulation}
        list(Trainer(objective, toys.config(tmp_path / str(i), **settings), data).train())
        nets.append(objective.net_)
    for net in nets[1:]:
        close(nets[0], net)

    class MeanOfMeans(toys.TokenRegression):  # the control: every micro-batch counts the same
        def weight(self, batch):
            return 1.0

    objective = MeanOfMeans(toys.make_net(dtype=DOUBLE))
    list(Trainer(objective, toys.config(tmp_path / "c", batch_size=2, gradient_accumulation_steps=4), data).train())
    with pytest.raises(AssertionError):
        close(nets[0], objective.net_, tolerance=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_two_networks_in_turns_equal_the_full_batch_loop_and_both_move(tmp_path, accumulation):
    data, objective, reference = toys.make_data(20, DOUBLE), toys.TwoNetworks(), toys.TwoNetworks()
    start = {n: toys.tensors(m) for n, m in objective.networks().items()}
    settings = {"batch_size": 2, "gradient_accumulation_steps": accumulation}
    trainer = Trainer(objective, toys.config(tmp_path, **settings), data)
    turns = [entry.turn for entry in trainer.train()]
    nets = dict(reference.networks())
    by_hand(
        nets,
        12,
        full_windows(data, 2 * accumulation),
        reference.turn,
        lambda n, w, s: reference.losses(n, *nets.values(), w[1]),
    )
    for name, module in objective.networks().items():
        close(module, nets[name])
        assert not toys.same(toys.tensors(module), start[name])
        assert all(p.requires_grad for p in module.parameters())  # given back as it came
    assert turns == ["auxiliary", "student"] * 6 and trainer.turn_counts == {"auxiliary": 6, "student": 6}


def test_control_a_counter_of_micro_steps_aliases_with_the_turns():
    """accelerate steps an optimiser where its micro-step count says so; with turns that alternate, one never moves."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    data, objective = toys.make_data(20, DOUBLE), toys.TwoNetworks()
    start = toys.tensors(objective.auxiliary)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    nets = objective.networks()
    optimizers = {n: accelerator.prepare(torch.optim.AdamW(m.parameters(), lr=1e-2)) for n, m in nets.items()}
    for micro in range(12):
        name = objective.turn(micro)
        with accelerator.accumulate(nets[name]):
            accelerator.backward(objective.losses(name, *nets.values(), data[torch.arange(2)]))
            optimizers[name].step()
            optimizers[name].zero_grad()
    GradientState._reset_state()
    AcceleratorState._reset_state()
    assert toys.same(toys.tensors(objective.auxiliary), start)


def test_phases_have_fresh_optimisers_and_frozen_copies(tmp_path):
    data, objective = toys.make_data(8), toys.TwoPhases((5, 6))
    config = toys.config(tmp_path, max_steps=100, lr_scheduler="linear", batch_size=8)
    logs = list(Trainer(objective, config, data).train())
    assert [entry.phase for entry in logs] == ["fit"] * 5 + ["tune"] * 6
    assert [entry.learning_rate for entry in logs] == [1e-2 * (1 - k / 5) for k in range(5)] + [
        1e-2 * (1 - k / 6) for k in range(6)
    ]
    net, order = toys.make_net(3), DataOrder(0, 8, 8)
    for steps, offset in ((5, 0), (6, 5)):
        copy = toys.make_net(0)
        copy.load_state_dict(net.state_dict())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
        for k in range(steps):
            batch = data[order.window(offset + k)]
            guess = net(batch["x"])
            loss = (guess - batch["y"]).square().mean()
            loss = loss + (guess - copy(batch["x"]).detach()).square().mean() if offset else loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = 1e-2 * (1 - k / steps)
            optimizer.step()
    close(objective.net_, net, tolerance=1e-5)
    assert not any(p.requires_grad for p in objective.copy.parameters())


def test_only_parameters_that_require_a_gradient_are_trained(tmp_path):
    objective = toys.Regression()
    objective.net_[0].requires_grad_(False)
    base, head = toys.tensors(objective.net_[0]), toys.tensors(objective.net_[3])
    trainer = Trainer(objective, toys.config(tmp_path, weight_decay=0.1, ema_decay=0.9), toys.make_data())
    list(trainer.train())
    assert toys.same(toys.tensors(objective.net_[0]), base) and not toys.same(toys.tensors(objective.net_[3]), head)
    assert set(trainer.networks["net"].ema.shadow) == {"3.weight", "3.bias"}
    from genkit.serialization import load_tensors

    assert set(load_tensors(tmp_path / "checkpoint-12" / "networks" / "net.safetensors")) == {"3.weight", "3.bias"}
    objective.net_.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        list(Trainer(objective, toys.config(tmp_path / "b"), toys.make_data()).train())


class WithSpare(toys.Regression):
    """A parameter that the loss never sees."""

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.net_.register_parameter("spare", nn.Parameter(torch.zeros(1)))
        self.allowed = allowed

    def parameters_without_gradient(self, turn):
        return self.allowed


def test_parameters_that_get_no_gradient_are_named_unless_allowed(tmp_path):
    with pytest.raises(GenkitError, match="1 trained parameter.*spare"):
        list(Trainer(WithSpare(), toys.config(tmp_path / "a"), toys.make_data()).train())
    assert len(list(Trainer(WithSpare(("spare",)), toys.config(tmp_path / "b"), toys.make_data()).train())) == 12


def test_bad_losses_and_weights_are_refused(tmp_path):
    class Vector(toys.Regression):
        def loss(self, turn, batch, *, step, keys):
            return LossOutput(self.net(turn)(batch["x"]))

    class Detached(toys.Regression):
        def loss(self, turn, batch, *, step, keys):
            return LossOutput(super().loss(turn, batch, step=step, keys=keys).loss.detach())

    class Weightless(toys.Regression):
        def weight(self, batch):
            return 0.0

    class OtherLogs(toys.Regression):
        def loss(self, turn, batch, *, step, keys):
            output = super().loss(turn, batch, step=step, keys=keys)
            return LossOutput(output.loss, {f"log{len(self.seen)}": 1.0})

    class Lost(toys.Regression):
        def turn(self, step):
            return "nte"

    for i, (kind, message) in enumerate(
        [
            (Vector, r"shape \(2, 2\)"),
            (Detached, "requires_grad=False"),
            (Weightless, "not all 0"),
            (OtherLogs, "same names"),
            (Lost, "'nte'"),
        ]
    ):
        settings = toys.config(tmp_path / str(i), gradient_accumulation_steps=2)
        with pytest.raises(GenkitError, match=message):
            list(Trainer(kind(), settings, toys.make_data()).train())


def test_training_leaves_the_callers_random_numbers_alone_and_dropout_is_keyed(tmp_path):
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    trainer = Trainer(toys.Regression(toys.make_net(dropout=0.5)), toys.config(tmp_path), toys.make_data())
    for _ in trainer.train():
        pass
    assert torch.equal(torch.randn(3), expected)
    draws = {}
    for key in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]:
        with step_rng(*key, torch.device("cpu")):
            draws[key] = torch.rand(4)
        with step_rng(*key, torch.device("cpu")):
            assert torch.equal(torch.rand(4), draws[key])
    assert len({tuple(d.tolist()) for d in draws.values()}) == 4  # step, rank and seed all count


def test_bfloat16_computes_low_keeps_weights_high_and_leaves_the_module_plain(tmp_path):
    results = {}
    for precision in ("no", "bf16"):
        objective = toys.Regression(toys.make_net(width=32))
        forward = type(objective.net_).forward
        settings = toys.config(tmp_path / precision, mixed_precision=precision, ema_decay=0.9)
        results[precision] = [entry.loss for entry in Trainer(objective, settings, toys.make_data()).train()]
        assert {p.dtype for p in objective.net_.parameters()} == {torch.float32}
        assert objective.net_.forward.__func__ is forward and "forward" not in objective.net_.__dict__
        assert objective.net_(torch.zeros(1, 3)).dtype == torch.float32
    assert results["bf16"] != results["no"]
    assert results["bf16"] == pytest.approx(results["no"], rel=0.05)
    with pytest.raises(ConfigError, match="fp16 needs a CUDA device"):
        Trainer(toys.Regression(), toys.config(tmp_path / "h", mixed_precision="fp16"), toys.make_data())


def test_no_clipping_and_weight_decay_reach_the_update(tmp_path):
    data, net = toys.make_data(8, DOUBLE), toys.make_net(dtype=DOUBLE)
    objective = toys.Regression(toys.make_net(dtype=DOUBLE), noise=0.0)
    settings = {"batch_size": 8, "max_grad_norm": None, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_epsilon": 1e-3}
    logs = list(Trainer(objective, toys.config(tmp_path, **settings), data).train())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.8, 0.999), eps=1e-3, weight_decay=0.3)
    for entry in logs:
        optimizer.zero_grad()
        (net(data.tensors["x"]) - data.tensors["y"]).square().mean().backward()
        norm = torch.cat([p.grad.reshape(-1) for p in net.parameters()]).norm()
        assert entry.grad_norm == pytest.approx(norm.item(), rel=1e-9) and entry.grad_norm > 1.0
        optimizer.step()
    close(objective.net_, net)


def test_a_loss_scale_changes_nothing_but_the_overflowing_steps(tmp_path):
    """The path of float16: a scaled backward pass, unscaled before clipping; an overflow only lowers the scale."""
    runs, small = {}, toys.make_data()
    data = TensorData({"x": small.tensors["x"], "y": 50 * small.tensors["y"]})
    for name, scale in (("plain", None), ("scaled", 2.0**10), ("overflowing", 2.0**127)):
        objective = toys.Regression(noise=0.0)
        trainer = Trainer(objective, toys.config(tmp_path / name, max_skipped_steps=0, batch_size=10), data)
        if scale is not None:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        runs[name] = (list(trainer.train()), toys.tensors(objective.net_), trainer)
    for key, value in runs["plain"][1].items():
        torch.testing.assert_close(runs["scaled"][1][key], value, rtol=1e-5, atol=1e-6)
    logs, _, trainer = runs["overflowing"]
    skipped = [entry.skipped for entry in logs]
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)
    assert trainer.accelerator.scaler.get_scale() == 2.0 ** (127 - sum(skipped))
    again = toys.config(
        tmp_path / "overflowing", max_steps=13, resume_from_checkpoint="latest", max_skipped_steps=0, batch_size=10
    )
    resumed = Trainer(toys.Regression(noise=0.0), again, data)
    resumed.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert [entry.skipped for entry in resumed.train()] == [False]
    assert resumed.accelerator.scaler.get_scale() == trainer.accelerator.scaler.get_scale()


def test_logs_are_one_row_a_logged_step_with_means_over_the_window(tmp_path):
    objective = toys.Regression(bad_steps=(4,))
    settings = toys.config(tmp_path, logging_steps=3, gradient_accumulation_steps=2, max_steps=11)
    logs = list(Trainer(objective, settings, toys.make_data()).train())
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 5, 6, 9, 11]  # every third, the skipped one, the last
    for row in rows:
        entry = logs[row["step"] - 1]
        assert row["loss"] == (None if entry.skipped else entry.loss)
        assert row["turn"] == "net" and row["phase"] == "train" and row["epoch"] == (row["step"] - 1) // 3
        if not entry.skipped:
            assert row["error"] == entry.logs["error"]
    assert rows[1]["skipped"] and len(rows[1]["sample_ids"]) == 4


def test_memory_does_not_grow_with_steps(tmp_path):
    trainer = Trainer(
        toys.Regression(),
        toys.config(tmp_path, max_steps=400, logging_steps=50, save_steps=10_000, ema_decay=0.9),
        toys.make_data(),
    )
    trainer.objective.seen = Forgetful()
    counts = []
    for entry in trainer.train():
        if entry.step in (100, 390):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 100


class Forgetful(list):
    def append(self, value: object) -> None:
        pass


def test_the_world_must_have_the_size_that_was_asked_for(monkeypatch):
    config = toys.config("unused")
    for name in ("WORLD_SIZE", "MASTER_PORT", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    check_world_size(config, 1)
    with pytest.raises(ConfigError, match="num_processes: 2 asked for, 1 running.*cpu2.yaml"):
        check_world_size(config.model_copy(update={"num_processes": 2}), 1)
    # what accelerate launch --cpu --num_processes 2 leaves behind
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ConfigError, match="asked for several processes and started 1"):
        check_world_size(config, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2"):
        check_world_size(config, 1)
    check_world_size(config, 2)


def test_batches_and_windows_larger_than_the_data_are_refused_up_front(tmp_path):
    for changes, message in [
        ({"batch_size": 11}, "batch_size 11"),
        ({"gradient_accumulation_steps": 6}, "5 micro-batches"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Trainer(toys.Regression(), toys.config(tmp_path, **changes), toys.make_data(10))
    with pytest.raises(ConfigError, match="device: cuda"):
        if torch.cuda.is_available():
            pytest.skip("has CUDA")
        Trainer(toys.Regression(), toys.config(tmp_path, device="cuda"), toys.make_data(10))


def test_trackers_are_extras(tmp_path, monkeypatch):
    import sys

    from genkit.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"genkit-diffusion\[track\]"):
        list(Trainer(toys.Regression(), toys.config(tmp_path / "w", report_to="wandb"), toys.make_data()).train())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"genkit-diffusion\[track\]"):
        list(Trainer(toys.Regression(), toys.config(tmp_path / "t", report_to="tensorboard"), toys.make_data()).train())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.loss, "gave a Tensor, expected LossOutput"),
        (lambda o: LossOutput(0.5), r"gave a LossOutput\(float\), expected"),
        (lambda o: LossOutput(o.loss, [o.loss]), "gave a list as logs, expected a dict"),
        (lambda o: LossOutput(o.loss, {"a": o.loss, "b": torch.ones(1)}), r"logged 'b' as a tensor of shape \(1,\)"),
        (lambda o: LossOutput(o.loss, {"a": "high"}), "logged 'a' as a str"),
        (lambda o: LossOutput(o.loss, {"a": None}), "logged 'a' as a NoneType"),
    ],
)
def test_a_loss_of_another_kind_is_explained(tmp_path, change, message):
    class Changed(toys.Regression):
        def loss(self, *args, **kwargs):
            return change(super().loss(*args, **kwargs))

    with pytest.raises(GenkitError, match=message):
        list(Trainer(Changed(), toys.config(tmp_path), toys.make_data()).train())


def test_phases_need_steps_and_names_of_their_own(tmp_path):
    for steps in (0, -1):
        with pytest.raises(ConfigError, match=f"phase 'a' has {steps} steps; give at least 1"):
            Phase("a", steps)

    class Twice(toys.Regression):
        def phases(self):
            return Phase("a", 2), Phase("b", 2), Phase("a", 3)

    with pytest.raises(ConfigError, match=r"\['a'\] are there twice"):
        Trainer(Twice(), toys.config(tmp_path), toys.make_data())
