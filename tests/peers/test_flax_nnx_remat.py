"""What Flax's tests of `nnx.remat` check of values, of `jaxmem.remat`."""

import chex
import flax.errors
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmem

# Flax's batch statistics are float32 whatever the rest is.
pytestmark = pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
FLOAT = {"param_dtype": jnp.float64}


def plain(fun):
    return fun


def pure(tree):
    """The arrays of an nnx state, keys as their data."""
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = nnx.to_pure_dict(tree)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, leaves)


def assert_same(actual, expected):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-12, atol=1e-12)


def inputs(rows=3):
    return jax.random.normal(jax.random.key(5), (rows, 4))


class EveryFeature(nnx.Module):
    """All that a call may change: statistics, counts of keys, variables, attributes, structure."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs, **FLOAT)
        self.norm = nnx.BatchNorm(4, rngs=rngs, **FLOAT)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.again = self.first  # shared
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs, **FLOAT) for _ in range(2)])
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))
        self.calls = 0
        self.last = None

    def __call__(self, x, scale=1.0, *, shift=None):
        x = self.dropout(jnp.tanh(self.norm(self.first(x))))
        for layer in self.layers:
            x = jnp.tanh(layer(x) * scale)
        self.seen[...] += 1
        self.calls += 1
        self.last = "called"
        if self.calls == 2:
            self.late = nnx.Variable(x.sum())
        x = self.again(x)
        return x if shift is None else x + shift


def trained(remat, transform=plain, steps=3):
    """Losses, gradients and the model after some steps, and its attributes."""
    model = EveryFeature(nnx.Rngs(0))
    call = remat(lambda model, x, scale: jnp.sum(model(x, scale, shift=x) ** 2))

    def step(model, x):
        return nnx.value_and_grad(lambda model: call(model, x, 0.5))(model)

    step = transform(step)
    results = []
    for number in range(steps):
        loss, gradient = step(model, inputs() + number)
        nnx.update(
            model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradient)
        )
        results.append((loss, pure(gradient)))
    return results, pure(nnx.state(model)), (model.calls, model.last, hasattr(model, "late"))


@pytest.mark.parametrize("transform", [plain, nnx.jit], ids=["eager", "jit"])
def test_everything_that_a_call_changes(remat, transform):
    actual, expected = trained(remat, transform), trained(plain, transform)
    assert_same(actual[:2], expected[:2])
    assert actual[2] == expected[2] == (3, "called", True)


def test_equals_nnx_remat(remat):
    assert_same(trained(remat)[:2], trained(nnx.remat)[:2])


@pytest.mark.parametrize("form", ["class", "instance", "method", "bound method", "unbound"])
def test_forms(remat, form):
    class Decorated(EveryFeature):
        @remat
        def __call__(self, x, scale=1.0, *, shift=None):
            return super().__call__(x, scale, shift=shift)

    def make(form):
        kind = {"class": remat(EveryFeature), "method": Decorated}.get(form, EveryFeature)
        model = kind(nnx.Rngs(0))
        if form == "instance":
            model = remat(model)
        called = {
            "bound method": lambda model, *args, **kwargs: remat(model.__call__)(*args, **kwargs),
            "unbound": remat(EveryFeature.__call__),
        }.get(form, lambda model, *args, **kwargs: model(*args, **kwargs))
        return model, called

    results = []
    for each in (form, "plain"):
        model, called = make(each)
        assert isinstance(model, EveryFeature)
        loss = lambda model: jnp.sum(called(model, inputs(), 2.0, shift=None) ** 2)  # noqa: E731, B023
        gradients = [nnx.grad(loss)(model) for _ in range(2)]
        results.append((list(map(pure, gradients)), pure(nnx.state(model)), jnp.array(model.calls)))
    assert_same(*results)


def test_dropout_differs_from_call_to_call(remat):
    rngs = nnx.Rngs(dropout=3)
    dropout, other = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=3))
    planned = remat(lambda dropout, x: dropout(x) * 2)
    masks = [planned(dropout, jnp.ones((4, 16))) for _ in range(3)]
    chex.assert_trees_all_equal(masks, [other(jnp.ones((4, 16))) * 2 for _ in range(3)])
    assert not jnp.array_equal(masks[0], masks[1])
    assert not jnp.array_equal(masks[1], masks[2])


def test_keys_drawn_from_rngs(remat):
    def noisy(rngs, x):
        for _ in range(3):
            x = jnp.tanh(x + jax.random.normal(rngs.noise(), x.shape))
        return jnp.sum(x)

    one, other = nnx.Rngs(0, noise=1), nnx.Rngs(0, noise=1)
    planned = remat(noisy)
    for _ in range(3):
        assert_same(planned(one, inputs()), noisy(other, inputs()))
    assert one.noise.count[...] == other.noise.count[...] == 9


@pytest.mark.parametrize("jitted", [False, True])
def test_bare_variables(remat, jitted):
    """A function of variables that no module holds, one of which it counts up."""
    count = nnx.BatchStat(jnp.zeros((), jnp.int32))
    w = nnx.Param(jax.random.normal(jax.random.key(1), (4, 4)))
    b = nnx.Param(jax.random.normal(jax.random.key(2), (4,)))

    def linear(w, b, count, x):
        count[...] += 1
        for _ in range(3):
            x = jnp.tanh(x @ w + b[None])
        return jnp.sum(x)

    def gradients(fun):
        step = nnx.value_and_grad(lambda w, b, count, x: fun(w, b, count, x), argnums=(0, 1))
        loss, (gw, gb) = (nnx.jit(step) if jitted else step)(w, b, count, inputs())
        return loss, gw[...], gb[...]

    assert_same(gradients(remat(linear)), gradients(linear))
    assert count[...] == 2


def test_structures_of_modules(remat):
    """Lists and dicts of modules, one of them twice, and one by keyword."""
    rngs = nnx.Rngs(0)
    layers = nnx.List([nnx.Linear(4, 4, rngs=rngs, **FLOAT) for _ in range(3)])
    norm = nnx.BatchNorm(4, rngs=rngs, **FLOAT)

    def chain(modules, x, *, norm):
        for layer in modules["layers"]:
            x = norm(jnp.tanh(layer(x)))
        modules["layers"][0].bias[...] += 1
        return jnp.sum(x**2)

    def run(fun):
        model = nnx.Dict(layers=nnx.clone(layers), norm=nnx.clone(norm))

        def loss(model):
            twice = {"layers": [*model.layers, model.layers[0]]}
            return fun(twice, inputs(), norm=model.norm)

        return loss(model), pure(nnx.grad(loss)(model)), pure(nnx.state(model))

    assert_same(run(remat(chain)), run(chain))


def test_intermediates_that_are_captured(remat):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(4, 4, rngs=rngs, **FLOAT)
            self.b = nnx.Linear(4, 4, rngs=rngs, **FLOAT)

        def __call__(self, x):
            for layer in (self.a, self.b, self.a):
                x = jnp.tanh(layer(x))
                self.sow(nnx.Intermediate, "norms", jnp.sum(x**2))
            return x

    def run(fun):
        y, found = nnx.capture(fun, nnx.Intermediate)(Net(nnx.Rngs(0)), inputs())
        return y, jax.tree.leaves(found)

    call = lambda model, x: model(x)  # noqa: E731
    assert_same(run(remat(call)), run(call))


def test_modules_returned(remat):
    """Modules that a function returns come back as modules: new ones, and those it was given."""

    def extend(first, x):
        second = nnx.Linear(4, 4, rngs=nnx.Rngs(1), **FLOAT)
        for _ in range(3):
            x = jnp.tanh(first(x))
        return second, first, second(x)

    first = nnx.Linear(4, 4, rngs=nnx.Rngs(0), **FLOAT)
    second, same, y = remat(extend)(first, inputs())
    wanted, _, expected = extend(first, inputs())
    assert same is first
    assert_same((pure(nnx.state(second)), y), (pure(nnx.state(wanted)), expected))


def test_structure_changed_outside(remat):
    """The plan of one structure is not used for another."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(*[nnx.Linear(4, 4, rngs=rngs, **FLOAT) for _ in range(3)])
    planned = remat(lambda model, x: jnp.sum(model(x) ** 2))
    loss = lambda model, x: jnp.sum(model(x) ** 2)  # noqa: E731
    for change in (None, jnp.tanh, jnp.sin):
        if change:
            model.layers.append(change)
        actual, expected = (nnx.grad(fun)(model, inputs()) for fun in (planned, loss))
        assert_same(pure(actual), pure(expected))


class Scanned(nnx.Module):
    axes = nnx.StateAxes({(nnx.Param, nnx.RngState): 0, ...: None})

    @nnx.split_rngs(splits=5)
    @nnx.vmap(in_axes=(axes, axes), axis_size=5)
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs, **FLOAT)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def block(self, x):
        return self.dropout(jnp.tanh(self.linear(x)))


def test_inside_nnx_scan(remat):
    def run(transform):
        model = Scanned(nnx.Rngs(0))
        call = nnx.scan(
            transform(Scanned.block), in_axes=(Scanned.axes, nnx.Carry), out_axes=nnx.Carry
        )
        results = [nnx.grad(lambda model: jnp.sum(call(model, inputs()) ** 2))(model)]
        return [*map(pure, results), call(model, inputs()), pure(nnx.state(model))]

    assert_same(run(remat), run(plain))
    assert_same(run(remat), run(nnx.remat))


def test_inside_nnx_vmap(remat):
    def run(transform):
        model = EveryFeature(nnx.Rngs(0))
        model.eval()
        call = transform(lambda model, x: jnp.sum(model(x[None]) ** 2))
        mapped = nnx.vmap(call, in_axes=(nnx.StateAxes({...: None}), 0))
        return mapped(model, inputs()), nnx.to_pure_dict(nnx.state(model, nnx.Param))

    assert_same(run(remat), run(plain))


def test_inside_custom_vjp(remat):
    class Pair(nnx.Module):
        def __init__(self):
            self.x, self.y, self.z = nnx.Param(jnp.array(1.0)), nnx.Param(jnp.array(2.0)), 0

    @nnx.custom_vjp
    @remat
    def product(m):
        m.z += 1
        return jnp.sin(m.x[...]) * m.y[...]

    def forward(m):
        return product(m), (jnp.cos(m.x[...]), jnp.sin(m.x[...]), m)

    def backward(residuals, g):
        (m_g,), out_g = g
        cos, sin, m = residuals
        m_g["x"][...], m_g["y"][...] = cos * out_g * m.y[...], sin * out_g
        return (m_g,)

    product.defvjp(forward, backward)
    m = Pair()
    gradient = nnx.grad(nnx.jit(lambda m: product(m)), argnums=nnx.DiffState(0, ...))(m)
    assert_same(pure(gradient), {"x": 2 * jnp.cos(1.0), "y": jnp.sin(1.0)})
    assert m.z == 1


def test_a_module_that_is_closed_over(remat):
    """Flax tells: the change would be lost."""
    model = EveryFeature(nnx.Rngs(0))
    with pytest.raises(flax.errors.TraceContextError, match="different trace level"):
        remat(lambda x: jnp.sum(model(x)))(inputs())
    model.eval()
    frozen = nnx.Sequential(*model.layers)
    loss = lambda x: jnp.sum(jnp.tanh(frozen(jnp.tanh(frozen(x)))))  # noqa: E731
    assert_same(jax.grad(remat(loss))(inputs()), jax.grad(loss)(inputs()))


def test_a_module_of_an_outer_trace(remat):
    """One that a call does not change may be an argument (`nnx.remat` refuses it)."""
    model, frozen = (nnx.Linear(4, 4, rngs=nnx.Rngs(n), **FLOAT) for n in range(2))
    count = nnx.Variable(jnp.zeros(()))

    def chain(model, frozen, x):
        for _ in range(3):
            x = jnp.tanh(frozen(jnp.tanh(model(x))))
        return jnp.sum(x)

    def gradient(fun):
        return pure(nnx.grad(lambda model: fun(model, frozen, inputs()))(model))

    def counting(model, count):
        count[...] += 1
        return jnp.sum(model(inputs()))

    assert_same(gradient(remat(chain)), gradient(chain))
    with pytest.raises(flax.errors.TraceContextError, match="different trace level"):
        nnx.grad(lambda model: remat(counting)(model, count))(model)


def test_under_jax_transforms_alone(remat):
    """Modules are pytrees: `jax.jit` and `jax.grad` take them, with what is real in them."""
    model = nnx.Sequential(*[nnx.Linear(4, 4, rngs=nnx.Rngs(n), **FLOAT) for n in range(4)])
    loss = lambda model, x: jnp.sum(jnp.tanh(model(x)) ** 2)  # noqa: E731
    for transform in (jax.grad, lambda fun: jax.jit(jax.grad(fun))):
        actual, expected = (transform(fun)(model, inputs()) for fun in (remat(loss), loss))
        assert_same(jax.tree.leaves(actual), jax.tree.leaves(expected))


def test_a_function_that_fails_leaves_nothing_behind(remat):
    model = EveryFeature(nnx.Rngs(0))
    before = pure(nnx.state(model))

    def failing(model, x):
        model(x)
        raise KeyError("halfway")

    with pytest.raises(KeyError, match="halfway"):
        remat(failing)(model, inputs())
    assert_same(pure(nnx.state(model)), before)
    assert model.calls == 0
    remat(lambda model, x: model(x))(model, inputs())
    assert model.calls == 1


def test_plan_of_a_function_of_a_module():
    """Planning changes nothing, and what is planned is what runs: with updates, and when bound."""
    for bound in (False, True):
        model, twin = EveryFeature(nnx.Rngs(0)), EveryFeature(nnx.Rngs(0))
        loss = model.__call__ if bound else lambda model, x: jnp.sum(model(x) ** 2)
        args = (inputs(),) if bound else (model, inputs())
        chosen = jaxmem.plan(loss, *args)
        assert model.calls == 0 and model.seen[...] == 0
        result = chosen.apply(loss)(*args)
        expected = twin(inputs()) if bound else jnp.sum(twin(inputs()) ** 2)
        assert_same(result, expected)
        assert_same(pure(nnx.state(model)), pure(nnx.state(twin)))


def test_module_without_a_call():
    class Encoder(nnx.Module):
        def encode(self, x):
            return x

    for form in (Encoder, Encoder()):
        with pytest.raises(jaxmem.JaxmemError, match="Encoder has none. Decorate its methods"):
            jaxmem.remat(form)
