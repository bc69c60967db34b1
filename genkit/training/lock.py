"""One run per output folder: two at once would overwrite each other's checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from genkit.errors import ConfigError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: runs are not kept apart there
    fcntl = None

__all__ = ["LOCK", "hold_output_dir"]

log = logging.getLogger("genkit.training")
LOCK = ".lock"


@contextmanager
def hold_output_dir(output_dir: Path) -> Iterator[None]:
    """Holds the existing ``output_dir`` for one run; the kernel lets go when the process ends, however it ends.

    The file stays behind, because removing it would let two later runs lock two different files.

    Raises:
        ConfigError: another run holds the folder.
    """
    if fcntl is None:
        yield
        return
    with (output_dir / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"output_dir {output_dir} is in use by another run that has not ended; wait for it or stop it, or give "
                f"another output_dir"
            ) from error
        except OSError as error:  # some network file systems have no locks
            log.warning("output_dir %s cannot be locked (%s): start no second run in it", output_dir, error)
        yield
