"""Primitives of our own: only a primitive can say how it is transposed, or what it is lowered to.

Each is made when it is first bound, since its rules are registered with JAX's internals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxmem.jaxprs import internals

if TYPE_CHECKING:
    from jax.extend.core import Primitive


def computed_by(
    name: str, run: Callable, abstract: Callable, batched: Callable, several: bool = False
) -> Primitive:
    """A primitive that is what ``run`` computes, of results that ``abstract`` tells, ``several`` or
    one; under `jax.vmap` ``batched``. Its derivatives are for the caller to register."""
    primitive = internals.Primitive(name)
    primitive.multiple_results = several
    primitive.def_impl(run)
    primitive.def_abstract_eval(abstract)
    if internals.optional("batching"):
        internals.batching.primitive_batchers[primitive] = batched
    lowered = internals.mlir.lower_fun(run, multiple_results=several)
    internals.mlir.register_lowering(primitive, lowered)
    return primitive
