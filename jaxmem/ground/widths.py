"""Types wide enough to add up in."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def promote_at_least(least: Any, dtype: Any) -> np.dtype:
    """A type, or ``least`` where it is of another kind or has fewer bits.

    JAX's promotion does not: it has none for the shortest types (float8, int4).

    >>> promote_at_least(np.float32, np.float16), promote_at_least(np.float32, np.float64)
    (dtype('float32'), dtype('float64'))
    """
    least, dtype = np.dtype(least), np.dtype(dtype)
    kind = jnp.inexact if jnp.issubdtype(least, jnp.inexact) else jnp.integer
    wide = jnp.issubdtype(dtype, kind) and dtype.itemsize >= least.itemsize
    return dtype if wide else least
