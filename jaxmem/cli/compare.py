"""``jaxmem diff``: two steps compared."""

import pathlib
from collections.abc import Callable
from typing import Any

from jaxmem.cli.loading import STEP, load
from jaxmem.cli.options import add_command, add_files, add_target, budget_of, check_files
from jaxmem.cli.output import compared, compile_step, show, write_files
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports import diff, read_report
from jaxmem.targets import target


def add_diff(commands) -> None:
    about = "compare two steps: what grew, what shrank, and a verdict"
    parser = add_command(commands, "diff", _diff, about)
    of = f"a file that estimate --json wrote, or {STEP}"
    parser.add_argument("before", help=of)
    parser.add_argument("after", help=of)
    add_target(parser)
    add_files(parser)
    parser.add_argument("--budget", help="exit code 3 if the second one does not fit it")


def _diff(options) -> int:
    check_files(options)
    chosen = target(options.target, count=options.count)
    names = (options.before, options.after)
    given = [_read_or_load(name) for name in names]
    of = given[1] if isinstance(given[1], dict) else None
    usable, name = (of["usable"], of["target"]) if of else (chosen.usable_bytes, chosen.name)
    budget = budget_of(options, usable, name)
    both = [
        one if isinstance(one, dict) else compile_step(name, *one, chosen)
        for name, one in zip(names, given, strict=True)
    ]
    found = diff(*both)
    show(found.to_json() if options.json else found)
    write_files(found, options, budget)
    return compared(options.after, found.after["device"], budget)


def _read_or_load(name: str) -> dict[str, Any] | tuple[Callable, tuple]:
    """A report that a file holds, or a step and its arguments."""
    path = pathlib.Path(name)
    if path.is_file():
        try:
            return read_report(path.read_text())
        except (JaxmemError, ValueError) as error:
            raise JaxmemError(f"{name}: {error}") from error
    if ":" not in name:
        raise JaxmemError(f"There is no file {name!r}; a step is given as {STEP}.")
    return load(name)
