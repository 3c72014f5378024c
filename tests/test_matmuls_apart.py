"""Matmuls that XLA's own kernels refuse, compiled for a GPU that is absent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxlib.mlir.dialects import stablehlo

import jaxmem
from jaxmem.targets import spmd
from jaxmem.targets.cuda.matmuls_apart import keep_apart


def shape(*sizes, dtype=jnp.bfloat16, sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def attention(params, x):
    """Its result is transposed, so that rows of the last matmul come of two axes."""
    x = x @ params["in"]
    heads = x.reshape(*x.shape[:2], 4, 64)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads, heads) / 8)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, heads).reshape(x.shape)
    return jnp.mean(jnp.square((mixed @ params["out"]).astype(jnp.float32)))


def compiled(length, sharding=None):
    params = {name: shape(256, 256) for name in ("in", "out")}
    x = shape(32, length, 256, sharding=sharding)
    target = jaxmem.target("h100", count=2) if sharding else "h100"
    return jaxmem.memory(jax.value_and_grad(attention), params, x, target=target, timeline=False)


def test_an_odd_length_takes_what_an_even_one_takes():
    odd, even = compiled(1023), compiled(1024)
    assert odd.device == pytest.approx(even.device, rel=0.03)
    assert "gemm_fusion" in odd.hlo  # the other matmuls are XLA's own


def test_so_it_does_on_several_devices():
    sharding = NamedSharding(
        AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data")
    )
    odd, even = compiled(1023, sharding), compiled(1024, sharding)
    assert odd.device == pytest.approx(even.device, rel=0.03)
    assert "gemm_fusion" in odd.hlo


CONTRACTIONS = [
    ("bik,bkj->bij", (2, 3, 5), (2, 5, 4)),
    ("ibk,jkb->bij", (3, 2, 5), (4, 5, 2)),
    ("ikl,klj->ij", (3, 5, 2), (5, 2, 4)),
    ("akbl,lkc->abc", (3, 5, 2, 6), (6, 5, 4)),
    ("bqhd,bkhd->bhqk", (2, 3, 4, 5), (2, 7, 4, 5)),
    ("i,j->ij", (3,), (4,)),
    ("k,k->", (3,), (3,)),
    ("bk,bk->b", (2, 3), (2, 3)),
]


@pytest.mark.parametrize(("formula", "left", "right"), CONTRACTIONS)
def test_a_matmul_that_is_kept_apart_is_the_same(formula, left, right):
    def function(a, b):
        return jax.lax.map(lambda one: jnp.einsum(formula, one, b), a[None])

    one, other = (np.random.default_rng(0).normal(size=size) for size in (left, right))
    with jax.enable_x64(True):
        exported = jax.export.export(jax.jit(function))(one, other)
        changed, barriers = kept_apart(exported.mlir_module_serialized)
        assert barriers == 2
        same = dataclasses.replace(exported, mlir_module_serialized=changed)
        np.testing.assert_allclose(same.call(one, other), function(one, other), rtol=1e-13)


def kept_apart(serialized: bytes) -> tuple[bytes, int]:
    """A module with all of its matmuls apart, and how many barriers it has."""
    with spmd._context() as context:
        module = stablehlo.deserialize_portable_artifact(context, serialized)
        keep_apart(module, AnyShape(), count=1)
        assert module.operation.verify()
        version = stablehlo.get_current_version()
        text = stablehlo.serialize_portable_artifact_str(str(module), version)
        return text, str(module).count("optimization_barrier")


class AnyShape:
    """Shapes of results, of which any is a part of itself."""

    def __iter__(self):
        sizes = range(1, 8)
        yield from ((i, j) for i in sizes for j in range(1, 31))
        yield from ((b, i, j) for b in range(1, 9) for i in sizes for j in sizes)


def test_other_matmuls_stay_as_they_are():
    exported = jax.export.export(jax.jit(jnp.matmul))(shape(6, 5), shape(5, 8))
    with spmd._context() as context:
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        for shapes, count, found in (
            ([(6, 7)], 1, False),
            ([(3, 8)], 1, False),
            ([(3, 8)], 3, False),
            ([(1, 6, 8)], 1, False),
            ([], 1, False),
            ([(3, 8)], 2, True),
        ):
            keep_apart(module, shapes, count)
            assert ("optimization_barrier" in str(module)) == found
