"""``jaxmem fit``: the levers that make a step fit."""

import inspect
import json
from typing import Any

from jaxmem.cli.loading import FIT, described, load_function
from jaxmem.cli.options import add_command, add_files, check_files
from jaxmem.cli.output import show, write_files
from jaxmem.fitting.levers import allowed, kept
from jaxmem.fitting.one_call import fit
from jaxmem.fitting.search import LeverSearch
from jaxmem.fitting.workload import Workload
from jaxmem.ground.errors import JaxmemError


def add_fit(commands) -> None:
    about = "choose the levers that make a step fit; exit code 3 if nothing does"
    parser = add_command(commands, "fit", _fit, about)
    add_workload(parser)
    parser.add_argument("--devices", type=int, help="how many; the shape of their mesh is chosen")
    add_files(parser)


def add_workload(parser) -> None:
    """What `search_of` reads."""
    parser.add_argument("workload", help=f"{FIT}; options given here win")
    parser.add_argument("--target", help="a target's name (default: local)")
    parser.add_argument("--budget", help="bytes, '11GiB' or '80%%' (default: the target's)")
    for name, about, known in (
        ("allow", "what may be done although it changes the numerics", allowed()),
        ("keep", "what may NOT be done although it changes no numerics", kept()),
    ):
        what = "; ".join(f"'{word}', {text}" for word, text in known.items())
        about = f"{about}, by name (may be repeated): {what}"
        parser.add_argument(f"--{name}", action="append", default=[], metavar="NAME", help=about)
    parser.add_argument("--compilations", type=int, help="at most (default: 6)")


def _fit(options) -> int:
    check_files(options)
    search, compilations = search_of(options)
    fitting = search.run(compilations).fitting
    show(json.dumps(fitting.to_dict(), indent=1) if options.json else fitting)
    write_files(fitting.report, options, fitting.budget, name=options.workload)
    return 0


def search_of(options) -> tuple[LeverSearch, int]:
    """The search of the workload that is named, and how much it may compile."""
    parts, chosen = arguments_of(options)
    compilations = chosen.pop("compilations", 6)
    return LeverSearch(Workload(*parts, **chosen)), compilations


def arguments_of(options) -> tuple[tuple, dict[str, Any]]:
    """What `jaxmem.fit` takes for the workload that is named, and its options, over which those of
    the command line win."""
    returns = "(loss_fn, optimizer, params, batch)"
    made = load_function(
        options.workload, FIT, (), returns, "one that makes the loss, the optimizer"
    )()
    parts = made if isinstance(made, tuple) else ()
    extra = parts[4] if len(parts) == 5 else {}
    if len(parts) not in (4, 5) or not callable(parts[0]) or not isinstance(extra, dict):
        raise JaxmemError(
            f"{options.workload} must return {returns}, and may return a dict of options for "
            f"jaxmem.fit after them. It returned {described(made)}."
        )
    unknown = sorted(map(str, extra.keys() - inspect.signature(fit).parameters))
    if unknown:
        raise JaxmemError(f"{options.workload} returns options that jaxmem.fit has not: {unknown}.")
    names = ("budget", "target", "allow", "keep", "compilations")
    given = {name: getattr(options, name, None) for name in (*names, "devices")}
    given = {name: value for name, value in given.items() if value not in (None, [])}
    if "devices" in given:
        extra = {name: value for name, value in extra.items() if name != "mesh"}
    return parts[:4], {**extra, **given}
