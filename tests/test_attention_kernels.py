"""Attention by cuDNN (`jax.nn.dot_product_attention`), for which JAX asks the attached device: of
GPUs that are not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import jaxprs
from jaxmem.levers.batch.independence import reduction_of
from jaxmem.program.costs import flops as flops_of

BATCH, LENGTH, HEADS, KEYS, WIDTH = 4, 512, 8, 2, 64
SCORES = BATCH * HEADS * LENGTH**2
MIB = 2**20


def heads(count=HEADS, batch=BATCH, **options):
    return jax.ShapeDtypeStruct((batch, LENGTH, count, WIDTH), jnp.bfloat16, **options)


def attention(query, key, value, is_causal=False):
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, implementation="cudnn"
    )


def loss(query, key, value, is_causal=False):
    return jnp.sum(attention(query, key, value, is_causal).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_kernel_counts_its_matmuls_and_holds_no_scores(is_causal):
    """Two matmuls forward and five backward, of a causal mask's half (Dao 2023)."""
    fun = functools.partial(loss, is_causal=is_causal)
    args = heads(), heads(KEYS), heads(KEYS)
    report = jaxmem.memory(jax.grad(fun, (0, 1, 2)), *args, target="h100")
    flops = 2 * 7 * SCORES * WIDTH // (2 if is_causal else 1)
    assert (report.work.flops, report.work.matmuls) == (flops, 7)
    assert report.device < 2 * SCORES  # of the scores' bytes in bfloat16
    assert report.time.seconds > flops / 989e12
    plan = jaxmem.plan(fun, *args, target="h100", argnums=(0, 1, 2), compilations=1)
    assert plan.compiled.flops == flops
    with jaxprs.in_place_of_attached(jaxmem.target("h100")):
        steps = jaxprs.flatten(fun, args).steps
    assert sum(flops_of(step.equation) for step in steps) == flops * 2 // 7


def test_outside_of_jaxmem_jax_asks_the_attached_device():
    args = heads(), heads(KEYS), heads(KEYS)
    jaxmem.memory(loss, *args, target="h100")
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        jax.make_jaxpr(functools.partial(loss, is_causal=True))(*args)


@pytest.mark.parametrize("form", ["scan", "unrolled"])
def test_layers_with_the_kernel_are_planned(form):
    width = HEADS * WIDTH

    def layer(x, weights):
        y = x @ weights["in"]
        query, key, value = jnp.split(y.reshape(*x.shape[:2], 3 * HEADS, WIDTH), 3, 2)
        x = x + attention(query, key, value, True).reshape(x.shape) @ weights["out"]
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    def network(params, x):
        if form == "scan":
            x, _ = jax.lax.scan(layer, x, params)
        else:
            for at in range(4):
                x, _ = layer(x, jax.tree.map(lambda leaf, at=at: leaf[at], params))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shapes = {"in": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {
        name: jax.ShapeDtypeStruct((4, *shape), jnp.bfloat16) for name, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct((16, LENGTH, width), jnp.bfloat16)
    plain = jaxmem.memory(jax.value_and_grad(network), params, x, target="h100")
    budget = plain.device * 6 // 10
    plan = jaxmem.plan(network, params, x, target="h100", budget=budget)
    assert plain.device == pytest.approx(plan.plain_bytes, rel=0.1)
    assert plan.compiled.bytes <= budget
    assert plain.work.flops < plan.compiled.flops < 1.34 * plain.work.flops


@pytest.mark.slow
def test_fit_cuts_a_batch_that_the_kernel_reads():
    params = jax.ShapeDtypeStruct((3, 64, HEADS * WIDTH), jnp.float32)

    def loss_fn(params, batch):
        shape = (*batch.shape[:2], HEADS, WIDTH)
        parts = [(batch @ one.astype(batch.dtype)).reshape(shape) for one in params]
        return jnp.mean(attention(*parts).astype(jnp.float32) ** 2)

    batch = jax.ShapeDtypeStruct((64, LENGTH, 64), jnp.bfloat16)
    given = loss_fn, optax.adam(1e-3), params, batch
    plain = jaxmem.fit(*given, target="h100").fitting.chosen.compiled
    step = jaxmem.fit(*given, target="h100", budget=plain // 2, keep=("placement",))
    assert step.fitting.chosen.levers.microbatches > 1
    assert step.fitting.chosen.compiled <= plain // 2


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_examples_are_apart_but_for_dropout(rate):
    """Whose mask depends on the place of an example in the batch."""
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

    def loss_fn(params, batch):
        mixed = dot_product_attention(params * batch, batch, batch, dropout_rate=rate)
        return jnp.mean(mixed.astype(jnp.float32) ** 2)

    params = jax.ShapeDtypeStruct((1, 1, HEADS, WIDTH), jnp.bfloat16)
    with jaxprs.in_place_of_attached(jaxmem.target("h100")):
        proof = reduction_of(
            lambda params, batch, *_: (loss_fn(params, batch), None), heads(), [2], params
        )
    assert proof.reduction == (None if rate else "mean"), proof
    assert bool(rate) == ("place of an example" in str(proof.why))


# ---- on several devices

MESH = AbstractMesh((8,), ("data",))
ROWS = NamedSharding(MESH, PartitionSpec("data"))
EIGHT = functools.partial(jaxmem.target, "h100", count=8)


def test_in_shard_map_each_device_has_its_own_part():
    args = [heads(count, 8 * BATCH, sharding=ROWS) for count in (HEADS, KEYS, KEYS)]

    def mapped(*args):
        specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
        out = jax.shard_map(attention, mesh=MESH, **specs, check_vma=False)(*args)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    report = jaxmem.memory(jax.grad(mapped, (0, 1, 2)), *args, target=EIGHT())
    assert report.work.flops == 2 * 7 * SCORES * WIDTH


def test_what_xla_would_cut_by_calling_python_is_told():
    args = [heads(count, 8 * BATCH, sharding=ROWS) for count in (HEADS, KEYS, KEYS)]
    text = (
        r"is a jax.custom_partitioning, which XLA cuts over devices by calling into Python. That "
        r"cannot be compiled for devices that are not there. Call it in jax.shard_map over all axes"
    )
    with pytest.raises(jaxmem.JaxmemError, match=text):
        jaxmem.memory(loss, *args, target=EIGHT())


def test_calls_into_python_are_left_out_on_several_devices_too():
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=ROWS)

    def step(x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x * jax.pure_callback(np.asarray, like, x)

    with pytest.warns(jaxmem.JaxmemWarning, match="such calls are left out of this estimate"):
        report = jaxmem.memory(step, x, target=EIGHT())
    assert report.argument == 8 * 1024 * 4
