"""Bytes of abstract values, and their types as text."""

import functools
import math


def type_of(aval, *stacked: int) -> str:
    """Dtype and shape of an abstract value, or of a stack of so many, as text."""
    return named_type(getattr(aval, "dtype", ""), (*stacked, *getattr(aval, "shape", ())))


@functools.cache
def named_type(dtype, shape: tuple) -> str:
    return f"{dtype}{list(shape)}"


def size_of(aval) -> int:
    """Bytes of an abstract value."""
    if not hasattr(aval, "shape"):
        return 0  # a token
    return math.prod(aval.shape) * aval.dtype.itemsize
