"""One loop for every objective.

A step is one optimiser update of one network: all micro-batches of a window are read and weighed, each contributes
its part of the mean over all units of all processes, and the gradient is checked before anything moves. Whatever
depends on time (order, noise, dropout, learning rate, turn) is a function of the step, so a checkpoint needs no
random state and a resumed run repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from genkit.errors import CheckpointError, ConfigError
from genkit.serialization import save_json
from genkit.training import checkpoint as folders
from genkit.training.accelerator import decide_on_main, make_accelerator, on_every_process
from genkit.training.batches import BatchReader, TrainingData
from genkit.training.build import build_networks, release_networks
from genkit.training.config import TrainerConfig
from genkit.training.config_files import changed_keys
from genkit.training.lock import hold_output_dir
from genkit.training.networks import TrainedNetwork, averaged_weights, set_turn
from genkit.training.objective import Objective, Phase, check_phases
from genkit.training.optim import learning_rate
from genkit.training.order import DataOrder
from genkit.training.sharding import is_sharded, save_on_all, shard_suffix
from genkit.training.step_log import StepLog, divergence
from genkit.training.stepping import Stepper, StepResult
from genkit.training.trackers import StopSignal, Tracker, make_trackers

__all__ = ["Trainer"]

log = logging.getLogger("genkit.training")
SavePipeline = Callable[[Path, Mapping[str, nn.Module]], None]


class Trainer:
    """Trains an objective's networks; ``train()`` is a generator that yields after every step.

    Args:
        objective: losses, networks, phases and turns.
        config: validated configuration.
        data: map-style training data (:class:`genkit.training.batches.TrainingData`).
        save_pipeline: called on the main process at the end with ``output_dir/pipeline`` and the networks (moving
            averages where they are kept).

    Raises:
        ConfigError: empty data, a batch or window larger than the data, settings that this machine cannot do.
    """

    def __init__(
        self, objective: Objective, config: TrainerConfig, data: TrainingData, save_pipeline: SavePipeline | None = None
    ) -> None:
        self.objective, self.config, self.save_pipeline = objective, config, save_pipeline
        self.output_dir = Path(config.output_dir)
        self.phases = check_phases(objective.phases()) or (Phase("train", config.max_steps),)
        self.phase_ends = list(itertools.accumulate(phase.steps for phase in self.phases))
        self.last_step = min(config.max_steps, self.phase_ends[-1])
        self.reader = BatchReader(data)
        self.accelerator = make_accelerator(config)
        world = self.accelerator.num_processes
        self.order = DataOrder(config.seed, len(data), config.batch_size, config.gradient_accumulation_steps, world)
        self.stepper = Stepper(self.accelerator, objective, config, self.reader, self.order)
        self.networks: dict[str, TrainedNetwork] = {}
        self.step, self.phase_index, self.skipped, self.skipped_in_a_row = 0, -1, 0, 0
        self.turn_counts: dict[str, int] = {}
        self.stopped = False
        self._turn: str | None = None
        self._saved_step = -1
        self._data_hash: str | None = None
        self._given_frozen = set(objective.frozen())

    # --- the loop ---------------------------------------------------------------------------------------------------

    def train(self) -> Iterator[StepLog]:
        """Runs to ``max_steps``, or to the end of the step in which a SIGTERM arrives; a step's checkpoint is on disk
        before the step is yielded.

        Raises:
            ConfigError: an output folder in use, or changed settings or data on resume.
            CheckpointError: a damaged or foreign checkpoint, or a save that failed (older checkpoints are unchanged).
            DivergenceError: more than ``max_skipped_steps`` non-finite steps in a row.
        """
        with ExitStack() as stack:
            stack.callback(lambda: release_networks(self.objective, self.networks))
            self._start(stack)
            trackers = make_trackers(self.config, self.step) if self.accelerator.is_main_process else []
            for tracker in trackers:
                stack.callback(tracker.close)
            bar = stack.enter_context(self._bar())
            stop = stack.enter_context(StopSignal())
            while self.step < self.last_step and not self.stopped:
                self._enter_phase(self._phase_of(self.step))
                entry = self._run_step(stop)
                if self.skipped_in_a_row > self.config.max_skipped_steps:
                    self._report(entry, trackers)
                    raise divergence(entry, self.config.max_skipped_steps, folders.checkpoints(self.output_dir))
                if self.stopped or self.step % self.config.save_steps == 0 or self.step == self.last_step:
                    self._save()
                self._report(entry, trackers)
                bar.update()
                bar.set_postfix_str(f"loss {entry.loss:.4g}", refresh=False)
                yield entry
            self._finish()

    def _bar(self) -> Any:
        """On the main process's terminal only."""
        hidden = None if self.config.progress and self.accelerator.is_main_process else True
        return tqdm(total=self.last_step, initial=self.step, disable=hidden, unit="step", desc="train")

    def _report(self, entry: StepLog, trackers: list[Tracker]) -> None:
        if entry.step % self.config.logging_steps and not entry.skipped and entry.step != self.last_step:
            return
        row = asdict(entry)
        row |= row.pop("logs")
        if not row["skipped"]:
            del row["sample_ids"]
        for tracker in trackers:
            tracker.log(row | {"epoch": self.order.place(entry.step - 1)[0]})

    def _finish(self) -> None:
        if self.step < self.last_step:
            log.info(
                "SIGTERM: checkpoint-%d is saved, stopping; continue with resume_from_checkpoint=latest", self.step
            )
        elif self.save_pipeline is not None:
            save, target = self.save_pipeline, self.output_dir / "pipeline"
            with averaged_weights(self.networks) as modules:
                decide_on_main(self.accelerator, lambda: save(target, modules))

    # --- phases and turns -------------------------------------------------------------------------------------------

    def _phase_of(self, step: int) -> int:
        return next(i for i, end in enumerate(self.phase_ends) if step < end)

    def _enter_phase(self, index: int) -> None:
        """Starts all phases up to ``index``, then makes networks' optimisers anew."""
        if index == self.phase_index:
            return
        set_turn(self.networks, None)
        for phase in self.phases[self.phase_index + 1 : index + 1]:
            self.objective.start_phase(phase.name)
        self.phase_index, self._turn = index, None
        self.networks = build_networks(self.accelerator, self.objective, self.config, self.networks)

    def _take_turn(self, step: int) -> TrainedNetwork:
        turn = self.objective.turn(step)
        if turn not in self.networks:
            raise ConfigError(f"turn({step}) gave {turn!r}, but the networks are {sorted(self.networks)}")
        network = self.networks[turn]
        if turn != self._turn:
            set_turn(self.networks, turn)
            self.objective.bind({turn: network.wrapped})
            self._turn = turn
        return network

    def _rate(self, network: TrainedNetwork) -> float:
        phase = self.phases[self.phase_index]
        inside = self.step - (self.phase_ends[self.phase_index] - phase.steps)
        c = self.config
        return learning_rate(
            phase.learning_rate_factor * network.base_rate,
            inside,
            phase.steps,
            scheduler=c.lr_scheduler,
            warmup_steps=c.warmup_steps,
        )

    # --- one step ---------------------------------------------------------------------------------------------------

    def _run_step(self, stop: StopSignal) -> StepLog:
        started = time.perf_counter()
        network = self._take_turn(self.step)
        rate = self._rate(network)
        result = self.stepper.run(network, self.step, rate, stop.received)
        self.step += 1
        self.stopped = result.stop
        self.turn_counts[network.name] = self.turn_counts.get(network.name, 0) + 1
        if result.finite:
            self.skipped_in_a_row = 0
        else:
            self._count_skip(result)
        return StepLog(
            step=self.step,
            phase=self.phases[self.phase_index].name,
            turn=network.name,
            loss=result.loss,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            seconds=time.perf_counter() - started,
            logs=result.logs,
            skipped=not result.finite,
            sample_ids=result.sample_ids,
        )

    def _count_skip(self, result: StepResult) -> None:
        self.skipped += 1
        if result.overflow:  # the float16 loss scale has just been lowered
            return
        self.skipped_in_a_row += 1
        log.warning(
            "step %d: loss %s, gradient norm %s on the samples %s; the step is skipped (%d in a row)",
            self.step,
            result.loss,
            result.grad_norm,
            list(result.sample_ids[:20]),
            self.skipped_in_a_row,
        )

    # --- saving and resuming ----------------------------------------------------------------------------------------

    def _made_frozen(self) -> dict[str, nn.Module]:
        return {n: m for n, m in self.objective.frozen().items() if n not in self._given_frozen}

    def _state(self) -> dict[str, Any]:
        epoch, position = self.order.place(self.step)
        scaler = self.accelerator.scaler
        return {
            "step": self.step,
            "epoch": epoch,
            "window_in_epoch": position,
            "phase": self.phases[self.phase_index].name,
            "phase_index": self.phase_index,
            "turn_counts": self.turn_counts,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "config_hash": self.config.config_hash(),
            "frozen_hashes": {name: network.frozen_hash() for name, network in self.networks.items()},
            "scaler": None if scaler is None else scaler.state_dict(),
            **self._setup(),
        }

    def _setup(self) -> dict[str, Any]:
        world, sharded = self.accelerator.num_processes, is_sharded(self.accelerator)
        return {"samples": self.order.size, "data": self._data_hash, "world_size": world, "sharded": sharded}

    def _save(self) -> None:
        if self._saved_step == self.step:
            return
        folder = self.output_dir / f"checkpoint-{self.step}"
        groups = on_every_process(self.accelerator, lambda: folders.collect(self.networks, self._made_frozen()))
        save_on_all(self.accelerator, folder, groups, self._state(), self.config.resolved())
        decide_on_main(
            self.accelerator, lambda: folders.prune_checkpoints(self.output_dir, self.config.save_total_limit)
        )
        self._saved_step = self.step

    def _start(self, stack: ExitStack) -> None:
        resume = self.config.resume_from_checkpoint

        def choose() -> str | None:
            folders.make_output_dir(self.output_dir)
            stack.enter_context(hold_output_dir(self.output_dir))
            folders.prepare_output_dir(self.output_dir, resume)
            found = folders.choose_checkpoint(self.output_dir, resume)
            return None if found is None else str(found)

        chosen = decide_on_main(self.accelerator, choose)
        self._data_hash = on_every_process(self.accelerator, self.reader.fingerprint)
        if chosen is not None:
            data = on_every_process(self.accelerator, lambda: self._read(Path(chosen)))
            self._resume(data, Path(chosen))
        resolved = self.config.resolved()
        decide_on_main(self.accelerator, lambda: save_json(self.output_dir / "config.json", resolved))

    def _read(self, folder: Path) -> folders.CheckpointData:
        """A checkpoint that this run may continue."""
        data = folders.read_checkpoint(folder, shard_suffix(self.accelerator))
        state = data.state
        changed = changed_keys(data.config, self.config) + folders.changed_setup(state, self._setup())
        if changed:
            raise ConfigError(
                f"{folder} cannot be continued, because these settings changed:\n  " + "\n  ".join(changed) + "\n"
                "Set them back, or start a new run in another output_dir."
            )
        steps = data.config["max_steps"]
        if self.config.lr_scheduler != "constant" and steps != self.config.max_steps:
            log.warning("max_steps was %d and is %d: the rest of the decay differs", steps, self.config.max_steps)
        if not 0 <= state["phase_index"] < len(self.phases):
            raise CheckpointError(f"{folder}: saved in phase {state['phase_index']}, but there are {len(self.phases)}")
        return data

    def _resume(self, data: folders.CheckpointData, folder: Path) -> None:
        state = data.state
        self._enter_phase(state["phase_index"])
        folders.apply_checkpoint(data, self.networks, self._made_frozen())
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step = self._saved_step = state["step"]
        self.skipped, self.skipped_in_a_row = state["skipped"], state["skipped_in_a_row"]
        self.turn_counts = dict(state["turn_counts"])
        log.info("resumed from %s (step %d)", folder, self.step)
        if self.step >= self.last_step:
            log.info("max_steps=%d is already reached, there is nothing to train", self.last_step)
