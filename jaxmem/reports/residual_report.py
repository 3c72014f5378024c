"""What a forward pass keeps for its backward pass."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxmem import jaxprs
from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.checks import check_call, name_of, note_call
from jaxmem.ground.words import pluralize
from jaxmem.program import size_of
from jaxmem.reports.where.arguments import argument_paths
from jaxmem.reports.where.names import UNATTRIBUTED, modules_of, source_of
from jaxmem.reports.xla.instructions import Frame


@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """One kept value: ``source`` is the user's line that made it, or the argument that it is."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operation: str
    source: str
    module: str
    is_argument: bool


@dataclasses.dataclass(frozen=True, repr=False)
class Residuals:
    """What is kept, largest first; `residuals` makes it.

    ``total`` counts what the forward pass makes; arguments that are kept (``argument_bytes``) are
    there in any case.
    """

    values: tuple[Residual, ...]

    @property
    def total(self) -> int:
        """Bytes of the kept values that are not arguments."""
        return sum(value.bytes for value in self.values if not value.is_argument)

    @property
    def argument_bytes(self) -> int:
        """Bytes of the kept values that are arguments."""
        return sum(value.bytes for value in self.values if value.is_argument)

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        return iter(self.values)

    def __str__(self):
        made = [value for value in self.values if not value.is_argument]
        lines = [
            f"{format_bytes(self.total)} kept in {pluralize(len(made), 'value')}, besides "
            f"{format_bytes(self.argument_bytes)} of arguments"
        ]
        for value in made:
            what = f"{value.dtype}[{','.join(map(str, value.shape))}]"
            where = " · ".join(part for part in (value.operation, value.module) if part)
            lines.append(f"{format_bytes(value.bytes):>14}  {what:24}  {where}  {value.source}")
        return "\n".join(lines)

    __repr__ = __str__


def residuals(fun: Callable, *args: Any, **kwargs: Any) -> Residuals:
    """The values that the forward pass of a function keeps for its backward pass.

    What `jax.ad_checkpoint.print_saved_residuals` prints, as data: with bytes, a total, the user's
    line and the module, sorted. Regions of `jax.checkpoint`, policies and `jaxmem.remat` are
    honoured. This is JAX's plan; what XLA fuses, merges or recomputes shows in `jaxmem.memory`.

    Args:
        fun: a function of arrays in pytrees; nothing runs.
        *args, **kwargs: its arguments, real or `jax.ShapeDtypeStruct`.

    Raises:
        JaxmemError: the function does not take these arguments.

    >>> import jax.numpy as jnp, jaxmem
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.sin(x @ w))
    >>> kept = jaxmem.residuals(loss, jnp.ones((4, 8)), jnp.ones((2, 4)))
    >>> [(value.operation, value.shape) for value in kept if not value.is_argument]
    [('cos', (2, 8))]
    """
    check_call(fun, args, kwargs, "jaxmem.residuals")
    args, kwargs = jax.tree.map(jaxprs.abstract, (args, kwargs))
    leaves, call = jaxprs.split_arrays(fun, args, kwargs)
    paths = argument_paths(fun, args, kwargs)
    found = []
    with note_call(name_of(fun), fun, args, kwargs), jaxprs.in_place_of_attached(None):
        every = jaxprs.saved_residuals(call, leaves)
    for kept in every:
        if kept.equation is not None:
            operation = kept.operation
            source = source_of(Frame(*frame) for frame in kept.frames)
        elif kept.argument is not None:
            operation, source = "argument", f"argument {paths[kept.argument]}"
        else:
            operation, source = "constant", UNATTRIBUTED
        module = "/".join(modules_of(f"{kept.name_stack}/{kept.operation}"))
        aval, given = kept.aval, kept.equation is None
        found.append(
            Residual(size_of(aval), aval.shape, str(aval.dtype), operation, source, module, given)
        )
    return Residuals(tuple(sorted(found, key=lambda value: -value.bytes)))
