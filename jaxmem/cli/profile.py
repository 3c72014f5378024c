"""``jaxmem profile``: a step measured on the attached device."""

import json

from jaxmem.cli.loading import STEP, load
from jaxmem.cli.options import add_command, add_files, budget_of, check_files
from jaxmem.cli.output import compared, progress, write_files
from jaxmem.ground.budget import Budget
from jaxmem.reports import measure
from jaxmem.targets import target


def add_profile(commands) -> None:
    about = "run a step once on the attached device: the allocator's peak beside the compiled bytes"
    parser = add_command(commands, "profile", _profile, about)
    parser.add_argument("step", help=STEP)
    about = "exit code 3 if the measured peak (on a CPU: the compiled bytes) is over it"
    parser.add_argument("--budget", help=about)
    add_files(parser)


def _profile(options) -> int:
    check_files(options)
    budget = budget_of(options, target("local").usable_bytes, "the attached device")
    step, args = load(options.step)
    with progress(f"running {options.step}"):
        measured = measure(step, *args)
    if options.json:
        fields = ("arguments", "before", "after", "earlier_peak", "peak", "phases", "unexplained")
        about = {name: getattr(measured, name) for name in fields}
        print(json.dumps({**about, "compiled": json.loads(measured.compiled.to_json())}, indent=1))
    else:
        print(measured)
    device = measured.compiled.device
    peak = measured.peak or device
    left = Budget(budget, peak - device).available  # what is there for the step
    write_files(measured.compiled, options, left, name=options.step)
    return compared("the step", peak, budget)
