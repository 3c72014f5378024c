"""Bars of progress in a terminal: one display for all that goes on."""

import contextlib
import sys
import threading
from collections.abc import Iterator

import rich.console
import rich.progress
import rich.table
import rich.text

from jaxmem.ground.bar import Bar

_lock = threading.Lock()
_display: rich.progress.Progress | None = None


class _CountColumn(rich.progress.ProgressColumn):
    """``2 of at most 6``, and the time."""

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        bar: Bar = task.fields["bar"]
        count = f"{bar.done} of at most {bar.most}, " if bar.most else ""
        told = f"{task.elapsed or 0:.0f} s"
        if bar.remaining_seconds is not None and round(bar.remaining_seconds):
            told += f", up to about {_time(bar.remaining_seconds)} more"
        return rich.text.Text(count + told)


class _BarColumn(rich.progress.BarColumn):
    """The bar itself, where something is counted."""

    def render(self, task: rich.progress.Task):
        return super().render(task) if task.total is not None else rich.text.Text("")


class _MessageColumn(rich.progress.ProgressColumn):
    """What goes on, cut to one line."""

    def get_table_column(self) -> rich.table.Column:
        return rich.table.Column(ratio=1, no_wrap=True, overflow="ellipsis")

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        return rich.text.Text(task.fields["bar"].message + " ...")


class _Display(rich.progress.Progress):
    """The rows of all tasks; how far they are is looked up when they are drawn."""

    def get_renderables(self):
        for task in self.tasks:
            task.completed = task.fields["bar"].done
        yield from super().get_renderables()


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _console() -> rich.console.Console | None:
    """The terminal; None: there is none, or it cannot draw a line twice."""
    if not sys.stderr.isatty():
        return None
    console = rich.console.Console(stderr=True)
    return console if console.is_interactive else None


@contextlib.contextmanager
def shown(bar: Bar) -> Iterator[bool]:
    """Shows a bar below those that are there; whether there is a terminal."""
    global _display
    with _lock:
        if _display is None and (console := _console()) is not None:
            _display = _Display(
                _MessageColumn(),
                _BarColumn(bar_width=20),
                _CountColumn(),
                console=console,
                transient=True,
                expand=True,
                refresh_per_second=4,
                redirect_stdout=False,  # what was asked for goes where it is to go
            )
            _display.start()
        display = _display
        task = None if display is None else display.add_task("", total=bar.most, bar=bar)
        bar.redraw = display.refresh if display else bar.redraw
    try:
        yield display is not None
    finally:
        if display is not None and task is not None:
            with _lock:
                display.remove_task(task)
                if not display.tasks:
                    display.stop()
                    _display = None
