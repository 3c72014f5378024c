"""Compiling for a GPU that need not be there, with results kept on disk."""

import hashlib
import os
import pathlib

import jaxlib

from jaxmem.ground.errors import CompileError
from jaxmem.ground.version import __version__
from jaxmem.targets.cache import Compiled, cache_folder, read, result_path, write
from jaxmem.targets.cuda.install import Compiler, find_compiler
from jaxmem.targets.cuda.target import CudaTarget
from jaxmem.targets.workers import Command, ask

_IN_WORKER = pathlib.Path(__file__).with_name("in_worker.py")
_NO_TILES = "Couldn't find output tile sizes"
_TRITON = "xla_gpu_enable_triton_gemm"


def compile_module(
    module: bytes,
    target: CudaTarget,
    *,
    options: dict | None = None,
    timeout: float = 3600,
    full: bool = False,
    hold: bool = False,
) -> Compiled:
    """Compiles a lowered module for a GPU that need not be there.

    Runs in a worker process; calls from several threads run side by side, one on each core.
    Results are kept on disk, keyed by module, target, options and versions (XLA's and jaxmem's);
    one that is damaged is compiled again.

    Args:
        module: StableHLO as MLIR bytecode, lowered for platform ``cuda``.
        target: the GPU, and how many of them.
        options: XLA flags by name (values of type bool, int, float or str).
        timeout: seconds, after which the worker is killed.
        full: whether to generate the code too, and not to stop where the buffers are assigned.
        hold: whether that may be asked for next.

    Raises:
        CompileError: XLA refused the program, ran out of time, or died; with its last lines.
        JaxmemError: the compiler is not installed.
    """
    compiler = find_compiler(target.cuda)
    flags: list[tuple[str, object]] = [("xla_gpu_autotune_level", "0")]
    if compiler.toolkit:
        flags.append(("xla_gpu_cuda_data_dir", str(compiler.toolkit)))
    flags += sorted((options or {}).items())
    request = {
        "module": module,
        "config": target.config(),
        "count": target.count,
        "flags": flags,
    }
    path = _result_path(request, compiler, options)
    kept = read(path)
    if kept is not None and (kept.stats or not full):
        return kept
    reply = ask(worker_command(compiler), request, full, timeout, target.name, hold)
    if _NO_TILES in reply.get("error", "") and _TRITON not in (options or {}):
        # Without autotuning XLA takes Triton's first tiling, which odd shapes refuse; on a GPU the
        # tuner would take cuBLAS then.
        flags.append((_TRITON, False))
        reply = ask(worker_command(compiler), request, full, timeout, target.name, hold)
    if "error" in reply:
        raise CompileError(
            f"XLA could not compile the program for {target.name}:\n{reply['error']}"
        )
    compiled = Compiled(reply["texts"], reply["stats"])
    write(path, compiled)
    return compiled


def worker_command(compiler: Compiler) -> Command:
    """How a worker with that compiler is started."""
    path = (str(compiler.toolkit / "bin"),) if compiler.toolkit else ()
    return Command(_IN_WORKER, (str(compiler.plugin), str(compiler.packages)), path)


def _result_path(request: dict, compiler: Compiler, options: dict | None) -> pathlib.Path:
    key = hashlib.sha256(request["module"])
    rest = [
        request["config"],
        request["count"],
        sorted((options or {}).items()),
        [compiler.version, compiler.cuda, jaxlib.__version__, os.environ.get("XLA_FLAGS", "")],
        __version__,
    ]
    key.update(repr(rest).encode())
    return result_path(cache_folder() / "compiled", key.hexdigest()[:40])
