"""Runs the benchmarks of some groups, or all of them, each in a process of its own.

    python -m benchmarks                     # all: many hours on two cores
    python -m benchmarks planner speed       # two groups
    python -m benchmarks.speed.import_time    # one; most of the long ones take parts as arguments

The group "gpu" needs a GPU that is attached; without one its scripts say so and end.
"""

import argparse
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
GROUPS = ("memory", "planner", "levers", "scale", "speed", "gpu")


def modules(group: str) -> list[str]:
    """The benchmarks of a group, as Python runs them."""
    pattern = "gpu*.py" if group == "gpu" else f"{group}/[!_]*.py"
    paths = sorted((ROOT / "benchmarks").glob(pattern))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    groups = parser.parse_args().groups or GROUPS
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"no group {', '.join(unknown)}: there are {', '.join(GROUPS)}")
    for module in [module for group in groups for module in modules(group)]:
        print(f"python -m {module}", flush=True)
        subprocess.run([sys.executable, "-m", module], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
