"""Automatic mixed precision, on the traced program of any function."""

import functools
from collections.abc import Callable, Mapping

import jax
import numpy as np

from jaxmem import jaxprs
from jaxmem.frameworks.modules import on_arrays
from jaxmem.ground.checks import shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.mixed_precision.caster import Caster
from jaxmem.levers.mixed_precision.dtypes import cast_to, output_dtypes
from jaxmem.levers.mixed_precision.policy import Precision, precision as parse_precision
from jaxmem.levers.mixed_precision.rules import RULES, check_rules


def autocast(
    fun: Callable,
    precision: str | Precision,
    *,
    rules: Mapping[str, str] | None = None,
) -> Callable:
    """``fun`` with each of its operations in the dtype that suits it.

    The function is traced in float32, as it is written, and evaluated operation by operation:

    ============  ==================================================================================
    ``compute``   matmuls and convolutions: operands and result in the ``compute`` dtype, each
                  operand cast where it is used, products summed in float32 inside the operation.
                  Not what sums nothing (an outer product), which is a product like any other, nor
                  what asks for `jax.lax.Precision.HIGHEST`, which is float32
    ``float32``   exp, log, pow, squares, roots, sums (of segments too), products and cumulative
                  sums, and with them softmax, norms, variances and losses
    ``follow``    the rest of arithmetic, comparisons, selections and layout: the widest of its
                  operands of full size. Scalars, biases and what else is broadcast (a norm's mean
                  and scale) do not count: with them the operation runs in float32, and its result
                  is rounded once such operations are done with it: float32 ones read it as it is.
    as traced     everything else (kernels, collectives, linear algebra, random bits), and all that
                  is float64, or bfloat16 and float16 by an explicit cast of the function's own
    ============  ==================================================================================

    The lists are those of PyTorch's autocast where JAX has the operation, but for
    ``scatter-add``: a thousand messages to one node of a graph, each 1, add up to 256 in bfloat16.
    Norms have their statistics in float32 and come out as what is normalised, as PyTorch's batch
    norm (not its layer norm, which comes out in float32).

    Arguments are never cast as a whole. A matmul that reads a parameter casts it in the forward
    and again in the backward pass (a `jax.checkpoint` round the one operation), so that no
    low-precision copy of it lives in between. The bodies of scan, while, cond, `jax.checkpoint` and
    of functions with custom derivatives are cast too; those of `jax.shard_map` and of Pallas
    kernels are not. A loop's carry keeps the dtype it starts in unless the body widens it, but a
    sum is float32: a carry that each round only adds to, scales, moves or selects from. So is what
    a loop carries for 256 rounds or more, those of loops inside counted, or for nobody knows how
    many (`while_loop`). A `while_loop` that goes on until a number in floating point is small or
    near enough (a fixed point) is left as it is: in 16 bits it might never be. What all matmuls are
    asked for by `jax.default_matmul_precision` is no wish of one: `Precision.HIGHEST` is heard
    where that is not "highest" already. Works on a gradient function as on what it is the gradient
    of, and under `jit`, `grad`, `vmap` and `scan`.

    Args:
        fun: any JAX function.
        precision: a `Precision` or its text; its ``compute`` dtype is that of the matmuls. Results
            that ``fun`` has in float32 come out in its ``output`` dtype. float16 needs a
            `LossScale` to train, bfloat16 does not.
        rules: changes to `jaxmem.levers.mixed_precision.rules.RULES`, as in
            ``{"tanh": "float32", "reduce_sum": "follow"}``.

    Raises:
        JaxmemError: the precision does not parse, or computes in neither bfloat16 nor float16
            nor float32; or a rule is not one of the above, or for an operation that JAX has not.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def layer(w, x):
    ...     return jax.nn.softmax(x @ w)
    >>> w, x = jnp.eye(3, dtype="float32"), jnp.ones((2, 3), "float32")
    >>> print(jax.make_jaxpr(jaxmem.autocast(layer, "bf16"))(w, x).eqns[0].outvars[0].aval)
    bfloat16[2,3]
    """
    if not callable(fun):
        raise JaxmemError(f"jaxmem.autocast takes a function; got {shown(fun)}.")
    chosen = parse_precision(precision)
    changes = check_rules(rules or {})
    if chosen.compute == np.float32:
        return fun
    if chosen.compute.itemsize != 2:
        raise JaxmemError(
            f"jaxmem.autocast computes in bfloat16 or float16; got {chosen}. Cast the arguments "
            "themselves with Precision.cast_to_compute."
        )
    caster = Caster(chosen.compute, {**RULES, **changes}, recast=True)
    return _wrap(fun, caster, chosen.output)


def autocast_inside_regions(fun: Callable, precision: Precision) -> Callable:
    """`autocast` of a function that is going to be cut into regions, whose recompute makes the
    casts of parameters again anyway."""
    return _wrap(fun, Caster(precision.compute, RULES, recast=False), precision.output)


def _wrap(fun: Callable, caster: "Caster", output: np.dtype) -> Callable:
    def evaluate(call, leaves):
        flat = jaxprs.flatten(call, leaves)
        stored = [*([False] * len(flat.consts)), *([True] * len(leaves))]
        results = caster.run(flat, [*flat.consts, *leaves], stored, output.itemsize > 2)
        results = [
            cast_to(result, output) if traced == np.float32 else result
            for result, traced in zip(results, output_dtypes(flat), strict=True)
        ]
        return jax.tree.unflatten(flat.out_tree, results)

    @functools.wraps(fun)
    def cast(*args, **kwargs):
        return on_arrays(evaluate, fun, args, kwargs)

    return cast
