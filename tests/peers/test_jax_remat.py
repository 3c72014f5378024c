"""What JAX's tests of `jax.checkpoint` check of values, of `jaxmem.remat`."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmem


def assert_same(actual, expected):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-11, atol=1e-12)


def is_real(leaf):
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def backward(fun, args):
    """The gradient of a function of all its results, and the gradient of that gradient's norm."""
    numbers = tuple(n for n, arg in enumerate(args) if all(map(is_real, jax.tree.leaves(arg))))

    def loss(*args):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(fun(*args)) if is_real(x))

    def norm(*args):
        gradient = jax.grad(loss, numbers)(*args)
        return sum(jnp.sum(jnp.cos(g)) for g in jax.tree.leaves(gradient))

    return jax.grad(loss, numbers)(*args), jax.grad(norm, numbers)(*args)


def first(fun, args):
    """The gradient of a function of all its results."""
    return jax.grad(lambda *args: sum(jnp.sum(x) for x in jax.tree.leaves(fun(*args))))(*args)


def forward(fun, args):
    """The derivative along a direction, and one that is linearised."""
    real = [n for n, arg in enumerate(args) if all(map(is_real, jax.tree.leaves(arg)))]

    def of_real(*chosen):
        filled = list(args)
        for at, arg in zip(real, chosen, strict=True):
            filled[at] = arg
        return [x for x in jax.tree.leaves(fun(*filled)) if is_real(x)]

    chosen = tuple(jax.tree.map(jnp.asarray, args[n]) for n in real)
    along = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype), chosen
    )
    return jax.jvp(of_real, chosen, along), jax.linearize(of_real, *chosen)[1](*along)


def check(remat, fun, *args, kinds=(forward, backward)):
    """Values and derivatives of the planned function are those of the plain one."""

    def everything(fun):
        return lambda *args: (fun(*args), *(kind(fun, args) for kind in kinds))

    planned = remat(fun)
    expected = jax.jit(everything(fun))(*args)
    actual = jax.jit(everything(planned))(*args)
    assert_same(actual, expected)
    assert_same(jax.tree.map(jnp.asarray, planned(*args)), expected[0])
    for leaf, wanted in zip(*map(jax.tree.leaves, (actual[0], expected[0])), strict=True):
        assert jax.typeof(leaf) == jax.typeof(wanted)  # with its weak type


def sines(x, times=3):
    for _ in range(times):
        x = jnp.sin(x)
    return x


X = np.linspace(0.1, 1.2, 6).reshape(2, 3)


def test_results_that_are_constants(remat):
    check(remat, lambda x: (sines(x), 3.0, 2, np.float32(1), jnp.arange(2), None), X)
    value, constant = remat(lambda x: (sines(x), 3.0))(2.0)
    assert value == sines(2.0) and constant == 3.0


def test_arguments_that_come_back(remat):
    check(remat, lambda x, n: {"b": x, "a": (sines(x), [n, x]), "n": n + 1}, X, np.arange(3))
    assert_same(remat(lambda: jnp.ones(2))(), jnp.ones(2))


def test_weak_types_and_narrow_ones(remat):
    for x in (2.0, jnp.float32(2), np.float32(2), jnp.asarray(2.0), jnp.asarray(2.0, jnp.bfloat16)):
        x = jnp.asarray(x) if isinstance(x, float) else x
        check(remat, lambda x: (sines(x) * 2.0 + 1, x + 1), x, kinds=(forward,))
    planned = jax.make_jaxpr(remat(lambda x: sines(x) * x + 1))(2.0)
    assert planned.out_avals == jax.make_jaxpr(lambda x: sines(x) * x + 1)(2.0).out_avals


def test_closed_over_values(remat):
    def outer(inner):
        def fun(x):
            y = 2 * jnp.sin(x)
            return inner(lambda x: sines(jnp.cos(x) * jnp.sin(y)))(x)

        return fun

    expected = forward(outer(lambda f: f), (X,)), backward(outer(lambda f: f), (X,))
    assert_same((forward(outer(remat), (X,)), backward(outer(remat), (X,))), expected)


@pytest.mark.parametrize("positive", [True, False])
def test_python_control_flow_on_constants(remat, positive):
    def fun(x, flag, *, options):
        return (sines(x) if flag else jnp.cos(x)) * options["scale"][0]

    static = {"flag": positive, "options": {"scale": [2]}}
    check(lambda f: functools.partial(remat(fun), **static), functools.partial(fun, **static), X)
    planned = remat(fun)
    for flag in (positive, not positive, positive):
        assert_same(planned(X, flag, options={"scale": [3]}), fun(X, flag, options={"scale": [3]}))


def test_jit_inside_and_outside(remat):
    scaled = jax.jit(lambda a, b: sines(a) * b)
    check(remat, lambda w, x: scaled(scaled(w, x), scaled(x, w)), X, X + 1)
    y = jax.jit(lambda x: remat(lambda: 2 * x)())(3)
    assert_same(y, jnp.asarray(6))


def test_jit_of_dropped_results(remat):
    check(remat, lambda x: sines(jax.jit(lambda: (x, x))()[1]), X)
    check(remat, lambda x: sines(jax.jit(lambda: 3.0)() * x), X)
    check(remat, lambda x: jax.grad(lambda x: jnp.sum(sines((x, x)[0])))(x), X)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0)])
def test_jit_that_forwards_its_arguments(remat, order):
    @jax.jit
    def permuted(args):
        picked = [args[at] for at in order]
        return [picked[0], jnp.exp(picked[1]), jnp.sin(picked[2]), picked[1], picked[0]]

    check(
        remat,
        lambda args: permuted(permuted(args)[2:]),
        [np.float64(0.1), np.float64(0.2), np.float64(0.3)],
    )


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (1, 2), (0, 1)])
def test_vmap(remat, axes):
    fun = lambda x: jnp.stack([sines(x), jnp.cos(sines(x, 2))])  # noqa: E731
    check(lambda f: jax.vmap(remat(fun), *axes), jax.vmap(fun, *axes), X)
    check(remat, jax.vmap(fun, *axes), X)
    chex.assert_trees_all_close(
        [jax.jacfwd(remat(sines))(X[0]), jax.jacrev(remat(sines))(X[0])],
        [jax.jacfwd(sines)(X[0])] * 2,
    )


def test_vmap_with_a_named_axis(remat):
    fun = lambda x: sines(x) - lax.pmean(sines(x), "batch")  # noqa: E731
    check(lambda f: jax.vmap(remat(fun), axis_name="batch"), jax.vmap(fun, axis_name="batch"), X)


def test_third_derivatives(remat):
    for fun in (lambda x: jnp.cos(jnp.sin(x)), lambda x: lax.cond(x > 0, sines, jnp.cos, x)):
        of = lambda f: jax.jit(jax.grad(jax.grad(jax.grad(f))))  # noqa: E731
        assert_same(of(remat(fun))(0.3), of(fun)(0.3))
        nested = jax.grad(remat(jax.grad(remat(jax.grad(fun)))))
        assert_same(jax.jit(nested)(0.3), of(fun)(0.3))


def test_nested_in_halves(remat):
    def halves(functions, wrap):
        if len(functions) == 1:
            return functions[0]
        middle = len(functions) // 2
        first, second = halves(functions[:middle], wrap), halves(functions[middle:], wrap)
        return wrap(lambda x: first(second(x)))

    for wrap in (remat, lambda f: jax.checkpoint(remat(f)), lambda f: remat(jax.checkpoint(f))):
        nested = halves([jnp.sin, jnp.cos, jnp.tanh, jnp.sin], wrap)
        check(lambda f, nested=nested: nested, lambda x: jnp.sin(jnp.cos(jnp.tanh(jnp.sin(x)))), X)


# ---- loops and branches


def body(c, x):
    return jnp.sin(c) * x, jnp.cos(c)


def test_scan_of_a_planned_body(remat):
    scanned = lambda body: lambda c: lax.scan(body, c, jnp.arange(1.0, 4.0))  # noqa: E731
    check(lambda f: scanned(remat(body)), scanned(body), X)


def test_planned_scan(remat):
    check(remat, lambda c: lax.scan(body, c, jnp.arange(1.0, 4.0)), X)
    check(remat, lambda c: lax.scan(lambda c, _: (c + 1, None), c, None, length=1)[0], X)


def test_scan_whose_stacked_results_are_not_needed(remat):
    def step(c, a):
        b = jnp.sin(a).sum() + jnp.sin(c).sum()
        return jnp.sin(c * b), b

    check(
        remat,
        lambda c, xs: lax.scan(step, c, xs)[0].sum(),
        np.arange(4.0) / 4,
        np.arange(6.0).reshape(2, 3),
    )


def test_scan_whose_result_has_no_gradient(remat):
    def fun(scale):
        move = lambda r, _: (r + 0.001 * scale * r, jnp.zeros(1))  # noqa: E731
        return lax.scan(remat(move), jnp.asarray(X), jnp.arange(2))[0][0, 0]

    expected = jax.grad(lambda s: X[0, 0] * (1 + 0.001 * s) ** 2)(5.0)
    chex.assert_trees_all_close(jax.grad(fun)(5.0), expected, rtol=1e-12)


def test_scan_with_defaults_and_constants(remat):
    def step(state, dt=0.5, c=1):
        u, v = state
        return u + 0.1 * v, v + c**2 * u * dt

    def loss(wrap):
        def of(u, target, dt):
            stepped = lambda s, _: (wrap(step)(s, dt, 2), None)  # noqa: E731
            (u, _), _ = lax.scan(stepped, (u, jnp.zeros_like(u)), None, 5)
            return ((u - target) ** 2).mean()

        return of

    check(lambda f: loss(remat), loss(lambda f: f), X, X - 1, np.float64(0.3))


def test_dots_in_a_scan(remat):
    def step(w):
        def fun(x, _):
            for _ in range(3):
                x = jnp.sin(jnp.dot(x, w, precision=lax.Precision.HIGHEST))
            return x, None

        return fun

    def branches(w):
        return lax.cond(w.sum() > 0, lambda w: step(w)(jnp.ones(3), 0)[0], lambda w: w[0], w)

    w = np.eye(3) + 0.1
    check(remat, lambda w: lax.scan(step(w), jnp.ones(3), None, length=2)[0], w)
    check(remat, branches, w)


BRANCHES = {
    "both": (lambda c: (jnp.sin(c), jnp.cos(c)), lambda c: (jnp.tanh(c), jnp.sin(c))),
    "one does nothing": (lambda c: (sines(c), c), lambda c: (c, c)),
    "constants": (
        lambda c: (c * jnp.array([1.0, 2.0, 3.0])[None], c),
        lambda c: (jnp.sin(c), 2 * c),
    ),
}


@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("sign", [1, -1])
def test_cond(remat, branches, sign):
    fun = lambda x: lax.cond(jnp.sum(x) > 0, *BRANCHES[branches], sines(x, 2))  # noqa: E731
    check(remat, fun, X * sign)
    inner = [remat(branch) for branch in BRANCHES[branches]]
    check(lambda f: lambda x: lax.cond(jnp.sum(x) > 0, *inner, sines(x, 2)), fun, X * sign)


def test_switch_under_vmap(remat):
    fun = lambda n, x: lax.switch(n, [jnp.sin, jnp.cos, jnp.tanh], sines(x, 2))  # noqa: E731
    check(lambda f: jax.vmap(remat(fun)), jax.vmap(fun), np.array([2, 0]), X)


def test_while_loops(remat):
    def fun(x, y):
        _, x, y = lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[2]), c[1]), (0, x, y)
        )
        return x + 2 * y

    check(remat, fun, X, X + 1, kinds=(forward,))
    swapped = lambda x, y: sum(lax.while_loop(lambda _: False, lambda c: (c[1], c[0]), (x, y)))  # noqa: E731
    check(remat, swapped, X, X + 1, kinds=(forward,))
    counted = lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) * (i + 1), x)  # noqa: E731
    check(remat, counted, X)


# ---- custom rules


@jax.custom_jvp
def doubled(x):
    return jnp.sin(x)


@doubled.defjvp
def _(primals, tangents):
    return doubled(*primals), 2 * jnp.cos(primals[0]) * tangents[0]


def through_jit(wrap):
    """A rule that computes value and derivative in a call of its own."""

    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    @sine.defjvp
    def _(primals, tangents):
        (x,), (along,) = primals, tangents
        value, slope = wrap(lambda: (jnp.sin(x), jnp.cos(x)))
        return value, slope * along

    return sine


@jax.custom_jvp
def summed(x):
    return jnp.sum(x, axis=0)


@summed.defjvp
def _(primals, tangents):
    return summed(*primals), summed(*tangents)


@jax.custom_jvp
def counted(x):
    return x * jnp.arange(3.0)[None]


@counted.defjvp
def _(primals, tangents):
    return counted(*primals), tangents[0] * jnp.arange(3.0)[None]


RULES = {
    "double": lambda x: doubled(doubled(x) * 1e-1),
    "with jit": through_jit(lambda f: jax.jit(f)()),
    "with cond": through_jit(lambda f: lax.cond(True, f, f)),
    "with scan": through_jit(lambda f: lax.scan(lambda c, _: (f(), None), f(), None, length=1)[0]),
    "linear": lambda x: summed(jnp.sin(x)),
    "constants": counted,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("wrapper", ["twice", "scan", "cond"])
def test_custom_jvp(remat, rule, wrapper):
    rule = RULES[rule]
    same = rule is not RULES["linear"]
    fun = {
        "twice": lambda x: rule(jnp.tanh(rule(x))) if same else rule(x),
        "scan": lambda x: lax.scan(lambda c, y: (c, rule(jnp.tanh(y))), 0.0, jnp.stack([x, 2 * x]))[
            1
        ],
        "cond": lambda x: lax.cond(x.sum() > 0, rule, lambda x: rule(2 * x), jnp.sin(x)),
    }[wrapper]
    # Where a rule is not the derivative of its value, the second derivative depends on where JAX's
    # own regions are: inside of a scan it is another one.
    undefined = rule is RULES["double"] and wrapper == "scan"
    check(remat, fun, X, kinds=(forward, first) if undefined else (forward, backward))


def tripled(optimize=False):
    @functools.partial(jax.custom_vjp)
    def fun(x):
        return jnp.sin(x["a"]) * x["b"]

    def ahead(x):
        return fun(x), (jnp.cos(x["a"]), jnp.sin(x["a"]), x["b"])

    def back(kept, g):
        cos, sin, b = kept
        return ({"a": 3 * cos * b * g, "b": sin * g},)

    fun.defvjp(ahead, back, optimize_remat=optimize)
    return fun


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(k, x):
    return jnp.sin(k * x)


scaled.defvjp(
    lambda k, x: (scaled(k, x), jnp.cos(k * x)),
    lambda k, cos, g: (jnp.clip(k * cos * g, -0.3, 0.3),),
)


@jax.custom_vjp
def symbolic(x, y):
    return x * y


def symbolic_forward(x, y):
    assert x.perturbed and not y.perturbed
    return symbolic(x.value, y.value), (x.value, y.value)


symbolic.defvjp(symbolic_forward, lambda kept, g: (g * kept[1], None), symbolic_zeros=True)

VJP_RULES = {
    "pytree": lambda x: tripled()({"a": x, "b": jnp.cos(x)}),
    "optimized": lambda x: tripled(True)({"a": x, "b": jnp.cos(x)}),
    "static argument": lambda x: scaled(2.0, x) * 3,
}


@pytest.mark.parametrize("rule", VJP_RULES)
@pytest.mark.parametrize("wrapper", ["twice", "scan", "cond", "vmap"])
def test_custom_vjp(remat, rule, wrapper):
    rule = VJP_RULES[rule]
    fun = {
        "twice": lambda x: rule(jnp.tanh(rule(x))),
        "scan": lambda x: lax.scan(lambda c, _: (rule(jnp.tanh(c)), c), x, None, length=2),
        "cond": lambda x: lax.cond(x.sum() > 0, rule, lambda x: rule(2 * x), jnp.sin(x)),
        "vmap": jax.vmap(lambda x: rule(jnp.tanh(rule(x)))),
    }[wrapper]
    optimized = rule is VJP_RULES["optimized"]
    check(
        remat,
        fun,
        X,
        kinds=() if optimized and wrapper == "vmap" else (first,) if optimized else (backward,),
    )


def test_custom_vjp_told_what_is_differentiated(remat):
    """A rule that is told that an argument is a constant; its plan keeps what it is told."""
    y = jnp.asarray(X) + 1
    fun = lambda x: jnp.sin(symbolic(symbolic(x, y), y))  # noqa: E731
    check(remat, fun, X, kinds=(first,))


def test_custom_linear_solve(remat):
    def fun(a, b):
        solve = lambda a, b: lax.custom_linear_solve(  # noqa: E731
            functools.partial(jnp.matmul, a), b,
            lambda _, b: jnp.linalg.solve(a, b), lambda _, b: jnp.linalg.solve(a.T, b),
        )  # fmt: skip
        return jnp.sin(solve(jnp.tanh(a), jnp.cos(b)))

    check(remat, fun, np.eye(3) + 0.1, X[0])


# ---- residuals, policies, effects


def test_names_and_policies_around(remat):
    """A region of the user's around the planned function, with names inside, and the reverse."""
    policies = jax.checkpoint_policies

    def fun(x):
        y = checkpoint_name(jnp.sin(x) * 2, "y")
        z = checkpoint_name({"z": jnp.cos(y)}, "z")["z"]
        return sines(z) + y

    for policy in (
        policies.everything_saveable,
        policies.nothing_saveable,
        policies.dots_saveable,
        policies.dots_with_no_batch_dims_saveable,
        policies.save_only_these_names("y"),
        policies.save_any_names_but_these("z"),
        jaxmem.remat_policy(target="h200"),
    ):
        check(
            lambda f, policy=policy: jax.checkpoint(remat(fun), policy=policy),
            fun,
            X,
            kinds=(first,),
        )
        check(
            lambda f, policy=policy: remat(jax.checkpoint(fun, policy=policy)),
            fun,
            X,
            kinds=(first,),
        )
    check(lambda f: jax.vmap(remat(fun)), jax.vmap(fun), X)


def test_integers_have_no_cotangents(remat):
    fun = lambda x, n: (jnp.sum(sines(x) * n), n + 1, x > 0.5)  # noqa: E731
    results = []
    for each in (remat(fun), fun):
        (value, *rest), pull = jax.vjp(each, X, np.arange(3)[None])
        zeros = [np.zeros(r.shape, jax.dtypes.float0) for r in rest]
        results.append((value, *rest, pull((1.0, *zeros))[0]))
        assert pull((1.0, *zeros))[1].dtype == jax.dtypes.float0
        gradient = jax.grad(lambda x, n, each=each: each(x, n)[0], (0, 1), allow_int=True)
        assert gradient(X, np.arange(3)[None])[1].dtype == jax.dtypes.float0
    assert_same(*results)


def test_some_arguments_are_not_differentiated(remat):
    """Only some arguments, and results that nobody differentiates: an accuracy, a count."""

    def fun(w, x, labels):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return jnp.mean((x - labels) ** 2), {
            "right": jnp.mean(x > labels),
            "n": labels.size,
            "x": x,
        }

    args = np.eye(3) + 0.1, X, X > 0.5
    for numbers in (0, 1, (0, 1)):
        results = []
        for each in (remat(fun), fun):
            derive = jax.value_and_grad(each, numbers, has_aux=True)
            results.append(jax.tree.map(jnp.asarray, (derive(*args), jax.jit(derive)(*args))))
        assert_same(*results)


def test_complex_numbers(remat):
    fun = lambda x: jnp.sum(jnp.abs(sines(x * (1 + 2j))) ** 2)  # noqa: E731
    assert_same(jax.grad(remat(fun))(X + 1j), jax.grad(fun)(X + 1j))


def test_transposed(remat):
    fun = lambda x: (3 * x)[:, ::-1] + x  # noqa: E731
    actual, expected = (jax.linear_transpose(f, X)(X) for f in (remat(fun), fun))
    assert_same(actual, expected)


def test_keys(remat):
    fun = lambda key, x: sines(x + jax.random.normal(key, x.shape))  # noqa: E731
    keys = jax.random.split(jax.random.key(0), 2)
    results = [jax.vmap(jax.jacrev(f, 1))(keys, X) for f in (remat(fun), fun)]
    assert_same(*results)


def test_gradients_added_up_in_references(remat):
    results = []
    for fun in (remat(sines), sines):
        _, pull = jax.vjp(fun, jnp.asarray(X))
        reference = jax.new_ref(jnp.ones_like(X))
        pull.with_refs(reference)(jnp.ones_like(X))
        results.append(reference[...])
    assert_same(*results)


def test_shard_map_inside_and_outside(remat):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    check(remat, shard(sines), X)
    check(lambda f: shard(remat(sines)), shard(sines), X)
    scalar = lambda x: sines(x.sum())[None]  # noqa: E731
    check(remat, shard(scalar), X)


def test_module_paths_stay(remat):
    def fun(x):
        with jax.named_scope("tower"):
            for layer in range(3):
                with jax.named_scope(f"layer{layer}"):
                    x = jnp.sin(x)
        return jnp.sum(x)

    text = jax.jit(jax.grad(remat(fun))).lower(X).as_text(debug_info=True)
    assert all(re.search(rf"tower\)?/layer{layer}/", text) for layer in range(3))


def test_no_tracer_escapes_in_silence(remat):
    kept = [jnp.zeros(())]

    def fun():
        kept[0] += 1
        return kept[0]

    def twice():
        remat(fun)()
        return remat(fun)()

    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.jit(twice)()


@pytest.mark.parametrize("effect", ["callback", "reference"])
def test_effects_are_refused(remat, effect):
    """`jax.checkpoint` runs them once more in the backward pass. A plan may move them too (but for
    prints: tests/test_printing.py)."""

    def fun(x):
        x = sines(x)
        if effect == "callback":
            jax.experimental.io_callback(print, None, x)
        else:
            reference = jax.new_ref(x)
            x = reference[...]
        return jnp.sum(sines(x))

    with pytest.raises(
        jaxmem.PlanError, match=r"side effect, .* at test_jax_remat.py:\d+ \(.*fun\)"
    ):
        jax.grad(remat(fun))(X)


def test_errors_of_the_function_come_through(remat):
    with pytest.raises(ZeroDivisionError):
        remat(lambda x: 1 / 0)(X)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        remat(lambda x: x if x > 0 else -x)(2.0 * jnp.ones(()))
    with pytest.raises(TypeError, match="not a valid JAX type"):
        remat(lambda x: (x, "text"))(X)
