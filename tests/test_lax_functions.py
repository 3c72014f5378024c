"""What `jax.lax` has: how it is planned, and that what treats rows alike keeps examples apart."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmem

ROWS = np.array([2, 0, 3, 1])
VALUES = {
    "float32": np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(4, 3) % 0.37 + 0.2,
    "complex64": (np.linspace(0.1, 0.9, 12) % 0.37 + 0.2j).reshape(4, 3).astype(np.complex64),
    "int32": (np.arange(12, dtype=np.int32) * 5 % 7).reshape(4, 3),
    "bool": (np.arange(12) * 5 % 7 > 3).reshape(4, 3),
}
# The first is given a list: of an array it takes row for row. The other one is a loop that ends
# when all elements are done.
EXCEPT = {"stack", "random_gamma_grad"}


def calls(dtype):
    """Functions of one to three arrays of rows, of which the same comes in whatever order."""
    x = VALUES[dtype]
    for name in sorted(set(dir(lax)) - EXCEPT):
        fun = getattr(lax, name)
        if not callable(fun) or name[0] == "_" or isinstance(fun, type) or name.endswith("_p"):
            continue
        for count in (1, 2, 3):
            operands = [x, x[::-1] + x, x * x][:count] if dtype != "bool" else [x, ~x, x][:count]
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    (made,) = jax.tree.leaves(fun(*operands))
                    other = fun(*[one[ROWS] for one in operands])
            except Exception:  # of another number of operands, or another dtype
                continue
            same = np.shape(made) == x.shape and np.array_equal(np.array(made)[ROWS], other, True)
            if same:
                yield name, fun, operands


def keeps_apart(fun, operands) -> bool:
    def loss(scale, batch):
        made = jnp.asarray(fun(*batch))
        rows = jnp.sum(jnp.real(made).astype(jnp.float32), 1)
        return jnp.mean(rows * scale)

    with warnings.catch_warnings():
        warnings.simplefilter("error", jaxmem.JaxmemWarning)
        try:
            jax.eval_shape(jaxmem.microbatch(loss, 2), jnp.float32(2), list(operands))
        except jaxmem.JaxmemWarning:
            return False
    return True


@pytest.mark.parametrize(("dtype", "least"), [*zip(VALUES, (60, 25, 35, 15), strict=True)])
def test_functions_of_each_element_keep_examples_apart(dtype, least):
    found = list(calls(dtype))
    assert len({name for name, *_ in found}) >= least
    assert [name for name, fun, operands in found if not keeps_apart(fun, operands)] == []


def test_a_search_in_sorted_numbers_keeps_examples_apart(recwarn):
    """`jnp.searchsorted` compares by an order of all numbers, which JAX has primitives for."""

    def loss(p, x):
        knots = jnp.cumsum(jax.nn.softmax(p))
        return jnp.mean(jax.vmap(lambda x: (x - knots[jnp.searchsorted(knots, x)]) ** 2)(x))

    args = jnp.ones(8), jnp.linspace(0.1, 0.8, 6)
    chex.assert_trees_all_close(
        jaxmem.microbatch(loss, 3)(*args), jax.value_and_grad(loss)(*args), rtol=1e-12
    )
    assert not recwarn.list


def test_products_of_complex_numbers_are_fused():
    """XLA computes real and imaginary parts in the kernel that reads them."""

    def loss(ws, x):
        for w, v in ws:
            z = lax.complex(x @ w, x @ v)
            x = jnp.abs(z * jnp.conj(z + 1))
        return jnp.mean(x**2)

    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    args = [(array((64, 64)), array((64, 64)))] * 6, array((64, 1024, 64))
    plain = jaxmem.plan(loss, *args, target="h100", compilations=0).plain_bytes
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target="h100", timeline=False)
    assert compiled.device == pytest.approx(plain, rel=0.1)


SHAPES = {
    "stack": lambda x: jnp.stack([x, 2 * x], -1),
    "unstack": lambda x: sum(jnp.unstack(x, axis=-1)),
    "tile": lambda x: jnp.tile(x, (1, 3)),
    "tile in front": lambda x: jnp.tile(x[:, None], (1, 2, 2)),
    "polyval": lambda x: jnp.polyval(jnp.array([0.5, 0.1, 2.0], x.dtype), x),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_several_operations_to_xla_is_planned_as_these(name):
    def loss(w, x):
        made = jnp.sin(SHAPES[name](jnp.tanh(x @ w)))
        return jnp.mean(jnp.sum(made, range(1, made.ndim)))

    args = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), jnp.linspace(-2.0, 2.0, 32).reshape(4, 8)
    expected = jax.value_and_grad(loss)(*args)
    chex.assert_trees_all_close(jaxmem.microbatch(loss, 2)(*args), expected, rtol=1e-12)
    for planner in ("dp", "dots"):
        planned = jaxmem.plan(loss, *args, planner=planner).apply(loss)
        chex.assert_trees_all_close(jax.value_and_grad(planned)(*args), expected, rtol=1e-12)
        chex.assert_trees_all_close(jax.jit(jax.grad(planned))(*args), expected[1], rtol=1e-11)


@pytest.mark.parametrize("target", ["h100", "t4"])
def test_rotated_pairs_are_no_kernels_of_their_own(target):
    """Rotary embeddings of interleaved pairs are stacked: XLA does so in the kernel that reads them
    or multiplies."""

    def loss(ws, x):
        turn = jnp.cos(jnp.arange(1024.0, dtype=jnp.float32))[None, :, None]
        for w, v in ws:
            y = x @ w
            a, b = y[..., ::2], y[..., 1::2]
            y = jnp.stack([a * turn - b * (1 - turn), a * (1 - turn) + b * turn], -1)
            x = x + y.reshape(x.shape) @ v
        return jnp.mean(x**2)

    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    args = [(array((64, 64)), array((64, 64)))] * 6, array((64, 1024, 64))
    plain = jaxmem.plan(loss, *args, target=target, compilations=0).plain_bytes
    compiled = jaxmem.memory(jax.value_and_grad(loss), *args, target=target, timeline=False)
    assert compiled.device == pytest.approx(plain, rel=0.1)
