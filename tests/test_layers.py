import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem

pytestmark = pytest.mark.slow

LAYERS = 5  # not a square: the last segment is shorter
HEAD = jnp.linspace(0.5, 1, 4)
X = jnp.sin(jnp.arange(24.0)).reshape(6, 4)
SHIFT = jnp.asarray(0.3)
FORMS = [(inputs, count) for inputs in ("keep", "offload", "recompute") for count in (1, 3)]
forms = pytest.mark.parametrize(("inputs", "microbatches"), FORMS)
HIDE = {"xla_gpu_enable_latency_hiding_scheduler": True}


def block(p, x, shift):
    return x + jnp.tanh(x @ p["up"] + p["bias"][None] + p["number"] * shift) @ p["down"]


def make(key):
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (4, 8)),
        "down": jax.random.normal(down, (8, 4)),
        "bias": jnp.zeros(8),
        "number": jax.random.randint(key, (), 0, 3),
    }


def keys(count=LAYERS):
    return jax.random.split(jax.random.key(0), count)


def floats(tree):
    return {name: leaf for name, leaf in tree.items() if name != "number"}


def plain_loss(head, params, x, shift):
    numbers = jax.vmap(make)(keys())["number"]
    y, _ = jax.lax.scan(lambda x, p: (block(p, x, shift), None), x, {**params, "number": numbers})
    return jnp.sum(jnp.sin(y) @ head)


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@forms
def test_gradients_are_those_of_the_plain_layers_and_on_the_host(inputs, microbatches):
    stack = jaxmem.layers(block, inputs=inputs, microbatches=microbatches)
    params = stack.init(make, keys())
    assert kinds(floats(params)) == {"pinned_host"}

    def loss(head, params, x, shift):
        params = {**params, "number": jax.vmap(make)(keys())["number"]}
        return jnp.sum(jnp.sin(stack(params, x, shift)) @ head)

    run = jax.value_and_grad(loss, (0, 1, 2, 3))
    got = jax.jit(run)(HEAD, floats(params), X, SHIFT)
    plain = floats(jax.vmap(make)(keys()))
    expected = jax.jit(jax.value_and_grad(plain_loss, (0, 1, 2, 3)))(HEAD, plain, X, SHIFT)
    chex.assert_trees_all_close(*map(jax.device_get, (got, expected)), rtol=1e-11)
    assert kinds(got[1][1]) == {"pinned_host"}
    assert kinds(got[1][2:]) == {"device"}


OPTIMIZERS = {
    "adamw": optax.adamw(optax.linear_schedule(0.1, 0.0, 10)),
    "clipped per layer": optax.chain(optax.clip_by_global_norm(0.1), optax.lion(1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "booleans": optax.apply_if_finite(optax.adam(1e-2), 2),
    "int8": optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int8), params),
        lambda g, state, params=None: (
            jax.tree.map(lambda s, g: -0.01 * (s + g), state, g),
            jax.tree.map(lambda s, g: jnp.clip(s + 50 * g, -99, 99).astype(jnp.int8), state, g),
        ),
    ),
}


@functools.cache
def plain_steps(name, steps):
    optimizer = OPTIMIZERS[name]
    params = floats(jax.vmap(make)(keys()))
    state = jax.vmap(optimizer.init)(params)

    @jax.jit
    def step(params, state):
        value, (head, gradient) = jax.value_and_grad(plain_loss, (0, 1))(HEAD, params, X, SHIFT)
        updates, state = jax.vmap(optimizer.update)(gradient, state, params)
        return value, head, optax.apply_updates(params, updates), state

    for _ in range(steps):
        value, head, params, state = step(params, state)
    return value, head, params, state


@functools.cache
def updating_step(inputs, microbatches, name, donate):
    stack = jaxmem.layers(
        block, optimizer=OPTIMIZERS[name], inputs=inputs, microbatches=microbatches
    )

    def loss(head, stacks, x):
        return jnp.sum(jnp.sin(stack(stacks["blocks"], x, SHIFT)) @ head), x.shape

    step = jaxmem.value_and_update(loss, has_aux=True)
    return stack, jax.jit(step, donate_argnums=1 if donate else ())


@pytest.mark.parametrize(
    ("inputs", "microbatches", "name", "donate"),
    [(*form, "adamw", True) for form in FORMS]
    + [("keep", 1, name, True) for name in [*OPTIMIZERS][1:]]
    + [("keep", 1, "adamw", False)],
)
def test_the_update_in_the_backward_pass_is_the_plain_one(inputs, microbatches, name, donate):
    stack, step = updating_step(inputs, microbatches, name, donate)
    state = {"blocks": stack.init(make, keys())}
    numbers = jnp.copy(state["blocks"].params["number"])
    for _ in range(3):
        (value, shape), head, state = step(HEAD, state, X)
    assert shape == X.shape
    expected = plain_steps(name, 3)
    params, opt_state = state["blocks"]
    chex.assert_trees_all_equal(params["number"], numbers)
    got = (value, head, floats(params), jax.tree.leaves(opt_state))
    expected = (*expected[:3], jax.tree.leaves(expected[3]))
    chex.assert_trees_all_close(*map(jax.device_get, (got, expected)), rtol=1e-9, atol=1e-12)
    for leaf in jax.tree.leaves((floats(params), opt_state)):
        assert leaf.sharding.memory_kind == ("pinned_host" if leaf.ndim > 1 else "device")


def test_clipping_by_the_norm_of_all_gradients_takes_the_other_form():
    optimizer = optax.adam(0.1)
    stack = jaxmem.layers(block, optimizer=optimizer)

    @jax.jit
    def step(state):
        def loss(params):
            return jnp.sum(jnp.sin(stack({**params, "number": state.params["number"]}, X, SHIFT)))

        gradients = {**jax.grad(loss)(floats(state.params)), "number": state.params["number"]}
        norm = stack.norm(gradients)
        return norm, stack.update(state, gradients, scale=jnp.minimum(1, 0.1 / norm))

    norm, state = step(stack.init(make, keys()))
    params = floats(jax.vmap(make)(keys()))
    gradient = jax.grad(plain_loss, 1)(jnp.ones(4), params, X, SHIFT)
    chex.assert_trees_all_close(norm, optax.tree.norm(gradient), rtol=1e-12)
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optimizer)
    updates, _ = jax.jit(clipped.update)(gradient, clipped.init(params), params)
    expected = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(
        *map(jax.device_get, (floats(state.params), expected)), rtol=1e-9, atol=1e-12
    )


def test_a_stack_of_one_may_change_shapes():
    """An embedding, layers and a head with the loss in it: the whole model on the host."""
    adam = optax.adam(0.1)
    embed = jaxmem.layers(lambda table, tokens: table[tokens], optimizer=adam)
    blocks = jaxmem.layers(lambda w, x: jnp.tanh(x @ w), optimizer=adam)
    head = jaxmem.layers(lambda w, xy: jnp.mean((xy[0] @ w)[:, 0] * xy[1]), optimizer=adam)
    tokens = jnp.asarray([0, 2, 1])
    arrays = [
        jnp.linspace(-1, 1, 12).reshape(1, 3, 4),
        jnp.ones((2, 4, 4)) / 9,
        jnp.ones((1, 4, 1)),
    ]
    stacks = [
        part.init(lambda w: w, array)
        for part, array in zip((embed, blocks, head), arrays, strict=True)
    ]

    def loss(_, stacks, tokens):
        x = blocks(stacks[1], embed(stacks[0], tokens))
        return head(stacks[2], (x, tokens))

    def plain(arrays):
        x = arrays[0][0][tokens]
        for w in arrays[1]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x @ arrays[2][0])[:, 0] * tokens)

    value, _, stacks = jax.jit(jaxmem.value_and_update(loss))((), stacks, tokens)
    expected, gradient = jax.value_and_grad(plain)(arrays)
    updates, _ = adam.update(gradient, adam.init(arrays), arrays)
    got = [stack.params for stack in stacks]
    chex.assert_trees_all_close(value, expected)
    chex.assert_trees_all_close(
        *map(jax.device_get, (got, optax.apply_updates(arrays, updates))), rtol=1e-9
    )


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(4, param_dtype=x.dtype)(nn.LayerNorm(param_dtype=x.dtype)(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, param_dtype=jnp.float64, rngs=rngs)
        self.dense = nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        return x + self.dense(self.norm(x))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_layers_of_flax_modules(kind):
    if kind == "linen":
        module = Linen()

        def make(key):
            return module.init(key, X)["params"]

        def apply(params, x):
            return module.apply({"params": params}, x)
    else:
        graph = nnx.graphdef(Nnx(nnx.Rngs(0)))

        def make(key):
            return nnx.state(Nnx(nnx.Rngs(params=key)))

        def apply(state, x):
            return nnx.merge(graph, state)(x)

    stack = jaxmem.layers(jax.checkpoint(apply, policy=jaxmem.remat_policy()), inputs="offload")
    params = stack.init(make, keys())
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(stack(p, X) ** 2)))(params)

    def plain(params):
        y, _ = jax.lax.scan(lambda x, p: (apply(p, x), None), X, params)
        return jnp.sum(y**2)

    expected = jax.jit(jax.grad(plain))(jax.vmap(make)(keys()))
    chex.assert_trees_all_close(*map(jax.device_get, (gradient, expected)), rtol=1e-9, atol=1e-12)


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, param_dtype=jnp.float64, rngs=rngs)
        self.dense = nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        return x + self.dense(self.norm(x, use_running_average=True))


def test_of_an_nnx_module_only_its_parameters_are_trained():
    graph, _, rest = nnx.split(Normed(nnx.Rngs(0)), nnx.Param, ...)
    optimizer = optax.adamw(0.1, weight_decay=0.5)

    def apply(params, x):
        return nnx.merge(graph, params, rest)(x)

    def make(key):
        return nnx.state(Normed(nnx.Rngs(params=key)), nnx.Param)

    stack = jaxmem.layers(apply, optimizer=optimizer)
    step = jaxmem.value_and_update(lambda _, stacks, x: jnp.sum(stack(stacks, x) ** 2))
    _, _, got = jax.jit(step, donate_argnums=1)((), stack.init(make, keys()), X)

    def loss(params):
        y, _ = jax.lax.scan(lambda x, p: (apply(p, x), None), X, params)
        return jnp.sum(y**2)

    params = jax.vmap(make)(keys())
    state = jax.vmap(optimizer.init)(params)
    updates, _ = jax.vmap(optimizer.update)(jax.jit(jax.grad(loss))(params), state, params)
    expected = optax.apply_updates(params, updates)
    assert set(got.params["norm"]) == {"scale", "bias"}
    chex.assert_trees_all_close(*map(jax.device_get, (got.params, expected)), rtol=1e-7)


def test_a_checkpoint_brings_the_stack_back_to_the_host(tmp_path):
    stack, step = updating_step("keep", 1, "adamw", True)
    _, _, state = step(HEAD, {"blocks": stack.init(make, keys())}, X)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "one", state)
    checkpointer.wait_until_finished()
    (value, _), _, further = step(HEAD, jax.tree.map(lambda leaf: leaf, state), X)
    fresh = {"blocks": stack.init(make, keys())}
    restored = jaxmem.place(checkpointer.restore(tmp_path / "one", fresh), like=fresh)
    assert kinds(restored["blocks"].params["up"]) == {"pinned_host"}
    (again, _), _, same = step(HEAD, restored, X)
    chex.assert_trees_all_equal(jax.device_get((again, same)), jax.device_get((value, further)))


# ---- compiled for a GPU


def compiled(count, mesh=None, options=None, **choices):
    width = 512

    def wide(p, x):
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    def make(key):
        return {
            "up": jax.random.normal(key, (width, 4 * width), jnp.float32),
            "down": jax.random.normal(key, (4 * width, width), jnp.float32),
        }

    choices = {"optimizer": optax.adamw(1e-3), "precision": "bf16"} | choices
    stack = jaxmem.layers(wide, **choices)

    def step(state, x):
        def loss(_, state, x):
            return jnp.mean(stack(state, x).astype(jnp.float32) ** 2)

        value, _, state = jaxmem.value_and_update(loss)((), state, x)
        return state, value

    state = jaxmem.eval_shape(lambda: stack.init(make, keys(count)))
    x = jax.ShapeDtypeStruct((256, width), jnp.bfloat16)
    target, shardings = "h200", {}
    if mesh is not None:

        def split(leaf, axis):
            kind = getattr(leaf.sharding, "memory_kind", None)
            spec = PartitionSpec(*[None] * axis, "data") if leaf.ndim > axis else PartitionSpec()
            sharding = NamedSharding(mesh, spec, memory_kind=kind)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        state, x = jax.tree.map(lambda leaf: split(leaf, 1), state), split(x, 0)
        whole = NamedSharding(mesh, PartitionSpec())
        places = jax.tree.map(lambda leaf: leaf.sharding, state)
        shardings = {"out_shardings": (places, whole)}
        target = jaxmem.target("h200", count=8)
    step = jax.jit(step, donate_argnums=0, **shardings)
    return jaxmem.memory(step, state, x, target=target, compiler_options=options)


LAYER = 2 * 4 * 512 * 512 * 4  # bytes of a layer's parameters


@pytest.mark.parametrize("inputs", ["offload", "recompute"])
def test_device_bytes_do_not_grow_with_depth(inputs):
    few, many = compiled(4, inputs=inputs), compiled(36, inputs=inputs)
    kept = 0 if inputs == "offload" else (6 + 6 - 2 - 2) * 256 * 512 * 2  # layer inputs
    assert abs(many.device - few.device - kept) < 0.03 * few.device
    assert many.device < 6 * LAYER
    host = 36 * (3 * LAYER + (256 * 512 * 2 if inputs == "offload" else 0))
    assert many.host == pytest.approx(host, rel=1e-3)
    assert many.on_host.alias == pytest.approx(36 * 3 * LAYER, rel=1e-3)


def test_the_next_layer_comes_while_one_computes():
    report = compiled(6, inputs="offload", options=HIDE)
    assert report.transfers.count > 10
    assert report.transfers.overlapped >= 0.4 * report.transfers.count


def test_a_stack_may_be_sharded():
    report = compiled(
        4, AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)), inputs="offload"
    )
    alone = compiled(4, inputs="offload")
    assert report.host == pytest.approx(alone.host / 8, rel=1e-3)
    assert report.on_host.alias == pytest.approx(alone.on_host.alias / 8, rel=1e-3)
    assert report.device < alone.device / 2
    assert report.collectives.count["all-gather"] >= 8
    assert report.collectives.bytes["reduce-scatter"] > 0


# ---- refusals


def test_what_is_not_a_stack_of_layers_is_refused():
    stack = jaxmem.layers(lambda w, x: w * x, optimizer=optax.sgd(0.1))
    with pytest.raises(jaxmem.JaxmemError, match=r"axis are {\"\['a'\]\": 2, \"\['b'\]\": 3}"):
        stack({"a": jnp.ones(2), "b": jnp.ones(3)}, jnp.ones(1))
    with pytest.raises(jaxmem.JaxmemError, match="those of no array at all"):
        stack({}, jnp.ones(1))
    with pytest.raises(jaxmem.JaxmemError, match=r"takes float64\[2\] and returns float64\[3, 2\]"):
        jaxmem.layers(lambda w, x: w[:, None] * x[None])(jnp.ones((2, 3)), jnp.ones(2))
    with pytest.raises(jaxmem.JaxmemError, match=r"into 3 microbatches.*one has shape \[4\]"):
        jaxmem.layers(lambda w, x: w * x, microbatches=3)(jnp.ones(2), jnp.ones(4))
    plain = jaxmem.layers(lambda w, x: w * x)
    with pytest.raises(jaxmem.JaxmemError, match="have no optimizer to update a stack with"):
        plain.update(jaxmem.LayerStack(jnp.ones(2), ()), jnp.ones(2))


def test_a_stack_of_another_optimizer_is_refused():
    state = jaxmem.layers(lambda w, x: w * x, optimizer=optax.adam(0.1)).init(
        lambda w: w, jnp.ones((3, 2))
    )
    stack = jaxmem.layers(lambda w, x: w * x, optimizer=optax.lion(0.1))
    with pytest.raises(
        jaxmem.JaxmemError, match=r"state\[0\].nu is a float\d+\[2\] array in the stack"
    ):
        stack.update(state, jnp.ones((3, 2)))


def test_a_stack_on_the_device_is_refused():
    stack = jaxmem.layers(lambda w, x: jnp.tanh(x @ w), optimizer=optax.adam(0.1))
    state = stack.init(lambda key: jax.random.normal(key, (4, 4)), keys())
    moved = jax.device_put(state, jax.memory.Space.Device)
    step = jax.jit(jaxmem.value_and_update(lambda _, s: jnp.sum(stack(s, X))))
    with pytest.raises(jaxmem.OffloadError) as caught:
        step((), moved)
    assert str(caught.value) == (
        "jaxmem.layers keeps its stack in host memory, and stack.params is on the device. Make the "
        "stack with the init of these layers, abstract it with jaxmem.eval_shape, and put a "
        "restored one back with jaxmem.place."
    )
    step((), jaxmem.place(moved, like=state))
    half = state._replace(opt_state=moved.opt_state)
    with pytest.raises(jaxmem.OffloadError, match=r"and stack.opt_state\[0\].mu is on the device"):
        step((), half)
    with pytest.raises(jaxmem.OffloadError, match=r"and stack.opt_state\[0\].mu is on the device"):
        stack.update(half, state.params)
    with pytest.raises(jaxmem.OffloadError, match="and stack is on the device"):
        jax.grad(lambda w: jnp.sum(stack(w, X)))(moved.params)


def test_a_scalar_of_each_layer_has_a_gradient():
    stack = jaxmem.layers(lambda p, x: x * p)
    params = stack.init(lambda p: p, jnp.asarray([2.0, 3.0]))
    assert jax.grad(lambda p: stack(p, jnp.ones(())))(params).tolist() == [3, 2]


def test_a_stack_goes_to_its_layers_once():
    stack = jaxmem.layers(lambda w, x: w * x, optimizer=optax.sgd(0.1))
    state = stack.init(lambda w: w, jnp.ones((3, 2)))

    def run(loss, state=state):
        return jaxmem.value_and_update(loss)(jnp.ones(2), state, jnp.ones(2))

    with pytest.raises(jaxmem.JaxmemError, match="used twice in one loss"):
        run(lambda p, s, x: jnp.sum(p * stack(s, stack(s, x))))
    with pytest.raises(jaxmem.JaxmemError, match="was given 1 LayerStacks and used 0"):
        run(lambda p, s, x: jnp.sum(p * x))
    with pytest.raises(jaxmem.JaxmemError, match=r"takes a pytree of LayerStacks.*got \['Array"):
        run(lambda p, s, x: jnp.sum(p * x), jnp.ones(2))
    apart = jax.jit(lambda s, x: stack(s, x))
    value, *_ = run(lambda p, s, x: jnp.sum(p * apart(s, apart(s, x))))
    assert jnp.isnan(value)


def test_a_stack_that_no_gradient_reaches_stays_as_it_is():
    """A frozen encoder below a decoder: it was all zeros after a step, and the loss NaN."""
    stack = jaxmem.layers(lambda w, x: jnp.sin(w * x), optimizer=optax.adam(0.1))

    def loss(scale, stacks, x):
        return jnp.sum(scale * stack(stacks[1], jax.lax.stop_gradient(stack(stacks[0], x))))

    encoder = stack.init(lambda w: w, jnp.ones((3, 2)))
    decoder = stack.init(lambda w: w, jnp.full((3, 2), 0.5))
    alone = jaxmem.value_and_update(lambda scale, s, x: jnp.sum(scale * stack(s, x)))
    x = jnp.arange(2.0)
    for wrap in (lambda f: f, jax.jit):
        value, _, stacks = wrap(jaxmem.value_and_update(loss))(2.0, (encoder, decoder), x)
        hidden = stack(encoder, x)
        wanted, _, updated = wrap(alone)(2.0, decoder, hidden)
        assert value == wanted and jnp.isfinite(value)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, stacks, (encoder, updated)))


def test_wrong_choices_are_refused():
    with pytest.raises(jaxmem.JaxmemError, match=r"takes a function block.*got <class"):
        jaxmem.layers(Linen)
    with pytest.raises(jaxmem.JaxmemError, match="inputs= as one of .*; got 'drop'"):
        jaxmem.layers(block, inputs="drop")
    with pytest.raises(jaxmem.JaxmemError, match="microbatches= as an int of 1 or more; got 0"):
        jaxmem.layers(block, microbatches=0)
    with pytest.raises(jaxmem.JaxmemError, match=r"jaxmem.layers takes an optax.Gradient"):
        jaxmem.layers(block, optimizer="adam")
