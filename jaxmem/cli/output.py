"""What commands print and write, and the exit code of a budget."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import rich.console
import rich.text

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import JaxmemError
from jaxmem.ground.progress import waiting
from jaxmem.reports import Diff, MemoryReport, memory
from jaxmem.targets import LocalDevice, Target

MISSED = 3


def show(printed: Any) -> None:
    """Prints an object; on a terminal its first line, the answer, is bold, and green or red."""
    text = str(printed)
    if not sys.stdout.isatty():
        print(text, flush=True)
        return
    answer, *rest = text.splitlines()
    colour = "red" if "does not fit" in answer else "green" if "fits" in answer else "default"
    console = rich.console.Console(highlight=False, soft_wrap=True)
    console.print(rich.text.Text(answer, f"bold {colour}"))
    print("\n".join(rest), flush=True)


def compared(what: str, device: int, budget: int | None) -> int:
    """The exit code of what takes so many bytes; says so if that is over the budget."""
    if budget is None or device <= budget:
        return 0
    print(
        f"jaxmem: {what} takes {format_bytes(device)}, {format_bytes(device - budget)} more than "
        f"the budget of {format_bytes(budget)}.",
        file=sys.stderr,
    )
    return MISSED


def compile_step(
    name: str, step: Callable, args: tuple, chosen: Target | LocalDevice
) -> MemoryReport:
    with progress(f"compiling {name} for {chosen.name}"):
        return memory(step, *args, target=chosen)


def write_files(
    report: MemoryReport | Diff, options, budget: int | None = None, **title: str
) -> None:
    """The files that were asked for, with the budget that the command was held to."""
    if options.html:
        write_to(options.html, functools.partial(report.to_html, budget=budget, **title))
    if options.plot:
        write_to(options.plot, functools.partial(report.plot, budget=budget, dark=options.dark))


def write_to(path: str, write: Callable[[str], Any]) -> None:
    try:
        write(path)
    except OSError as error:
        raise JaxmemError(f"The report cannot be written: {error}.") from error
    print(f"wrote {path}", file=sys.stderr)


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Seconds on stderr while something takes long; on a terminal in one line that moves."""
    began = time.monotonic()
    with waiting(what) as drawn:
        if not drawn:
            print(f"{what} ...", file=sys.stderr, flush=True)
        yield
    print(f"{what}: {time.monotonic() - began:.1f} s", file=sys.stderr)
