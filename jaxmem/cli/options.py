"""Options that several commands have."""

import pathlib
from collections.abc import Callable
from typing import Any

from jaxmem.ground.bytes import device_budget
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports import check_plot


def add_command(commands, name: str, run: Callable[[Any], int], about: str):
    parser = commands.add_parser(name, help=about, description=about)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    return parser


def add_target(parser) -> None:
    parser.add_argument("--target", default="local", help="a target's name (default: local)")
    parser.add_argument(
        "--count", type=int, default=1, help="devices of a sharded step (default: 1)"
    )


def add_files(parser) -> None:
    parser.add_argument("--html", metavar="FILE", help="write it as a page to open in a browser")
    parser.add_argument("--plot", metavar="FILE", help="draw the timeline as .png, .svg or .pdf")
    add_dark(parser)


def add_dark(parser) -> None:
    parser.add_argument("--dark", action="store_true", help="draw --plot for a dark page")


def budget_of(options, usable: int, name: str) -> int | None:
    """Bytes of the budget that was given, if one was, on that device."""
    return None if options.budget is None else device_budget(options.budget, usable, name)


def check_files(options) -> None:
    """That what was asked for can be written, as far as names and folders tell."""
    if options.plot:
        check_plot(options.plot)
    for path in filter(None, (options.html, options.plot)):
        check_folder(path)


def check_folder(path: str) -> None:
    """That there is a folder for a file."""
    folder = pathlib.Path(path).resolve().parent
    if not folder.is_dir():
        raise JaxmemError(f"The report cannot be written to {path}: there is no folder {folder}.")
