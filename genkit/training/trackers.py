"""Where a run's numbers go: ``log.jsonl`` always, tensorboard and wandb on request; and the stop signal."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from genkit.errors import MissingExtraError
from genkit.serialization import canonical_hash
from genkit.training.config import TrainerConfig

__all__ = ["JsonLines", "StopSignal", "Tracker", "make_trackers"]


class Tracker(Protocol):
    """Takes one flat row of numbers and words per logged step."""

    def log(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line. Rows after ``resumed_step`` (of a run that died after its last checkpoint) and a last
    line that was cut off are dropped first, so that every step has one row."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        if path.exists():
            _rewrite(path, [row for row in read_rows(path) if row["step"] <= resumed_step])
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({k: _finite(v) for k, v in row.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a log file; lines that are not whole are left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    draft = path.with_name(f".tmp-{path.name}")
    draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(draft, path)


def _finite(value: Any) -> Any:
    """JSON has no NaN; null stands for it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _TensorBoard:
    def __init__(self, folder: Path, resumed_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("report_to: tensorboard needs pip install 'genkit-diffusion[track]'") from error
        # torch's writer is untyped
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)  # type: ignore[no-untyped-call]

    def log(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                self._writer.add_scalar(key, value, row["step"])  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class _WandB:
    def __init__(self, config: TrainerConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("report_to: wandb needs pip install 'genkit-diffusion[track]'") from error
        folder = Path(config.output_dir).resolve()
        same_run = canonical_hash(str(folder))[:16]  # a resumed run goes on in the same place
        self._run = wandb.init(
            project="genkit", name=folder.name, id=same_run, resume="allow", dir=folder, config=config.resolved()
        )

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def close(self) -> None:
        self._run.finish()


def make_trackers(config: TrainerConfig, resumed_step: int) -> list[Tracker]:
    """The trackers of the main process.

    Raises:
        MissingExtraError: a tracker whose package is not installed.
    """
    folder = Path(config.output_dir)
    trackers: list[Tracker] = []
    for name in config.trackers():
        trackers.append(_TensorBoard(folder / "tensorboard", resumed_step) if name == "tensorboard" else _WandB(config))
    return [JsonLines(folder / "log.jsonl", resumed_step), *trackers]


class StopSignal:
    """Notes a SIGTERM so that the loop can save at the next step's end; the previous handler comes back afterwards."""

    def __init__(self) -> None:
        self.received = False
        self._previous: Any = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __exit__(self, *exc: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
