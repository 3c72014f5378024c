"""A compilation for a target that need not be there, with its result kept on disk."""

import hashlib
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jaxlib

from jaxmem.ground.errors import CompileError
from jaxmem.ground.progress import expect, slow
from jaxmem.ground.version import __version__
from jaxmem.targets import durations
from jaxmem.targets.cache import CachedProgram, cache_folder, read, result_path, write
from jaxmem.targets.workers import Command, ask

Request = dict[str, Any]

# Seconds. Chosen: networks of the benchmarks take up to 20, and who waits longer wonders.
_LONG = 60.0


def compile_in_worker(
    command: Command,
    request: Request,
    target: str,
    *,
    key: Sequence[Any],
    timeout: float,
    full: bool,
    hold: bool,
    again: Callable[[Request, Mapping[str, Any]], Request | None] = lambda *_: None,
) -> CachedProgram:
    """Compiles in a worker process; calls from several threads run side by side, one on each core.
    A result that was kept is taken, one that is damaged is compiled again.

    Args:
        command: starts the worker.
        request: what its ``compile`` takes; ``module`` is the program.
        target: the name of the target.
        key: by what, beside the module and the versions of jaxlib and jaxmem, results differ.
        timeout: seconds, after which the worker is killed.
        full: whether to generate the code too, and not to stop where the buffers are assigned.
        hold: whether that may be asked for next.
        again: the request to try after a request and its reply; None: none.

    Raises:
        CompileError: XLA refused the program, ran out of time, or died; with its last lines.
    """
    path = _result_path(request["module"], key)
    kept = read(path)
    if kept is not None and (kept.stats or not full):
        return kept
    size, began = len(request["module"]), time.monotonic()
    expect(durations.expected(target, size))
    told = f"jaxmem: XLA compiles for {target}, longer than {_LONG:g} s; at most {timeout:g} s"
    with slow(_LONG, told):
        reply = ask(command, request, full, timeout, target, hold)
        while other := again(request, reply):
            request = other
            reply = ask(command, request, full, timeout, target, hold)
    if "error" in reply:
        raise CompileError(f"XLA could not compile the program for {target}:\n{reply['error']}")
    compiled = CachedProgram(reply["texts"], reply["stats"])
    write(path, compiled)
    if not full:  # which goes on from there, and takes longer
        durations.remember(target, size, time.monotonic() - began)
    return compiled


def _result_path(module: bytes, key: Sequence[Any]) -> pathlib.Path:
    hashed = hashlib.sha256(module)
    environment = os.environ.get("XLA_FLAGS", "")
    hashed.update(repr([*key, jaxlib.__version__, environment, __version__]).encode())
    return result_path(cache_folder() / "compiled", hashed.hexdigest()[:40])
