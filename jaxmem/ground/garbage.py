"""The garbage collector, out of the way while programs are traced, and reports written of them."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_users = 0  # how many want it off
_was_on = False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is looked for that can be freed: of a trace nearly all is alive until its end, and
    looking takes a third of its time (ResNet50's plans: 1.1 s of CPU, and 0.8 without). What is
    garbage then is found after it. So it is of what is read of compiled programs (a report on GPT-2
    medium: 1.3 s, and 0.9 without). (If what is traced turns the collector off, it is on again.)
    Works as a decorator too."""
    global _users, _was_on
    with _lock:
        if not _users:
            _was_on = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _was_on:
                gc.enable()
