"""How often loops run, read off HLO that does not say so."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.reports.xla.computations import computations_of
from jaxmem.reports.xla.hlo import calls_of
from tests.absent_tpu import needs_libtpu

COUNTED = re.compile(r',?"known_trip_count":\{"n":"\d+"\}')


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def scanned(w, x):
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)
    return jnp.sum(x**2)


def in_reverse(w, x):
    xs = jnp.stack([x * number for number in range(5)])
    return jnp.sum(jax.lax.scan(lambda x, y: (jnp.sin(x @ w) + y, x), x, xs, reverse=True)[1])


def nested(w, x):
    def outer(x, _):
        return jax.lax.fori_loop(2, 9, lambda _, x: jnp.tanh(x @ w), x), None

    return jnp.sum(jax.lax.scan(outer, x, length=3)[0])


def in_regions(w, x):
    body = jax.checkpoint(lambda x, _: (jnp.tanh(jnp.sin(x @ w) @ w), None))
    return jnp.sum(jax.lax.scan(body, x, length=6)[0] ** 2)


LOOPS = {one.__name__: one for one in (scanned, in_reverse, nested, in_regions)}
TARGETS = ("v5e", "h100")
ARGS = shape(256, 256), shape(2048, 256)


def turns_of(hlo):
    lines = [line for found in computations_of(hlo).values() for line in found.values()]
    calls = (calls_of(line) for line in lines if re.search(r"\bwhile\(", line))
    return sorted(one.trip_count if one.trip_count is not None else -1 for one in calls)


@pytest.mark.parametrize("name", LOOPS)
def test_what_xla_says_is_found_without_it(name):
    """On a GPU XLA says how often a loop runs: that is taken out, and read off again."""
    step = jax.value_and_grad(LOOPS[name])
    hlo = jaxmem.memory(step, *ARGS, target="h100", timeline=False).hlo
    said = turns_of(hlo)
    assert said and -1 not in said
    assert COUNTED.search(hlo)
    assert turns_of(COUNTED.sub("", hlo)) == said


@needs_libtpu
@pytest.mark.parametrize("name", LOOPS)
def test_a_tpus_flops_are_those_of_a_gpu(name):
    """Numbers of 64 bits are pairs on a TPU, and not read."""
    step = jax.value_and_grad(LOOPS[name])
    with jax.enable_x64(False):
        reports = [jaxmem.memory(step, *ARGS, target=one, timeline=False) for one in TARGETS]
    tpu, gpu = reports
    assert " while(" in tpu.hlo
    assert tpu.work.flops == gpu.work.flops


def test_a_loop_that_nothing_counts_is_not_known():
    def until(x):
        return jax.lax.while_loop(lambda x: jnp.max(x) < 3.0, lambda x: jnp.sin(x) * 1.5, x)

    hlo = jaxmem.memory(until, shape(64, 64), target="h100", timeline=False).hlo
    assert turns_of(hlo) == [-1]


def doubled(w, x):
    return jax.lax.while_loop(
        lambda c: c[0] < 100, lambda c: (c[0] * 2, jnp.tanh(c[1] @ w)), (1, x)
    )


def until_small(w, x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: jnp.tanh(x @ w) / 2, x)


def of_no_flops(w, x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: jnp.sin(x) / 2, x)


def in_a_scan(w, x):
    return jax.lax.scan(lambda x, _: (until_small(w, x), None), x, length=5)[0]


@needs_libtpu
@pytest.mark.parametrize(
    ("loop", "target"),
    [(doubled, "v5e"), *itertools.product((until_small, of_no_flops, in_a_scan), TARGETS)],
)
def test_loops_that_are_not_counted_are_told(loop, target):
    with jax.enable_x64(False):  # counters of 64 bits are not read on a TPU
        report = jaxmem.memory(loop, *ARGS, target=target)
        counted = jaxmem.memory(scanned, *ARGS, target=target, timeline=False)
    turn = 0 if loop is of_no_flops else 2 * 2048 * 256 * 256
    assert report.work.uncounted == 1
    assert report.work.flops == turn * (5 if loop is in_a_scan else 1)
    assert (
        "note: how often it runs is not known: 1 loop counts once in FLOPs, bytes moved and time"
        in " ".join(str(report).split())
    )
    assert not counted.work.uncounted
