"""Programs on several devices: projected as one of them runs them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import jaxprs
from jaxmem.fitting import Levers, LeverSearch, Workload
from jaxmem.program import apply_compiler_rules, read_program, zeros_of_loops
from jaxmem.rematerialization.constraints import Constraints
from jaxmem.rematerialization.traced import TracedFunction

P = PartitionSpec
HEADS, WIDTH, WORDS, ROWS, TOKENS = 16, 1024, 8192, 16, 512
# Axes of the mesh: of the batch, of the model, and whether parameters are spread over the batch's.
MESHES = {
    "data": ({"data": 8}, "data", None, False),
    "model": ({"model": 8}, None, "model", False),
    "fsdp": ({"data": 8}, "data", None, True),
    "fsdp x model": ({"data": 4, "model": 2}, "data", "model", True),
}


def _mesh(axes):
    # As XLA spreads what is inside; with jax 0.12 a mesh is explicit where nothing is said.
    automatic = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=automatic)


def placed(mesh, shape, *parts, dtype=jnp.bfloat16):
    """An abstract array that lies in pieces on a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*parts)))


def transformer(kind: str, form: str, layers: int = 4):
    """A decoder as its users write one, with arguments that say where they lie."""
    axes, data, model, fsdp = MESHES[kind]
    mesh = _mesh(axes)
    own, array = data if fsdp else None, functools.partial(placed, mesh)

    shapes = {
        "qkv": ((WIDTH, 3, HEADS, WIDTH // HEADS), (own, None, model, None)),
        "out": ((HEADS, WIDTH // HEADS, WIDTH), (model, None, own)),
        "up": ((WIDTH, 4 * WIDTH), (own, model)),
        "down": ((4 * WIDTH, WIDTH), (model, own)),
    }
    if form == "scan":
        blocks = {n: array((layers, *s), None, *parts) for n, (s, parts) in shapes.items()}
    else:
        blocks = [{n: array(s, *p) for n, (s, p) in shapes.items()} for _ in range(layers)]
    params = {"words": array((WORDS, WIDTH), model, own), "blocks": blocks}

    def sharded(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(data, None, None)))

    def norm(x):
        wide = x.astype(jnp.float32)
        wide -= wide.mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)

    def block(x, w):
        x = sharded(x)
        q, k, v = jnp.einsum("bsd,dchk->cbshk", norm(x), w["qkv"])
        scores = jnp.einsum("bshk,bthk->bhst", q, k).astype(jnp.float32)
        scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -1e9)
        shares = jax.nn.softmax(scores).astype(x.dtype)
        x = x + jnp.einsum("bhst,bthk,hkd->bsd", shares, v, w["out"])
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]

    def loss(params, tokens):
        x = params["words"][tokens]
        if form == "scan":
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params["blocks"])
        else:
            x = functools.reduce(block, params["blocks"], x)
        logits = (norm(sharded(x)) @ params["words"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -jnp.mean(picked)

    return loss, (params, array((ROWS, TOKENS), data, dtype=jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param("unrolled", marks=pytest.mark.slow), "scan"])
@pytest.mark.parametrize("kind", MESHES)
def test_bytes_and_flops_are_those_of_one_device(kind, form):
    loss, args = transformer(kind, form)
    target = jaxmem.target("h100", count=8)
    report = jaxmem.memory(jax.value_and_grad(loss), *args, target=target)
    traced = TracedFunction(loss, args, {}, 0)
    assert 3 * traced.program.flops == report.work.flops
    plain = Constraints.parse("70GiB", 0, target, "dp").plan(traced.program)
    assert plain.projected_bytes == pytest.approx(report.device, rel=0.05)
    together = traced.program.unsharded
    assert together.fingerprint == traced.program.fingerprint == _on_one(loss, args).fingerprint


def _on_one(loss, args):
    traced = TracedFunction(loss, args, {}, 0)
    return read_program(traced.flat, traced.program.differentiated)


@pytest.mark.parametrize("kind", MESHES)
def test_kernels_are_the_same_ones_wherever_the_function_is_traced(kind):
    loss, args = transformer(kind, "unrolled")
    spread, alone = TracedFunction(loss, args, {}, 0).program, _on_one(loss, args)
    kernels = [kernel for kernel in spread.kernels if not kernel.sent_bytes]
    assert [kernel.operations[-1] for kernel in kernels] == [
        kernel.operations[-1] for kernel in alone.kernels
    ]
    assert [kernel.results for kernel in kernels] == [kernel.results for kernel in alone.kernels]
    sent = len(spread.kernels) - len(kernels)
    assert sent == 0 if "fsdp" not in kind else sent >= 4 * 4  # each matrix of each layer


@pytest.mark.slow
@pytest.mark.parametrize("form", ["unrolled", "scan"])
@pytest.mark.parametrize("kind", ["model", "fsdp x model"])
def test_half_of_the_bytes_for_little(kind, form):
    loss, args = transformer(kind, form)
    target = jaxmem.target("h100", count=8)
    plain = jaxmem.memory(jax.value_and_grad(loss), *args, target=target)
    budget = int(0.55 * plain.device)
    plan = jaxmem.plan(loss, *args, target=target, budget=budget)
    assert plan.compiled.bytes <= budget
    # With global bytes over the number of devices it was 2.08 times the FLOPs.
    assert plan.compiled.flops < 1.06 * plain.work.flops
    assert plan.predicted.bytes == pytest.approx(plan.compiled.bytes, rel=0.13)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [pytest.param(False, marks=pytest.mark.slow), True])
def test_plans_made_for_several_devices_are_plans_of_the_function(scanned):
    mesh = _mesh({"data": 8})
    array = functools.partial(placed, mesh, dtype=jnp.float64)

    def layer(x, w):
        return jnp.tanh(x @ w) @ w.T + jnp.sin(x)

    def loss(ws, x):
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)
        else:
            for at in range(12):
                x = layer(x, ws[at])
        return jnp.sum(x**2)

    args = array((12, 64, 64), None, "data"), array((512, 64), "data")
    plans = jaxmem.pareto(loss, *args).plans
    assert plans[-1].projected_bytes < 0.7 * plans[0].projected_bytes
    one, other = jax.random.split(jax.random.key(0))
    real = jax.random.normal(one, (12, 64, 64)) / 8, jax.random.normal(other, (512, 64))
    wanted = jax.value_and_grad(loss)(*real)
    for plan in plans:
        planned = jaxmem.Plan.from_json(plan.to_json()).apply(loss)
        found = jax.jit(jax.value_and_grad(planned))(*real)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), found, wanted)


def loss_without_logits():
    """Rows that lie in pieces of each sequence, which are gathered for the loss."""
    array = functools.partial(placed, _mesh({"data": 8}))

    def loss(params, x, labels):
        weights, head = params
        return jnp.mean(jaxmem.ops.softmax_cross_entropy(x @ weights, head, labels))

    params = array((1024, 1024), "data", None), array((1024, 8192), None, "data")
    x = array((16, 8192, 1024), None, "data", None)
    return loss, (params, x, array((16, 8192), None, "data", dtype=jnp.int32))


@pytest.mark.slow
def test_what_is_opaque_is_projected_where_its_operands_are_gathered():
    """It was 70 % too high."""
    loss, args = loss_without_logits()
    target = jaxmem.target("h100", count=8)
    report = jaxmem.memory(jax.value_and_grad(loss), *args, target=target, timeline=False)
    plan = jaxmem.plan(loss, *args, target=target, budget="70GiB", compilations=0)
    assert plan.projected_bytes == pytest.approx(report.device, rel=0.12)


def test_a_loop_fills_its_zeros_and_what_is_gathered_for_it_fills_none():
    loss, args = loss_without_logits()
    rules = jaxmem.target("h100").rules
    loops = dataclasses.replace(rules.loops, shares_zeros=True)  # as jax 0.10 has it
    program = TracedFunction(loss, args, {}, 0).program
    run = apply_compiler_rules(program, dataclasses.replace(rules, loops=loops))
    (filling,) = zeros_of_loops(run)
    assert run.operation_of(filling).joint and not run.kernels[filling].sent_bytes
    assert any(kernel.sent_bytes for kernel in run.kernels[filling - 2 : filling])


def test_what_cannot_be_asked_is_spread_evenly(monkeypatch):
    mesh = _mesh({"data": 8})
    lying = NamedSharding(mesh, P("data"))
    flat = jaxprs.flatten(jnp.tanh, [jax.ShapeDtypeStruct((16, 64), "float32", sharding=lying)])
    found = jaxprs.propagate_shardings(flat, [lying])
    assert [found.aval(value).shape for value in range(2)] == [(2, 64), (2, 64)]
    monkeypatch.setattr(jaxprs.shardings, "propagated", lambda *_: None)
    found = jaxprs.propagate_shardings(flat, [lying])
    assert [found.aval(value).shape for value in range(2)] == [(16, 8), (16, 8)]


MESH = _mesh({"data": 4, "model": 2})


_array = functools.partial(placed, MESH, dtype=jnp.float32)


ROWS_OF = _array((32768, 512), "data")


def nested_scans():
    def outer(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0], None

    def loss(ws, x):
        return jnp.mean(jax.lax.scan(outer, x, ws)[0] ** 2)

    return loss, (_array((4, 3, 512, 512), None, None, None, "model"), ROWS_OF)


def collectives():
    ring = [(one, (one + 1) % 4) for one in range(4)]

    @functools.partial(jax.shard_map, mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data"))
    def layer(w, x):
        return jnp.tanh(jax.lax.ppermute(x, "data", ring) @ w)

    def loss(ws, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0] ** 2)

    return loss, (_array((12, 512, 512)), ROWS_OF)


def own_rules(*parts):
    @jax.custom_vjp
    def layer(w, x):
        return jnp.tanh(x @ w)

    def forward(w, x):
        return layer(w, x), (w, x)

    def backward(kept, cotangent):
        w, x = kept
        inner = cotangent * (1 - jnp.tanh(x @ w) ** 2)
        return x.T @ inner, inner @ w.T

    layer.defvjp(forward, backward)

    def loss(ws, x):
        return jnp.mean(functools.reduce(lambda x, w: layer(w, x), ws, x) ** 2)

    return loss, ([_array((512, 512), *parts)] * 8, ROWS_OF)


def test_what_is_gathered_is_no_value_of_the_program():
    loss, args = own_rules("data", None)
    spread, alone = TracedFunction(loss, args, {}, 0).program, _on_one(loss, args)
    assert len(spread.unsharded.sizes) == len(alone.sizes)
    assert spread.fingerprint == alone.fingerprint


@pytest.mark.parametrize(
    "make", [nested_scans, collectives, functools.partial(own_rules, None, "model")]
)
def test_what_is_inside_of_an_operation_is_spread_too(make):
    loss, args = make()
    report = jaxmem.memory(
        jax.value_and_grad(loss), *args, target=jaxmem.target("h100", count=8), timeline=False
    )
    projected = jaxmem.plan(loss, *args).plain_bytes
    # Of own rules XLA gathers again what is projected to be kept, five at a time: 23 % off.
    assert projected == pytest.approx(report.device, rel=0.25)


def test_an_axis_that_does_not_divide_is_in_pieces_of_one_size():
    lying = NamedSharding(MESH, P("data", None))

    def loss(ws, x):
        for up, down in ws:
            x = jax.lax.with_sharding_constraint(x + jnp.tanh(x @ up) @ down, lying)
        return jnp.mean(x**2)

    pair = _array((512, 1024), None, "model"), _array((1024, 512), "model", None)
    args = [pair] * 6, jax.ShapeDtypeStruct((32766, 512), jnp.float32)
    program = TracedFunction(loss, args, {}, 0).program
    first = program.operations[0].outputs[0]
    assert program.types[first] == "float32[8192, 512]"
    assert program.whole_types[first] == "float32[32766, 1024]"
    report = jaxmem.memory(
        jax.value_and_grad(loss),
        *args,
        target=jaxmem.target("h100", count=8),
        timeline=False,
    )
    # XLA pads in copies, which are not projected: 30 % off, and 140 % with whole axes.
    assert jaxmem.plan(loss, *args).plain_bytes == pytest.approx(report.device, rel=0.35)


def test_an_axis_that_does_not_divide_inside_of_a_loop():
    lying = NamedSharding(MESH, P("data", None))

    def sharded(x):
        return jax.lax.with_sharding_constraint(x, lying)

    def loss(ws, x):
        y, _ = jax.lax.scan(lambda x, w: (sharded(jnp.tanh(x @ w)), None), sharded(jnp.sin(x)), ws)
        return jnp.mean(y**2)

    shapes = _array((4, 64, 64), None, None, "model"), jax.ShapeDtypeStruct((1022, 64), "float32")
    program = TracedFunction(loss, shapes, {}, 0).program
    (body,) = (one.body for one in program.operations if one.body)
    made = [body.types[value] for one in body.operations for value in one.outputs]
    assert made == ["float32[256, 32]", "float32[256, 64]", "float32[256, 64]"]


def test_a_vector_that_scales_features_does_not_spread_them():
    """As XLA has it: an axis of one element comes by a reshape, which Shardy looks through."""
    mesh = _mesh({"data": 8})
    array = functools.partial(placed, mesh)

    def layer(x, scaled):
        scale, w = scaled
        return x + jnp.tanh((x * scale[None, None]) @ w), None

    def loss(words, layers, tokens):
        x, _ = jax.lax.scan(layer, words[tokens], layers)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    words = array((1024, 256), "data")
    layers = array((4, 256), None, "data"), array((4, 256, 256), None, "data")
    tokens = array((16, 128), "data", dtype=jnp.int32)
    found = TracedFunction(loss, (words, layers, tokens), {}, 0)
    (scan,) = [step for step in found.flat.steps if step.primitive == "scan"]
    assert found.shards(found.flat).aval(scan.outputs[0]).shape == (2, 128, 256)
    step = jax.value_and_grad(loss, (0, 1))
    report = jaxmem.memory(step, words, layers, tokens, target=jaxmem.target("h100", count=8))
    assert "bf16[2,128,256]" in report.hlo and "bf16[16,128,32]" not in report.hlo


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("form", ["unrolled", "scan"])
def test_fit_projects_what_a_device_has(form, stage):
    """Without recomputation; plans of half the bytes: benchmarks/scale/stages.py."""

    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def loss(layers, x):
        if form == "scan":
            x, _ = jax.lax.scan(layer, x, layers)
        else:
            x = functools.reduce(lambda x, w: layer(x, w)[0], layers, x)
        return jnp.mean(x**2)

    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    one = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    layers = [one] * 6
    if form == "scan":
        layers = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((6, *leaf.shape), leaf.dtype), one)
    x = jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32)
    mesh = AbstractMesh((8,), ("data",))
    workload = Workload(loss, optax.adam(1e-3), layers, x, target="h100", mesh=mesh)
    costs, levers = LeverSearch(workload).costs, Levers(stage=stage)
    plain = costs.plain_plan(levers)
    step, state = workload.step(levers, plain), workload.state(levers)
    report = jaxmem.memory(step, state, workload.batch, target=workload.target, timeline=False)
    assert costs.candidate_of(levers, plain).projected == pytest.approx(report.device, rel=0.12)


def test_zeros_that_a_loop_begins_with_are_made_in_pieces():
    """Shardy makes a constant anew for each reader; of those that it returns it knows none."""

    def summed(x):
        def turn(carry, _):
            total, count = carry
            return (total + jnp.sin(x), count + 1), None

        (total, _), _ = jax.lax.scan(turn, (jnp.zeros(x.shape), 0), length=3)
        return total * (1 + jnp.ones(x.shape))

    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    flat = jaxprs.flatten(summed, [x])
    rows = NamedSharding(_mesh({"data": 8}), P("data"))
    pieces = jaxprs.propagate_shardings(flat, [rows])
    made = [step.outputs[0] for step in flat.steps if not [*step.uses]]
    assert len(made) >= 2
    shapes = {flat.avals[at].shape: pieces.aval(at).shape for at in made}
    assert shapes.get((64, 32), (8, 32)) == (8, 32)
    whole = [at for step in flat.steps for at in step.outputs if flat.avals[at].shape == (64, 32)]
    assert len(whole) >= 2
    assert {pieces.aval(at).shape for at in whole} == {(8, 32)}


def test_what_is_sent_may_be_made_of_what_was_sent():
    """A sequence that is cut for the residual stream alone: it is gathered after it was cut."""
    mesh = _mesh({"data": 4, "model": 2})

    array = functools.partial(placed, mesh, dtype=jnp.float32)

    def loss(params, x):
        def layer(x, w):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", "model")))
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    params = {"up": array((3, 128, 256), None, None, "model")}
    params["down"] = array((3, 256, 128), None, "model")
    program = TracedFunction(loss, (params, array((16, 8, 128), "data")), {}, 0).program
    (scan,) = program.scans
    body = program.operation_of(scan).body
    made = set(range(body.input_count))
    for kernel in body.kernels:
        assert made.issuperset(kernel.sources)
        made.update(kernel.results)
    assert [kernel.ring.devices for kernel in body.kernels if kernel.summed_bytes] == [2]


@pytest.mark.slow
def test_conditionals_that_hand_an_operand_on():
    """What a conditional's derivative keeps of an operand is that operand."""
    mesh = _mesh({"data": 8})

    def array(*shape, parts=()):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*parts)))

    def loss(weights, x):
        for w in weights:
            x = jax.lax.cond(
                jnp.sum(w) > 0, lambda x, w: jnp.sin(x @ w), lambda x, w: jnp.cos(x @ w), x, w
            )
        return jnp.mean(x**2)

    args = [array(64, 64)] * 4, array(4096, 64, parts=("data",))
    spread, alone = (TracedFunction(loss, args, {}, 0).program, _on_one(loss, args))
    assert spread.unsharded.fingerprint == alone.fingerprint
    assert jaxmem.plan(loss, *args).plain_bytes < jaxmem.plan(loss, *_whole(args)).plain_bytes


def _whole(args):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)


@pytest.mark.parametrize("budget", [0.5, pytest.param(0.4, marks=pytest.mark.slow)])
def test_sequences_that_are_cut(budget):
    """The loss of the next token takes a slice of logits that lie on other devices, and writes its
    derivative over them; gradients of `jaxmem.ops.attention` lie as its operands do."""
    mesh = _mesh({"data": 2, "context": 4})
    rows, length, width, words = 4, 4096, 512, 32768
    array = functools.partial(placed, mesh)

    def sharded(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", "context", None)))

    def block(x, w):
        x = sharded(x)
        q, k, v = ((x @ one).reshape(rows, length, 8, -1) for one in w["heads"])
        mixed = jaxmem.ops.attention(q, k, v, is_causal=True, block=(256, 256))
        x = x + mixed.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(params, tokens):
        x, _ = jax.lax.scan(block, params["words"][tokens], params["blocks"])
        logits = (sharded(x) @ params["words"].T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits[:, :-1], -1) - picked)

    both = ("data", "context")
    matrix = array((4, width, width), None, both)
    blocks = {
        "heads": [matrix] * 3,
        "out": matrix,
        "up": array((4, width, 4 * width), None, None, both),
        "down": array((4, 4 * width, width), None, both),
    }
    params = {"words": array((words, width), None, both), "blocks": blocks}
    args = params, array((rows, length), "data", "context", dtype=jnp.int32)
    traced = TracedFunction(loss, args, {}, 0, gradient_bytes=_pieces(params))
    target = jaxmem.target("h100", count=8)
    plain = Constraints.parse("70GiB", 0, target, "dp").plan(traced.program).plain_bytes
    plan = Constraints.parse(int(budget * plain), 0, target, "dp").plan(traced.program)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    step = jax.jit(
        jax.value_and_grad(plan.apply(loss)),
        out_shardings=(NamedSharding(mesh, P()), shardings),
    )
    compiled = jaxmem.memory(step, *args, target=target, timeline=False).device
    if jax.__version_info__ >= (0, 12) and plan.projected_bytes < 0.7 * compiled:
        pytest.xfail("the newest XLA does not write the derivative of cut logits over them")
    # The rest is what XLA gathers of keys and values for each block of attention.
    assert plan.projected_bytes == pytest.approx(compiled, rel=0.13)


def _pieces(arrays):
    """Bytes of each array that one device has."""
    return [
        leaf.dtype.itemsize * int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
        for leaf in jax.tree.leaves(arrays)
    ]


@pytest.mark.parametrize(
    ("end", "aligned"), [(4095, True), (4090, True), (3584, False), (2048, False), (10, False)]
)
def test_slices_that_lie_where_they_were(end, aligned):
    mesh = _mesh({"data": 8})
    sharded = NamedSharding(mesh, P("data", None))
    x = jax.ShapeDtypeStruct((4096, 16), jnp.float32, sharding=sharded)
    program = TracedFunction(lambda x: jnp.sum(jnp.sin(x[:end])), (x,), {}, 0).program
    (found,) = (one for one in program.operations if one.name == "slice")
    assert found.communication.aligned == aligned


def test_rules_on_explicit_axes():
    """Whose values have their shardings in their types."""

    @jax.custom_vjp
    def rule(x):
        return jnp.sin(x)

    rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))

    def branch(x):
        return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x).sum()

    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, P("data", None)))
    for loss in (lambda x: rule(x).sum(), branch):
        assert TracedFunction(loss, (x,), {}, 0).program.kernels
