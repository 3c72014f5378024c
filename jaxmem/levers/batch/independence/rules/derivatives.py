"""Functions with a derivative rule of the user's: the rule is traced, and walked too.

Where a loss is a sum over examples its derivative is one, by the chain rule. Only a derivative that
the user wrote may be anything.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.levers.batch.independence.kinds import (
    DIFFERENT_PROGRAM,
    BatchInvariant,
    BatchReduction,
    Kind,
    NotProved,
    PerExample,
    first_line,
    mean_growth,
    same_growth,
)
from jaxmem.levers.batch.independence.layout import common_batch_axis
from jaxmem.levers.batch.independence.operation import BatchOperation
from jaxmem.levers.batch.independence.registry import inside
from jaxmem.ops import losses

if TYPE_CHECKING:
    from jaxmem.levers.batch.independence.walk import Walk


@inside(*jaxprs.CUSTOM_RULES)
def custom(walk: "Walk", operation: BatchOperation) -> list[Kind]:
    """Of a function with a derivative rule."""
    if _trusted(operation):
        return _by_rows(operation)
    plain = walk.called(operation)
    if not walk.differentiated or any(isinstance(kind, NotProved) for kind in plain):
        return plain
    if not _real(operation)[0]:
        return plain
    derivative = _wrong_tangents if "jvp" in operation.name else _wrong_cotangents
    why = derivative(walk, operation, plain)
    if why is None:
        return plain
    return operation.all_results(NotProved(f"{why} (in the derivative rule of {operation.where})"))


def _derived(
    walk: "Walk", trace: Callable[[int], jaxprs.FlatJaxpr], given: list[Kind]
) -> list[Kind]:
    """Of the results of a derivative; ``trace`` makes its program in either trace."""
    try:
        flats = trace(0), trace(1)
    except Exception as error:  # whatever the user's rule raises
        return [NotProved(f"the proof cannot trace it: {first_line(error)}")]
    return dataclasses.replace(walk, flats=flats, differentiated=False).kinds(given)


def _wrong_tangents(walk: "Walk", operation: BatchOperation, plain: list[Kind]) -> str | None:
    """What is wrong with a rule for tangents, which is linear in them anyway."""
    at, outputs = _real(operation)

    def trace(which: int) -> jaxprs.FlatJaxpr:
        def pushed(*values):
            call, chosen = _call(operation, which, values, at)
            tangents = jax.jvp(call, tuple(chosen), values[len(operation.kinds) :])[1]
            return [tangents[index] for index in outputs]

        avals = _avals(operation, which)
        return jaxprs.flatten(pushed, [*avals, *(avals[index] for index in at)])

    tangents = [_tangent(operation.kinds[index], operation.shapes[index]) for index in at]
    found = _derived(walk, trace, [*operation.kinds, *tangents])
    return _first_unlike(found, [plain[index] for index in outputs])


def _wrong_cotangents(walk: "Walk", operation: BatchOperation, plain: list[Kind]) -> str | None:
    """What is wrong with a rule for cotangents: it must be linear in them, for those of a
    slice are larger than those of the batch."""
    at, outputs = _real(operation)

    def trace(which: int) -> jaxprs.FlatJaxpr:
        def pulled(*values):
            call, chosen = _call(operation, which, values, at)

            def of_real(*chosen):
                results = call(*chosen)
                return [results[index] for index in outputs]

            results, pull = jax.vjp(of_real, *chosen)
            return results, pull(list(values[len(operation.kinds) :]))

        variables = operation.steps[which].equation.outvars
        avals = [jaxprs.struct_of(variables[index].aval) for index in outputs]
        return jaxprs.flatten(pulled, [*_avals(operation, which), *avals])

    # Any growth that no other number has: it must come out as it went in.
    growth = mean_growth(walk.sizes) * 0.7310585786300049
    given = [_cotangent(plain[index], growth) for index in outputs]
    found = _derived(walk, trace, [*operation.kinds, *given])
    expected = [_cotangent(operation.kinds[index], growth) for index in at]
    return _first_unlike(found, [*(plain[index] for index in outputs), *expected])


def _tangent(kind: Kind, shapes) -> Kind:
    """Of the tangent of a value."""
    if isinstance(kind, BatchInvariant):
        return BatchInvariant(value=(0.0, 0.0)) if shapes[0] != shapes[1] else BatchInvariant()
    return kind


def _cotangent(kind: Kind, growth: float) -> Kind:
    """Of the cotangent of a value, which has this growth where the value has none."""
    if isinstance(kind, PerExample):
        return PerExample(kind.axis, kind.outer, kind.inner, growth / kind.growth)
    if isinstance(kind, BatchInvariant):
        return BatchReduction(growth / kind.growth)
    return (
        BatchInvariant(growth / kind.growth)
        if isinstance(kind, BatchReduction)
        else DIFFERENT_PROGRAM
    )


def _first_unlike(found: list[Kind], expected: list[Kind]) -> str | None:
    whys = (_unlike(*pair) for pair in zip(found, expected, strict=False))
    return next((why for why in whys if why is not None), None)


def _unlike(found: Kind, expected: Kind) -> str | None:
    """Why a value is not of the kind that it should be of."""
    if isinstance(found, NotProved):
        return found.why
    if isinstance(found, BatchInvariant) and found.is_zero:
        return None
    if isinstance(found, PerExample) and isinstance(expected, PerExample):
        same = common_batch_axis([found, expected]) is not None
    else:
        same = isinstance(found, BatchInvariant | BatchReduction) and type(found) is type(expected)
    if same and same_growth(found.growth, expected.growth):  # type: ignore[union-attr]
        return None
    return "its examples see one another, or it is not linear"


def _trusted(operation: BatchOperation) -> bool:
    """Whether it is our own loss, which keeps rows apart, in blocks that no walk sees through."""
    called = jaxprs.custom_function(operation.steps[0].equation)
    return called.startswith(f"_statistics at {losses.__file__}:")


def _by_rows(operation: BatchOperation) -> list[Kind]:
    rows, labels = operation.kinds[0], operation.kinds[-1]
    others = operation.kinds[1:-1]
    for kind in operation.kinds:
        if isinstance(kind, NotProved):
            return operation.all_results(kind)
    own = [kind for kind in (rows, labels) if isinstance(kind, PerExample) and kind.axis == 0]
    common = common_batch_axis(own) if len(own) == 2 else None
    if common is None or not all(isinstance(kind, BatchInvariant) for kind in others):
        return operation.all_results(operation.mixes_examples)
    if not all(same_growth(kind.growth, 1) for kind in operation.kinds):
        return operation.all_results(operation.depends_on_batch_size)
    return operation.all_results(common)


def _call(
    operation: BatchOperation, which: int, values, at: list[int]
) -> tuple[Callable, list[Any]]:
    """The call as a function of its real operands, and these."""
    step = operation.steps[which]

    def call(*chosen):
        filled = list(values[: len(operation.kinds)])
        for index, value in zip(at, chosen, strict=True):
            filled[index] = value
        return jaxprs.evaluate(step, filled)

    return call, [values[index] for index in at]


def _real(operation: BatchOperation) -> tuple[list[int], list[int]]:
    """Which operands and which results of a call have derivatives."""
    equation = operation.steps[0].equation
    operands, results = (
        [at for at, atom in enumerate(atoms) if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]
        for atoms in (equation.invars, equation.outvars)
    )
    return operands, results


def _avals(operation: BatchOperation, which: int) -> list[Any]:
    return [jaxprs.struct_of(atom.aval) for atom in operation.steps[which].equation.invars]
