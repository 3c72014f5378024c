"""``jaxmem calibrate``: what kernels reach on the attached device."""

import json

from jaxmem.cli.options import add_command
from jaxmem.cli.output import progress, show
from jaxmem.reports import calibrate
from jaxmem.targets import calibration_name, forget_calibration, target


def add_calibrate(commands) -> None:
    about = (
        "measure what kernels reach on the attached device, for a minute; predicted times are "
        "those of this device from then on"
    )
    parser = add_command(commands, "calibrate", _calibrate, about)
    about = "about how long it may take (default: 60)"
    parser.add_argument("--seconds", type=float, default=60.0, help=about)
    about = "remove what was measured: times are predicted from the maker's figures again"
    parser.add_argument("--forget", action="store_true", help=about)


def _calibrate(options) -> int:
    local = target("local")
    if options.forget:
        removed = [str(path) for path in forget_calibration(calibration_name(local))]
        if options.json:
            print(json.dumps({"removed": removed}, indent=1))
        else:
            print("\n".join(f"removed {path}" for path in removed) or "there is no calibration")
        return 0
    with progress(f"calibrating {local.description}"):
        found = calibrate(seconds=options.seconds)
    if options.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        show(found)
    return 0
