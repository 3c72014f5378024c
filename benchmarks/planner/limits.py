"""What projections are known to miss: small programs of docs/limits.md.

Projected and compiled bytes for an H100, of the step as it is and of the plan with the fewest
projected bytes at one more forward pass. "Off" is what is compiled beyond what was projected.
There is no bar: these are the programs that are projected worst.
"""

from collections.abc import Callable

import jax

import jaxmem
from benchmarks._limits import PROGRAMS
from benchmarks._record import record


def row(name: str, loss: Callable, args: tuple) -> dict:
    plan = jaxmem.plan(loss, *args, target="h100", compilations=0)

    def compiled(fun, options=None) -> int:
        step = jax.value_and_grad(fun)
        options = {"compiler_options": options, "timeline": False}
        return jaxmem.memory(step, *args, target="h100", **options).device

    plain, planned = compiled(loss), compiled(plan.apply(loss), plan.compiler_options)
    return {
        "program": name,
        "projected": jaxmem.format_bytes(plan.plain_bytes),
        "compiled": jaxmem.format_bytes(plain),
        "off": _beyond(plain, plan.plain_bytes),
        "plan, projected": jaxmem.format_bytes(plan.projected_bytes),
        "plan, compiled": jaxmem.format_bytes(planned),
        "plan, off": _beyond(planned, plan.projected_bytes),
    }


def _beyond(compiled: int, projected: int) -> str:
    return f"{round(compiled / projected - 1, 2) + 0.0:+.0%}"  # (never -0%)


def main():
    rows = [row(name, *make()) for name, make in PROGRAMS.items()]
    record("Programs that are projected wrongly", rows, __doc__.split("\n\n", 1)[1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
