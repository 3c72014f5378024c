"""What commands print and write, and the exit code of a budget."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports import Diff, MemoryReport, memory
from jaxmem.targets import LocalDevice, Target

MISSED = 3


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


def write_files(report: MemoryReport | Diff, options) -> None:
    for path, write in ((options.html, report.to_html), (options.plot, report.plot)):
        if path:
            write_to(path, write)


def write_to(path: str, write: Callable[[str], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise JaxmemError(f"The report cannot be written: {error}.") from error
    print(f"wrote {path}", file=sys.stderr)


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Seconds on stderr while something takes long; on a terminal in one line."""
    began, done = time.monotonic(), threading.Event()
    live = sys.stderr.isatty()

    def tell():
        print(f"{what} ...", file=sys.stderr, end="" if live else "\n", flush=True)
        while live and not done.wait(1):
            seconds = time.monotonic() - began
            print(f"\r{what} ... {seconds:.0f} s", file=sys.stderr, end="", flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
        print(f"{chr(13) if live else ''}{what}: {time.monotonic() - began:.1f} s", file=sys.stderr)
