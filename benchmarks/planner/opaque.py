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


def programs():
    test = of_tests("test_opaque")
    for name, (make, what, options) in test.PROGRAMS.items():
        yield name, *make(what, **options)
    yield "ragged matmul", test.experts, test.of_experts(groups=8)
    for name, operation in test.ASKED.items():
        yield f"matmul and {name}", *test.of_one(operation)


def row(name, loss, args) -> dict:
    plan = jaxmem.plan(loss, *args, compilations=0)

    def compiled(fun, options=None):
        step = jax.value_and_grad(fun)
        return jaxmem.memory(step, *args, target="h200", timeline=False, compiler_options=options)

    plain, planned = compiled(loss), compiled(plan.apply(loss), plan.compiler_options)
    return {
        "layers": name,
        "projected": jaxmem.format_bytes(plan.plain_bytes),
        "compiled": jaxmem.format_bytes(plain.device),
        "off": f"{plain.device / plan.plain_bytes - 1:+.1%}",
        "plan, projected": jaxmem.format_bytes(plan.projected_bytes),
        "plan, compiled": jaxmem.format_bytes(planned.device),
        "plan, off": f"{planned.device / plan.projected_bytes - 1:+.1%}",
        "FLOPs": f"{1 + plan.predicted.recompute_flops / max(plain.work.flops, 1):.3f}x",
    }


def main():
    rows = [row(*one) for one in programs()]
    record("Projected bytes of what is not planned inside", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
