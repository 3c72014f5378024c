"""``jaxmem explore``: a page to choose from, of everything that a step may be."""

import json
import pathlib

from jaxmem.cli.fit import add_workload, search_of
from jaxmem.cli.options import add_command, check_folder
from jaxmem.cli.output import progress, show, write_to
from jaxmem.fitting.choice_page import frontier_of, page_of_fitting
from jaxmem.ground.errors import BudgetError


def add_explore(commands) -> None:
    about = (
        "write a page to choose from: bytes against time of what a step may be, and what each plan "
        "does with the values of each module and line; exit code 3 if nothing fits"
    )
    parser = add_command(commands, "explore", _explore, about)
    add_workload(parser)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the page")


def _explore(options) -> int:
    check_folder(options.output)
    search, compilations = search_of(options)
    missed = None
    try:
        fitting = search.run(compilations).fitting
    except BudgetError as error:  # the page shows what there is
        missed, fitting = error, search.fitting()
    with progress("planning the frontier"):
        text = page_of_fitting(fitting, frontier_of(search, fitting), options.workload)
    write_to(options.output, lambda path: pathlib.Path(path).write_text(text, "utf-8"))
    if missed:
        raise missed
    show(json.dumps(fitting.to_dict(), indent=1) if options.json else fitting)
    return 0
