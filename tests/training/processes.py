"""Forked processes whose imports are done: several ranks over gloo, or one child that a test kills."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

_CONTEXT = multiprocessing.get_context("fork")


def _fresh_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def _child(function: Callable[..., Any], arguments: tuple[Any, ...], env: dict[str, str], quiet: bool) -> None:
    os.environ.update(env)
    _fresh_accelerate()
    code = 0
    try:
        function(*arguments)
    except BaseException:
        if not quiet:
            traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no pytest shutdown in a copy of the pytest process


def start(function: Callable[..., Any], *arguments: Any, quiet: bool = False) -> multiprocessing.Process:
    """One child process."""
    process = _CONTEXT.Process(target=_child, args=(function, arguments, {}, quiet))
    process.start()
    return process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(function: Callable[..., Any], *arguments: Any, world: int = 2, env: dict[str, str] | None = None) -> None:
    """``function(*arguments)`` on ``world`` ranks; fails when one of them fails or takes more than a minute."""
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    processes = []
    for rank in range(world):
        own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(_CONTEXT.Process(target=_child, args=(function, arguments, own, False)))
        processes[-1].start()
    for process in processes:
        process.join(60)
        if process.exitcode != 0:
            for other in processes:
                other.kill()
    assert [p.exitcode for p in processes] == [0] * world
