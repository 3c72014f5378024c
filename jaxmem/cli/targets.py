"""``jaxmem targets``: the devices that can be compiled for."""

import dataclasses
import json
import sys

import rich.console
import rich.table

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
    table = rich.table.Table(box=None, pad_edge=False)
    table.add_column("name")
    numbers = ("usable", "GB/s", "float32 TFLOP/s", "bfloat16 TFLOP/s", "host GB/s", "links GB/s")
    for head in numbers:
        table.add_column(head, justify="right")
    table.add_column("description")
    for one in known.values():
        table.add_row(
            one.name,
            format_bytes(one.usable_bytes),
            f"{one.memory_bandwidth / 1e9:.0f}",
            f"{one.flops_per_second('float32') / 1e12:.1f}",
            f"{one.flops_per_second('bfloat16') / 1e12:.1f}",
            f"{one.host_bandwidth / 1e9:.0f}",
            f"{one.links.inside / 1e9:.0f} {one.links.kind}",
            one.description,
        )
    width = None if sys.stdout.isatty() else 120
    rich.console.Console(width=width, highlight=False).print(table)
    return 0
