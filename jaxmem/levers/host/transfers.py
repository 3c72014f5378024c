"""Arrays between host and device memory, whole or one layer of a stack."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import jaxprs
from jaxmem.ground.errors import OffloadError
from jaxmem.targets import HOST_KIND


def on_host(leaf: Any) -> bool:
    """Whether an array is in host memory."""
    return jaxprs.memory_space(leaf) is jaxprs.HOST


def offloadable(leaf: Any) -> bool:
    """Whether a leaf goes to host memory: scalars and empty arrays stay on the device."""
    return getattr(leaf, "ndim", 0) > 0 and leaf.size > 0


def to_host(leaf: Any) -> Any:
    """The leaf in host memory, if it is one to go there."""
    if not offloadable(leaf):
        return leaf
    kinds = jaxprs.memory_kinds()
    if HOST_KIND not in kinds:
        raise OffloadError(
            f"Arrays are to be kept in pinned host memory, and the devices of this platform "
            f"({jax.default_backend()}) have {' and '.join(kinds) or 'no memory kinds'}. "
            "Keep them on the device: leave jaxmem.offload and jaxmem.layers out."
        )
    return jax.device_put(leaf, jaxprs.HOST)


def to_device(leaf: Any) -> Any:
    """The leaf in device memory."""
    return jax.device_put(leaf, jaxprs.DEVICE) if on_host(leaf) else leaf


def fetch(stack: Any, index: Any, after: Sequence[Any] = ()) -> Any:
    """One layer of a stack, on the device; not before ``after`` is there."""
    if on_host(stack) and after:
        stack, *_ = jax.lax.optimization_barrier((stack, *after))
    taken = jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
    return to_device(taken)


def store(stack: Any, value: Any, index: Any) -> Any:
    """The stack with one layer replaced, in place where the compiler owns the stack."""
    value = jnp.asarray(value, stack.dtype)[None]
    if on_host(stack):
        value = jax.device_put(value, jaxprs.HOST)
    return jax.lax.dynamic_update_index_in_dim(stack, value, index, 0)


def zeros(shape: Sequence[int], dtype: Any) -> Any:
    """Zeros in host memory, where they are to go there."""
    return to_host(jnp.zeros(shape, dtype))
