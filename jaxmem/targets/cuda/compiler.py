"""Compiling for a target in worker processes, side by side, with results kept on disk."""

import atexit
import contextlib
import hashlib
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
from typing import ClassVar

from jaxmem.ground.errors import CompileError
from jaxmem.targets.cache import Compiled, cache_folder, read, result_path, write
from jaxmem.targets.cuda.install import Compiler, find_compiler
from jaxmem.targets.cuda.target import CudaTarget

_WORKER = pathlib.Path(__file__).with_name("worker.py")
_NO_TILES = "Couldn't find output tile sizes"
_TRITON = "xla_gpu_enable_triton_gemm"


def compile_module(
    module: bytes,
    target: CudaTarget,
    *,
    options: dict | None = None,
    timeout: float = 3600,
    dump: bool = False,
) -> Compiled:
    """Compiles a lowered module for a GPU that need not be there.

    Runs in a worker process; calls from several threads run side by side, one on each core.
    Results are kept on disk, keyed by module, target, options and version; one that is damaged is
    compiled again.

    Args:
        module: StableHLO as MLIR bytecode, lowered for platform ``cuda``.
        target: the GPU, and how many of them.
        options: XLA flags by name (values of type bool, int, float or str).
        timeout: seconds, after which the worker is killed.
        dump: whether to give XLA's buffer assignment too (`Compiled.dump`).

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
        "options": flags,
    }
    path = _result_path(request, compiler, options)
    kept = read(path)
    if kept is not None and (kept.dump or not dump):
        return kept
    with _slots:
        reply = _ask(compiler, request, dump, timeout, target.name)
        if _NO_TILES in reply.get("error", "") and _TRITON not in (options or {}):
            # Without autotuning XLA takes Triton's first tiling, which odd shapes refuse; on a
            # GPU the tuner would take cuBLAS then.
            flags.append((_TRITON, False))
            reply = _ask(compiler, request, dump, timeout, target.name)
    if "error" in reply:
        raise CompileError(
            f"XLA could not compile the program for {target.name}:\n{reply['error']}"
        )
    compiled = Compiled(reply["stats"], reply["hlo"], reply["dump"])
    write(path, compiled)
    return compiled


def _ask(compiler: Compiler, request: dict, dump: bool, timeout: float, name: str) -> dict:
    """The reply of a worker to a request, with a folder for the dump if there is to be one."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            about = {**request, "dump": folder if dump else None}
            return _Worker.borrow(compiler).request(about, timeout, name)
    except OSError as error:
        raise CompileError(
            f"Compiling for {name} needs a process of its own and a temporary folder, and could "
            f"not have them: {error}. Free memory and disk, or set TMPDIR to another folder."
        ) from error


def _result_path(request: dict, compiler: Compiler, options: dict | None) -> pathlib.Path:
    key = hashlib.sha256(request["module"])
    rest = [
        request["config"],
        request["count"],
        sorted((options or {}).items()),
        [compiler.version, compiler.cuda, os.environ.get("XLA_FLAGS", "")],
    ]
    key.update(repr(rest).encode())
    return result_path(cache_folder() / "compiled", key.hexdigest()[:40])


# ---- workers

_slots = threading.BoundedSemaphore(os.cpu_count() or 1)


class _Worker:
    """One compiling process and the pipe to it."""

    _idle: ClassVar[list["_Worker"]] = []
    _lock = threading.Lock()

    def __init__(self, compiler: Compiler):
        self.compiler = compiler
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        environment = dict(os.environ, JAX_PLATFORMS="cpu")
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        if compiler.toolkit:
            path = environment.get("PATH", os.defpath)
            environment["PATH"] = os.pathsep.join([str(compiler.toolkit / "bin"), path])
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", str(_WORKER)),
                *(compiler.plugin, compiler.packages, str(os.getpid())),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the user's process, which ends its workers
        )

    @classmethod
    def borrow(cls, compiler: Compiler) -> "_Worker":
        with cls._lock:
            for worker in list(cls._idle):
                dead = worker.process.poll() is not None
                if dead or worker.compiler == compiler:
                    cls._idle.remove(worker)
                    if not dead:
                        return worker
                    worker.close()
        return cls(compiler)

    def request(self, request: dict, timeout: float, name: str) -> dict:
        """Sends a request and waits; the worker goes back to the idle ones if it lives."""
        timed_out = threading.Event()

        def stop():
            timed_out.set()
            self.process.kill()

        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        timer = threading.Timer(timeout, stop)
        timer.start()
        try:
            pickle.dump(request, stdin)
            stdin.flush()
            reply = pickle.load(stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            code = self.process.wait()
            tail = "\n".join(self._last_lines())
            self.close()
            if timed_out.is_set():
                raise CompileError(
                    f"XLA did not finish compiling for {name} within {timeout:g} s and was "
                    f"stopped. Pass a longer timeout=. Its last lines:\n{tail}"
                ) from error
            raise CompileError(
                f"XLA died (exit code {code}) while compiling for {name}; this process is "
                f"unharmed. Its last lines:\n{tail}"
            ) from error
        except BaseException:  # an interrupt leaves the pipe in an unknown state
            self.close()
            raise
        finally:
            timer.cancel()
        with self._lock:
            self._idle.append(self)
        return reply

    def _last_lines(self, count: int = 12) -> list[str]:
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - 8192))
        return self.log.read().decode(errors="replace").splitlines()[-count:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


@atexit.register
def _close_idle() -> None:
    while _Worker._idle:
        _Worker._idle.pop().close()


def _forget() -> None:
    """In a fork: the workers are its parent's, and so are the slots and the lock that the parent's
    threads held, which nobody would give back here."""
    global _slots
    _slots = threading.BoundedSemaphore(os.cpu_count() or 1)
    _Worker._lock = threading.Lock()
    _Worker._idle.clear()


os.register_at_fork(after_in_child=_forget)
