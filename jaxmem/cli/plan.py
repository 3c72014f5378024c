"""``jaxmem plan``: what a loss saves and recomputes."""

import functools
from typing import Any

import jax

from jaxmem.cli.loading import LOSS, load
from jaxmem.cli.options import add_command, add_dark, check_files
from jaxmem.cli.output import compile_step, progress, show, write_to
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.host.offloading import eval_shape
from jaxmem.planning import PLANNERS
from jaxmem.rematerialization.frontier import pareto
from jaxmem.rematerialization.plans import plan
from jaxmem.targets import target


def add_plan(commands) -> None:
    about = "plan what a loss saves and recomputes within a budget; exit code 3 if none fits"
    parser = add_command(commands, "plan", _plan, about)
    parser.add_argument("loss", help=LOSS)
    parser.add_argument("--target", help="a target's name: compile the plan for it, and correct it")
    parser.add_argument("--budget", help="bytes, '11GiB' or '80%%' (default: the least memory)")
    parser.add_argument("--reserved", default="0", help="of it, for the optimizer's state, say")
    parser.add_argument("--planner", default="dp", help=f"{', '.join(PLANNERS)} (default: dp)")
    parser.add_argument("--compilations", type=int, default=5, help="at most (default: 5)")
    about = "what becomes of regions that the loss has already (default: open)"
    parser.add_argument("--regions", default="open", choices=["open", "keep"], help=about)
    about = "let residuals of scans wait in host memory"
    parser.add_argument("--offload", action="store_true", help=about)
    parser.add_argument("--plot", metavar="FILE", help="draw the frontier as .png, .svg or .pdf")
    add_dark(parser)
    about = "write the compiled timeline of value and gradient under the plan as a page (--target)"
    parser.add_argument("--html", metavar="FILE", help=about)


def _plan(options) -> int:
    check_files(options)
    if options.html and not options.target:
        raise JaxmemError("--html shows what was compiled: name a target to compile for.")
    loss, args = load(options.loss, "loss")
    reserved = 0 if options.reserved == "0" else options.reserved
    common: dict[str, Any] = {
        "planner": options.planner,
        "target": options.target,
        "regions": options.regions,
    }
    with progress(f"planning {options.loss}"):
        has_aux = isinstance(eval_shape(loss, *args), tuple)
        found = plan(
            loss,
            *args,
            budget=options.budget,
            reserved=reserved,
            has_aux=has_aux,
            offload=options.offload,
            compilations=options.compilations,
            **common,
        )
        if found.compiled and not options.json:
            _ = found.bound  # which is printed once it is known
    show(found.to_json() if options.json else found)
    if options.html:
        step = jax.jit(
            jax.value_and_grad(found.apply(loss), has_aux=has_aux),
            compiler_options=found.compiler_options,
        )
        report = compile_step(options.loss, step, args, target(options.target))
        left = found.allowance.available
        write_to(options.html, functools.partial(report.to_html, budget=left, name=options.loss))
    if options.plot:
        with progress("planning the frontier"):
            frontier = pareto(loss, *args, reserved=reserved, **common)
        draw = functools.partial(frontier.plot, budget=found.budget, dark=options.dark)
        write_to(options.plot, draw)
    return 0
