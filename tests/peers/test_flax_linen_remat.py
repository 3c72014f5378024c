"""What Flax's tests of `nn.remat` check of values, of `jaxmem.remat`; and more forms of calls."""

import functools
from typing import Any

import chex
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxmem

Dense = functools.partial(nn.Dense, param_dtype=jnp.float64)


def plain(thing):
    return thing


def assert_same(actual, expected):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-12, atol=1e-12)


def inputs(rows=3, width=4):
    return jax.random.normal(jax.random.key(5), (rows, width))


def run(model, *args, mutable=(), rngs=None, **kwargs):
    """Parameters, results, and gradients of a model's first call, and of one that is jitted."""
    keys = {name: jax.random.key(n) for n, name in enumerate(["params", *(rngs or {})])}
    variables = model.init(keys, *args, **kwargs)
    rest = {name: value for name, value in variables.items() if name != "params"}

    def loss(params, first):
        bound_variables = {**rest, "params": params}
        result = model.apply(
            bound_variables, first, *args[1:], mutable=list(mutable), rngs=rngs, **kwargs
        )
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(result[0])), result

    differentiate = jax.value_and_grad(loss, (0, 1), has_aux=True)
    arguments = variables.get("params", {}), args[0]
    return variables, differentiate(*arguments), jax.jit(differentiate)(*arguments)


class MLP(nn.Module):
    transform: Any = plain

    @nn.compact
    def __call__(self, x):
        for features in (3, 4, 5):
            x = jnp.tanh(self.transform(Dense)(features)(x))
        return x


def test_layers_of_a_compact_module(remat):
    assert_same(run(MLP(remat), inputs()), run(MLP(), inputs()))


def decorated(transform):
    class Net(nn.Module):
        @transform
        @nn.compact
        def __call__(self, x):
            for features in (3, 4, 5):
                x = jnp.tanh(Dense(features)(x))
            return x

    return Net()


def test_decorated_method(remat):
    assert_same(run(decorated(remat), inputs()), run(decorated(plain), inputs()))


class Stack(nn.Module):
    """Blocks with names by default: those of the plain blocks, where the blocks are planned."""

    transform: Any = plain

    @nn.compact
    def __call__(self, x):
        block = self.transform(Block)
        return block(8)(block(8, name="named")(block(8)(x)))


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return x + Dense(x.shape[-1])(jnp.tanh(Dense(self.width)(x)))


def test_parameters_keep_their_names(remat):
    expected, actual, theirs = (
        flax.traverse_util.flatten_dict(Stack(transform).init(jax.random.key(0), inputs()), sep="/")
        for transform in (plain, remat, nn.remat)
    )
    assert_same(actual, expected)
    assert "params/Block_0/Dense_1/kernel" in actual
    assert "params/CheckpointBlock_0/Dense_1/kernel" in theirs  # Flax's own has other names
    assert_same(run(Stack(remat), inputs()), run(Stack(), inputs()))
    assert remat(Block).__name__ == "Block" and repr(remat(Block)(3)) == repr(Block(3))


class Options(nn.Module):
    """All kinds of arguments, each of which matters."""

    @nn.compact
    def __call__(self, x, train=True, mode="sum", *, scale=1.0, mask=None, activation=jnp.tanh):
        assert isinstance(train, bool) and isinstance(mode, str)
        for _ in range(2):
            x = activation(Dense(4)(x))
        x = x * scale if train else x - scale
        x = x if mask is None else jnp.where(mask, x, 0.0)
        return {"sum": x.sum, "mean": x.mean}[mode]()


CALLS = {
    "defaults": ((), {}),
    "positional": ((False, "mean"), {}),
    "keywords": ((), {"train": False, "mode": "mean", "scale": 2.0}),
    "both": ((False,), {"scale": 3}),
    "function": ((), {"activation": jnp.sin}),
    "array": ((), {"scale": jnp.array(2.0), "mask": jnp.array([[True], [False], [True]])}),
    "numpy scalar": ((), {"scale": jnp.float64(0.5)}),
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments(remat, call):
    args, kwargs = CALLS[call]
    expected = run(Options(), inputs(), *args, **kwargs)
    assert_same(run(remat(Options)(), inputs(), *args, **kwargs), expected)


@pytest.mark.parametrize("call", CALLS)
def test_arguments_change_from_call_to_call(remat, call):
    """One model, called in several ways in turn."""
    model = remat(Options)()
    variables = model.init(jax.random.key(0), inputs())
    for args, kwargs in (CALLS[call], CALLS["defaults"], CALLS[call]):
        expected = Options().apply(variables, inputs(), *args, **kwargs)
        assert_same(model.apply(variables, inputs(), *args, **kwargs), expected)


class Stateful(nn.Module):
    """Statistics, a cache, intermediates, and two streams of keys."""

    train: bool = True

    def setup(self):
        self.layers = [Dense(4) for _ in range(2)]
        self.norm = nn.BatchNorm(use_running_average=not self.train, param_dtype=jnp.float64)
        self.dropout = nn.Dropout(0.5, deterministic=not self.train)
        self.count = self.variable("cache", "count", lambda: jnp.zeros((), jnp.int32))

    def __call__(self, x):
        for layer in self.layers:
            x = self.dropout(jnp.tanh(self.norm(layer(x))))
            self.sow("intermediates", "norms", jnp.sum(x**2))
        self.count.value += 1
        return x + jax.random.normal(self.make_rng("noise"), x.shape), None

    def encode(self, x):
        return self.layers[0](x)


def test_collections_and_keys(remat):
    streams = {"dropout": jax.random.key(7), "noise": jax.random.key(8)}
    options = {"mutable": ["batch_stats", "cache", "intermediates"], "rngs": streams}
    assert_same(run(remat(Stateful)(), inputs(), **options), run(Stateful(), inputs(), **options))
    assert_same(
        run(remat(Stateful)(), inputs(), **options), run(nn.remat(Stateful)(), inputs(), **options)
    )
    options["mutable"] = ["cache"]
    assert_same(
        run(remat(Stateful)(False), inputs(), **options), run(Stateful(False), inputs(), **options)
    )


def test_named_method(remat):
    variables = Stateful(False).init(
        {"params": jax.random.key(0), "noise": jax.random.key(1)}, inputs()
    )
    results = [
        model.apply(variables, inputs(), method="encode")
        for model in (remat(Stateful)(False), Stateful(False))
    ]
    assert_same(*results)


class Model(nn.Module):
    """A model that hands keywords to its blocks, in the manner of an encoder and decoder."""

    transform: Any = plain

    def setup(self):
        block = self.transform(T5Block)
        self.blocks = [block(has_bias=layer == 0, name=str(layer)) for layer in range(3)]

    def __call__(self, x, mask=None, output_attentions=False, deterministic=True):
        bias, attentions = None, ()
        for block in self.blocks:
            outputs = block(
                x,
                attention_mask=mask,
                position_bias=bias,
                encoder_hidden_states=None,
                output_attentions=output_attentions,
                deterministic=deterministic,
                init_cache=False,
            )
            x, bias = outputs[0], outputs[1]
            attentions += (outputs[2],) if output_attentions else ()
        return x, attentions


class T5Block(nn.Module):
    has_bias: bool

    @nn.compact
    def __call__(
        self,
        hidden_states,
        attention_mask=None,
        position_bias=None,
        encoder_hidden_states=None,
        output_attentions=False,
        return_dict=True,
        deterministic=True,
        init_cache=False,
    ):
        q, k, v = (Dense(4, name=name, use_bias=False)(hidden_states) for name in "qkv")
        scores = q @ k.T
        if self.has_bias and position_bias is None:
            position_bias = self.param(
                "bias", nn.initializers.normal(1.0, jnp.float64), scores.shape
            )
        scores = scores + position_bias
        if attention_mask is not None:
            scores = jnp.where(attention_mask[None], scores, -1e9)
        weights = jax.nn.softmax(scores)
        y = nn.Dropout(0.3)(weights @ v, deterministic=deterministic)
        outputs = (hidden_states + y, position_bias)
        return (*outputs, weights, None) if output_attentions else (*outputs, None)


@pytest.mark.parametrize("attentions", [False, True])
def test_stack_of_blocks_called_with_keywords(remat, attentions):
    mask = jnp.array([True, True, False])
    options = {
        "output_attentions": attentions,
        "deterministic": False,
        "rngs": {"dropout": jax.random.key(3)},
    }
    actual, expected = (
        run(Model(transform), inputs(), mask=mask, **options) for transform in (remat, plain)
    )
    assert_same(actual, expected)


class Shared(nn.Module):
    """A module given to another one, and one whose scope is shared."""

    transform: Any = plain

    def setup(self):
        self.dense = Dense(4)
        self.user = self.transform(Uses)(self.dense)
        self.inner = self.transform(Block)(8)
        nn.share_scope(self, self.inner)

    def __call__(self, x):
        return self.inner(self.user(self.dense(x), other=self.dense))


class Uses(nn.Module):
    dense: nn.Module

    @nn.compact
    def __call__(self, x, other):
        return Dense(4)(jnp.tanh(self.dense(x))) + other(x)


def test_shared_modules_and_scopes(remat):
    assert_same(run(Shared(remat), inputs()), run(Shared(), inputs()))


def scanned(transform):
    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                transform(Step),
                variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
                split_rngs={"params": True, "dropout": True},
                length=3,
            )
            return layers()(x, None)

    return Scanned()


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.Dropout(0.3, deterministic=False)(jnp.tanh(Dense(4)(x)))
        self.sow("intermediates", "norm", x.sum())
        return x, x[0]


def test_inside_nn_scan(remat):
    options = {"rngs": {"dropout": jax.random.key(3)}, "mutable": ["intermediates"]}
    assert_same(run(scanned(remat), inputs(), **options), run(scanned(plain), inputs(), **options))


def mapped(transform):
    return nn.vmap(
        transform(Block), variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0
    )(8)


def test_inside_nn_vmap(remat):
    x = inputs(12).reshape(3, 4, 4)
    assert_same(run(mapped(remat), x), run(mapped(plain), x))


def test_around_nn_scan(remat):
    def make(transform):
        class Layers(nn.Module):
            @nn.compact
            def __call__(self, x):
                scan = nn.scan(
                    Step,
                    variable_axes={"params": 0},
                    split_rngs={"params": True, "dropout": True},
                    length=3,
                )
                return jnp.tanh(scan()(jnp.tanh(x), None)[0])

        return transform(Layers)()

    options = {"rngs": {"dropout": jax.random.key(3)}}
    assert_same(run(make(remat), inputs(), **options), run(make(plain), inputs(), **options))


def test_subclass_of_a_planned_class(remat):
    def make(transform):
        class Scaled(transform(Block)):
            scale: float = 2.0

            @nn.compact
            def __call__(self, x):
                return Dense(4)(super().__call__(x) * self.scale)

        return Scaled(8)

    assert_same(run(make(remat), inputs()), run(make(plain), inputs()))


def test_partial_of_a_class(remat):
    assert_same(run(remat(functools.partial(Block, width=8))(), inputs()), run(Block(8), inputs()))


def test_function_that_takes_a_module(remat):
    def make(transform):
        class Calls(nn.Module):
            def setup(self):
                self.first, self.second = Dense(4), Dense(4)

            def __call__(self, x):
                half = lambda module, x, *, times: jnp.tanh(module.first(module.second(x))) * times  # noqa: E731
                return transform(half)(self, transform(half)(self, x, times=2.0), times=3)

        return Calls()

    assert_same(run(make(remat), inputs()), run(make(plain), inputs()))


def test_several_methods_and_nesting(remat):
    counts = {"setup": 0, "call": 0}

    def make(transform):
        class Inner(nn.Module):
            def setup(self):
                counts["setup"] += 1
                self.dense = Dense(4)

            @transform
            def one(self, x):
                counts["call"] += 1
                return jnp.tanh(self.dense(x))

            @transform
            def two(self, x, *, power):
                return self.one(jnp.tanh(self.dense(x)) ** power)

        class Outer(nn.Module):
            def setup(self):
                self.inner = Inner()

            @transform
            def __call__(self, x):
                return self.inner.one(x), self.inner.two(x, power=2)

        return Outer()

    found = []
    for transform in (remat, nn.remat):
        counts.update(setup=0, call=0)
        make(transform).init(
            jax.random.key(0),
            inputs(),
        )
        found.append(dict(counts))
    assert found[0] == found[1]
    assert_same(run(make(remat), inputs()), run(make(plain), inputs()))


def test_a_method_is_called_once_for_what_watches(remat):
    """What is captured, intercepted and tabulated is there once, as it is for `nn.remat`."""

    def seen(model):
        calls = []

        def watch(following, args, kwargs, context):
            calls.append((context.method_name, sorted(kwargs)))
            return following(*args, **kwargs)

        with nn.intercept_methods(watch):
            variables = model.init(jax.random.key(0), inputs())
        _, found = model.apply(variables, inputs(), capture_intermediates=True)
        return calls, found

    for ours, theirs in (
        (decorated(remat), decorated(nn.remat)),
        (remat(Block)(8), nn.remat(Block)(8)),
    ):
        (calls, found), (expected_calls, expected) = seen(ours), seen(theirs)
        assert calls == expected_calls
        assert_same(found, expected)


def test_init_is_lazy(remat):
    shapes = jax.eval_shape(remat(Block)(8).init, jax.random.key(0), inputs())
    assert jax.tree.map(jnp.shape, Block(8).init(jax.random.key(0), inputs())) == jax.tree.map(
        lambda leaf: leaf.shape, shapes
    )
    lazy = remat(Block)(8).lazy_init(jax.random.key(0), jax.ShapeDtypeStruct((3, 4), jnp.float64))
    assert_same(lazy, Block(8).init(jax.random.key(0), inputs()))


def test_bound_and_unbound(remat):
    variables = Block(8).init(jax.random.key(0), inputs())
    assert_same(remat(Block)(8).bind(variables)(inputs()), Block(8).apply(variables, inputs()))
    assert_same(
        nn.apply(remat(lambda m, x: m(x)), Block(8))(variables, inputs()),
        Block(8).apply(variables, inputs()),
    )
    loss = lambda model, variables, x: jnp.sum(model.apply(variables, x) ** 2)  # noqa: E731
    actual, expected = (jax.grad(f, 1)(Block(8), variables, inputs()) for f in (remat(loss), loss))
    assert_same(actual, expected)


def test_an_instance_is_refused(remat):
    for module in (nn.Dense(8), Block(8)):
        name = type(module).__name__
        with pytest.raises(jaxmem.JaxmemError, match=rf"Write jaxmem.remat\({name}\)\(...\)"):
            remat(module)


def test_a_class_without_a_call_is_refused(remat):
    class Encoder(nn.Module):
        def encode(self, x):
            return x

    with pytest.raises(jaxmem.JaxmemError, match="Encoder has none. Decorate its methods"):
        remat(Encoder)
