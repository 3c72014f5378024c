"""How fast a device multiplies matrices, by what their operands are and how exact it has to be."""

import dataclasses

import jax.numpy as jnp

_OF_BITS = {  # what the names of dtypes begin with
    "float8": "float8",
    "int8": "int8",
    "uint8": "int8",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float64": "float64",
    "complex128": "float64",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """FLOPs per second of matmuls and convolutions by the type of their operands, without sparsity
    and summed in float32 where they are shorter (as XLA does). ``tfloat32`` is float32 rounded to
    19 bits. 0: the device has no units for it."""

    float32: float
    float64: float = 0.0
    tfloat32: float = 0.0
    float16: float = 0.0
    bfloat16: float = 0.0
    float8: float = 0.0
    int8: float = 0.0

    def of(self, dtype) -> float:
        """The rate of operands of a dtype (or its name); of what the device has no units for, that
        of the type that XLA computes it in."""
        kind = next((kind for name, kind in _OF_BITS.items() if str(dtype).startswith(name)), "")
        found = getattr(self, kind or "float32")
        if not found and kind in ("float8", "int8"):
            found = self.bfloat16 or self.float16
        return found or self.float32


def product_bytes(dtype) -> float:
    """Bytes of an element of a dtype, or of its name, for each real product that it is in; of what
    is no dtype (a kernel of others' own), those of float32."""
    try:
        kind = jnp.dtype(dtype or "float32")
    except TypeError:
        return 4.0
    return kind.itemsize / (4 if kind.kind == "c" else 1)


def passes_of(precision: str) -> tuple[str, int]:
    """The type in which an algorithm of `jax.lax.DotAlgorithmPreset` multiplies float32, and in how
    many passes: ``("bfloat16", 6)`` of ``"bfloat16x6"``."""
    kind, _, passes = precision.partition("x")
    return kind, int(passes or 1)
