"""Primitives of our own: only a primitive can say how it is transposed, or what it is lowered to.

Each is made when it is first bound, since its rules are registered with JAX's internals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxmem.jaxprs import internals

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Primitive

# What each that was made computes, by its name.
_RUNS: dict[str, Callable] = {}


def function_of(equation: JaxprEqn) -> Callable | None:
    """What a primitive of our own computes in an equation; None: it is none of them."""
    run = _RUNS.get(equation.primitive.name)
    return run and functools.partial(run, **equation.params)


def computed_by(
    name: str, run: Callable, abstract: Callable, batched: Callable, several: bool = False
) -> Primitive:
    """A primitive that is what ``run`` computes, of results that ``abstract`` tells, ``several`` or
    one; under `jax.vmap` ``batched``. Its derivatives are for the caller to register."""
    primitive, _RUNS[name] = internals.Primitive(name), run
    primitive.multiple_results = several
    primitive.def_impl(run)
    primitive.def_abstract_eval(abstract)
    if internals.optional("batching"):
        internals.batching.primitive_batchers[primitive] = batched
    lowered = internals.mlir.lower_fun(run, multiple_results=several)
    internals.mlir.register_lowering(primitive, lowered)
    return primitive
