"""Custom derivatives under autocast: the rules are cast too."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmem import jaxprs
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.mixed_precision.dtypes import cast_to, dtype_of, is_floating, output_structs


def _original(step: jaxprs.FlatStep) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """A call as it was traced: a function of its operands, and what they were."""
    traced = [jaxprs.struct_of(variable.aval) for variable in step.equation.invars]
    return lambda *values: jaxprs.evaluate(step, values), traced


@contextlib.contextmanager
def _rule_of(step: jaxprs.FlatStep) -> Iterator[None]:
    """The rule of a custom derivative is traced inside."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise JaxmemError(
            f"The derivative rule of {step.primitive} at {step.line} reads a value that the "
            "function around it computed. JAX cannot differentiate that once the function is "
            "traced, under jax.jit and jax.checkpoint neither. Make the value an argument of the "
            "function that has the rule."
        ) from error


def custom_jvp(run, step, operands, stored) -> list[Any]:
    flat = jaxprs.called_jaxpr(step.equation)
    call = jax.custom_jvp(lambda *values: run(flat, values, stored))
    original, traced = _original(step)

    def rule(values, tangents):
        floats = [i for i, aval in enumerate(traced) if is_floating(aval.dtype)]
        at = [i for i in floats if not jaxprs.is_zero(tangents[i])]

        def derivative(*given):
            values, tangents = given[: len(traced)], given[len(traced) :]
            along = jaxprs.restrict_to(at, original, values)
            return jax.jvp(along, tuple(values[i] for i in at), tangents)

        likes = jax.eval_shape(lambda *x: run(flat, x, stored), *values)
        with _rule_of(step):
            rule_flat = jaxprs.flatten(derivative, [*traced, *(traced[i] for i in at)])
        inputs = [*rule_flat.consts, *values, *(tangents[i] for i in at)]
        found = run(rule_flat, inputs, [False] * len(inputs))
        half = len(likes)
        outs = [cast_to(out, like.dtype) for out, like in zip(found[:half], likes, strict=True)]
        tangent = [
            cast_to(out, like.dtype) if is_floating(like.dtype) else out
            for out, like in zip(found[half:], likes, strict=True)
        ]
        return outs, tangent

    call.defjvp(rule, symbolic_zeros=True)
    return call(*operands)


def custom_vjp(run, step, operands, stored) -> list[Any]:
    flat = jaxprs.called_jaxpr(step.equation)
    call = jax.custom_vjp(lambda *values: run(flat, values, stored))
    original, traced = _original(step)

    def fwd(*given):
        values = [one.value for one in given]
        floats = [i for i, aval in enumerate(traced) if is_floating(aval.dtype)]
        at = [i for i in floats if given[i].perturbed]

        def forward_of(*values):
            along = jaxprs.restrict_to(at, original, values)
            return jax.vjp(along, *[values[i] for i in at])

        with _rule_of(step):
            forward = jaxprs.flatten(forward_of, traced)
        _, pullback_tree = forward.out_tree.children()
        avals = output_structs(forward)
        outs, kept = avals[: len(flat.outputs)], avals[len(flat.outputs) :]
        likes = jax.eval_shape(lambda *x: run(flat, x, stored), *values)
        inputs = [*forward.consts, *values]
        found = run(forward, inputs, [False] * len(inputs))
        dtypes = [dtype_of(value) for value in values]

        def pull_back(residuals, cotangents):
            cotangents = [
                jaxprs.filled(aval) if jaxprs.is_zero(one) else one
                for one, aval in zip(cotangents, outs, strict=True)
                if is_floating(aval.dtype)
            ]

            def backward_of(*given):
                pull, floats = given[: len(kept)], iter(given[len(kept) :])
                every = [
                    next(floats)
                    if is_floating(aval.dtype)
                    else np.zeros(aval.shape, jax.dtypes.float0)
                    for aval in outs
                ]
                return jax.tree.unflatten(pullback_tree, pull)(every)

            given = [aval for aval in outs if is_floating(aval.dtype)]
            with _rule_of(step):
                backward = jaxprs.flatten(backward_of, [*kept, *given])
                inputs = [*backward.consts, *residuals, *cotangents]
                found = run(backward, inputs, [False] * len(inputs))
            gradients: list[Any] = [None] * len(traced)
            for i, gradient in zip(at, found, strict=True):
                gradients[i] = cast_to(gradient, dtypes[i])
            return tuple(gradients)

        rounded = [cast_to(x, like.dtype) for x, like in zip(found, likes, strict=False)]
        return rounded, jax.tree_util.Partial(pull_back, found[len(outs) :])

    # Rules may tell operands that are differentiated from others, and refuse the others.
    call.defvjp(fwd, lambda pull_back, cotangents: pull_back(cotangents), symbolic_zeros=True)
    return call(*operands)
