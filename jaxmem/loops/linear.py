"""A linear function with a transpose of its own: what a derivative that is written by hand hands
to JAX, so that forward mode, reverse mode and all that is built of them go on to work."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.placement import stack_of
from jaxmem.jaxprs.primitives import computed_by

if TYPE_CHECKING:
    from jax.extend.core import Primitive

# Of residuals and of operands, a list each, to a list of results.
Function = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Linear:
    """A function of residuals and operands that is linear in the operands, and its transpose, which
    may be given None for a cotangent that is zero; each as it is run, and as JAX may differentiate
    it again (``plain``): a loop that makes its states again has no derivative in reverse mode.
    ``operands`` and ``results`` are abstract values."""

    run: Function
    plain: Function
    transposed: Function
    plain_transposed: Function
    operands: tuple[Any, ...]
    results: tuple[Any, ...]

    def __call__(self, residuals: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        return _linear().bind(*residuals, *operands, rule=self, count=len(residuals))

    def of_some(self, at: Sequence[int]) -> Linear:
        """The function of the operands that stand at some places; the others, zeros, are None."""

        def chosen(function: Function) -> Function:
            def of_chosen(residuals, operands):
                filled = [None] * len(self.operands)
                for place, value in zip(at, operands, strict=True):
                    filled[place] = value
                return function(residuals, filled)

            return of_chosen

        def choosing(function: Function) -> Function:
            def chosen_of(residuals, cotangents):
                made = function(residuals, cotangents)
                return [made[place] for place in at]

            return chosen_of

        return Linear(
            chosen(self.run),
            chosen(self.plain),
            choosing(self.transposed),
            choosing(self.plain_transposed),
            tuple(self.operands[place] for place in at),
            self.results,
        )

    @property
    def transpose(self) -> Linear:
        """The transpose, whose operands are cotangents of the results."""
        return Linear(
            self.transposed,
            self.plain_transposed,
            self.run,
            self.plain,
            self.results,
            self.operands,
        )


@functools.cache
def _linear() -> Primitive:
    linear = computed_by(
        "linear_with_transpose", _run, lambda *_, rule, **__: list(rule.results), _batched, True
    )
    internals.ad.primitive_jvps[linear] = _jvp
    internals.ad.primitive_transposes[linear] = _transpose
    return linear


def _run(*values, rule: Linear, count: int):
    values = tuple(map(jnp.asarray, values))  # literals of a jaxpr are numbers of Python's
    return rule.run(list(values[:count]), list(values[count:]))


def _jvp(values, tangents, *, rule: Linear, count: int):
    results = rule(values[:count], values[count:])
    zero = internals.ad.Zero
    if all(type(one) is zero for one in tangents[:count]):
        moved = map(internals.ad.instantiate_zeros, tangents[count:])
        return results, rule(values[:count], list(moved))
    at = [place for place, one in enumerate(tangents) if type(one) is not zero]

    def plain(*chosen):
        filled = list(values)
        for place, one in zip(at, chosen, strict=True):
            filled[place] = one
        return rule.plain(filled[:count], filled[count:])

    _, moved = jax.jvp(plain, [values[place] for place in at], [tangents[place] for place in at])
    return results, moved


def _transpose(cotangents, *values, rule: Linear, count: int):
    zero = internals.ad.Zero
    at = [place for place, one in enumerate(cotangents) if type(one) is not zero]
    made = rule.transpose.of_some(at)(values[:count], [cotangents[place] for place in at])
    undefined = internals.ad.is_undefined_primal
    # An operand that is known is a zero that has been written out: it has no cotangent.
    known = [not undefined(one) for one in values[count:]]
    return [None] * count + [None if one else x for one, x in zip(known, made, strict=True)]


def _batched(values, axes, *, rule: Linear, count: int):
    (size,) = {x.shape[at] for x, at in zip(values, axes, strict=True) if at is not None}
    values = [
        x if at is None else jnp.moveaxis(x, at, 0) for x, at in zip(values, axes, strict=True)
    ]
    axes = [at if at is None else 0 for at in axes]
    residual_axes, operand_axes = axes[:count], axes[count:]
    inside = [
        aval if at is None else stack_of(aval, size)
        for aval, at in zip(rule.operands, operand_axes, strict=True)
    ]

    def of_all(function: Function) -> Function:
        return jax.vmap(function, (residual_axes, operand_axes), axis_size=size)

    def summed(function: Function) -> Function:
        def of_cotangents(residuals, cotangents):
            made = jax.vmap(function, (residual_axes, 0), axis_size=size)(residuals, cotangents)
            pairs = zip(made, operand_axes, strict=True)
            return [x if at == 0 else jnp.sum(x, 0) for x, at in pairs]

        return of_cotangents

    batched = Linear(
        of_all(rule.run),
        of_all(rule.plain),
        summed(rule.transposed),
        summed(rule.plain_transposed),
        tuple(inside),
        tuple(stack_of(aval, size) for aval in rule.results),
    )
    return batched(values[:count], values[count:]), [0] * len(rule.results)
