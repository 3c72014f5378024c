"""Long sequences over several devices: programs with collectives of their own."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxmem
from benchmarks.scale import context
from jaxmem.targets.cuda.family import Cuda

CASES = [
    pytest.param(context.ring, "scan", id="ring"),
    pytest.param(context.all_to_all, "scan", id="all-to-all", marks=pytest.mark.slow),
]


def bytes_of(fun, args):
    step = jax.value_and_grad(fun)
    return jaxmem.memory(step, *args, target=context.TARGET, timeline=False).device


@pytest.mark.parametrize(("attention", "form"), CASES)
def test_what_runs_inside_of_shard_map_is_projected(attention, form):
    """Scores of 8 GiB, three at a time in the backward pass, are in no value of the program."""
    loss, args = context.program(attention, form, layers=4)
    plain = jaxmem.plan(loss, *args, target=context.TARGET).plain_bytes
    assert plain == pytest.approx(bytes_of(loss, args), rel=0.1)
    plan = jaxmem.plan(loss, *args, budget=int(0.8 * plain))
    assert plan.projected_bytes <= 0.8 * plain
    assert plan.projected_bytes == pytest.approx(bytes_of(plan.apply(loss), args), rel=0.1)


MESH = jax.sharding.AbstractMesh((8,), ("data",))
ROWS, WIDTH, LAYERS = 2048, 512, 4


def layer(x, w):
    return x + jax.nn.gelu(x @ w["u"]) @ w["d"]


def layers(weights, x):
    for w in weights:
        x = layer(x, w)
    return x


def scanned(weights, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]


def passed_around(weights, x):
    ahead = [(at, (at + 1) % 8) for at in range(8)]
    for w in weights:
        y = jnp.tanh(x @ w["u"]) @ w["d"]
        x = jax.nn.softmax(y + jax.lax.ppermute(y, "data", ahead))
    return x


def mapped(fun, replicated=False):
    places = (P(), P("data"))
    return jax.shard_map(
        fun, mesh=MESH, in_specs=places, out_specs=P() if replicated else P("data")
    )


def mean_inside(weights, x):
    return jax.lax.pmean(jnp.mean(layers(weights, x) ** 2), "data")


def each_layer(weights, x):
    one = mapped(lambda w, x: layer(x, w))
    return jax.lax.scan(lambda x, w: (one(w, x), None), x, weights)[0]


def squared(fun):
    return lambda weights, x: jnp.mean(fun(weights, x) ** 2)


@pytest.mark.parametrize(
    ("loss", "stacked"),
    [
        pytest.param(squared(mapped(layers)), False, id="layers"),
        pytest.param(mapped(mean_inside, replicated=True), False, id="whole loss"),
        pytest.param(squared(mapped(passed_around)), False, id="passed around"),
        pytest.param(squared(mapped(scanned)), True, id="scan inside"),
        pytest.param(squared(each_layer), True, id="inside of a scan"),
    ],
)
def test_xla_fuses_what_is_inside_of_shard_map(loss, stacked):
    """As JAX differentiates it, each residual inside is a result: twice what XLA has in memory."""

    def of(*shape, along=None):
        place = jax.sharding.NamedSharding(MESH, P(along))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)

    count = (LAYERS,) if stacked else ()
    weights = {"u": of(*count, WIDTH, 4 * WIDTH), "d": of(*count, 4 * WIDTH, WIDTH)}
    args = weights if stacked else [weights] * LAYERS, of(8 * ROWS, WIDTH, along="data")
    target = jaxmem.target("h100", count=8)
    step = jax.jit(jax.value_and_grad(loss))
    options = Cuda.compiler_options
    report = jaxmem.memory(step, *args, target=target, compiler_options=options, timeline=False)
    plain = jaxmem.plan(loss, *args, target=target, compilations=0).plain_bytes
    assert plain == pytest.approx(report.device, rel=0.1)


@pytest.mark.slow
def test_attention_around_a_ring_is_attention():
    script = """
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 8)
from benchmarks.scale import context
automatic = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=automatic)
x = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 8))
mapped = dict(mesh=mesh, in_specs=(context.PLACE,) * 3, out_specs=context.PLACE, check_vma=False)
wanted = jax.nn.dot_product_attention(*x)
for attention in (context.ring, context.all_to_all):
    found = jax.jit(jax.shard_map(attention, **mapped))(*x)
    assert jnp.abs(found - wanted).max() < 1e-5, attention
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
