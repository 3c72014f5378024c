"""Dtypes of values, and casts between them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs


def output_structs(flat: jaxprs.FlatJaxpr) -> list[jax.ShapeDtypeStruct]:
    return [jaxprs.struct_of(flat.aval(output)) for output in flat.outputs]


def output_dtypes(flat: jaxprs.FlatJaxpr) -> list[Any]:
    return [dtype_of(flat.aval(output)) for output in flat.outputs]


def dtype_of(value: Any) -> Any:
    return getattr(value, "dtype", None) if hasattr(value, "dtype") else np.result_type(value)


def is_floating(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def among(operand: Any, numbers: set[int]) -> bool:
    return isinstance(operand, int) and operand in numbers


def is_scalar_shape(aval: Any) -> bool:
    return getattr(aval, "shape", None) == ()


def wider(first: Any, second: Any) -> Any:
    both = is_floating(first) and is_floating(second)
    return first if not both or first.itemsize >= second.itemsize else second


def strong(value: Any) -> Any:
    value = jnp.asarray(value)
    return jax.lax.convert_element_type(value, value.dtype) if is_floating(value.dtype) else value


def cast_to(value: Any, dtype: Any) -> Any:
    """A floating-point value in a dtype; anything else as it is."""
    if not is_floating(dtype_of(value)) or not is_floating(dtype) or dtype_of(value) == dtype:
        return value
    return jax.lax.convert_element_type(value, dtype)
