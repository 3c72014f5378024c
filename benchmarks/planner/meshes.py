"""Plans of a transformer on eight devices, beside what one of them compiles to.

A decoder of 8 layers in plain JAX (tests/test_spread.py), on meshes of eight H100, unrolled and as
a scan: bytes of each device as projected and as compiled, for the step as it is and for a plan
within half of its bytes, and the FLOPs of that plan.
"""

import jax

import jaxmem
from benchmarks._models import of_tests
from benchmarks._record import record
from jaxmem.ground.errors import BudgetError

TARGET = "h100"


def programs():
    test = of_tests("test_spread")
    for kind in test.MESHES:
        for form in ("unrolled", "scan"):
            yield f"{kind}, {form}", *test.transformer(kind, form, layers=8)


def row(name, loss, args) -> dict:
    target = jaxmem.target(TARGET, count=8)
    plain = jaxmem.memory(jax.value_and_grad(loss), *args, target=target, timeline=False)
    projected = jaxmem.plan(loss, *args, target=target, compilations=0).plain_bytes
    budget = plain.device // 2
    found = {
        "mesh": name,
        "projected": jaxmem.format_bytes(projected),
        "compiled": jaxmem.format_bytes(plain.device),
        "off": f"{plain.device / projected - 1:+.1%}",
        "budget": jaxmem.format_bytes(budget),
    }
    try:
        plan = jaxmem.plan(loss, *args, target=target, budget=budget)
    except BudgetError as error:
        lowest = f"none: the lowest {jaxmem.format_bytes(error.lowest or 0)}"
        empty = dict.fromkeys(("plan, projected", "plan, compiled", "plan, off", "FLOPs"), "")
        return found | empty | {"plan, compiled": lowest}
    assert plan.compiled is not None
    return found | {
        "plan, projected": jaxmem.format_bytes(plan.projected_bytes),
        "plan, compiled": jaxmem.format_bytes(plan.compiled.bytes),
        "plan, off": f"{plan.compiled.bytes / plan.projected_bytes - 1:+.1%}",
        "FLOPs": f"{plan.compiled.flops / plain.work.flops:.3f}x",
    }


def main():
    rows = [row(*one) for one in programs()]
    record("Plans on eight devices", rows, __doc__.split("\n\n")[1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
