"""Worker processes that compile, as many side by side as the machine has room for."""

import atexit
import contextlib
import dataclasses
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxmem.ground.errors import CompileError
from jaxmem.targets.background import current_job

_PROGRAM = pathlib.Path(__file__).with_name("worker.py")
_IDLE = 50  # seconds: the worker itself ends after 60
_SHUTDOWN_SECONDS = 5  # seconds that a worker is given to end what it runs: it takes milliseconds
# Bytes of a compilation, until one was measured: a ResNet50 step takes 0.42 GB until its buffers
# are assigned, a 24-layer GPT 0.45 GB, and both 0.75 GB in all (jax 0.10.2).
_FIRST_RESIDENT = 2**30


@dataclasses.dataclass(frozen=True)
class Command:
    """How a worker is started.

    Attributes:
        family: the file with what is the compiler's own (see ``worker.py``).
        arguments: for its ``prepare``.
        path: folders that programs are looked for in first.
    """

    family: pathlib.Path
    arguments: tuple[str, ...]
    path: tuple[str, ...] = ()


def ask(
    command: Command,
    request: Mapping[str, Any],
    full: bool,
    timeout: float,
    name: str,
    hold: bool = False,
) -> dict[str, Any]:
    """The reply of a worker to a request, when there is room for one more. With ``hold`` a full
    compilation of the same, asked for next, goes on from there.

    Raises:
        CompileError: it died, took too long, or there is no room on disk or in memory.
    """
    with _slots.taken():
        if (job := current_job()) and job.stopped:
            raise CompileError(f"The compilation for {name} is not wanted any more.")
        try:
            worker = Worker.acquire(command, request if full else None)
            about = {"full": full, "hold": hold, "request": request}
            reply = worker.request(about, timeout, name)
        except OSError as error:
            raise CompileError(
                f"Compiling for {name} needs a process of its own and a temporary folder, and "
                f"could not have them: {error}. Free memory and disk, or set TMPDIR to another "
                "folder."
            ) from error
        _slots.learn(reply.get("resident", 0))
        return reply


def start_one(command: Command) -> None:
    """Starts a worker if there is none: it is ready when the program is traced and lowered."""
    with Worker.lock:
        if not Worker.idle and not _slots.running:
            with contextlib.suppress(OSError):  # said when it is needed
                Worker.idle.append(Worker(command))


class Worker:
    """One compiling process and the pipe to it.

    Attributes:
        held: the request whose compilation it holds; None: it holds none.
        since: when it became idle.
    """

    idle: ClassVar[list["Worker"]] = []
    lock = threading.Lock()

    def __init__(self, command: Command):
        self.command, self.since = command, time.monotonic()
        self.paused: Mapping[str, Any] | None = None
        self.folder = tempfile.mkdtemp()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        environment = dict(os.environ, JAX_PLATFORMS="cpu")
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        path = environment.get("PATH", os.defpath)
        environment["PATH"] = os.pathsep.join([*command.path, path])
        # A fork beside a thread that sleeps, of which Python warns, is what a worker does.
        start = [sys.executable, "-P", "-W", "ignore::DeprecationWarning", str(_PROGRAM)]
        try:
            self.process = subprocess.Popen(
                [*start, str(command.family), str(os.getpid()), self.folder, *command.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the user's process, which ends its workers
            )
        except BaseException:
            self.log.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @classmethod
    def acquire(cls, command: Command, paused: Mapping[str, Any] | None = None) -> "Worker":
        """An idle worker, or a new one: the one that holds a request, else one that holds none, or
        what it holds for the longest time."""
        with cls.lock:
            for worker in list(cls.idle):
                if time.monotonic() - worker.since > _IDLE or worker.process.poll() is not None:
                    cls.idle.remove(worker)
                    worker.close()
            fitting = [worker for worker in cls.idle if worker.command == command]
            if fitting:
                worker = min(fitting, key=lambda one: cls._preference(one, paused))
                cls.idle.remove(worker)
                return worker
        return cls(command)

    @staticmethod
    def _preference(worker: "Worker", paused: Mapping[str, Any] | None) -> tuple[bool, bool, float]:
        wanted = worker.paused is not None and worker.paused == paused
        return not wanted, worker.paused is not None, worker.since

    def release(self) -> None:
        """For the next one that asks."""
        self.since = time.monotonic()
        with self.lock:
            self.idle.append(self)

    def request(self, request: dict, timeout: float, name: str) -> dict:
        """Sends a request and waits; the worker goes back to the idle ones if it lives."""
        timed_out = threading.Event()

        def stop():
            timed_out.set()
            self.process.kill()

        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        job = current_job()
        if job is not None:
            job.process = self.process
            if job.stopped:
                self.process.terminate()
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
            raise self._died(code, name, tail) from error
        except BaseException:  # an interrupt leaves the pipe in an unknown state
            self.close()
            raise
        finally:
            timer.cancel()
            if job is not None:
                job.process = None
        tail = "\n".join(self._last_lines()) if "died" in reply else ""
        self.paused = request["request"] if request["hold"] and "texts" in reply else None
        self.release()
        if "died" in reply:
            raise self._died(reply["died"], name, tail)
        return reply

    @staticmethod
    def _died(code: int, name: str, tail: str) -> CompileError:
        return CompileError(
            f"XLA died (exit code {code}) while compiling for {name}; this process is unharmed. "
            f"Its last lines:\n{tail}"
        )

    def _last_lines(self, count: int = 12) -> list[str]:
        end = os.fstat(self.log.fileno()).st_size
        start = max(0, end - 2**16)
        text = os.pread(self.log.fileno(), end - start, start)  # the worker has its offset
        lines = text.decode(errors="replace").splitlines()
        # What was wrong comes before the frames of the stack.
        *_, reason = ["", *(line for line in lines if "Check failed: " in line)]
        last = lines[-count:]
        return last if not reason or reason in last else [reason, *last]

    def close(self) -> None:
        """Ends it; what it runs ends with it."""
        self.process.terminate()
        try:
            self.process.wait(_SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Slots:
    """Room for compilations: one a core, as far as memory goes."""

    def __init__(self):
        self.running, self.resident = 0, _FIRST_RESIDENT
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for room and keeps it; there is always room for one."""
        with self.changed:
            job = current_job()
            while self.running and not (self._room() or (job and job.stopped)):
                self.changed.wait(1)  # others than ours free memory too
            self.running += 1
        try:
            yield
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify()

    def _room(self) -> bool:
        # Those that run may not have taken yet what they will.
        return self.running < cores() and free_memory() > (self.running + 1) * self.resident

    def learn(self, resident: int) -> None:
        """The next one may take as much as the largest so far."""
        self.resident = max(resident, self.resident)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int:
    """Bytes that the machine, or this container of it, has for new processes."""
    free = [2**62]
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = pathlib.Path("/proc/meminfo").read_text()
        free.append(int(text.partition("MemAvailable:")[2].split()[0]) * 1024)
    group = pathlib.Path("/sys/fs/cgroup")
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with contextlib.suppress(OSError, ValueError, IndexError):  # no such group, or "max"
            files = (group / stat).read_text().partition("inactive_file ")[2].split()[0]
            taken = int((group / used).read_text()) - int(files)
            free.append(int((group / limit).read_text()) - taken)
    return min(free)


_slots = _Slots()


@atexit.register
def close_idle() -> None:
    """Ends the workers that wait."""
    while Worker.idle:
        Worker.idle.pop().close()


def _forget() -> None:
    """In a fork: the workers are its parent's, and so are the slots and the lock that the parent's
    threads held, which nobody would give back here."""
    global _slots
    _slots = _Slots()
    Worker.lock = threading.Lock()
    Worker.idle.clear()


os.register_at_fork(after_in_child=_forget)
