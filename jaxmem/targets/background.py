"""Work that goes on while the caller does something else, and can be stopped."""

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

Value = TypeVar("Value")
_TURN = 0.5  # seconds; chosen: the longest that Ctrl-C may take


class Killable(Protocol):
    """A process that somebody waits for."""

    def terminate(self) -> None: ...


class Job(threading.Thread, Generic[Value]):
    """A call in a thread of its own, which waits for a process.

    Attributes:
        stopped: whether nobody waits for it any more.
        process: what it waits for, to be killed then.
    """

    def __init__(self, call: Callable[[], Value]):
        super().__init__(daemon=True)
        self.call, self.stopped = call, False
        # Not `join`: in Python 3.11 a thread counts as ended once that was interrupted.
        self.ended = threading.Event()
        self.process: Killable | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.call()
        except BaseException as error:  # the one who waits is told
            self.error = error
        finally:
            self.ended.set()

    def result(self) -> Value:
        """What the call returned, or raises what it raised."""
        # In turns: Python looks for an interrupt before it begins to wait, and one that comes just
        # then, or to another thread, would be seen at the end alone.
        while not self.ended.wait(_TURN):
            pass
        if self.error is not None:
            raise self.error
        return self.value

    def stop(self) -> None:
        """Ends the process; what the call raises then, nobody hears."""
        self.stopped = True
        if self.process is not None and not self.ended.is_set():
            self.process.terminate()


def current_job() -> Job | None:
    """The job whose thread this is."""
    thread = threading.current_thread()
    return thread if isinstance(thread, Job) else None
