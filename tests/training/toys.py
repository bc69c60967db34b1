"""Small objectives whose training can be written out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from genkit.serialization import save_tensors, write_folder
from genkit.training import LossOutput, Objective, Phase, TensorData, TrainerConfig


def make_data(size: int = 10, dtype: torch.dtype = torch.float32) -> TensorData:
    """A linear regression y = Wx + noise with three inputs and two outputs."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(size, 3, generator=generator, dtype=dtype)
    w = torch.randn(3, 2, generator=generator, dtype=dtype)
    return TensorData({"x": x, "y": x @ w + 0.1 * torch.randn(size, 2, generator=generator, dtype=dtype)})


def make_net(seed: int = 0, width: int = 8, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A two-layer network with weights from ``seed``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 2)).to(dtype)


class Regression(Objective):
    """Mean squared error with keyed input noise; steps in ``bad_steps`` have a NaN loss or gradient."""

    def __init__(
        self,
        net: nn.Module | None = None,
        noise: float = 0.1,
        bad_steps: tuple[int, ...] = (),
        bad: str = "loss",
    ) -> None:
        self.net_ = make_net() if net is None else net
        self.noise, self.bad_steps, self.bad = noise, bad_steps, bad
        self.seen: list[tuple[int, list[int]]] = []

    def networks(self) -> Mapping[str, nn.Module]:
        return {"net": self.net_}

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys) -> LossOutput:
        self.seen.append((step, batch["sample_id"].tolist()))
        x = batch["x"] + self.noise * keys.normal((3,)).to(batch["x"])
        loss = (self.net(turn)(x) - batch["y"]).square().mean()
        if step in self.bad_steps:
            # sqrt at 0 has a finite value and an infinite slope, which 0 · ∞ turns into NaN
            zero = next(self.net_.parameters()).sum() * 0.0
            loss = loss * float("nan") if self.bad == "loss" else loss + zero.sqrt() * 0.0
        return LossOutput(loss, {"error": loss.detach().sqrt()})


class TokenRegression(Regression):
    """Samples of different lengths: the mean runs over units, and ``weight`` says how many there are."""

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        return float(batch["length"].sum())

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys) -> LossOutput:
        error = (self.net(turn)(batch["x"]) - batch["y"]).square().mean(dim=1)
        return LossOutput((error * batch["length"]).sum() / batch["length"].sum())


class TwoNetworks(Objective):
    """Student and auxiliary in turns; each one's loss runs through the other, which must not move in that turn."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.student, self.auxiliary = make_net(1, dtype=dtype), make_net(2, dtype=dtype)

    def networks(self) -> Mapping[str, nn.Module]:
        return {"student": self.student, "auxiliary": self.auxiliary}

    def turn(self, step: int) -> str:
        return ("auxiliary", "student")[step % 2]

    def losses(self, turn: str, student: nn.Module, auxiliary: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        x, y = batch["x"], batch["y"]
        guess = student(x)
        judged = auxiliary(torch.cat((guess, guess[:, :1]), dim=1))
        return (judged - y).square().mean() if turn == "auxiliary" else (judged + guess - y).square().mean()

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys) -> LossOutput:
        return LossOutput(self.losses(turn, self.net("student"), self.net("auxiliary"), batch))


class TwoPhases(Objective):
    """Phase ``fit`` trains a network; phase ``tune`` freezes a copy and trains towards data and copy alike."""

    def __init__(self, steps: tuple[int, int] = (5, 6)) -> None:
        self.net_, self.copy, self.steps = make_net(3), None, steps

    def phases(self) -> tuple[Phase, ...]:
        return Phase("fit", self.steps[0]), Phase("tune", self.steps[1])

    def start_phase(self, name: str) -> None:
        if name == "tune":
            self.copy = make_net(0)
            self.copy.load_state_dict(self.net_.state_dict())

    def networks(self) -> Mapping[str, nn.Module]:
        return {"net": self.net_}

    def frozen(self) -> Mapping[str, nn.Module]:
        return {} if self.copy is None else {"copy": self.copy}

    def loss(self, turn: str, batch: Mapping[str, Tensor], *, step: int, keys) -> LossOutput:
        guess = self.net("net")(batch["x"])
        loss = (guess - batch["y"]).square().mean()
        if self.copy is not None:
            loss = loss + (guess - self.net("copy")(batch["x"])).square().mean()
        return LossOutput(loss)


def config(output_dir: Path | str, **changes) -> TrainerConfig:
    """A quiet configuration of 12 steps on the CPU."""
    values = {
        "output_dir": str(output_dir),
        "max_steps": 12,
        "save_steps": 100,
        "batch_size": 2,
        "learning_rate": 1e-2,
        "progress": False,
    }
    return TrainerConfig(**(values | {"device": "cpu", "logging_steps": 1} | changes))


def save_net(folder: Path, networks: Mapping[str, nn.Module]) -> None:
    """A stand-in for a method's save_pipeline."""

    def write(stage: Path) -> None:
        for name, module in networks.items():
            save_tensors(stage / f"{name}.safetensors", module.state_dict())

    write_folder(folder, write, meta={})


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's state."""
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
