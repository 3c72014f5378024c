"""Mixed precision: which dtype parameters, computation and results have."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.frameworks import flax as _flax
from jaxmem.ground.checks import shown
from jaxmem.ground.errors import JaxmemError

T = TypeVar("T")

_ROLES = ("params", "compute", "output")
_DTYPES = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float64": jnp.float64,
}
_SHORT = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SHORT |= {"f16": "float16", "fp64": "float64", "f64": "float64", "half": "float16"}


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of parameters, of computation and of results.

    Casts touch floating-point arrays alone; integers, booleans and PRNG keys pass as they are.

    >>> import jax.numpy as jnp, jaxmem
    >>> bf16 = jaxmem.precision("bf16")
    >>> print(bf16)
    params=float32,compute=bfloat16,output=float32
    >>> bf16.cast_to_compute({"x": jnp.ones(2), "label": jnp.arange(2)})["x"].dtype
    dtype(bfloat16)
    """

    params: Any = jnp.float32
    compute: Any = jnp.float32
    output: Any = jnp.float32

    def __post_init__(self):
        for role in _ROLES:
            object.__setattr__(self, role, _dtype(getattr(self, role), f"{role}=..."))

    def cast_to_params(self, tree: T) -> T:
        """The tree with floating-point arrays in the parameters' dtype."""
        return _cast(tree, self.params)

    def cast_to_compute(self, tree: T) -> T:
        """The tree with floating-point arrays in the computation's dtype."""
        return _cast(tree, self.compute)

    def cast_to_output(self, tree: T) -> T:
        """The tree with floating-point arrays in the results' dtype."""
        return _cast(tree, self.output)

    def module(self, module: Any) -> Any:
        """A Flax module that computes in this precision by its own ``dtype``.

        A linen module comes back with ``dtype`` set to the computation's and ``param_dtype`` (where
        it has one) to the parameters', and so do modules among its fields; what it makes inside
        must be given them on (``nn.Dense(8, dtype=self.dtype)``), as is usual. Every layer of an
        nnx module has them set, and its parameters cast, in place.

        Raises:
            JaxmemError: not a Flax module, or one with no ``dtype`` anywhere.

        >>> import flax.linen as nn, jaxmem
        >>> print(jaxmem.precision("bf16").module(nn.Dense(8)).dtype)
        bfloat16
        """
        return _flax.with_dtypes(module, self.compute, self.params)

    def __str__(self):
        return ",".join(f"{role}={np.dtype(getattr(self, role)).name}" for role in _ROLES)


def precision(text: "str | Precision") -> Precision:
    """A `Precision` from text.

    ``"bf16"`` and ``"fp16"`` keep parameters and results in float32 and compute in the half type;
    ``"fp32"`` does nothing by halves. The long form names the roles, those left out are float32:
    ``"params=float32,compute=bfloat16,output=float32"``. bf16 needs no loss scaling, since its
    exponent has float32's range; fp16 does.

    Raises:
        JaxmemError: the text does not parse.

    >>> import jaxmem
    >>> jaxmem.precision("compute=bfloat16") == jaxmem.precision("bf16")
    True
    """
    if isinstance(text, Precision):
        return text
    if not isinstance(text, str):
        raise _error(text, f"it is of type {type(text).__name__}")
    stripped = text.strip().lower()
    if "=" not in stripped:
        return Precision(compute=_dtype(stripped, text))
    roles = {}
    for part in stripped.split(","):
        role, _, dtype = (piece.strip() for piece in part.partition("="))
        if role not in _ROLES or role in roles:
            raise _error(text, f"{part.strip()!r} does not give one of {', '.join(_ROLES)} once")
        roles[role] = _dtype(dtype, text)
    return Precision(**roles)


def _dtype(value: Any, text: Any) -> np.dtype:
    try:
        name = _SHORT.get(value, value) if isinstance(value, str) else np.dtype(value).name
    except TypeError:
        name = None
    if value is None or name not in _DTYPES:
        raise _error(text, f"{shown(value)} is none of {', '.join(_DTYPES)}")
    if name == "float64" and not jax.config.jax_enable_x64:
        raise _error(text, "JAX has float64 only with jax.config.update('jax_enable_x64', True)")
    return np.dtype(_DTYPES[name])


def _error(text: Any, why: str) -> JaxmemError:
    return JaxmemError(
        f"The precision {shown(text)} does not parse: {why}. Write 'bf16', 'fp16', 'fp32', or "
        "'params=float32,compute=bfloat16,output=float32'."
    )


def _cast(tree: T, dtype: np.dtype) -> T:
    def cast(leaf):
        if isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf.astype(dtype)
        return leaf

    return jax.tree.map(cast, tree)
