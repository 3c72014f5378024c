"""``jaxmem diff``: two steps compared."""

import pathlib
from collections.abc import Callable
from typing import Any

from jaxmem.cli.loading import STEP, load
from jaxmem.cli.options import add_command, add_files, add_target, budget_of, check_files
from jaxmem.cli.other_environment import estimate_elsewhere
from jaxmem.cli.output import compared, compile_step, show, write_files
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports import diff, read_report
from jaxmem.targets import target


def add_diff(commands) -> None:
    about = "compare two steps: what grew, what shrank, and a verdict"
    parser = add_command(commands, "diff", _diff, about)
    of = f"a file that estimate --json wrote, or {STEP}"
    parser.add_argument("before", help=of)
    parser.add_argument("after", nargs="?", help=f"{of} (default: the same step)")
    about = "compile 'before' in another environment: its folder, or its Python"
    parser.add_argument("--python", metavar="ENV", help=about)
    about = "import 'before' from another folder, such as a git worktree of an earlier commit"
    parser.add_argument("--directory", metavar="DIR", help=about)
    add_target(parser)
    add_files(parser)
    parser.add_argument("--budget", help="exit code 3 if the second one does not fit it")


def _diff(options) -> int:
    check_files(options)
    elsewhere = bool(options.python or options.directory)
    if options.after is None and not elsewhere:
        raise JaxmemError(
            "jaxmem diff compares two steps: name both, or say with --python or --directory where "
            "the first one is."
        )
    chosen = target(options.target, count=options.count)
    after_name = options.after or options.before
    after = _read_or_load(after_name)
    before = None if elsewhere else _read_or_load(options.before)
    of = after if isinstance(after, dict) else None
    usable, name = (of["usable"], of["target"]) if of else (chosen.usable_bytes, chosen.name)
    budget = budget_of(options, usable, name)
    if before is None:
        before = estimate_elsewhere(options)
    both = [
        one if isinstance(one, dict) else compile_step(of_which, *one, chosen)
        for of_which, one in ((options.before, before), (after_name, after))
    ]
    found = diff(*both)
    show(found.to_json() if options.json else found)
    write_files(found, options, budget)
    return compared(after_name, found.after["device"], budget)


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
