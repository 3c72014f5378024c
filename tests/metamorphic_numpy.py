# ruff: noqa: E501 (tables, one entry a line)
"""Evaluates a jaxpr with NumPy, equation by equation.

Compiling a random program takes a second, and its gradient op by op as long; this takes
milliseconds, and what is computed again comes out bit for bit as before. Primitives that are not in
the tables run as JAX runs them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _logistic(x):
    return 1 / (1 + np.exp(-x))


def _integer_pow(x, y):
    return np.power(x, y) if y >= 0 else 1 / np.power(x, -y)


def _round(x, rounding_method):
    if int(rounding_method) == 1:
        return np.round(x)
    return np.trunc(x + np.copysign(0.5, x))


def _divide(x, y):
    if np.issubdtype(np.asarray(x).dtype, np.integer):
        return np.trunc(np.true_divide(x, np.where(y == 0, 1, y)))
    return x / y


def _select_n(which, *cases):
    if len(cases) == 2 and np.asarray(which).dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases) if np.ndim(which) else cases[int(which)]


def _clamp(low, x, high):
    return np.minimum(np.maximum(x, low), high)


def _plain(fun, *names):
    """A NumPy function as a rule: its operands and the named parameters."""
    return lambda *args, **params: fun(*args, **{n: params[n] for n in names})


ELEMENTWISE = {
    name: _plain(fun)
    for name, fun in {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divide, "neg": np.negative,
        "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "exp": np.exp, "log": np.log,
        "log1p": np.log1p, "expm1": np.expm1, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
        "abs": np.abs, "sign": np.sign, "floor": np.floor, "ceil": np.ceil, "max": np.maximum,
        "min": np.minimum, "pow": np.power, "atan2": np.arctan2, "logistic": _logistic,
        "erf": _erf, "square": np.square, "rem": np.fmod, "eq": np.equal, "ne": np.not_equal,
        "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "add_any": np.add, "is_finite": np.isfinite, "real": np.real, "imag": np.imag,
        "conj": np.conj, "complex": lambda x, y: x + 1j * y, "clamp": _clamp,
        "select_n": _select_n, "stop_gradient": lambda x: x, "copy": lambda x: x,
        "copy_p": lambda x: x, "name": lambda x: x, "convert_element_type": lambda x: x,
        "exp2": np.exp2, "cosh": np.cosh, "sinh": np.sinh, "pvary": lambda *x: x[0],
        "reduce_precision": lambda x: x,
    }.items()
}  # fmt: skip
ELEMENTWISE |= {
    "integer_pow": lambda x, *, y: _integer_pow(x, y),
    "round": lambda x, *, rounding_method: _round(x, rounding_method),
}
del ELEMENTWISE["reduce_precision"]


def _logical(name, boolean, integer):
    return lambda *xs, **_: (boolean if np.asarray(xs[0]).dtype == bool else integer)(*xs)


ELEMENTWISE |= {
    "and": _logical("and", np.logical_and, np.bitwise_and),
    "or": _logical("or", np.logical_or, np.bitwise_or),
    "xor": _logical("xor", np.logical_xor, np.bitwise_xor),
    "not": _logical("not", np.logical_not, np.invert),
}


def _dot_general(x, y, *, dimension_numbers, preferred_element_type=None, **_):
    (cx, cy), (bx, by) = dimension_numbers
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    ix, iy = [None] * x.ndim, [None] * y.ndim
    for i, j in [*zip(bx, by, strict=True), *zip(cx, cy, strict=True)]:
        ix[i] = iy[j] = next(letters)
    ix = [i or next(letters) for i in ix]
    iy = [i or next(letters) for i in iy]
    out = [ix[i] for i in bx]
    out += [c for n, c in enumerate(ix) if n not in (*bx, *cx)]
    out += [c for n, c in enumerate(iy) if n not in (*by, *cy)]
    wide = np.result_type(preferred_element_type or x.dtype, np.float32)
    if np.issubdtype(x.dtype, np.integer) or x.dtype == bool:
        wide = np.int64
    return np.einsum(f"{''.join(ix)},{''.join(iy)}->{''.join(out)}", x.astype(wide), y.astype(wide))


def _broadcast_in_dim(x, *_, shape, broadcast_dimensions, **__):
    lined = [1] * len(shape)
    for i, d in enumerate(broadcast_dimensions):
        lined[d] = x.shape[i]
    return np.broadcast_to(np.reshape(x, lined), shape)


def _slice(x, *, start_indices, limit_indices, strides):
    strides = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _pad(x, value, *, padding_config):
    shape = [lo + hi + n + max(n - 1, 0) * inner for n, (lo, hi, inner) in zip(x.shape, padding_config, strict=True)]  # fmt: skip
    # Written into an array wide enough for what negative padding cuts off.
    wide = [
        n + max(-lo, 0) + max(-hi, 0) for n, (lo, hi, _) in zip(shape, padding_config, strict=True)
    ]
    out = np.full(wide, value, x.dtype)
    inside = tuple(
        slice(max(lo, 0), max(lo, 0) + max((n - 1) * (inner + 1) + 1, 0), inner + 1)
        for n, (lo, hi, inner) in zip(x.shape, padding_config, strict=True)
    )
    out[inside] = x
    return out[tuple(slice(max(-lo, 0), max(-lo, 0) + n) for n, (lo, _, _) in zip(shape, padding_config, strict=True))]  # fmt: skip


def _starts(x, sizes, starts):
    return [min(max(int(s), 0), n - m) for n, m, s in zip(x.shape, sizes, starts, strict=True)]


def _dynamic_slice(x, *starts, slice_sizes):
    starts = _starts(x, slice_sizes, starts)
    return x[tuple(slice(s, s + m) for s, m in zip(starts, slice_sizes, strict=True))]


def _dynamic_update_slice(x, update, *starts):
    starts = _starts(x, update.shape, starts)
    out = np.array(x)
    out[tuple(slice(s, s + m) for s, m in zip(starts, update.shape, strict=True))] = update
    return out


def _cumulative(fun):
    def rule(x, *, axis, reverse):
        x = np.flip(x, axis) if reverse else x
        y = fun.accumulate(x, axis)
        return np.flip(y, axis) if reverse else y

    return rule


def _iota(*, dtype, shape, dimension, **_):
    lined = [1] * len(shape)
    lined[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension]).reshape(lined), shape)


def _wide(fun):
    """A sum in more bits than it is given, as XLA sums."""

    def rule(x, *, axes, **_):
        if x.dtype == jnp.bfloat16 or x.dtype == np.float16:
            x = x.astype(np.float32)
        return fun(x, axis=tuple(axes))

    return rule


def _windows(x, fill, sizes, strides, padding, base, dilation):
    """The windows of ``x``, and the number of each of their elements in padded ``x``."""
    config = [(lo, hi, b - 1) for (lo, hi), b in zip(padding, base, strict=True)]
    padded = _pad(x, fill, padding_config=config)
    numbers = np.arange(padded.size).reshape(padded.shape)
    spans = [(m - 1) * d + 1 for m, d in zip(sizes, dilation, strict=True)]
    steps = (slice(None, None, s) for s in strides)
    dilated = (slice(None, None, d) for d in dilation)
    numbers = np.lib.stride_tricks.sliding_window_view(numbers, spans)[(*steps, *dilated)]
    return padded, numbers


def _reduce_window(fun, fill):
    def rule(x, *, window_dimensions, window_strides, padding, base_dilation, window_dilation):
        low = np.asarray(fill, x.dtype)
        padded, numbers = _windows(
            x, low, window_dimensions, window_strides, padding, base_dilation, window_dilation
        )
        return fun(padded.reshape(-1)[numbers], axis=tuple(range(x.ndim, 2 * x.ndim)))

    return rule


def _select_and_scatter_add(source, x, *, select_prim, window_dimensions, window_strides, padding):
    """The first of each window's largest (or smallest) elements takes the window's cotangent."""
    least = select_prim.name == "le"
    fill = np.asarray(np.inf if least else -np.inf, x.dtype)
    ones = (1,) * x.ndim
    padded, numbers = _windows(x, fill, window_dimensions, window_strides, padding, ones, ones)
    numbers = numbers.reshape(source.size, -1)
    rows = padded.reshape(-1)[numbers]
    first = (np.argmin if least else np.argmax)(rows, 1)
    out = np.zeros(padded.size, x.dtype)
    np.add.at(out, numbers[np.arange(source.size), first], source.reshape(-1))
    inside = tuple(slice(lo, lo + n) for n, (lo, _) in zip(x.shape, padding, strict=True))
    return out.reshape(padded.shape)[inside]


STRUCTURAL = {
    "reduce_window_max": _reduce_window(np.max, -np.inf),
    "reduce_window_min": _reduce_window(np.min, np.inf),
    "reduce_window_sum": _reduce_window(np.sum, 0),
    "select_and_scatter_add": _select_and_scatter_add,
    "dot_general": _dot_general, "broadcast_in_dim": _broadcast_in_dim, "slice": _slice,
    "pad": _pad, "dynamic_slice": _dynamic_slice, "dynamic_update_slice": _dynamic_update_slice,
    "reshape": lambda x, *, new_sizes, **_: np.reshape(x, new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "expand_dims": lambda x, *, dimensions: np.expand_dims(x, dimensions),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "reduce_sum": _wide(np.sum), "reduce_max": _wide(np.max), "reduce_min": _wide(np.min),
    "reduce_prod": _wide(np.prod), "reduce_and": _wide(np.all), "reduce_or": _wide(np.any),
    "argmax": lambda x, *, axes, index_dtype: np.argmax(x, axes[0]),
    "argmin": lambda x, *, axes, index_dtype: np.argmin(x, axes[0]),
    "cumsum": _cumulative(np.add), "cumprod": _cumulative(np.multiply),
    "cummax": _cumulative(np.maximum), "cummin": _cumulative(np.minimum), "iota": _iota,
}  # fmt: skip
CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat", "remat3",
    "custom_jvp_call", "custom_vjp_call",
}  # fmt: skip


def _closed(jaxpr, consts=()):
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, consts)


def _scan(args, p):
    jaxpr, consts = _closed(p["jaxpr"])
    if "ft_in" in p:  # jax 0.11
        fixed, carry, _ = (len(list(part)) for part in p["ft_in"].unpack())
    else:
        fixed, carry = p["num_consts"], p["num_carry"]
    xs = fixed + carry
    state, rows = list(args[fixed:xs]), []
    order = range(p["length"])
    for i in reversed(order) if p["reverse"] else order:
        out = evaluate(jaxpr, consts, [*args[:fixed], *state, *(x[i] for x in args[xs:])])
        state = out[:carry]
        rows.append(out[carry:])
    rows = rows[::-1] if p["reverse"] else rows
    if not rows:
        shapes = [v.aval for v in jaxpr.outvars[carry:]]
        return [*state, *(np.zeros((0, *a.shape), a.dtype) for a in shapes)]
    stack = lambda ys: jnp.stack(ys) if isinstance(ys[0], jax.Array) else np.stack(ys)  # noqa: E731
    return [*state, *(stack(ys) for ys in zip(*rows, strict=True))]


def _while(args, p):
    (cond, ccs), (body, bcs) = _closed(p["cond_jaxpr"]), _closed(p["body_jaxpr"])
    a, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    state = list(args[b:])
    while evaluate(cond, ccs, [*args[:a], *state])[0]:
        state = evaluate(body, bcs, [*args[a:b], *state])
    return state


def _gathered(x, p):
    return x if p["tiled"] else np.expand_dims(x, p["all_gather_dimension"])


def _scattered(x, p):
    return x if p["tiled"] else np.squeeze(x, p["scatter_dimension"])


# Of one device alone: inside `shard_map` over a mesh of one, where JAX would compile each
# operation.
ALONE = {
    "all_gather": _gathered, "all_gather_invariant": _gathered, "reduce_scatter": _scattered,
    "axis_index": lambda p: np.int32(0), "ppermute": lambda x, p: x,
}  # fmt: skip
ALIKE = {"pvary", "pcast"}
REDUCED = {
    "psum": np.sum,
    "psum2": np.sum,
    "psum_invariant": np.sum,
    "pmax": np.max,
    "pmin": np.min,
}


def _equation(eqn, args):
    name, p = eqn.primitive.name, eqn.params
    if name == "shard_map" and p["mesh"].size == 1:
        return evaluate(*_closed(p["jaxpr"]), args)
    if name in ALIKE:
        return args
    if name in REDUCED:  # an axis that `vmap` named is a number by now
        axes = tuple(axis for axis in p["axes"] if isinstance(axis, int))
        return [REDUCED[name](x, axes) for x in args]
    if name in ALONE:
        return [ALONE[name](*args, p)]
    if name == "scan":
        return _scan(args, p)
    if name == "while":
        return _while(args, p)
    if name == "cond":
        branch = p["branches"][min(max(int(args[0]), 0), len(p["branches"]) - 1)]
        return evaluate(*_closed(branch), args[1:])
    if name == "optimization_barrier":
        return args
    if name == "split":
        ends = np.cumsum(p["sizes"])[:-1]
        return np.split(args[0], ends, p["axis"])
    if name in CALLS:
        return evaluate(*_closed(next(p[k] for k in ("jaxpr", "call_jaxpr") if k in p)), args)
    rule = ELEMENTWISE.get(name) or STRUCTURAL.get(name)
    if rule is not None and not any(isinstance(a, jax.Array) for a in args):
        return [rule(*args, **p)]
    bound = eqn.primitive.get_bind_params(p)  # a pair before jax 0.10
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    out = eqn.primitive.bind(*subfuns, *args, **params)
    out = out if eqn.primitive.multiple_results else [out]
    return [_array(x) for x in out]


def _array(x):
    return (
        x if jnp.issubdtype(getattr(x, "dtype", np.bool_), jax.dtypes.extended) else np.asarray(x)
    )


def evaluate(jaxpr, consts, args):
    """What ``jaxpr`` returns, a list."""
    env = dict(zip(jaxpr.constvars, map(_array, consts), strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))
    read = lambda v: np.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else env[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        out = _equation(eqn, [read(v) for v in eqn.invars])
        for v, x in zip(eqn.outvars, out, strict=True):
            if not isinstance(x, jax.Array):
                x = np.real(x) if np.isrealobj(np.empty(0, v.aval.dtype)) else x
                x = np.asarray(x, v.aval.dtype)
            env[v] = x
    return [read(v) for v in jaxpr.outvars]


def on_arrays(fun, *args, **kwargs):
    """``fun`` of its array leaves alone, and those: Python numbers stay what they are."""
    flat, tree = jax.tree.flatten((args, kwargs))
    places = [n for n, x in enumerate(flat) if hasattr(x, "dtype")]

    def of_arrays(*arrays):
        leaves = list(flat)
        for n, x in zip(places, arrays, strict=True):
            leaves[n] = x
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return fun(*args, **kwargs)

    return of_arrays, [flat[n] for n in places]


def run(fun, *args, **kwargs):
    """``fun(*args, **kwargs)``, traced and evaluated with NumPy; array leaves become NumPy's."""
    fun, arrays = on_arrays(fun, *args, **kwargs)
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*arrays)
    with np.errstate(all="ignore"):
        out = evaluate(closed.jaxpr, closed.consts, [_array(x) for x in arrays])
    return jax.tree.unflatten(jax.tree.structure(shapes), out)
