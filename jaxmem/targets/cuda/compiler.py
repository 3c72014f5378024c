"""Compiling for a GPU that need not be there."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jaxmem.targets.cache import CachedProgram
from jaxmem.targets.compilation import Request, compile_in_worker
from jaxmem.targets.cuda.install import Compiler, find_compiler
from jaxmem.targets.cuda.target import CudaTarget
from jaxmem.targets.workers import Command

_IN_WORKER = pathlib.Path(__file__).with_name("in_worker.py")
_NO_TILES = "Couldn't find output tile sizes"
_REFUSED = re.compile(_NO_TILES + r" .*?= \w+\[([\d,]+)\]\S* dot\(")
# Chosen: transformers of odd lengths need one or two. Each is one more compilation, as far as to
# where kernels are cut into tiles. At half and at twice tests/test_matmuls_apart.py passes.
_MOST_APART = 6
_TRITON = "xla_gpu_enable_triton_gemm"


def compile_module(
    module: bytes,
    target: CudaTarget,
    *,
    options: dict | None = None,
    timeout: float = 3600,
    full: bool = False,
    hold: bool = False,
) -> CachedProgram:
    """Compiles a lowered module for a GPU that need not be there.

    Args:
        module: StableHLO as MLIR bytecode, lowered for platform ``cuda``.
        target: the GPU, and how many of them.
        options: XLA flags by name (values of type bool, int, float or str).
        timeout, full, hold: those of `compile_in_worker`.

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

    def again(asked: Mapping[str, Any], reply: Mapping[str, Any]) -> Request | None:
        """Without autotuning XLA takes Triton's first tiling, which odd shapes refuse; on a GPU the
        tuner would take cuBLAS for such a matmul. One after the other is kept apart
        (`matmuls_apart`), and where that does not help Triton is off."""
        error, apart = reply.get("error"), asked.get("apart", ())
        if error is None or _TRITON in dict(asked["flags"]):
            return None
        if not apart and _NO_TILES not in error:
            return None
        refused = _REFUSED.search(error)
        shape = tuple(map(int, refused[1].split(","))) if refused else None
        if shape is None or shape in apart or len(apart) == _MOST_APART:
            return request | {"flags": [*flags, (_TRITON, False)]}
        return request | {"apart": (*apart, shape)}

    return compile_in_worker(
        worker_command(compiler),
        request,
        target.name,
        key=[
            request["config"],
            target.count,
            sorted((options or {}).items()),
            [compiler.version, compiler.cuda],
        ],
        timeout=timeout,
        full=full,
        hold=hold,
        again=again,
    )


def worker_command(compiler: Compiler) -> Command:
    """How a worker with that compiler is started."""
    path = (str(compiler.toolkit / "bin"),) if compiler.toolkit else ()
    return Command(_IN_WORKER, (str(compiler.plugin), str(compiler.packages)), path)
