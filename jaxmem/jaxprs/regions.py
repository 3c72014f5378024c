"""`jax.checkpoint` around parts of a flat program, and the policies that it asks."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmem.ground.errors import JaxmemError
from jaxmem.jaxprs import internals
from jaxmem.jaxprs.equations import parameters_of
from jaxmem.jaxprs.flat import FlatStep, context, evaluate
from jaxmem.targets.memories import HOST_KIND

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


def checkpoint_like(step: FlatStep, fun: Callable, operands: Sequence[Any]) -> list[Any]:
    """``fun(*operands)`` under the same `jax.checkpoint` as a step's."""
    if "_prim" in step.equation.params:
        with context(step):
            policy = parameters_of(step.equation)["policy"]
            return jax.checkpoint(fun, policy=policy)(*operands)
    closed = jax.make_jaxpr(fun)(*operands)
    jaxpr = internals.partial_eval.convert_constvars_jaxpr(closed.jaxpr)
    return evaluate(step, [*closed.consts, *operands], jaxpr=jaxpr)


# With the flag jax_remat3, jax 0.10 knows a policy of names by its class.
_SAVE_ONLY: type = type(jax.checkpoint_policies.save_only_these_names())


@dataclasses.dataclass(frozen=True)
class NamePolicy(_SAVE_ONLY if dataclasses.is_dataclass(_SAVE_ONLY) else object):  # type: ignore[misc]
    """A policy of `jax.checkpoint`: values of ``saveable_names`` are saved, and those of the names
    ``offloaded`` sent to host memory. (JAX's own policies fail at primitives that have a parameter
    named ``prim``, as Equinox's.)"""

    saveable_names: frozenset[str]
    offloaded: frozenset[str] = frozenset()

    def __call__(self, primitive, /, *avals, **parameters):
        name = parameters["name"] if primitive.name == "name" else None
        if name in self.offloaded:
            return internals.partial_eval.Offloadable(src="device", dst=HOST_KIND)
        saves = name in self.saveable_names
        if not self.offloaded:
            return saves
        return internals.partial_eval.Saveable if saves else internals.partial_eval.Recompute


def named(value: Any, name: str) -> Any:
    """A value that policies know by a name. A complex one by its parts: JAX rounds what a region
    saves to its own precision, which it cannot do to complex numbers."""
    _transpose_names()
    if not jnp.iscomplexobj(value):
        return checkpoint_name(value, name)
    parts = jnp.real(value), jnp.imag(value)
    return jax.lax.complex(*(checkpoint_name(part, name) for part in parts))


@functools.cache
def _transpose_names() -> None:
    """JAX does not know how to transpose what has names (`jax.linear_transpose`); from now on it
    does."""
    named = jax.make_jaxpr(lambda value: checkpoint_name(value, ""))(0.0)
    (primitive,) = (equation.primitive for equation in named.eqns)
    if primitive.name == "name":  # with the flag jax_remat3 it is no primitive
        transposes = internals.ad.primitive_transposes
        transposes.setdefault(primitive, lambda cotangent, _, **name: [cotangent])


def policy_saves(region: JaxprEqn, equation: JaxprEqn) -> bool:
    """Whether the policy of a user's own region keeps what an equation in it makes, on the device
    or in host memory."""
    policy = parameters_of(region).get("policy")
    if not callable(policy):
        return False
    decided = policy(
        equation.primitive, *(atom.aval for atom in equation.invars), **equation.params
    )
    return bool(decided) and decided is not internals.partial_eval.Recompute


@dataclasses.dataclass(frozen=True)
class OperationPolicy:
    """A policy of `jax.checkpoint` that decides by operation: ``saves(primitive, *avals,
    **parameters)``."""

    saves: Callable[..., bool]

    def __post_init__(self):
        _ask_policies()

    def __call__(self, primitive, /, *avals, **parameters) -> bool:
        return self.saves(primitive, *avals, **parameters)


@functools.cache
def _ask_policies() -> None:
    """With the flag jax_remat3 JAX asks policies of names alone: of matmuls and convolutions it
    asks an `OperationPolicy` too, from now on, and treats other policies as before."""
    try:
        internals.remat  # noqa: B018
    except JaxmemError:
        return  # there is no such flag
    new = "custom_vjp_rules" in inspect.signature(internals.remat.RematTrace).parameters  # jax 0.12

    def rule_of(primitive, before):
        def rule(trace, *values, **parameters):
            policy = trace.policy if new else trace
            if not isinstance(policy, OperationPolicy) and before is not None:
                return before(trace, *values, **parameters)
            again = functools.partial(primitive.bind, **parameters)
            out = again(*values)
            saves = isinstance(policy, OperationPolicy) and policy(
                primitive, *map(jax.typeof, values), **parameters
            )

            def recompute(saved, *values):
                results = again(*values)
                return internals.primal_left_tangent_right(*saved, results) if saves else results

            saved = (out,) if saves else ()
            if new:
                return out, saved, recompute
            return out, functools.partial(recompute, saved)

        return rule

    for primitive in (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p):
        internals.remat.rules[primitive] = rule_of(primitive, internals.remat.rules.get(primitive))
