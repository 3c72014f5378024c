"""What projections are known to miss: small programs of docs/limits.md.

Projected and compiled bytes for an H100, of the step as it is and of the plan with the fewest
projected bytes at one more forward pass. "Off" is what is compiled beyond what was projected.
There is no bar: these are the programs that are projected worst.
"""

import jax

import jaxmem
from benchmarks._limits import PROGRAMS
from benchmarks._record import record
from benchmarks._steps import projections


def row(name, loss, args) -> dict:
    plan = jaxmem.plan(loss, *args, target="h100", compilations=0)
    columns, _ = projections(plan, loss, args, "h100", digits=0)
    return {"program": name} | columns


def main():
    rows = [row(name, *make()) for name, make in PROGRAMS.items()]
    record("Programs that are projected wrongly", rows, __doc__.split("\n\n", 1)[1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
