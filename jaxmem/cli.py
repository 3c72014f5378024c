"""The command line: ``jaxmem`` and ``python -m jaxmem``."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from jaxmem._bytes import format_bytes
from jaxmem._errors import JaxmemError
from jaxmem.targets import install_compiler, known_targets


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code (1: an error, which is printed)."""
    parser = argparse.ArgumentParser(prog="jaxmem", description="Memory tools for JAX and Flax.")
    commands = parser.add_subparsers(dest="command", required=True)
    targets = commands.add_parser("targets", help="list the GPUs that can be compiled for")
    targets.add_argument("--json", action="store_true", help="all figures, as JSON")
    install = commands.add_parser(
        "install-compiler", help="install XLA's compiler for GPUs that are not in the machine"
    )
    install.add_argument("--cuda", type=int, default=13, help="13, or 12 for V100 (default: 13)")
    options = parser.parse_args(arguments)
    try:
        if options.command == "targets":
            _targets(options.json)
        else:
            print("XLA's GPU compiler: installing once for this version of jaxlib", flush=True)
            print(f"XLA's GPU compiler is in {install_compiler(options.cuda)}")
    except JaxmemError as error:
        print(f"jaxmem: {error}", file=sys.stderr)
        return 1
    return 0


def _targets(as_json: bool) -> None:
    known = known_targets()
    if as_json:
        print(json.dumps([dataclasses.asdict(target) for target in known.values()], indent=1))
        return
    print(f"{'name':14}{'usable':>11}{'GB/s':>7}{'fp32':>7}{'half':>6} TFLOP/s  description")
    for target in known.values():
        print(
            f"{target.name:14}{format_bytes(target.usable_bytes):>11}"
            f"{target.memory_bandwidth / 1e9:>7.0f}{target.fp32_flops / 1e12:>7.1f}"
            f"{target.half_flops / 1e12:>6.0f}          {target.description}"
        )
