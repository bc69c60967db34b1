"""Training from a configuration file.

python -m genkit.train CONFIG [key=value ...]
accelerate launch --config_file configs/accelerate/cpu2.yaml -m genkit.train CONFIG [key=value ...]
genkit train CONFIG [key=value ...]
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genkit.errors import GenkitError

__all__ = ["add_arguments", "main", "train"]

_DESCRIPTION = "Train a method from a YAML configuration; saves checkpoints, log.jsonl and the final pipeline."
_EPILOG = """examples:
  python -m genkit.train configs/heavy_tailed_flow/returns.yaml output_dir=out/run max_steps=200
  python -m genkit.train configs/heavy_tailed_flow/returns.yaml output_dir=out/run resume_from_checkpoint=latest
  accelerate launch --config_file configs/accelerate/cpu2.yaml -m genkit.train CONFIG num_processes=2

Values are YAML scalars (learning_rate=1e-3, ema_decay=null); dotted keys reach into parts (clock.alpha=1.7).
A SIGTERM saves a checkpoint and exits with 0. Exit codes: 0 done or stopped, 1 an unexpected error, 2 wrong
usage or an error that the message explains, 130 interrupted.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of training, also used by ``genkit train``."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file, e.g. configs/heavy_tailed_flow/returns.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings in place of those in the file")


def train(config_path: str, overrides: Sequence[str] = ()) -> None:
    """Trains what a configuration describes, to its end.

    Raises:
        GenkitError: a configuration, data, checkpoint or training error; nothing already saved is lost.
    """
    from genkit.registry import method_module
    from genkit.training.config_files import load_config
    from genkit.training.trainer import Trainer

    config: Any = load_config(config_path, overrides)
    recipe = method_module(config.method, "config").build(config)
    trainer = Trainer(recipe.objective, config, recipe.data, recipe.save_pipeline)
    try:
        for _ in trainer.train():
            pass
    except KeyboardInterrupt:
        logging.getLogger("genkit.training").info("interrupted: %s", _what_is_kept(trainer.output_dir))
        raise
    if trainer.step >= trainer.last_step:
        logging.getLogger("genkit.training").info("done: %d steps, results in %s", trainer.step, config.output_dir)


def _what_is_kept(output_dir: Path) -> str:
    from genkit.training.checkpoint import checkpoints

    saved = checkpoints(output_dir)
    if not saved:
        return f"{output_dir} has no checkpoint yet, so nothing of this run is kept"
    return f"{saved[0][1]} is kept; continue with resume_from_checkpoint=latest"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m genkit.train",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    options = parser.parse_args(argv)
    _show_messages()
    try:
        train(options.config, options.overrides)
    except (GenkitError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        _leave_process_group()
    return 0


class _Messages(logging.StreamHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """What :func:`_show_messages` puts on the logger, so that the next call can tell it from a user's own handler."""


def _show_messages() -> None:
    """genkit's own messages go to stderr: everything from the main process, warnings from the others."""
    logger = logging.getLogger("genkit")
    for old in [h for h in logger.handlers if isinstance(h, _Messages)]:
        logger.removeHandler(old)  # it holds the stderr of an earlier call, which may be closed by now
    handler = _Messages()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


def _leave_process_group() -> None:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
