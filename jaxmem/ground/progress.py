"""What is said while a search runs: records of the logger ``jaxmem``, at level INFO.

In a terminal a bar takes their place (`jaxmem.ground.bars`), unless the program wants no records of
that level or has replaced the handler. Handlers that write elsewhere have the records all the same.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

from jaxmem.ground.bar import Bar


class _Stderr(logging.Handler):
    """Writes to whatever is stderr by then; nothing where the program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr)


_stderr = _Stderr()
logger = logging.getLogger("jaxmem")
if not logger.handlers:  # else the program has chosen already
    logger.addHandler(_stderr)
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def tell(text: str) -> None:
    """One line of progress. ``logging.getLogger("jaxmem").setLevel("WARNING")`` silences all."""
    logger.info(text)


def show(result: object) -> None:
    """Prints a result on stdout, unless that logger is silenced."""
    if logger.isEnabledFor(logging.INFO):
        print(result)


_open: list[Bar] = []  # the newest last


@contextlib.contextmanager
def counting(most: int, done: int = 0) -> Iterator[Bar]:
    """Counts the compilations of a search, in a terminal as a bar, with the time left."""
    bar = Bar("compiling", most, done)
    if not logger.isEnabledFor(logging.INFO) or _stderr not in logger.handlers:
        yield bar
        return
    with _in_terminal(bar) as drawn:
        handlers = [_stderr, *filter(_is_terminal, logging.getLogger().handlers)] * drawn
        for handler in handlers:
            handler.addFilter(_said_by_bar)
        try:
            yield bar
        finally:
            for handler in handlers:
                handler.removeFilter(_said_by_bar)


def _is_terminal(handler: logging.Handler) -> bool:
    """Whether it writes where the bar is: absl's does, say, which libraries bring along."""
    stream = getattr(handler, "stream", None)
    try:
        return bool(stream is not None and stream.isatty())
    except (AttributeError, ValueError):  # of what is no file, or is closed
        return False


def _said_by_bar(record: logging.LogRecord) -> bool:
    return record.name != logger.name


@contextlib.contextmanager
def waiting(said: str) -> Iterator[bool]:
    """Shows one piece of work in a terminal; whether there is one."""
    bar = Bar(said)
    bar.begin()
    with _in_terminal(bar) as drawn:
        yield drawn


@contextlib.contextmanager
def slow(seconds: float, text: str) -> Iterator[None]:
    """Tells it where something takes longer than that."""
    timer = threading.Timer(seconds, tell, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def expect(seconds: float | None) -> None:
    """The compiler begins, and is expected to take so long; None: nothing is known."""
    for bar in _open[-1:]:
        bar.expect(seconds)


@contextlib.contextmanager
def _in_terminal(bar: Bar) -> Iterator[bool]:
    if not sys.stderr.isatty():
        yield False
        return
    from jaxmem.ground.bars import shown  # rich takes long to import

    with shown(bar) as drawn:
        _open.append(bar)
        try:
            yield drawn
        finally:
            _open.remove(bar)
