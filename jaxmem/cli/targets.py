"""``jaxmem targets``: the devices that can be compiled for."""

import dataclasses
import json

from jaxmem.cli.options import add_command
from jaxmem.ground.bytes import format_bytes
from jaxmem.targets import known_targets


def add_targets(commands) -> None:
    add_command(commands, "targets", _targets, "list the accelerators that can be compiled for")


def _targets(options) -> int:
    known = known_targets()
    if options.json:
        print(json.dumps([dataclasses.asdict(one) for one in known.values()], indent=1))
        return 0
    print(f"{'name':14}{'usable':>11}{'GB/s':>7}{'fp32':>7}{'half':>6} TFLOP/s  description")
    for one in known.values():
        print(
            f"{one.name:14}{format_bytes(one.usable_bytes):>11}"
            f"{one.memory_bandwidth / 1e9:>7.0f}{one.fp32_flops / 1e12:>7.1f}"
            f"{one.half_flops / 1e12:>6.0f}          {one.description}"
        )
    return 0
