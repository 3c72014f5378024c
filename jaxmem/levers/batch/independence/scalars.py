"""Values of a trace, by the steps that make them: numbers, multiples, and what is the same."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.operation import equal

Makers = Mapping[int, jaxprs.FlatStep]  # of each value of a trace
# Of one operand, whose sum over examples they leave one.
LINEAR = frozenset("convert_element_type copy copy_p neg reshape squeeze".split())
ELEMENTWISE = frozenset("convert_element_type copy".split())
SAME = ELEMENTWISE | {"broadcast_in_dim", "reshape"}  # shows the same numbers


def number_of(makers: Makers, value: Any) -> float | None:
    """The real number that an operand is wherever the program runs; None: it is none."""
    if not isinstance(value, int):
        return None if np.ndim(value.val) or np.iscomplexobj(value.val) else float(value.val)
    step = makers.get(value)
    dtype = step.equation.outvars[0].aval.dtype if step else None
    if step is None or step.primitive not in SAME or jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    number = number_of(makers, step.inputs[0])
    return None if number is None else float(np.asarray(number).astype(dtype))


def are_alike(makers: Makers, one: Any, other: Any) -> bool:
    """Whether two values are computed in the same way from the same ones."""
    pending, seen = [(one, other)], set()
    while pending:
        pair = one, other = pending.pop()
        if not (isinstance(one, int) and isinstance(other, int)):
            if isinstance(one, int) or isinstance(other, int) or not equal(one.val, other.val):
                return False
            continue
        if one == other or pair in seen:
            continue
        seen.add(pair)
        first, second = makers.get(one), makers.get(other)
        if first is None or second is None or first.primitive != second.primitive:
            return False
        places = first.outputs.index(one), second.outputs.index(other)
        given, also = first.equation.params, second.equation.params
        if places[0] != places[1] or given.keys() != also.keys():
            return False
        if not all(equal(given[name], also[name]) for name in given):
            return False
        pending.extend(zip(first.inputs, second.inputs, strict=True))
    return True


def is_inexact(step: jaxprs.FlatStep) -> bool:
    """Whether it is of floating-point numbers, but for what it chooses by: those of integers are
    rounded."""
    operands = step.equation.invars[step.primitive == "select_n" :]
    variables = *operands, *step.equation.outvars
    return all(jnp.issubdtype(one.aval.dtype, jnp.inexact) for one in variables)


def is_multiple(step: jaxprs.FlatStep) -> bool:
    """Whether it multiplies a value with a number, or divides it by one."""
    of_one = len(step.inputs) == 2 and len(list(step.uses)) == 1
    divides = step.primitive == "div" and isinstance(step.inputs[0], int)
    return of_one and (step.primitive == "mul" or divides)
