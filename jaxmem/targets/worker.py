"""The process that compiles: reads pickled requests on stdin, writes pickled replies on stdout.

Run by path, never imported: it loads a compiler, which must not happen in the user's process (no
backend is touched there, and an abort inside XLA ends a child of this one only). It knows nothing
of jaxmem and does not import JAX.

    python -P worker.py FAMILY.py PARENT FOLDER ARGUMENT...

FAMILY.py is a file of `jaxmem.targets` with what is its compiler's own: ``prepare(*arguments)``,
called once, ``compile(prepared, **request)``, which returns an executable, and ``DUMPED``, the
endings of the files to read, by kind. Each request is compiled in a fork, where the compiler is
loaded already. XLA writes its answer, the scheduled program and its buffer assignment, long before
it has generated code: the fork is ended as soon as those files are whole, unless the request is
for a full compilation. Where that may be asked for next, the fork is held instead: stopped, until
it may go on, or another request comes.

Request: ``{"full": bool, "hold": bool, "request": what ``compile`` takes}``. Reply: ``{"texts":
{kind: gzipped text}, "stats": {name: bytes} or None, "resident": bytes}``, or ``{"error": text}``
or ``{"died": exit code}``. The worker ends when it is idle for a minute, or PARENT, the number of
the user's process, ends; all that it writes is in FOLDER.
"""

import contextlib
import ctypes
import gzip
import json
import os
import pathlib
import pickle
import runpy
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from typing import ClassVar

# Seconds after which a worker ends that nobody asks. Chosen: calls one after the other share it.
IDLE = 60
# Seconds between two looks at what XLA has written. Chosen: short beside a compilation.
_POLL = 0.005
_REPLY = "reply.json"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_folder = ""  # for what forks write


def main() -> None:
    global _folder
    signal.signal(signal.SIGTERM, lambda *_: _end())
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever XLA prints must not land between replies
    family, parent, _folder, *arguments = sys.argv[1:]
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    functions = runpy.run_path(family)
    prepared = functions["prepare"](*arguments)

    def compile(options: list, **request):
        return functions["compile"](prepared, options=options, **request)

    paused: _Fork | None = None
    while select.select([sys.stdin], [], [], IDLE)[0]:
        try:
            about = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            if paused is None or not about["full"] or paused.request != about["request"]:
                if paused is not None:
                    ended, paused = paused, None
                    ended.end()
                paused = _Fork(compile, about["request"])
            reply = paused.answer(functions["DUMPED"], about["full"], about["hold"])
        except OSError as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        if paused is not None and not paused.stopped:
            paused = None
        pickle.dump(reply, replies)
        replies.flush()
    _end()


def _end_with(parent: int) -> None:
    """Ends this process, and what it started, when its parent ends, however that dies.

    A death signal (prctl) would come when the thread ends that started this process, and the end of
    stdin only when every fork of the parent has closed the pipe, and not while XLA compiles.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    _end()


def _end() -> None:
    """Ends this process and what it started, and leaves nothing on disk."""
    for fork in list(_Fork.living):
        _kill(fork.child)
    shutil.rmtree(_folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():  # with ptxas, which XLA starts
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class _Fork:
    """A compilation in a process of its own."""

    living: ClassVar[list["_Fork"]] = []

    def __init__(self, compile, request: dict):
        self.request, self.stopped = request, False
        self.folder = tempfile.mkdtemp(dir=_folder)
        self.dump, self.reply = os.path.join(self.folder, "dump"), pathlib.Path(self.folder, _REPLY)
        os.mkdir(self.dump)
        worker = os.getpid()
        self.child = os.fork()
        if not self.child:
            _compile_and_exit(compile, worker, self.dump, self.reply, request)
        self.living.append(self)

    def end(self) -> None:
        """Nobody waits for it any more."""
        if self in self.living:
            _kill(self.child)
            os.waitpid(self.child, 0)
            self.living.remove(self)
        shutil.rmtree(self.folder, ignore_errors=True)

    def answer(self, dumped: dict[str, str], full: bool, hold: bool) -> dict:
        """Waits until it is whole, and ends it, or holds it."""
        if self.stopped:
            self.stopped = False
            os.killpg(self.child, signal.SIGCONT)
        try:
            return self._answer(dumped, full, hold)
        finally:
            if not self.stopped:
                self.end()

    def _answer(self, dumped: dict[str, str], full: bool, hold: bool) -> dict:
        dump, code, resident = self.dump, None, 0
        while code is None:
            paths = None if full else _whole(dump, dumped, self.child)
            if paths and hold:
                # It alone: what it is about to start, a fork that shares its memory, would be
                # stopped before it is a program of its own, and it cannot stop before that is.
                os.kill(self.child, signal.SIGSTOP)
            elif paths:
                _kill(self.child)
            how = os.WNOHANG if not paths else os.WUNTRACED if hold else 0
            pid, status, usage = os.wait4(self.child, how)
            if pid and os.WIFSTOPPED(status):
                os.killpg(self.child, signal.SIGSTOP)  # what it had started
                self.stopped, resident = True, _resident(self.child)
                break
            if pid:
                self.living.remove(self)
                code, resident = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
            else:
                time.sleep(_POLL)
        ended = code == 0 and self.reply.exists()
        said = json.loads(self.reply.read_text()) if ended else {}
        if "error" in said:
            return said
        paths = paths or _written(dump, dumped)
        if code is not None and code != 0 and (full or not paths):
            return {"died": code}
        if not paths:
            raise OSError(f"XLA wrote none of the files that are asked of it: {os.listdir(dump)}")
        texts = {kind: gzip.compress(path.read_bytes(), 3) for kind, path in paths.items()}
        if shutil.disk_usage(dump).free < 4096:
            raise OSError(
                f"the disk of {dump} is full, and XLA's dump may be cut short; set TMPDIR"
            )
        return {"texts": texts, "stats": said.get("stats"), "resident": resident}


def _resident(child: int) -> int:
    """The most bytes that a living process had."""
    try:
        status = pathlib.Path(f"/proc/{child}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return 0


def _written(dump: str, dumped: dict[str, str]) -> dict[str, pathlib.Path] | None:
    """The files that are asked for, by kind, if all of them are there."""
    names = os.listdir(dump)
    found = {}
    for kind, ending in dumped.items():
        ours = [name for name in names if name.endswith(ending)]
        if not ours:
            return None
        found[kind] = pathlib.Path(dump, min(ours))
    return found


def _whole(dump: str, dumped: dict[str, str], child: int) -> dict[str, pathlib.Path] | None:
    """The files that are asked for, if the child has written and closed all of them. It writes each
    at one go, in an order that differs from version to version, and some at the same time."""
    paths = _written(dump, dumped)
    if not paths:
        return None
    opened = set()
    try:
        for number in os.listdir(f"/proc/{child}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                opened.add(os.readlink(f"/proc/{child}/fd/{number}"))
    except FileNotFoundError:
        return None  # the child has ended, and says itself how
    return None if opened & {str(path.resolve()) for path in paths.values()} else paths


def _kill(child: int) -> None:
    """Ends the fork and whatever it started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _compile_and_exit(compile, worker: int, dump: str, reply: pathlib.Path, request: dict):
    """The fork: compiles in a process group of its own, and leaves a reply if it gets so far."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)
    _wake_with_the_worker()
    os.environ["TMPDIR"] = str(reply.parent)  # what ptxas leaves there goes with it
    threading.Thread(target=_end_with, args=(worker,), daemon=True).start()
    try:
        options = [("xla_dump_to", dump), ("xla_dump_hlo_as_text", True)]
        executable = compile(options, **request)
        stats, suffix = executable.get_compiled_memory_stats(), "_size_in_bytes"
        names = [name for name in dir(stats) if name.endswith(suffix)]
        said: dict = {"stats": {name.removesuffix(suffix): getattr(stats, name) for name in names}}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    if os.getppid() != worker:
        _end()
    reply.write_text(json.dumps(said))
    os._exit(0)


def _wake_with_the_worker() -> None:
    """Goes on when the worker ends, to see that: a fork that is held sees nothing."""
    with contextlib.suppress(AttributeError, OSError):  # Linux alone has it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


if __name__ == "__main__":
    main()
