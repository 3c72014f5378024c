"""Warnings on the user's own line."""

import contextlib
import functools
import os
import pathlib
import sys
import warnings

import jax

from jaxmem.ground.errors import JaxmemWarning

# What a call goes through on its way from the user's line: this package, JAX, and wrappers.
_PASSED = (
    str(pathlib.Path(__file__).parents[1]) + os.sep,
    str(pathlib.Path(jax.__file__).parent) + os.sep,
    contextlib.__file__,
    functools.__file__,
)


def warn(message: str) -> None:
    """Shows a `JaxmemWarning`, on the innermost line that is outside of this package and of JAX."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, JaxmemWarning, stacklevel=level)
