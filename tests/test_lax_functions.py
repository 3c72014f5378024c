"""Every function of `jax.lax` that treats rows alike is known to keep examples apart."""

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
