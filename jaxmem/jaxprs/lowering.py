"""A traced step, lowered for a device that need not be there."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxmem.ground.errors import JaxmemError
from jaxmem.jaxprs import internals
from jaxmem.jaxprs.barriers import barrier
from jaxmem.jaxprs.equations import find_callback, is_callback
from jaxmem.jaxprs.flat import FlatStep
from jaxmem.jaxprs.flattening import flatten_jaxpr
from jaxmem.jaxprs.nested import loop_of
from jaxmem.jaxprs.placement import HOST, memory_space

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Primitive

_lowering: contextvars.ContextVar[bool] = contextvars.ContextVar("_lowering", default=False)


def to_bytecode(lowered, locations: bool = True) -> tuple[bytes, int]:
    """A lowered step as MLIR bytecode, with or without modules and lines of code, and the number of
    partitions it was lowered for."""
    module = lowered.compiler_ir("stablehlo")
    partitions = module.operation.attributes["mhlo.num_partitions"].value
    if not locations and internals.optional("PassManager"):  # else they are in the cache's key
        with module.context:
            module = module.operation.clone()
            internals.PassManager.parse("builtin.module(strip-debuginfo)").run(module)
    return internals.mlir.module_to_bytecode(module), partitions


def lower_for(traced, platform: str):
    """Lowers a traced step for a platform on whatever machine this is. Calls into Python are left
    out: what they return is an array of zeros that is written to memory.

    Raises:
        JaxmemError: XLA would call Python to cut an operation over devices.
    """
    rules = [(primitive, _left_out) for primitive in _callbacks_of(traced)]
    if internals.optional("custom_partitioning_p"):
        rules.append((internals.custom_partitioning_p, _not_cut))
    parameters = internals.mlir.LoweringParameters(override_lowering_rules=tuple(rules))
    if internals.optional("dispatch"):
        internals.intercept(
            internals.dispatch, "jaxpr_has_prim_requiring_devices", _requires_devices
        )
    token = _lowering.set(True)
    try:
        return traced.lower(lowering_platforms=(platform,), _private_parameters=parameters)
    except TypeError as error:
        if "_private_parameters" not in str(error):
            raise
        raise internals.moved("traced.lower(_private_parameters=)") from None
    finally:
        _lowering.reset(token)


def _requires_devices(function: Callable, jaxpr: Any) -> bool:
    """JAX refuses to lower for devices that are not there what calls into Python; that is left out
    here."""
    return not _lowering.get() and function(jaxpr)


def _not_cut(ctx, *values, call: ClosedJaxpr, **_):
    """An operation of `jax.custom_partitioning` where a device has its own part of its operands."""
    context = ctx.module_context.axis_context
    if getattr(context, "num_devices", 1) != 1 and not _is_manual(context):
        name = internals.attribute(call.jaxpr, "jaxpr.debug_info.func_name")
        raise JaxmemError(
            f"{name} is a jax.custom_partitioning, which XLA cuts over devices by calling into "
            "Python. That cannot be compiled for devices that are not there. Call it in "
            "jax.shard_map over all axes of the mesh, where each device has its own part of the "
            "arrays."
        )
    return internals.mlir.lower_fun(internals.jaxpr_as_fun(call), multiple_results=True)(
        ctx, *values
    )


def _is_manual(context: Any) -> bool:
    """Whether all axes of the mesh are those of a `jax.shard_map`."""
    mesh = getattr(context, "mesh", None)
    return mesh is not None and set(context.manual_axes) == set(mesh.axis_names)


def _callbacks_of(traced) -> list[Primitive]:
    """The operations that are left out of a traced step. A step that has none of them needs none
    of JAX's names for them."""
    try:
        return _callbacks()
    except JaxmemError:
        if find_callback(traced.jaxpr.jaxpr):
            raise
        return []


@functools.cache
def _callbacks() -> list[Primitive]:
    """JAX's operations that call into Python."""

    found = [
        value for part in (internals.callback, internals.debugging) for value in vars(part).values()
    ]
    return [one for one in found if isinstance(one, internals.Primitive) and is_callback(one.name)]


def _left_out(ctx, *_, **__):
    def zeros():
        return barrier([jnp.zeros(aval.shape, aval.dtype) for aval in ctx.avals_out])

    made = internals.mlir.lower_fun(zeros, multiple_results=True)(ctx.replace(avals_in=[]))
    ctx.set_tokens_out(ctx.tokens_in)
    return made


def argument_names(traced) -> tuple[str, ...]:
    """Paths of the arrays that a traced step takes, in order: ``state.params['w']``."""
    return tuple(internals.attribute(traced.jaxpr.jaxpr, "jaxpr.debug_info.arg_names"))


def kept_arguments(lowered) -> list[int]:
    """The numbers of the arrays that the lowered program takes; jit drops those it never reads."""
    found = internals.attribute(lowered, "lowered._lowering.compile_args")
    return sorted(found["kept_var_idx"])


def compiler_options(lowered) -> dict[str, Any]:
    """The XLA flags that a step was jitted with."""
    return dict(internals.attribute(lowered, "lowered._lowering._compiler_options_kvs"))


def results_on_host(traced) -> list[bool] | None:
    """Whether each of a traced step's results should be in host memory; None: not known, since
    some result is an argument and need not be in the compiled program."""
    jaxpr = traced.jaxpr.jaxpr
    if not {id(variable) for variable in jaxpr.outvars}.isdisjoint(map(id, jaxpr.invars)):
        return None
    return [memory_space(variable.aval) is HOST for variable in jaxpr.outvars]


def donated_on_host(traced, lowered) -> set[int]:
    """The numbers of the arrays in host memory that a step donates."""
    given = jax.tree.leaves(lowered.args_info)
    return {
        number
        for number, (one, variable) in enumerate(zip(given, traced.jaxpr.jaxpr.invars, strict=True))
        if one.donated and memory_space(variable.aval) is HOST
    }


def kept_on_host(traced) -> tuple[int, str]:
    """The most bytes that a traced step keeps in host memory between where it sends values there
    and where it uses them (results apart), and the line that sends the first of those."""
    flat = flatten_jaxpr(traced.jaxpr)
    last = {value: at for at, step in enumerate(flat.steps) for value in step.uses}
    sent: dict[int, FlatStep] = {}
    for step in flat.steps:
        carry = loop_of(step.equation).carry if step.primitive == "scan" else slice(0, 0)
        if step.primitive in ("device_put", "scan"):
            own = step.outputs[carry.stop - carry.start :]  # what a loop carries was there before
            sent |= {value: step for value in own if memory_space(flat.avals[value]) is HOST}
    for value in flat.outputs:
        sent.pop(value, None) if isinstance(value, int) else None
    most, line, alive = 0, "", dict[int, FlatStep]()
    for at, step in enumerate(flat.steps):
        alive |= {value: step for value in step.outputs if value in sent}
        total = sum(flat.avals[value].size * flat.avals[value].dtype.itemsize for value in alive)
        if total > most:
            most, line = total, next(iter(alive.values())).line
        alive = {value: step for value, step in alive.items() if last.get(value, 0) > at}
    return most, line
