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
from jaxmem.ops.swapping import Wanted, swapped
from jaxmem.program.costs import flops as flops_of
from jaxmem.targets import family_of

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


def test_the_gradient_of_a_shared_bias_is_a_sum_over_examples():
    def loss_fn(params, batch):
        bias = jnp.ones((1, HEADS, LENGTH, LENGTH), batch.dtype) * params
        mixed = jax.nn.dot_product_attention(batch, batch, batch, bias=bias, implementation="cudnn")
        return jnp.mean(mixed.astype(jnp.float32) ** 2)

    def derived(params, batch, *_):
        return jax.value_and_grad(loss_fn)(params, batch)[0], None

    params = jax.ShapeDtypeStruct((1, HEADS, 1, 1), jnp.bfloat16)
    with jaxprs.in_place_of_attached(jaxmem.target("h100")):
        for loss in (lambda *args: (loss_fn(*args[:2]), None), derived):
            assert reduction_of(loss, heads(), [2], params).reduction == "mean"


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


# ---- in the place of plain attention


def rows_and_columns():
    return jnp.arange(32)[:, None], jnp.arange(32)[None]


def by_hand(masked, before=lambda scores: scores / jnp.sqrt(16.0).astype(scores.dtype)):
    """Attention whose scores go through ``before``, then ``masked``."""

    def attend(query, key, value):
        repeated = [jnp.repeat(one, query.shape[2] // one.shape[2], 2) for one in (key, value)]
        scores = before(jnp.einsum("bqhd,bkhd->bhqk", query, repeated[0]))
        weights = jax.nn.softmax(masked(scores.astype(jnp.float32)), -1).astype(query.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, repeated[1])

    return attend


def shown(condition, low=-1e9):
    def masked(scores):
        row, column = rows_and_columns()
        seen = jnp.broadcast_to(condition(row, column), (1, 1, 32, 32))
        return jnp.where(seen, scores, low)

    return masked


def added(scores):
    row, column = rows_and_columns()
    return scores + jnp.where(column > row, -1e9, 0.0)[None, None]


def by_jax(**options):
    return lambda *args: jax.nn.dot_product_attention(*args, **options)


TAKEN = {
    "jax.nn": (by_jax(), False),
    "jax.nn, causal": (by_jax(is_causal=True), True),
    "jax.nn, scaled": (by_jax(scale=0.3, is_causal=True), True),
    "no mask": (by_hand(lambda scores: scores), False),
    "scaled later": (by_hand(lambda scores: scores * 0.25, lambda scores: scores), False),
    "tril": (by_hand(lambda s: jnp.where(jnp.tril(jnp.ones((32, 32), bool)), s, -jnp.inf)), True),
    "ge": (by_hand(shown(lambda row, column: row >= column)), True),
    "le": (by_hand(shown(lambda row, column: column <= row)), True),
    "lt, moved by one": (by_hand(shown(lambda row, column: column < row + 1)), True),
    "not gt": (by_hand(shown(lambda row, column: ~(column > row))), True),
    "a difference": (by_hand(shown(lambda row, column: row - column + 3 > 2)), True),
    "added": (by_hand(added), True),
    "where twice": (
        by_hand(lambda s: shown(lambda r, c: r >= c)(shown(lambda r, c: c <= r)(s))),
        True,
    ),
}
LEFT = {
    "a window": by_jax(is_causal=True, local_window_size=(8, 0)),
    "only what was before": by_hand(shown(lambda row, column: row > column)),
    "one more": by_hand(shown(lambda row, column: row + 1 >= column)),
    "later keys": by_hand(shown(lambda row, column: row <= column)),
    "every other key": by_hand(shown(lambda row, column: 2 * row >= column)),
    "without a sign": by_hand(
        shown(lambda row, column: row.astype("uint32") - column.astype("uint32") + 3 > 2)
    ),
    "rounded": by_hand(shown(lambda row, column: (row * 1.0).astype("bfloat16") >= column)),
    "a diagonal": by_hand(shown(lambda row, column: row == column)),
    "masked a little": by_hand(shown(lambda row, column: row >= column, -5.0)),
    "masked to above": by_hand(shown(lambda row, column: row >= column, 5.0)),
    "masked, then turned": by_hand(lambda s: -shown(lambda r, c: r >= c, 1e9)(s)),
    "masked, then times -1": by_hand(lambda s: shown(lambda r, c: r >= c)(s) * -1.0),
    "masked, then divided": by_hand(lambda s: shown(lambda r, c: r >= c)(s) / 1e10),
    "masked, then scaled": by_hand(lambda s: shown(lambda r, c: r >= c)(s) * 0.5),
    "capped": by_hand(lambda scores: 5 * jnp.tanh(scores / 5)),
    "places added": by_hand(
        lambda s: s - 0.1 * jnp.abs(jnp.arange(32)[:, None] - jnp.arange(32)[None])[None, None]
    ),
    "the root of each": by_hand(lambda scores: jnp.sqrt(jnp.abs(scores))),
}


def with_stand_in(fun, args):
    """What a function gives with plain attention in the place of the kernel, and what that was
    asked for."""
    asked = []

    def kernel(query, key, value, scale, is_causal):
        asked.append((round(scale, 4), is_causal))
        return jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=is_causal)

    found = swapped(fun, Wanted(2**10, kernel=kernel, name="a stand-in"))(*args)
    return found, asked


def real(dtype="bfloat16", heads=4, keys=2):
    drawn = jax.random.split(jax.random.key(3), 3)
    counts = heads, keys, keys
    return [
        jax.random.normal(key, (2, 32, count, 16), jnp.float32).astype(dtype)
        for key, count in zip(drawn, counts, strict=True)
    ]


@pytest.mark.parametrize("name", TAKEN)
def test_attention_is_by_the_kernel_where_it_is_the_same(name):
    fun, is_causal = TAKEN[name]
    args = real()
    found, asked = with_stand_in(fun, args)
    assert {one[1] for one in asked} == {is_causal}, asked
    np.testing.assert_allclose(
        found.astype(np.float32), fun(*args).astype(np.float32), atol=0.03, rtol=0.03
    )


@pytest.mark.parametrize("name", LEFT)
def test_attention_that_the_kernel_has_not_is_by_ours(name):
    args = real()
    found, asked = with_stand_in(LEFT[name], args)
    assert asked == []
    np.testing.assert_allclose(
        found.astype(np.float32), LEFT[name](*args).astype(np.float32), atol=0.03, rtol=0.03
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_kernel_takes_16_bits_alone(dtype):
    args = [one.astype(dtype) for one in real()]
    assert with_stand_in(by_jax(is_causal=True), args)[1] == []


def test_a_kernel_that_refuses_a_shape_is_not_used():
    """cuDNN takes widths that are multiples of 8."""
    args = [jax.ShapeDtypeStruct((2, 32, 4, width), jnp.bfloat16) for width in (12, 12, 12)]
    swapping = jaxmem.ops.swap(by_jax(), least="1KiB", implementation="cudnn")
    with jaxprs.in_place_of_attached(jaxmem.target("h100")):
        assert "dot_product_attention" not in str(jax.make_jaxpr(swapping)(*args))
        args = [jax.ShapeDtypeStruct((2, 32, 4, 16), jnp.bfloat16)] * 3
        assert "dot_product_attention_fwd" in str(jax.make_jaxpr(swapping)(*args))


def test_before_ampere_there_is_no_kernel():
    for name, implementation in (("t4", ""), ("a100-40gb", "cudnn"), ("v5e", "")):
        target = jaxmem.target(name)
        assert family_of(target).attention(target) == implementation


def test_an_implementation_that_there_is_not_is_told():
    text = "implementation is None, 'xla' or 'cudnn'; got 'triton'"
    with pytest.raises(jaxmem.JaxmemError, match=text):
        jaxmem.ops.swap(by_jax(), implementation="triton")


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_fit_weighs_the_kernel_where_it_is_allowed(count):
    """Half of the matmuls' work, by a causal mask, and no scores."""
    width = 512

    def loss_fn(params, batch):
        x = batch.astype(jnp.bfloat16)
        query, key, value = (
            (x @ params[name].astype(x.dtype)).reshape(*x.shape[:2], 8, 64)
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return jnp.mean(mixed.astype(jnp.float32) ** 2)

    params = {
        name: jax.ShapeDtypeStruct((width, width), jnp.float32)
        for name in ("query", "key", "value")
    }
    batch = jax.ShapeDtypeStruct((4 * count, 2048, width), jnp.float32)
    given = loss_fn, optax.adam(1e-3), params, batch
    options = {"target": "h100", "keep": ("batch", "placement")}
    if count > 1:
        options["mesh"] = MESH
    plain = jaxmem.fit(*given, **options).fitting
    assert "put the device's own kernel in the place of attention" in plain.refused["kernels"]
    step = jaxmem.fit(*given, **options, budget=plain.chosen.compiled // 2, allow="kernels")
    assert step.fitting.chosen.levers.operations == "kernels"
    assert "the device's attention" in str(step.fitting)
    assert step.fitting.chosen.seconds < plain.chosen.seconds
    assert "__cudnn$fmhaSoftmaxBackward" in step.fitting.report.hlo
    assert step.fitting.report.work.flops < plain.report.work.flops


@pytest.mark.parametrize("options", [{"mesh": MESH}, {"devices": 8}, {}])
def test_the_kernel_is_searched_on_every_mesh(options):
    """Whose axes are explicit, as those of a mesh are by default since jax 0.12, or automatic."""

    def loss_fn(params, batch):
        shape = (*batch.shape[:2], HEADS, WIDTH)
        query = (batch @ params.astype(batch.dtype)).reshape(shape)
        mixed = jax.nn.dot_product_attention(query, query, query, is_causal=True)
        return jnp.mean(mixed.astype(jnp.float32) ** 2)

    params = jax.ShapeDtypeStruct((64, HEADS * WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((128, LENGTH, 64), jnp.bfloat16)
    with jaxprs.in_place_of_attached(jaxmem.target("h100")):
        workload = jaxmem.fitting.Workload(
            loss_fn, optax.adam(1e-3), params, batch, target="h100", allow="kernels", **options
        )
    assert {levers.operations for levers in workload.options} == {False, "kernels"}


# ---- what is not a kernel's


@pytest.mark.parametrize("length", [1, 77, 1023])
def test_lengths_that_the_derivative_refuses_are_ours(length):
    """cuDNN's forward pass takes odd lengths, and its backward pass does not."""
    args = [jax.ShapeDtypeStruct((2, length, 4, 16), jnp.bfloat16)] * 3
    fun = jaxmem.ops.swap(by_jax(is_causal=True), least="1B", implementation="cudnn")

    def loss(*args):
        return jnp.sum(fun(*args).astype(jnp.float32))

    report = jaxmem.memory(jax.grad(loss), *args, target="h100")
    assert "__cudnn" not in report.hlo


@pytest.mark.parametrize("name", ["t4", "v100-16gb", "v5e"])
def test_a_target_without_the_kernel_is_told(name):
    text = f"attention by a kernel .* that {name} does not have. Leave implementation= out, or take"
    args = heads(), heads(KEYS), heads(KEYS)
    for call in (jaxmem.memory, jaxmem.plan):
        with pytest.raises(jaxmem.JaxmemError, match=text):
            call(lambda *args: loss(*args), *args, target=name)
    swapping = jaxmem.ops.swap(by_jax(), least="1KiB", implementation="cudnn")
    with jaxprs.in_place_of_attached(jaxmem.target(name)):
        assert "dot_product_attention" not in str(jax.make_jaxpr(swapping)(*args))


def test_where_no_target_is_named_one_stands_for_it():
    """As for rates."""
    args = heads(), heads(KEYS), heads(KEYS)
    assert jaxmem.plan(lambda *args: loss(*args), *args).plain_bytes
    assert jaxmem.residuals(lambda *args: loss(*args), *args).total


def test_a_window_leaves_out_what_is_farther_away():
    def windowed(*args):
        out = jax.nn.dot_product_attention(
            *args, is_causal=True, local_window_size=(63, 0), implementation="cudnn"
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    args = heads(), heads(KEYS), heads(KEYS)
    report = jaxmem.memory(jax.grad(windowed, (0, 1, 2)), *args, target="h100")
    assert report.work.flops == 2 * 7 * (SCORES * 64 // LENGTH) * WIDTH
    with jaxprs.in_place_of_attached(jaxmem.target("h100")):
        steps = jaxprs.flatten(windowed, args).steps
    assert sum(flops_of(step.equation) for step in steps) == report.work.flops * 2 // 7


def test_what_masks_in_float16_masks_in_bfloat16():
    """-10,000 is -9,984 there."""

    def attend(query, key, value):
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 4
        row, column = rows_and_columns()
        seen = jnp.broadcast_to(row >= column, (1, 1, 32, 32))
        weights = jax.nn.softmax(jnp.where(seen, scores, jnp.array(-1e4, scores.dtype)), -1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    assert set(with_stand_in(attend, real(heads=4, keys=4))[1]) == {(0.25, True)}


def test_looking_at_shardings_is_left_out_on_absent_devices():
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=ROWS)

    def step(x):
        jax.debug.inspect_array_sharding(x, callback=print)
        return x * 2

    with pytest.warns(jaxmem.JaxmemWarning, match="such calls are left out of this estimate"):
        assert jaxmem.memory(step, x, target=EIGHT()).argument == 8 * 1024 * 4


@pytest.mark.slow
def test_the_table_speaks_of_the_whole_batch():
    """Where slices were chosen whose scores are too small to be worth it."""

    def loss_fn(params, batch):
        parts = [
            (batch @ one.astype(batch.dtype)).reshape(*batch.shape[:2], 4, 64) for one in params
        ]
        mixed = jax.nn.dot_product_attention(*parts, is_causal=True)
        return jnp.mean(mixed.astype(jnp.float32) ** 2)

    params = jax.ShapeDtypeStruct((3, 256, 256), jnp.float32)
    batch = jax.ShapeDtypeStruct((4, 2048, 256), jnp.bfloat16)
    given = loss_fn, optax.sgd(1e-3), params, batch
    table = jaxmem.fit(*given, target="h100", budget="200MiB", keep=("residuals",)).fitting
    assert table.chosen.levers.microbatches > 1
    for name in ("operations", "kernels"):
        assert "Without scores of attention" in table.refused[name]
        assert "the step would take" in table.refused[name]
    workload = jaxmem.fitting.Workload(*given, target="t4", allow="kernels")
    assert workload.refused["kernels"] == (
        "no attention of 64 MiB or more is one that a kernel of t4 takes"
    )
