"""Compiling for a TPU that need not be there."""

import os
import pathlib

from jaxmem.targets.cache import CachedProgram
from jaxmem.targets.compilation import compile_in_worker
from jaxmem.targets.tpu.install import find_compiler
from jaxmem.targets.tpu.target import TpuTarget
from jaxmem.targets.workers import Command

_IN_WORKER = pathlib.Path(__file__).with_name("in_worker.py")
# A step that is too large is compiled all the same: how much too large is what is asked.
_FLAGS = {"xla_tpu_no_crash_on_oom": True}


def compile_module(
    module: bytes,
    target: TpuTarget,
    *,
    options: dict | None = None,
    timeout: float = 3600,
    full: bool = False,
    hold: bool = False,
) -> CachedProgram:
    """Compiles a lowered module for TPUs that need not be there.

    Args:
        module: StableHLO as MLIR bytecode, lowered for platform ``tpu``.
        target: the slice.
        options: XLA flags by name (values of type bool, int, float or str).
        timeout, full, hold: those of `compile_in_worker`.

    Raises:
        CompileError: XLA refused the program, ran out of time, or died; with its last lines.
        JaxmemError: the compiler is not installed.
    """
    plugin = find_compiler()
    flags = _FLAGS | (options or {})
    request = {
        "module": module,
        "topology": _topology(target),
        "count": target.count,
        "flags": sorted(flags.items()),
    }
    environment = os.environ.get("LIBTPU_INIT_ARGS", "")
    return compile_in_worker(
        worker_command(plugin),
        request,
        target.name,
        key=[request["topology"], target.count, request["flags"], str(plugin), environment],
        timeout=timeout,
        full=full,
        hold=hold,
    )


def worker_command(plugin: pathlib.Path) -> Command:
    """How a worker with that libtpu is started."""
    return Command(_IN_WORKER, (str(plugin),))


def _topology(target: TpuTarget) -> dict:
    """The slice as libtpu names it."""
    options: dict = {"topology_name": f"{target.name}:{target.topology}"}
    if target.is_single:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if target.name == "v4":
        options["chip_config_name"] = "megacore"
    return options
