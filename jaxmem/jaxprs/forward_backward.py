"""An operation and its derivative as one flat program."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import jax

from jaxmem.jaxprs.equations import CUSTOM_VJPS, all_equations
from jaxmem.jaxprs.expansion import expanded
from jaxmem.jaxprs.flat import FlatJaxpr, FlatStep, evaluate
from jaxmem.jaxprs.flattening import flatten_jaxpr
from jaxmem.jaxprs.mapped import localized
from jaxmem.jaxprs.merging import CommonSubexpressions
from jaxmem.jaxprs.nested import branches_of, without_results
from jaxmem.jaxprs.operands import differentiable, restrict_to

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Literal


@dataclasses.dataclass(frozen=True)
class ForwardBackward:
    """What runs forward, and then backward, as JAX differentiates it.

    Attributes:
        flat: its inputs are the operands, then the cotangents of the results that have some (after
            constants); its outputs are the results, then the gradients. Of a `jax.shard_map` they
            are the pieces inside.
        boundary: how many of its steps run forward.
        operands: the values that the operands are, in their order.
        results: the values that the results are, in their order.
        cotangents: the inputs that are cotangents.
        rules: the calls of a `jax.custom_vjp` in it, which are written in place among its steps.
    """

    flat: FlatJaxpr
    boundary: int
    operands: tuple[int, ...]
    results: tuple[int | Literal, ...]
    cotangents: tuple[int, ...]
    rules: tuple[JaxprEqn, ...]


def trace_forward_backward(
    step: FlatStep, differentiated: Sequence[int], separate: bool = False
) -> ForwardBackward:
    """A step with its derivative by the operands that stand at some places; ``separate``: XLA
    sees one without the other, as it does where both are in loops, and merges nothing of the two. A
    rule of the user's own may raise anything."""
    operands = [variable.aval for variable in step.equation.invars]
    results = [variable.aval for variable in step.equation.outvars]
    real = differentiable(results)

    def whole(operands, cotangents):
        def run(*operands):
            found = evaluate(step, operands)
            return [found[at] for at in real], found

        chosen = [operands[at] for at in differentiated]
        of_chosen = restrict_to(differentiated, run, operands)
        _, back, found = jax.vjp(of_chosen, *chosen, has_aux=True)
        return found, back(list(jax.lax.optimization_barrier(tuple(cotangents))))

    traced = jax.make_jaxpr(whole)(operands, [results[at] for at in real])
    flat = localized(expanded(flatten_jaxpr(traced, differentiated=False)))
    first = flat.input_count - len(real)
    cotangents = tuple(range(first, flat.input_count))
    boundary, barrier = next(
        (at, one) for at, one in enumerate(flat.steps) if one.inputs == cotangents
    )
    forward, backward = flat.steps[:boundary], flat.steps[boundary + 1 :]
    same = dict(zip(barrier.outputs, cotangents, strict=True))
    both = dataclasses.replace(flat, steps=(*forward, *backward))
    flat = merge_common_subexpressions(both, same, boundary if separate else None)
    made = {value for one in forward for value in one.outputs}
    return ForwardBackward(
        flat,
        sum(made.issuperset(one.outputs) for one in flat.steps),
        tuple(range(first - len(operands), first)),
        flat.outputs[: len(results)],
        cotangents,
        tuple(one for one in all_equations(traced.jaxpr) if one.primitive.name in CUSTOM_VJPS),
    )


def merge_common_subexpressions(
    flat: FlatJaxpr,
    same: Mapping[int, int] = types.MappingProxyType({}),
    boundary: int | None = None,
) -> FlatJaxpr:
    """A program in which nothing is computed twice from the same values, as XLA has it; ``same``
    are values that are others; what comes from ``boundary`` on is merged apart."""
    first = dict(same)
    computed = CommonSubexpressions(differentiated=False)
    steps = []
    for number, step in enumerate(flat.steps):
        if number == boundary:
            computed = CommonSubexpressions(differentiated=False)
        inputs = tuple(first.get(x, x) if isinstance(x, int) else x for x in step.inputs)
        made = computed.lookup(step.equation, inputs)
        if made is not None:
            first.update(zip(step.outputs, made, strict=True))
            continue
        computed.insert(step.equation, inputs, step.outputs)
        step = dataclasses.replace(step, inputs=inputs)
        passed = _forwarded_operands(step)
        first.update((step.outputs[at], operand) for at, operand in passed.items())
        steps.append(_without_results(step, passed) if passed else step)
    outputs = tuple(first.get(x, x) if isinstance(x, int) else x for x in flat.outputs)
    return dataclasses.replace(flat, steps=tuple(steps), outputs=outputs)


def _without_results(step: FlatStep, at: Collection[int]) -> FlatStep:
    return dataclasses.replace(
        step,
        equation=without_results(step.equation, at),
        outputs=tuple(value for place, value in enumerate(step.outputs) if place not in at),
    )


def _forwarded_operands(step: FlatStep) -> dict[int, int]:
    """The places of a conditional's results that are operands whichever branch is taken, and which
    operands."""
    if step.primitive != "cond" or not (branches := branches_of(step.equation)):
        return {}
    operands = step.inputs[1:]
    found = {}
    for at in range(len(step.outputs)):
        passed = {
            branch.outputs[at] - branch.input_count if isinstance(branch.outputs[at], int) else 0
            for branch in branches
        }
        (number, *others) = passed
        if not others and -len(operands) <= number < 0 and isinstance(operands[number], int):
            found[at] = operands[number]
    return found
