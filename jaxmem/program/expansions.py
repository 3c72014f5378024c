"""How often XLA reads what an operation is of: what it writes in several reads it in several."""

from typing import Any

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.equations import inner_jaxprs, operation_of

# Polynomials of a value and of its square, and branches of these. Derived: as XLA writes them
# (xla/hlo/builder/lib/math.cc). Of `erfc` sixteen are the fewest that keep an exact GELU of
# bfloat16 that the cache holds, between matmuls of three axes, as is measured for two targets
# (tests/test_views.py).
_POLYNOMIALS = {"erfc": 16, "erf": 3, "erf_inv": 3, "cosh": 2, "sinh": 2}
_CALLS = ("custom_jvp_call", "jit", "pjit")
# Chosen: sums of sums of a value would read it without end; by then it is in memory.
_MOST = 64


def operand_reads(equation: Any) -> int:
    """How many operations read an operand of one: of a call those inside that lead to a result,
    each as often as they do, of the operand that is read most."""
    name = operation_of(equation)
    if name == "integer_pow":  # a square, and for an odd one the value itself
        exponent = abs(equation.params["y"])
        return 1 + (exponent % 2 and exponent > 1)
    if name not in _CALLS:
        return _POLYNOMIALS.get(name, 1)
    found = [
        _reads_of(operand, jaxpr) for jaxpr in inner_jaxprs(equation) for operand in jaxpr.invars
    ]
    return max([1, *found])


def _reads_of(operand: Any, jaxpr: Any) -> int:
    reads = {operand: 1}
    for equation in jaxpr.eqns:
        read = {one for one in equation.invars if not isinstance(one, internals.Literal)}
        if count := sum(reads.get(one, 0) for one in read):
            count = min(count * operand_reads(equation), _MOST)
            reads |= dict.fromkeys(equation.outvars, count)
    results = (one for one in jaxpr.outvars if not isinstance(one, internals.Literal))
    return max((reads.get(one, 0) for one in results), default=0)
