"""``jaxmem estimate``: what a step takes on an accelerator that need not be there."""

import json

from jaxmem.cli.loading import STEP, load
from jaxmem.cli.options import add_command, add_files, add_target, budget_of, check_files
from jaxmem.cli.output import compared, compile_step, show, write_files
from jaxmem.reports.drawn.report_text import report_parts
from jaxmem.reports.drawn.tables import as_text
from jaxmem.targets import target


def add_estimate(commands) -> None:
    about = (
        "compile a step for an accelerator, which need not be there, and say where its memory goes"
    )
    parser = add_command(commands, "estimate", _estimate, about)
    parser.add_argument("step", help=STEP)
    add_target(parser)
    add_files(parser)
    parser.add_argument("--budget", help="bytes, '11GiB' or '80%%'; exit code 3 if it is missed")


def _estimate(options) -> int:
    check_files(options)
    chosen = target(options.target, count=options.count)
    budget = budget_of(options, chosen.usable_bytes, chosen.name)
    report = compile_step(options.step, *load(options.step), chosen)
    if options.json:
        about = json.loads(report.to_json())
        if budget:
            about |= {"budget": budget, "fits": report.device <= budget}
        print(json.dumps(about, indent=1))
    else:
        show(as_text(report_parts(report, budget)))
    write_files(report, options, budget, name=options.step)
    return compared("the step", report.device, budget)
