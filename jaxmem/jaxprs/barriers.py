"""Barriers that keep XLA from moving work across them, with derivatives and batching rules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxmem.jaxprs import internals

if TYPE_CHECKING:
    from jax.extend.core import Primitive

# What these return are their operands.
BARRIERS = frozenset("after back_after back_together optimization_barrier together".split())


def barrier(values: Sequence[Any]) -> list[Any]:
    """The values, none of which is there before all are: `jax.lax.optimization_barrier`, but
    cotangents are none of it (XLA may fuse them), and a value that nothing needs is not computed
    for the others."""
    return _barrier().bind(*values) if values else []


def cotangent_barrier(values: Sequence[Any]) -> list[Any]:
    """The values as they are; of their cotangents none is there before all are."""
    return _cotangent_barrier().bind(*values) if values else []


def order_after(value: Any, other: Any) -> Any:
    """The value, which is not there before ``other`` is; cotangents are none of it."""
    return _order_after().bind(value, other)[0]


def order_cotangent_after(value: Any, other: Any) -> tuple[Any, Any]:
    """Both as they are; the cotangent of ``value`` is not there before that of ``other`` is."""
    first, second = _order_cotangent_after().bind(value, other)
    return first, second


# Each primitive is made when it is first bound: its rules are registered with JAX's internals.


@functools.cache
def _barrier() -> Primitive:
    barrier = identity("together")
    internals.ad.primitive_jvps[barrier] = identity_jvp(barrier)
    internals.mlir.register_lowering(barrier, internals._optimization_barrier_lowering_rule)
    internals.partial_eval.dce_rules[barrier] = _dead_code_rule
    return barrier


@functools.cache
def _order_after() -> Primitive:
    barrier = identity("after")
    internals.ad.primitive_jvps[barrier] = identity_jvp(barrier)
    internals.mlir.register_lowering(barrier, internals._optimization_barrier_lowering_rule)
    return barrier


@functools.cache
def _cotangent_barrier() -> Primitive:
    return _of_cotangents("back_together", _transposed_barrier)


@functools.cache
def _order_cotangent_after() -> Primitive:
    return _of_cotangents("back_after", _transposed_order)


def _of_cotangents(name: str, transposed: Callable) -> Primitive:
    """A primitive, since only a primitive can say how it is transposed."""
    barrier = identity(name)
    internals.ad.primitive_jvps[barrier] = lambda values, tangents: (
        list(values),
        _of_nonzeros(barrier.bind, tangents),
    )
    internals.ad.primitive_transposes[barrier] = transposed
    internals.mlir.register_lowering(barrier, lambda _, *values: list(values))
    internals.partial_eval.dce_rules[barrier] = _dead_code_rule
    return barrier


def _transposed_barrier(cotangents: Sequence[Any], *operands: Any) -> list[Any]:
    linear = list(map(is_linear, operands))
    wanted = [one for one, asked in zip(cotangents, linear, strict=True) if asked]
    made = iter(_of_nonzeros(_barrier().bind, wanted))
    return [next(made) if asked else None for asked in linear]


def _transposed_order(cotangents: Sequence[Any], *operands: Any) -> list[Any]:
    """Of one operand, where the other one is no part of a transposition, there is nothing to wait
    for."""
    nonzero = [type(one) is not internals.ad.Zero for one in cotangents]
    if len(operands) == 2 and all(nonzero) and all(map(is_linear, operands)):
        return [order_after(*cotangents), cotangents[1]]
    return _forwarded(cotangents, *operands)


def _forwarded(cotangents: Sequence[Any], *operands: Any) -> list[Any]:
    return [
        cotangent if is_linear(operand) else None
        for cotangent, operand in zip(cotangents, operands, strict=True)
    ]


def identity(name: str) -> Primitive:
    """A primitive that returns what it gets, with rules for all but tangents and lowering."""
    primitive = internals.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *values: list(values))
    primitive.def_abstract_eval(lambda *values: values)
    if internals.optional("batching"):
        batchers = internals.batching.primitive_batchers
        batchers[primitive] = lambda values, axes: (primitive.bind(*values), axes)
    internals.ad.primitive_transposes[primitive] = _forwarded
    _register_partial_eval(primitive)
    return primitive


def _register_partial_eval(primitive: Primitive) -> None:
    """Where some operands are known when a function is traced to be transposed
    (`jax.linear_transpose`), as weights that it closes over are, so are their results: what is
    linear would be multiplied with what is taken to be."""

    def partly_known(trace, *operands):
        parts: dict[bool, list] = {is_known: [] for is_known in (True, False)}
        for operand in operands:
            parts[operand.is_known()].append(operand)
        made = {
            is_known: iter(trace.default_process_primitive(primitive, part, {}) if part else ())
            for is_known, part in parts.items()
        }
        return [next(made[operand.is_known()]) for operand in operands]

    def in_region(saves, unknown, present, equation):
        """The same where `jax.checkpoint` parts what runs forward from what runs again: the
        equations of both, for each result whether it is unknown and whether it is made again, and
        what has to be kept for that."""
        known = _of_some(equation, [not one for one in unknown])
        avals = [operand.aval for operand in equation.invars]
        saved = known and saves(primitive, *avals) in (True, internals.partial_eval.Saveable)
        again = [one or not saved for one in unknown]
        missing = [
            operand
            for operand, given, asked in zip(equation.invars, present, again, strict=True)
            if asked and not given and not isinstance(operand, internals.Literal)
        ]
        return known, _of_some(equation, again), list(unknown), again, missing

    internals.partial_eval.custom_partial_eval_rules[primitive] = partly_known
    internals.partial_eval.partial_eval_jaxpr_custom_rules[primitive] = in_region


def is_linear(operand: Any) -> bool:
    """Whether something is transposed by an operand, which has no value then."""
    return internals.ad.is_undefined_primal(operand)


def identity_jvp(primitive: Primitive) -> Callable:
    return lambda values, tangents: (primitive.bind(*values), tangents)


def _dead_code_rule(used: list[bool], *rest):
    equation = rest[-1]  # jax 0.12 tells in between which operands are alive
    return used, _of_some(equation, used)


def _of_some(equation, used: Sequence[bool]) -> Any:
    """The equation of some of its operands; None: of none."""
    if not any(used):
        return None
    some = {
        name: [x for x, use in zip(getattr(equation, name), used, strict=True) if use]
        for name in ("invars", "outvars")
    }
    return equation.replace(**some)


def _of_nonzeros(fun: Callable, values: Sequence) -> list[Any]:
    """A function of all values at once, applied to those that are no symbolic zeros. A zero that is
    made an array depends on nothing, and `jax.checkpoint` cannot transpose what has such results.
    """
    zero = internals.ad.Zero
    present = [value for value in values if type(value) is not zero]
    made = iter(fun(*present) if present else [])
    return [value if type(value) is zero else next(made) for value in values]
