"""``jaxmem devices``: the fewest devices that a training step fits on."""

import json

from jaxmem.cli.fit import add_workload, arguments_of
from jaxmem.cli.options import add_command
from jaxmem.cli.output import show
from jaxmem.fitting.devices import devices_needed


def add_devices(commands) -> None:
    about = "find the fewest devices that a step fits on; exit code 3 if it fits on none"
    parser = add_command(commands, "devices", _devices, about)
    add_workload(parser)
    parser.add_argument("--most", type=int, default=1024, help="devices, at most (default: 1024)")


def _devices(options) -> int:
    parts, chosen = arguments_of(options)
    needed = devices_needed(*parts, **{"compilations": 3, **chosen, "most": options.most})
    show(json.dumps(needed.to_dict(), indent=1) if options.json else needed)
    return 0
