"""Rows that are taken of several tables at once, each by indices of its own (hash grids)."""

import jax
import jax.numpy as jnp
import pytest
from projections import projected_and_compiled

TABLES, LENGTH, ROWS = 12, 2**16, 2**18


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def rows_of(tables, indices):
    return jax.vmap(lambda table, index: table[index])(tables, indices)


def given(tables, indices):
    return jnp.mean(jnp.tanh(rows_of(tables, indices)) ** 2)


def computed(tables, points):
    return given(tables, (points * 100).astype(jnp.int32) % LENGTH)


def hashed(tables, points):
    """Of a grid for each table, as Instant-NGP does."""

    def level(table, resolution):
        at = jnp.floor(points * resolution).astype(jnp.uint32)
        primes = jnp.array([1, 2654435761, 805459861], jnp.uint32)
        index = (at * primes[None]).sum(-1, dtype=jnp.uint32)
        return table[index % jnp.uint32(LENGTH)]

    resolutions = jnp.arange(16, 16 + TABLES, dtype=jnp.float32)
    return jnp.mean(jnp.tanh(jax.vmap(level)(tables, resolutions)) ** 2)


def along(tables, indices):
    """Single elements, by three numbers each."""
    return jnp.mean(jnp.tanh(jnp.take_along_axis(tables, indices, 1)) ** 2)


LOSSES = {
    "given": (given, shape(TABLES, ROWS, dtype=jnp.int32)),
    "computed": (computed, shape(TABLES, ROWS)),
    "hashed": (hashed, shape(ROWS, 3)),
    "single elements": (along, shape(TABLES, ROWS, 2, dtype=jnp.int32)),
}


@pytest.mark.parametrize(
    ("name", "target"), [*((name, "h100") for name in LOSSES), ("hashed", "t4")]
)
def test_the_numbers_of_tables_are_beside_the_indices(name, target):
    """XLA writes them for the gather and for the scatter of its derivative: up to two thirds of
    what was projected were missing."""
    loss, indices = LOSSES[name]
    args = shape(TABLES, LENGTH, 2), indices
    projected, compiled = projected_and_compiled(loss, args, target)
    assert projected == pytest.approx(compiled, rel=0.05)
