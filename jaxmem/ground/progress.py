"""What is said while a search runs: records of the logger ``jaxmem``, at level INFO.

In a terminal a bar takes their place (`jaxmem.ground.bars`): unless the program has log handlers of
its own, or wants no records of that level.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator

from jaxmem.ground.bar import Bar


class _Stderr(logging.Handler):
    """Writes to whatever is stderr by then; nothing where the program has handlers of its own, or
    where a bar says it."""

    bars = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and not self.bars:
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


_open: list[Bar] = []  # the newest last


@contextlib.contextmanager
def counting(most: int, done: int = 0) -> Iterator[Bar]:
    """Counts the compilations of a search, in a terminal as a bar, with the time left."""
    bar = Bar("compiling", most, done)
    silent = not logger.isEnabledFor(logging.INFO)
    if silent or _stderr not in logger.handlers or logging.getLogger().handlers:
        yield bar
        return
    with _in_terminal(bar) as drawn:
        _stderr.bars += drawn
        try:
            yield bar
        finally:
            _stderr.bars -= drawn


@contextlib.contextmanager
def waiting(said: str) -> Iterator[bool]:
    """Shows one piece of work in a terminal; whether there is one."""
    bar = Bar(said)
    bar.begin()
    with _in_terminal(bar) as drawn:
        yield drawn


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
