"""Loops, branches and regions under autocast."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem import jaxprs
from jaxmem.levers.mixed_precision.accumulating import summed_carries
from jaxmem.levers.mixed_precision.dtypes import cast_to, dtype_of, is_floating, strong, wider


def body_shapes(body: Callable, carry: list[Any], slices: Sequence[Any]) -> list[Any]:
    """The abstract carry that a loop's body returns."""
    return jax.eval_shape(lambda *args: body(*args)[0], carry, slices)


# Rounds after which what is added to a carry in 16 bits may all have been lost: bfloat16 tells 256
# numbers apart between one power of two and the next. No network has as many layers.
_LONG = 256


def _rounds(loop: jaxprs.NestedLoop) -> float:
    """How often a loop's carry may be added to, in loops inside of it too; of a `while` nobody
    knows."""
    return math.inf if loop.condition is not None else loop.options["length"] * _inside(loop.body)


def _inside(flat: jaxprs.FlatJaxpr) -> float:
    """The rounds of the longest loop in a program, or 1."""
    most = 1.0
    for step in flat.steps:
        if step.primitive in ("scan", "while"):
            most = max(most, _rounds(jaxprs.loop_of(step.equation)))
        elif step.primitive == "cond":
            branches = jaxprs.branches_of(step.equation) or []
            most = max([most, *map(_inside, branches)])
        elif jaxprs.is_region(step.equation):
            most = max(most, _inside(jaxprs.called_jaxpr(step.equation)))
    return most


def _with_wide_sums(loop: jaxprs.NestedLoop, first: list[Any]) -> list[Any]:
    """A loop's first carry, its sums in float32 where the program has them so; of a long loop, or
    of one whose rounds are not known, all that it carries."""
    consts = loop.body_consts.stop - loop.body_consts.start
    traced = [dtype_of(aval) for aval in loop.body.avals[consts : consts + len(first)]]
    if all(dtype_of(x) == dtype for x, dtype in zip(first, traced, strict=True)):
        return first
    long = _rounds(loop) >= _LONG
    sums = [True] * len(first) if long else summed_carries(loop, len(first))
    return [
        cast_to(x, dtype) if is_sum and dtype == np.float32 else x
        for x, dtype, is_sum in zip(first, traced, sums, strict=True)
    ]


def _steady(first: list[Any], shapes: Callable, body: Callable) -> tuple[list[Any], Callable]:
    """A loop's first carry and its body, in dtypes that stay the same from round to round."""
    first = [strong(x) for x in first]
    while True:
        found = [wider(x.dtype, new.dtype) for x, new in zip(first, shapes(first), strict=True)]
        if found == [x.dtype for x in first]:
            break
        first = list(map(cast_to, first, found))

    def steady(carry, slices):
        carry, stacked = body(carry, slices)
        return list(map(cast_to, carry, found)), stacked

    return first, steady


def scan(run, step, operands, stored) -> list[Any]:
    loop = jaxprs.loop_of(step.equation)
    consts, count = operands[loop.body_consts], len(operands[loop.carry])
    first = _with_wide_sums(loop, operands[loop.carry])
    kept = [*stored[loop.body_consts], *([False] * count), *stored[loop.carry.stop :]]

    def body(carry, slices):
        return split(run(loop.body, [*consts, *carry, *slices], kept))

    def split(results):
        return results[:count], results[count:]

    slices = operands[loop.carry.stop :]
    one = [jaxprs.struct_of(jaxprs.element_of(jax.typeof(x))) for x in slices]
    first, body = _steady(first, lambda carry: body_shapes(body, carry, one), body)
    last, stacked = jax.lax.scan(body, first, slices, **loop.options)
    return [*last, *stacked]


def while_loop(run, step, operands, stored) -> list[Any]:
    loop = jaxprs.loop_of(step.equation)
    assert loop.condition is not None
    if _ends_by_values(loop):
        return _as_traced(step, operands)
    condition, first = loop.condition, _with_wide_sums(loop, operands[loop.carry])
    outer = operands[loop.condition_consts], operands[loop.body_consts]
    no = [False] * len(first)
    kept = [*stored[loop.condition_consts], *no], [*stored[loop.body_consts], *no]

    def body(carry, _):
        return run(loop.body, [*outer[1], *carry], kept[1]), ()

    def goes_on(carry):
        return run(condition, [*outer[0], *carry], kept[0])[0]

    first, body = _steady(first, lambda carry: body_shapes(body, carry, ()), body)
    return jax.lax.while_loop(goes_on, lambda carry: body(carry, ())[0], first)


def _ends_by_values(loop: jaxprs.NestedLoop) -> bool:
    """Whether a `while` goes on until what it carries, in floating point, is small or near enough,
    or until a flag says so that is made of such: rounded to 16 bits it may never be."""
    condition, body = loop.condition, loop.body
    assert condition is not None
    count = loop.carry.stop - loop.carry.start
    decide = _carries(condition, condition.outputs, count)
    while further := _carries(body, [body.outputs[at] for at in decide], count) - decide:
        decide |= further
    return any(is_floating(dtype_of(body.avals[body.input_count - count + at])) for at in decide)


def _carries(flat: jaxprs.FlatJaxpr, results: Sequence[Any], count: int) -> set[int]:
    """Which of a `while` loop's carries some results are made of: its last inputs."""
    first = flat.input_count - count
    return {at - first for at in flat.made_of(results) if first <= at < flat.input_count}


def cond(run, step, operands, stored) -> list[Any]:
    branches = jaxprs.branches_of(step.equation)
    if branches is None:
        return _as_traced(step, operands)
    index, *rest = operands

    def cast_branch(branch):
        return lambda *values: run(branch, values, stored[1:])

    functions = [cast_branch(branch) for branch in branches]
    results = [jax.eval_shape(function, *rest) for function in functions]
    dtypes = [functools.reduce(wider, map(dtype_of, each)) for each in zip(*results, strict=True)]

    def unified(function):
        return lambda *values: list(map(cast_to, function(*values), dtypes))

    return jax.lax.switch(index, list(map(unified, functions)), *rest)


def checkpoint(run, step, operands, stored) -> list[Any]:
    flat = jaxprs.called_jaxpr(step.equation)
    return jaxprs.checkpoint_like(step, lambda *values: run(flat, values, stored), operands)


def _as_traced(step, operands) -> list[Any]:
    dtypes = [dtype_of(variable.aval) for variable in step.equation.invars]
    return jaxprs.evaluate(step, list(map(cast_to, operands, dtypes)))
