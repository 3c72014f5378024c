# ruff: noqa: E501 (tables, one entry a line)
"""Custom differentiation rules of every kind, as functions of one array that keep its shape.

Each entry of `RULES` takes a `random.Random` and returns ``(text, function)``. A rule is *linear* if
its cotangent is; the others (clipping, signs, quantisation) tell a derivative that was taken once
from one that was taken once per reader.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero, linear_call


def _with_vjp(body, bwd, keeps_input=False, **options):
    """A `custom_vjp` of one array: ``bwd(x or None, g)`` is the cotangent."""
    fun = jax.custom_vjp(lambda x: body(x))
    fun.defvjp(
        lambda x: (body(x), x if keeps_input else None), lambda x, g: (bwd(x, g),), **options
    )
    return fun


def _norm(g):
    return g / (jnp.max(jnp.abs(g)) + jnp.asarray(0.01, g.dtype))


def _quantise(x, levels=4):
    return jnp.round(x * levels) / levels


COTANGENTS = {  # what a rule makes of a cotangent; none of these is linear
    "clip": lambda g: jnp.clip(g, -0.01, 0.01),
    "sign": lambda g: jnp.sign(g) * 0.01,
    "normalise": _norm,
    "quantise": lambda g: _quantise(g, 64) + g * 0.25,
    "fp8": lambda g: g.astype(jnp.float8_e5m2).astype(g.dtype),
    "threshold": lambda g: jnp.where(jnp.abs(g) > 0.01, g, 0),
    "square": lambda g: g * jnp.abs(g),
    "clip_norm": lambda g: (
        g * jnp.minimum(1, 0.05 / jnp.sqrt(jnp.sum(g * g) + 1e-6)).astype(g.dtype)
    ),
}

BODIES = {
    "x*1.0": lambda x: x * 1.0,
    "x": lambda x: x,
    "tanh": jnp.tanh,
    "round": _quantise,
    "normed": lambda x: x / (1 + jnp.mean(jnp.abs(x))),
    "sum_kept": lambda x: x + jnp.sum(x, -1, keepdims=True) * 0.1,
    "sorted": lambda x: jnp.sort(x, -1),
    "flat": lambda x: jnp.sin(x.reshape(-1)).reshape(x.shape),
}


def nonlinear(rng):
    name, body = rng.choice(sorted(COTANGENTS)), rng.choice(sorted(BODIES))
    cotangent = COTANGENTS[name]
    if rng.random() < 0.5:
        fun = _with_vjp(BODIES[body], lambda _, g: cotangent(g))
    else:
        fun = _with_vjp(BODIES[body], lambda x, g: cotangent(g * jnp.cos(x)), True)
    return f"custom_vjp[{body}, g->{name}]", fun


def reversal(rng):
    return "reversal", _with_vjp(lambda x: x, lambda _, g: -g)


def straight_through(rng):
    return "straight_through", _with_vjp(_quantise, lambda _, g: g)


def straight_through_masked(rng):
    return "straight_through_masked", _with_vjp(
        jnp.sign, lambda x, g: g * (jnp.abs(x) < 1).astype(g.dtype), True
    )


def straight_through_stop(rng):
    return "x+stop(round(x)-x)", lambda x: x + lax.stop_gradient(_quantise(x) - x)


def fp8(rng):
    def quantise(x, to):
        scale = jnp.max(jnp.abs(x)) / 8 + jnp.asarray(1e-3, x.dtype)
        return (x / scale).astype(to).astype(x.dtype) * scale

    return "fp8_in_out", _with_vjp(
        lambda x: quantise(x, jnp.float8_e4m3fn), lambda _, g: quantise(g, jnp.float8_e5m2)
    )


def nondiff(rng):
    limit = rng.choice([0.01, 0.1])

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
    def fun(limit, x, kind):
        return jnp.sin(x)

    fun.defvjp(
        lambda limit, x, kind: (jnp.sin(x), x),
        lambda limit, kind, x, g: (COTANGENTS[kind](g * jnp.cos(x)) + limit * g,),
    )
    kind = rng.choice(sorted(COTANGENTS))
    return f"custom_vjp[nondiff_argnums, {limit}, {kind}]", lambda x: fun(limit, x, kind)


def symbolic_zeros(rng):
    @jax.custom_vjp
    def fun(x, y):
        return jnp.sin(x) * y, x + y

    def fwd(x, y):
        kept = (x.value, y.value) if x.perturbed else (x.value, None)
        return (jnp.sin(x.value) * y.value, x.value + y.value), kept

    def bwd(kept, cotangents):
        a, b = cotangents
        x, y = kept
        parts = [] if isinstance(a, SymbolicZero) else [a * jnp.cos(x) * (1 if y is None else y)]
        parts += [] if isinstance(b, SymbolicZero) else [jnp.clip(b, -0.01, 0.01)]
        return (sum(parts) if parts else jnp.zeros_like(x)), jnp.zeros_like(x)

    fun.defvjp(fwd, bwd, symbolic_zeros=True)
    both = rng.random() < 0.5
    return f"custom_vjp[symbolic_zeros, both={both}]", (
        lambda x: (
            sum(fun(x, jnp.ones_like(x))) if both else fun(x, jnp.cos(lax.stop_gradient(x)))[0]
        )
    )


def with_integers(rng):
    @jax.custom_vjp
    def fun(x, i, flag):
        return jnp.roll(x, 1, 0) * flag + x[i % x.shape[0]][None] * 0.5

    def bwd(kept, g):
        i, flag = kept
        return jnp.clip(jnp.roll(g, -1, 0) * flag, -0.02, 0.02) + g * i, None, None

    fun.defvjp(lambda x, i, flag: (fun(x, i, flag), (i, flag)), bwd)
    flag, i = rng.random() < 0.7, rng.randrange(9)
    return f"custom_vjp[x, i={i}, {flag}]", lambda x: fun(x, jnp.asarray(i), jnp.asarray(flag))


def closure(rng):
    seed = rng.randrange(1000)

    def apply(x):
        with jax.ensure_compile_time_eval():
            table = jnp.asarray(np.random.default_rng(seed).normal(size=x.shape), x.dtype)
        fun = jax.custom_vjp(lambda x: x * table)
        fun.defvjp(lambda x: (x * table, None), lambda _, g: (jnp.clip(g * table, -0.01, 0.01),))
        return fun(x)

    return f"custom_vjp[closes over an array {seed}]", apply


def several_outputs(rng):
    @jax.custom_vjp
    def fun(x):
        return {"a": jnp.tanh(x), "n": jnp.sum(x > 0), "b": (x * 2.0, None)}

    def bwd(kept, g):
        return (jnp.clip(g["a"] + g["b"][0] ** 2, -0.02, 0.02) * kept["s"],)

    fun.defvjp(lambda x: (fun(x), {"s": jnp.cos(x), "none": None, "n": 3}), bwd)

    def apply(x):
        out = fun(x)
        return out["a"] + out["b"][0] * 0.5 + (out["n"] * 0.01).astype(x.dtype)

    return "custom_vjp[pytrees]", apply


def matmul_rule(rng):
    @jax.custom_vjp
    def fun(x, w):
        return x @ w

    def bwd(kept, g):
        x, w = kept
        g = _quantise(g, 64) + g * 0.5
        flat = x.reshape(-1, x.shape[-1])
        return g @ w.T, jnp.clip(flat.T @ g.reshape(-1, g.shape[-1]), -0.1, 0.1)

    fun.defvjp(lambda x, w: (x @ w, (x, w)), bwd)

    def apply(x):
        return fun(x, jnp.sin(x.reshape(-1, x.shape[-1]).T @ x.reshape(-1, x.shape[-1])))

    return "custom_vjp[x @ w, quantised]", apply


def optimize_remat(rng):
    fun = _with_vjp(
        lambda x: jnp.sin(x) * 1.5, lambda x, g: jnp.clip(g * jnp.cos(x), -0.01, 0.01), True,
        optimize_remat=True,
    )  # fmt: skip
    return "custom_vjp[optimize_remat]", fun


def nested_rules(rng):
    inner = _with_vjp(lambda x: x * 1.0, lambda _, g: jnp.clip(g, -0.05, 0.05))
    outer = jax.custom_vjp(lambda x: inner(jnp.tanh(x)))

    def fwd(x):
        y, pullback = jax.vjp(lambda x: inner(jnp.tanh(x)), x)
        return y, pullback

    outer.defvjp(fwd, lambda pullback, g: (_norm(pullback(g)[0]) * 0.1,))
    return "custom_vjp[of custom_vjp]", outer


def jvp_rule(rng):
    @jax.custom_jvp
    def fun(x):
        return jnp.maximum(x, 0)

    fun.defjvps(lambda t, ans, x: t * jax.nn.sigmoid(4 * x))
    return "custom_jvp[relu]", fun


def jvp_rule_nondiff(rng):
    scale = rng.choice([0.5, 2.0])

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def fun(scale, x):
        return jnp.round(x * scale)

    @fun.defjvp
    def rule(scale, primals, tangents):
        return fun(scale, *primals), tangents[0] * jnp.sum(jnp.cos(primals[0]) * scale) * 0.1

    return f"custom_jvp[nondiff, {scale}]", lambda x: fun(scale, x)


def jvp_rule_matmul(rng):
    @jax.custom_jvp
    def fun(x):
        return jnp.sin(x @ x.mT) @ x * 0.2 if x.ndim > 1 else jnp.sin(x) * 0.2

    @fun.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        return fun(x), jnp.cos(x) @ x.mT @ t * 0.2 if x.ndim > 1 else jnp.cos(x) * t * 0.2

    return "custom_jvp[matmul]", fun


def linear(rng):
    scale = rng.choice([0.5, -2.0])

    def apply(x):
        factor = lax.stop_gradient(jnp.cos(x))
        return linear_call(lambda r, t: t * r * scale, lambda r, t: t * r * -scale, factor, x)

    return f"linear_call[{scale}]", apply


def linear_clipped(rng):
    def apply(x):
        return linear_call(lambda r, t: t * 2.0, lambda r, t: jnp.clip(t, -0.01, 0.01), (), x)

    return "linear_call[transpose clips]", apply


def linear_solve(rng):
    def apply(x):
        flat = x.reshape(-1, x.shape[-1])
        a = flat.T @ flat * 0.1 + 2 * jnp.eye(x.shape[-1], dtype=x.dtype)
        solved = lax.custom_linear_solve(
            lambda v: a @ v, flat.T, lambda matvec, b: b / 2 - (matvec(b) - 2 * b) / 4,
            symmetric=True,
        )  # fmt: skip
        return solved.T.reshape(x.shape)

    return "custom_linear_solve", apply


def root(rng):
    def apply(x):
        def newton(f, y):
            for _ in range(6):
                y = y - f(y) / (1 + 0.5 * (1 - jnp.tanh(y) ** 2))
            return y

        return lax.custom_root(
            lambda y: y + 0.5 * jnp.tanh(y) - x, x * 0.7, newton,
            lambda g, y: y / g(jnp.ones_like(y)),
        )  # fmt: skip

    return "custom_root", apply


def custom_gradient(rng):
    @jax.custom_gradient
    def fun(x):
        return jnp.sin(x), lambda g: (jnp.clip(g, -0.01, 0.01) * jnp.cos(x),)

    return "custom_gradient[clip]", fun


def stochastic(rng):
    seed = rng.randrange(1000)

    def noisy(_, g):
        noise = jax.random.uniform(jax.random.key(seed), g.shape, jnp.float32)
        return jnp.floor(g * 64 + noise.astype(g.dtype)) / 64 + g

    return f"custom_vjp[stochastic rounding {seed}]", _with_vjp(lambda x: x * 1.0, noisy)


def penalty(rng):
    def apply(x):
        inner = jax.grad(lambda y: jnp.sum(jnp.tanh(y) ** 2 * jnp.cos(x)))
        return x * 0.5 + inner(x) ** 2

    return "gradient penalty", apply


def inner_jvp(rng):
    return "jvp inside", lambda x: jax.jvp(lambda y: jnp.sin(y) * y, (x,), (jnp.cos(x),))[1]


RULES = [
    nonlinear, nonlinear, nonlinear, reversal, straight_through, straight_through_masked,
    straight_through_stop, fp8, nondiff, symbolic_zeros, with_integers, closure, several_outputs,
    matmul_rule, optimize_remat, nested_rules, jvp_rule, jvp_rule_nondiff, jvp_rule_matmul, linear,
    linear_clipped, linear_solve, root, custom_gradient, stochastic, penalty, inner_jvp,
]  # fmt: skip
