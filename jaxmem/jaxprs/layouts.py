"""How arrays lie in memory."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from jaxmem.jaxprs import internals
from jaxmem.jaxprs.barriers import identity, identity_jvp
from jaxmem.jaxprs.operands import is_extended
from jaxmem.targets import FAMILIES

if TYPE_CHECKING:
    from jax.extend.core import Primitive


def row_major(value: Any) -> Any:
    """The value with its last axis innermost, where a compiler may choose; cotangents lie as they
    like."""
    lies = value.ndim > 1 and not is_extended(value)
    return _row_major().bind(value)[0] if lies else value


@functools.cache
def _row_major() -> Primitive:
    primitive = identity("row_major")
    internals.ad.primitive_jvps[primitive] = identity_jvp(primitive)
    internals.mlir.register_lowering(primitive, _lowered)
    return primitive


def _lowered(ctx, value) -> Any:
    """JAX's own constraint. XLA does not partition that one: where there are several devices the
    value is said to be in their memory, which it is, and most layouts end there too. A compiler by
    whose rules the rows do not matter is left to choose."""
    families = (one for one in FAMILIES.values() if one.platform in ctx.module_context.platforms)
    if not all(family.rules.loops.row_major for family in families):
        return [value]
    if getattr(ctx.module_context.axis_context, "num_devices", None) == 1:
        return internals.mlir.lower_fun(_laid_out, multiple_results=True)(ctx, value)
    kind = internals.mlir.wrap_with_memory_kind
    return [kind(ctx.module_context, value, "device", ctx.avals_out[0])]


def _laid_out(*values: Any) -> list[Any]:
    return [
        internals.with_layout_constraint(x, internals.Layout(tuple(range(x.ndim)))) for x in values
    ]
