"""Modules of any library as arguments: pytrees with functions inside, and the wrong things."""

import functools

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import io_callback

import jaxmem

X = jax.random.normal(jax.random.key(1), (32, 4))


class Net(eqx.Module):
    layers: list
    activation: object  # a function, which is a leaf of the pytree
    scale: float
    name: str = eqx.field(static=True)

    def __init__(self, activation=jnp.tanh, scale=0.5):
        keys = jax.random.split(jax.random.key(0), 6)
        self.layers = [eqx.nn.Linear(4, 4, key=key, dtype=jnp.float64) for key in keys]
        self.activation, self.scale, self.name = activation, scale, "net"

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(jax.vmap(layer)(x)) * self.scale
        return x


def loss(net, x):
    return jnp.sum(net(x) ** 2)


def in_regions(net, x):
    for layer in net.layers:
        x = eqx.filter_checkpoint(lambda layer, x: net.activation(jax.vmap(layer)(x)))(layer, x)
    return jnp.sum(x**2)


def assert_same(actual, expected):
    actual, expected = (jax.tree.leaves(tree) for tree in (actual, expected))
    chex.assert_trees_all_close(actual, expected, rtol=1e-12, atol=1e-12)


def gradient(fun, *args):
    return eqx.filter(eqx.filter_jit(eqx.filter_grad(fun))(*args), eqx.is_array)


def test_remat_and_plans_of_an_equinox_module():
    net = Net()
    chosen = jaxmem.plan(loss, net, X)
    assert chosen.regions
    assert chosen == jaxmem.plan(loss, eqx.filter_eval_shape(Net), X)
    for planned in (jaxmem.remat(loss), chosen.apply(loss), eqx.filter_jit(jaxmem.remat(loss))):
        assert_same(gradient(planned, net, X), gradient(loss, net, X))
    frontier = jaxmem.pareto(loss, net, X)
    assert frontier.plans[-1].projected_bytes < frontier.plans[0].projected_bytes


def test_a_changed_constant_makes_another_plan():
    """A function, a number and a list in a module are constants: never those of another call."""
    planned = jaxmem.remat(loss)
    nets = [Net(), Net(jnp.sin), Net(scale=2.0), Net(jax.nn.relu), Net()]
    nets.append(eqx.tree_at(lambda net: net.layers, Net(), Net().layers[:3]))
    for net in nets:
        assert_same(gradient(planned, net, X), gradient(loss, net, X))
    chosen = jaxmem.plan(loss, Net(), X)
    with pytest.raises(jaxmem.PlanError, match="program"):
        chosen.apply(loss)(Net(jnp.sin), X)


def test_policies_of_an_equinox_module():
    net = Net()
    policy = jaxmem.remat_policy(in_regions, net, X, budget="1MiB", target="h200")
    assert policy(jax.lax.dot_general_p, *[jax.typeof(X)] * 2) in (True, False)
    with pytest.raises(jaxmem.BudgetError, match="No policy for these regions fits"):
        jaxmem.remat_policy(in_regions, net, X, budget="100B")


def test_memory_of_an_equinox_module():
    for step in (gradient, loss):
        args = (loss, Net(), X) if step is gradient else (Net(), X)
        report = jaxmem.memory(step, *args, target="local")
        assert report.argument == X.nbytes + 6 * (16 + 4) * 8 + 8  # a number is an argument of jit
        assert {argument.path for argument in report.arguments if argument} >= {
            "net.layers[0].weight"
        } or (step is gradient)


def test_a_callable_equinox_module():
    """As `jax.checkpoint` has it: the module's arrays are closed over."""
    net = Net()
    assert_same(
        gradient(lambda net, x: jnp.sum(jaxmem.remat(net)(x) ** 2), net, X), gradient(loss, net, X)
    )
    assert_same(jaxmem.plan(net, X).apply(net)(X), net(X))


def test_a_method_of_an_equinox_module():
    class Planned(Net):
        @jaxmem.remat
        def __call__(self, x):
            return super().__call__(x)

    assert_same(gradient(loss, Planned(), X), gradient(loss, Net(), X))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(4)])
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x)
        return jnp.sum(x**2)


def test_policies_of_an_nnx_module():
    model = Stack(nnx.Rngs(0))
    policy = jaxmem.remat_policy(Stack.__call__, model, X, budget="1MiB", target="h200")
    assert callable(policy) and model.calls[...] == 0


@pytest.mark.slow
def test_plans_of_modules_for_a_target():
    """What is compiled takes the arrays of the module, with integers among its variables."""
    for model, fun in ((Net(), loss), (Stack(nnx.Rngs(0)), Stack.__call__)):
        chosen = jaxmem.plan(fun, model, X, budget="1MiB", target="h200", compilations=1)
        assert 0 < chosen.compiled_bytes <= 2**20


WRONG = {
    "an Equinox class": (Net, "class test_modules.Net"),
    "a linen class": (nn.Dense, "class flax.linen.linear.Dense"),
    "an nnx class": (Block, "class test_modules.Block"),
    "a linen module": (nn.Dense(4), "object flax.linen.linear.Dense"),
    "an array": (jnp.ones(1000), "object jaxlib._jax.ArrayImpl"),
    "a number": (3, "object builtins.int"),
    "parameters": ({"w": jnp.ones(1000)}, "object builtins.dict"),
    "a TrainState": (nnx.Optimizer, "class flax.nnx.training.optimizer.Optimizer"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_wrong_thing(wrong):
    thing, name = WRONG[wrong]
    name = name.replace("test_modules", __name__)
    for face in (jaxmem.plan, jaxmem.pareto, functools.partial(jaxmem.remat_policy, budget="1MiB")):
        with pytest.raises(jaxmem.JaxmemError, match=f"takes a function of arrays; got the {name}"):
            face(thing, X)
    if not isinstance(thing, type | nn.Module):
        with pytest.raises(jaxmem.JaxmemError, match=f"takes a function of arrays; got the {name}"):
            jaxmem.remat(thing)
    if not isinstance(thing, nn.Module):
        with pytest.raises(
            jaxmem.JaxmemError, match="memory takes a function or a jitted one; got"
        ):
            jaxmem.memory(thing, X, target="local")


def test_messages_name_no_function_that_was_not_called():
    def storing(x):
        io_callback(print, None, x)
        return jnp.sum(x)

    for face in (jaxmem.plan, jaxmem.pareto, functools.partial(jaxmem.remat_policy, budget="1MiB")):
        with pytest.raises(jaxmem.PlanError, match="side effect") as caught:
            face(storing, X)
        assert "jaxmem.remat" not in str(caught.value)


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = 0

    def __call__(self, x, *, scale):
        self.calls += 1
        return jnp.sum(self.dropout(self.linear(x)) * scale)


@pytest.mark.parametrize("transform", [jaxmem.ops.swap, lambda f: jaxmem.autocast(f, "bf16")])
def test_other_transformations_keep_what_changes_too(transform):
    """Keys that are drawn, and attributes."""
    model, twin = Counting(nnx.Rngs(0)), Counting(nnx.Rngs(0))
    x = jnp.ones((8, 4), jnp.float32)
    transformed = transform(lambda model, x, scale: model(x, scale=scale))
    for _ in range(2):
        chex.assert_trees_all_close(transformed(model, x, 2.0), twin(x, scale=2.0), rtol=0.05)
    assert model.calls == 2
    counts = [nnx.to_pure_dict(nnx.state(each, nnx.RngCount)) for each in (model, twin)]
    chex.assert_trees_all_equal(*counts)
