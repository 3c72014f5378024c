"""No kernel of a planned step writes over a buffer that it reads at other places."""

import gzip
import os
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_fuzz
from aliasing import overwritten
from hypothesis import Phase, given, seed, settings, strategies as st
from test_pooling import USES, VIEWS

import jaxmem

PROGRAMS = int(os.environ.get("JAXMEM_FUZZ", "400")) // 40


def compiled_here(step, *args, folder):
    """Of a step compiled for this CPU what is overwritten, and what it computes."""
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    compiled = jax.jit(step).lower(*args).compile(compiler_options=options)
    (buffers,) = pathlib.Path(folder).glob("*buffer-assignment.txt")
    return overwritten(compiled.as_text(), buffers.read_text()), compiled(*args)


def compiled_for_gpu(step, *args):
    report = jaxmem.memory(jax.jit(step), *args, target="h200")
    return overwritten(report.hlo, gzip.decompress(report.dump["buffer-assignment"]).decode())


def viewed(view, use):
    def loss(w, x):
        y = jnp.tanh(x @ w)
        z = nn.max_pool(VIEWS[view](y), (2, 2), (2, 2), "SAME")
        return jnp.sum(z**2) + USES[use](y, z)

    return loss


W = jax.random.normal(jax.random.key(0), (8, 8)) / 3
X = jax.random.normal(jax.random.key(1), (16, 8))


def test_the_checker_finds_what_computes_other_numbers(monkeypatch, tmp_path):
    """The GPU's derivative of pooling, compiled for a CPU: jaxlib 0.10.2 writes over what it reads.
    Whether it does is what the checker says."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    loss = viewed("reshape", "tanh")
    found, gradient = compiled_here(jax.grad(jaxmem.remat(loss)), W, X, folder=tmp_path)
    right = np.allclose(gradient, jax.grad(loss)(W, X), rtol=1e-10)
    assert right == (not found), found


@pytest.mark.parametrize(("padding", "found"), [("0_3x0_0", []), ("3_0x0_0", ["fused: x"])])
def test_what_is_put_back_in_its_place_is_not_overwritten(padding, found):
    """A row is cut out, and put where it was or elsewhere."""
    hlo = f"""HloModule rows

%rows (param_0: f64[4,4]) -> f64[4,4] {{
  %param_0 = f64[4,4]{{1,0}} parameter(0)
  %row = f64[1,4]{{1,0}} slice(%param_0), slice={{[0:1], [0:4]}}
  %flat = f64[4]{{0}} bitcast(%row)
  %sine = f64[4]{{0}} sine(%flat)
  %back = f64[1,4]{{1,0}} bitcast(%sine)
  %zero = f64[] constant(0)
  ROOT %pad = f64[4,4]{{1,0}} pad(%back, %zero), padding={padding}
}}

ENTRY %main (x: f64[4,4]) -> f64[4,4] {{
  %x = f64[4,4]{{1,0}} parameter(0)
  ROOT %fused = f64[4,4]{{1,0}} fusion(%x), kind=kLoop, calls=%rows
}}
"""
    buffers = """allocation 0: size 128, parameter 0
 value: <1 x @0> (size=128,offset=0): f64[4,4]{1,0}
 value: <2 fused @0> (size=128,offset=0): f64[4,4]{1,0}
"""
    assert overwritten(hlo, buffers) == found


@pytest.mark.parametrize("view", VIEWS)
def test_pooling_on_a_cpu(view, tmp_path):
    found, _ = compiled_here(jax.grad(jaxmem.remat(viewed(view, "tanh"))), W, X, folder=tmp_path)
    assert not found


def test_pooling_on_a_gpu():
    """Every view and every use of it in one program."""

    def loss(ws, x):
        return sum(
            viewed(view, use)(w, x)
            for w, (view, use) in zip(ws, [(v, u) for v in VIEWS for u in USES], strict=True)
        )

    ws = [W.astype(jnp.float32)] * len(VIEWS) * len(USES)
    assert not compiled_for_gpu(jax.grad(jaxmem.remat(loss)), ws, X.astype(jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_random_programs_under_random_plans(platform, tmp_path):
    """Several at once, since a program of its own takes seconds to compile."""

    @seed(7)
    @settings(max_examples=PROGRAMS, deadline=None, database=None, phases=[Phase.generate])
    @given(st.lists(test_fuzz.cases(), min_size=5, max_size=5))
    def check(cases):
        def step(*args):
            return [
                jax.grad(plan.apply(fun), (0, 1, 2), has_aux=True)(*args) for fun, plan in cases
            ]

        args = test_fuzz.arguments()
        if platform == "gpu":
            assert not compiled_for_gpu(step, *args)
        else:
            check.number = getattr(check, "number", 0) + 1
            found, _ = compiled_here(step, *args, folder=tmp_path / str(check.number))
            assert not found

    check()
