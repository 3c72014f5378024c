"""Projected bytes against compiled ones where nothing is planned inside of an operation.

Small networks whose layers are a conditional, a rule of the user's own, a recurrent cell or a
ragged matmul, and single operations whose derivative JAX is asked for (tests/test_opaque.py), for
an H200: projected and compiled bytes of the step as it is, and of the plan with the fewest
projected bytes at one more forward pass, with the FLOPs that it predicts beside those that are
compiled for the step as it is.
"""

import jax

import jaxmem
from benchmarks._models import of_tests
from benchmarks._record import record
from benchmarks._steps import projections

TARGET = "h200"


def programs():
    test = of_tests("test_opaque")
    for name, (make, what, options) in test.PROGRAMS.items():
        yield name, *make(what, **options)
    yield "ragged matmul", test.experts, test.of_experts(groups=8)
    for name, operation in test.ASKED.items():
        yield f"matmul and {name}", *test.of_one(operation)


def row(name, loss, args) -> dict:
    plan = jaxmem.plan(loss, *args, target=TARGET, compilations=0)
    columns, plain = projections(plan, loss, args, TARGET)
    more = plan.predicted.recompute_flops / max(plain.work.flops, 1)
    return {"layers": name} | columns | {"FLOPs": f"{1 + more:.3f}x"}


def main():
    rows = [row(*one) for one in programs()]
    record("Projected bytes of what is not planned inside", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
