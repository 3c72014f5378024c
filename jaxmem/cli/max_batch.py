"""``jaxmem max-batch``: the largest batch that fits."""

import json

from jaxmem.cli.loading import STEP_OF_BATCH, load_function, step_of
from jaxmem.cli.options import add_command, add_files, add_target, check_files
from jaxmem.cli.output import MISSED, write_files
from jaxmem.fitting.capacity import max_batch_size
from jaxmem.targets import target


def add_max_batch(commands) -> None:
    about = "find the largest batch that fits, by compiling a few; exit code 3 if none does"
    parser = add_command(commands, "max-batch", _max_batch, about)
    parser.add_argument("step", help=STEP_OF_BATCH)
    add_target(parser)
    add_files(parser)
    parser.add_argument("--budget", help="bytes, '11GiB' or '80%%' (default: the target's)")
    parser.add_argument("--multiple", type=int, help="of which the batch is one (default: 8)")


def _max_batch(options) -> int:
    check_files(options)
    chosen = target(options.target, count=options.count)
    what = "a function of the batch size that makes the step"
    function = load_function(options.step, STEP_OF_BATCH, (8,), "(step, args)", what)
    found = max_batch_size(
        step_of(options.step, function(options.multiple or 8))[0],
        lambda batch: step_of(options.step, function(batch))[1],
        budget=options.budget,
        target=chosen,
        multiple=options.multiple,
    )
    if options.json:
        fields = ("size", "too_large", "multiple", "budget", "compiled", "exact", "reason")
        about = {name: getattr(found, name) for name in fields}
        print(json.dumps(about | {"report": json.loads(found.report.to_json())}, indent=1))
    else:
        print(found)
    write_files(found.report, options, found.budget, name=options.step)
    return 0 if found.size else MISSED
