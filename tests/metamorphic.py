# ruff: noqa: E501 (tables, one entry a line)
"""Random differentiable programs of the widest variety, for `test_metamorphic`.

`program(seed)` is a `Program`: a list of statements over numbered values, so that it can be listed,
permuted, given dead code and made smaller (`smallest`). A *map* is a function of one array that
keeps its shape; maps nest in loops, branches, regions and shards. An *operation* adds statements of
any kind to a `Builder`.
"""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from metamorphic_rules import RULES

import jaxmem

LARGEST = 96  # elements of a value: tracing dominates


@dataclasses.dataclass(frozen=True)
class Statement:
    text: str
    fun: Callable
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["first", "rest"], meta_fields=["name"]
)
@dataclasses.dataclass
class Head:
    first: Any
    rest: Any
    name: str = "head"


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A loss with auxiliary results: ``fun(*args, **kwargs) -> (loss, aux)``."""

    seed: int
    dtype: Any
    style: int  # how the arguments are passed
    values: dict[int, Any]  # arguments by number
    params: tuple[int, ...]
    data: tuple[int, ...]
    statements: tuple[Statement, ...]
    terms: tuple[tuple[int, str], ...]  # (value, how it goes into the loss)
    aux: tuple[tuple[int, str], ...]
    scale: Any = 1.0

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    def trees(self):
        half = len(self.params) // 2
        rest = self.params[half:]
        params = {
            "layers": list(self.params[:half]),
            "head": Head(rest[0] if rest else None, rest[1:]),
        }
        return params, {"arrays": self.data, "none": None}

    @property
    def argnums(self):
        return {0: 0, 1: 1, 2: 0, 3: (0, 1)}[self.style]

    def parameters(self, factor=1.0):
        """The parameters, each times a factor of its own near to ``factor``."""
        rng = np.random.default_rng(self.seed)

        def varied(i):
            value = self.values[i]
            spread = (factor - 1) * (1 + 0.1 * rng.normal(size=value.shape))
            return jnp.asarray(np.asarray(value, np.float64) * (1 + spread), value.dtype)

        return jax.tree.map(varied if factor != 1.0 else self.values.get, self.trees()[0])

    def arguments(self, params=None):
        params = self.parameters() if params is None else params
        data = jax.tree.map(self.values.get, self.trees()[1])
        if self.style == 0:
            return (params, data), {}
        if self.style == 1:
            return (data, params), {}
        if self.style == 2:
            return (params,), {"data": data, "scale": self.scale}
        first, *others = data["arrays"]
        return (params, first, data | {"arrays": others}), {}

    def _bind(self, args, kwargs):
        if self.style == 0:
            return args
        if self.style == 1:
            return args[1], args[0]
        if self.style == 2:
            return args[0], kwargs["data"]
        return args[0], {"arrays": (args[1], *args[2]["arrays"])}

    def __call__(self, *args, **kwargs):
        params, data = self._bind(args, kwargs)
        numbers = jax.tree.leaves(self.trees()[0])
        env = dict(zip(numbers, jax.tree.leaves(params), strict=True))
        env |= dict(zip(self.data, data["arrays"], strict=True))
        for s in self.statements:
            out = s.fun(*(env[i] for i in s.inputs))
            env |= dict(zip(s.outputs, out if isinstance(out, tuple) else (out,), strict=True))
        loss = sum(TERMS[how](env[i]) for i, how in self.terms) * kwargs.get("scale", 1.0)
        return loss, {f"{how}{n}": AUX[how](env[i]) for n, (i, how) in enumerate(self.aux)} | {
            "none": None,
            "two": 2,
        }

    def listing(self):
        lines = [f"# seed {self.seed}, {jnp.dtype(self.dtype).name}, style {self.style}"]
        for kind, numbers in (("param", self.params), ("data", self.data)):
            for i in numbers:
                value = self.values[i]
                lines.append(f"v{i} = {kind} {getattr(value, 'dtype', type(value).__name__)}"
                             f"{list(np.shape(value))}")  # fmt: skip
        for s in self.statements:
            names = [", ".join(f"v{i}" for i in group) for group in (s.outputs, s.inputs)]
            lines.append(f"{names[0]} = {s.text} ({names[1]})")
        lines.append("loss = " + " + ".join(f"{how}(v{i})" for i, how in self.terms))
        lines.append("aux = " + ", ".join(f"{how}(v{i})" for i, how in self.aux))
        return "\n".join(lines)

    def pruned(self):
        """Without the statements that nothing reads."""
        needed = {i for i, _ in self.terms + self.aux}
        kept = []
        for s in reversed(self.statements):
            if needed & set(s.outputs):
                kept.append(s)
                needed |= set(s.inputs)
        keep = lambda numbers: tuple(i for i in numbers if i in needed)  # noqa: E731
        first = self.data[:1]  # style 3 passes it on its own
        return self.replace(
            statements=tuple(reversed(kept)),
            params=keep(self.params) or self.params[:1],
            data=first + keep(self.data[1:]),
        )

    def permuted(self, seed):
        """The same statements in another order that respects what each reads."""
        rng, ready = random.Random(seed), set(self.params + self.data)
        waiting, order = list(self.statements), []
        while waiting:
            able = [s for s in waiting if set(s.inputs) <= ready]
            chosen = rng.choice(able)
            waiting.remove(chosen)
            order.append(chosen)
            ready |= set(chosen.outputs)
        return self.replace(statements=tuple(order))

    def with_dead_code(self, seed):
        """With statements between the others whose results nothing reads."""
        rng = random.Random(seed)
        statements, free = [], 10_000
        for s in self.statements:
            statements.append(s)
            if rng.random() < 0.4:
                dead = rng.choice(
                    [s, Statement("dead", _DEAD[rng.randrange(3)], s.outputs[:1], (0,))]
                )
                outputs = tuple(range(free, free + len(dead.outputs)))
                free += len(outputs)
                statements.append(dataclasses.replace(dead, outputs=outputs))
        return self.replace(statements=tuple(statements))

    def with_identities(self, seed):
        """Some statements wrapped in what computes the same: jit, a closure, a call of a call."""
        rng, statements = random.Random(seed), []
        for s in self.statements:
            wrap = rng.choice([None, None, jax.jit, _through_tree])
            statements.append(dataclasses.replace(s, fun=wrap(s.fun)) if wrap else s)
        return self.replace(statements=tuple(statements))

    def split_rules(self):
        """Wrong on purpose: each custom rule runs once for every statement that reads its result."""
        statements, free = [], 20_000
        for s in self.statements:
            rules = [
                t for t in statements if "custom_vjp" in t.text and set(t.outputs) & set(s.inputs)
            ]
            swap = {}
            for t in rules:
                copies = tuple(range(free, free + len(t.outputs)))
                free += len(copies)
                statements.append(dataclasses.replace(t, outputs=copies))
                swap |= dict(zip(t.outputs, copies, strict=True))
            statements.append(
                dataclasses.replace(s, inputs=tuple(swap.get(i, i) for i in s.inputs))
            )
        return self.replace(statements=tuple(statements))


def _through_tree(fun):
    def wrapped(*args):
        return jax.tree.map(lambda y: y, fun(*jax.tree.map(lambda x: x, args)))

    return wrapped


_DEAD = [
    lambda v: jnp.sum(v),
    lambda v: jnp.argmax(v),
    lambda v: jnp.sin(jnp.ravel(v)).reshape(-1, 1) @ jnp.ones((1, 2)),
]


def _real(v):
    return jnp.real(v) + jnp.imag(v) if jnp.iscomplexobj(v) else v


TERMS = {
    "mean_square": lambda v: jnp.mean(jnp.square(_real(v))),
    "mean_sin": lambda v: jnp.mean(jnp.sin(_real(v) * 2)),
    "sum": lambda v: jnp.sum(_real(v)) * 0.1,
    "max": lambda v: jnp.max(_real(v)),
    "ramp": lambda v: jnp.vdot(
        _real(v), jnp.cos(jnp.arange(v.size)).reshape(v.shape).astype(v.real.dtype)
    ),
    "logsumexp": lambda v: jax.nn.logsumexp(_real(v)),
}
AUX = {
    "value": lambda v: v,
    "argmax": lambda v: jnp.argmax(_real(v)),
    "positive": lambda v: _real(v) > 0,
    "accuracy": lambda v: jnp.mean(_real(v) > 0.1),
    "weak": lambda v: jnp.asarray(2.5) * 2,
    "int8": lambda v: (_real(v) * 4).astype(jnp.int8),
    "complex": lambda v: v * 1j if v.dtype != jnp.bfloat16 else v,
    "stopped": lambda v: lax.stop_gradient(v) * 2,
    "shape": lambda v: v.shape[0] if v.ndim else 0,
}


# Maps: rng -> (text, function of an array that keeps shape and dtype). A map needs one dimension.


def _named(*pairs):
    return [lambda rng, pair=pair: pair for pair in pairs]


def _last(x):
    return max(x.shape[-1], 1)


SMOOTH = _named(
    ("tanh", jnp.tanh),
    ("sin", jnp.sin),
    ("cos*x", lambda x: jnp.cos(x) * x),
    ("exp(-x*x)", lambda x: jnp.exp(-x * x)),
    ("sigmoid", jax.nn.sigmoid),
    ("gelu", jax.nn.gelu),
    ("silu", jax.nn.silu),
    ("softplus", jax.nn.softplus),
    ("log1p(x*x)", lambda x: jnp.log1p(x * x)),
    ("sqrt(1+x*x)", lambda x: jnp.sqrt(1 + x**2)),
    ("rsqrt", lambda x: lax.rsqrt(1 + x * x)),
    ("erf", lambda x: lax.erf(x)),
    ("tanh**3", lambda x: jnp.tanh(x) ** 3),
    ("1/(2+cos)", lambda x: 1 / (2 + jnp.cos(x))),
    ("atan2", lambda x: jnp.arctan2(x, 1 + x * x)),
    ("x-0.5", lambda x: x - 0.5),
    ("2*x/3", lambda x: 2 * x / 3),
    ("logaddexp", lambda x: jnp.logaddexp(x, -x)),
    ("power", lambda x: jnp.power(1.5 + jnp.tanh(x), 1.7)),
    ("softmax", lambda x: jax.nn.softmax(x, -1)),
    ("log_softmax", lambda x: jax.nn.log_softmax(x, -1)),
    ("layer_norm", lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 0.1)),
    ("batch_norm", lambda x: (x - x.mean(0, keepdims=True)) * lax.rsqrt(x.var(0, keepdims=True) + 0.1)),
    ("l2", lambda x: x / jnp.sqrt(1 + jnp.sum(x * x, -1, keepdims=True))),
    ("x*sum", lambda x: x * jnp.tanh(jnp.sum(x, 0, keepdims=True))),
    ("reduce_precision", lambda x: lax.reduce_precision(x, 8, 20) if x.dtype == jnp.float64 else x * 1.0),
    ("through float32", lambda x: (jnp.sin(x.astype(jnp.float32)) * 2).astype(x.dtype)),
)  # fmt: skip
KINKED = _named(
    ("relu", jax.nn.relu),
    ("relu6", jax.nn.relu6),
    ("leaky", lambda x: jnp.where(x > 0, x, 0.1 * x)),
    ("abs", jnp.abs),
    ("clip", lambda x: jnp.clip(x, -0.6, 0.6)),
    ("max(x,-x/2)", lambda x: jnp.maximum(x, -x / 2)),
    ("x*sign", lambda x: x * jnp.sign(x)),
    ("stop*x", lambda x: lax.stop_gradient(jnp.cos(x)) * x),
    ("select_n", lambda x: lax.select_n(x > 0.2, x, jnp.sin(x))),
    ("x-max", lambda x: x - jnp.max(x, -1, keepdims=True)),
    ("median mask", lambda x: x * (x > jnp.mean(x)).astype(x.dtype)),
    ("mod", lambda x: jnp.mod(x, 0.7)),
    ("nan_to_num", lambda x: jnp.nan_to_num(jnp.sqrt(jnp.where(x > 0, x + 0.1, 1)))),
)
ALIASED = _named(
    ("reshape.sin", lambda x: jnp.sin(x.reshape(-1)).reshape(x.shape)),
    ("T.T", lambda x: jnp.swapaxes(jnp.swapaxes(x, 0, -1), 0, -1)),
    ("expand.squeeze", lambda x: jnp.squeeze(jnp.expand_dims(x, (0, 2)) * 1.5, (0, 2))),
    ("flip", lambda x: jnp.flip(x, -1)),
    ("roll", lambda x: jnp.roll(x, 1, -1)),
    ("split.concat", lambda x: jnp.concatenate([x[1:] * 2, x[:1]])),
    ("pad.slice", lambda x: jnp.pad(x, [(1, 1)] + [(0, 0)] * (x.ndim - 1), constant_values=0.5)[:-2]),
    ("pad.wrap", lambda x: jnp.pad(x, [(1, 0)] + [(0, 0)] * (x.ndim - 1), mode="wrap")[:-1]),
    ("negative pad", lambda x: lax.pad(x, jnp.zeros((), x.dtype), [(1, -1, 0)] + [(0, 0, 0)] * (x.ndim - 1))),
    ("real(complex)", lambda x: jnp.real(jnp.exp(1j * x.astype(jnp.float64)) * (1 + 1j)).astype(x.dtype)),
    ("imag(complex)", lambda x: jnp.imag(lax.complex(jnp.cos(x.astype(jnp.float64)), x.astype(jnp.float64)) ** 2).astype(x.dtype)),
    ("fft", lambda x: jnp.abs(jnp.fft.fft(x.astype(jnp.float64), axis=-1) + 3).astype(x.dtype) * 0.2),
    ("broadcast.mean", lambda x: jnp.mean(jnp.broadcast_to(x[None], (3, *x.shape)), 0)),
    ("bits", lambda x: x + (lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) % 7).astype(x.dtype) * 0.1),
    ("rev", lambda x: lax.rev(x, (0,))),
    ("tile", lambda x: jnp.tile(x, (2,) + (1,) * (x.ndim - 1))[1 : x.shape[0] + 1]),
    ("stack", lambda x: jnp.stack([x, jnp.sin(x)], 1)[:, 1] + x),
    ("split", lambda x: jnp.concatenate(jnp.split(x, x.shape[0])[::-1])),
)  # fmt: skip


def cumulative(rng):
    name = rng.choice(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
    reverse, axis = rng.random() < 0.5, rng.choice([0, -1])
    before = (lambda x: 1 + 0.3 * jnp.tanh(x)) if name == "cumprod" else (lambda x: x)
    return (
        f"{name}[{axis}, {reverse}]",
        lambda x: getattr(lax, name)(before(x), axis=axis % x.ndim, reverse=reverse) * 0.5,
    )


def sorting(rng):
    axis, kind = rng.choice([0, -1]), rng.randrange(4)

    def apply(x):
        if kind == 0:
            return jnp.sort(x, axis)
        if kind == 1:
            return lax.sort((x, jnp.cos(x)), dimension=axis % x.ndim, num_keys=1)[1]
        if kind == 2:
            return jnp.take_along_axis(x * 1.5, jnp.argsort(x, axis), axis)
        top, where = lax.top_k(x, max(_last(x) // 2, 1))
        return x - top[..., :1] * 0.5 + where[..., -1:].astype(x.dtype) * 0.1

    return f"sorting{kind}[{axis}]", apply


def _window(rng, rank=2):
    return tuple(rng.choice([1, 2, 3]) for _ in range(rank))


def pool_same(rng):
    """Pooling with windows of stride 1, over the array seen as (1, rows, columns, 1) or 2-D."""
    kind = rng.choice(["max", "max", "max", "min", "add", "flax"])
    window, dilation = _window(rng), (2, 1) if kind == "add" else (1, 1)
    flat = rng.random() < 0.4
    repeat = rng.random() < 0.3

    def pooled(y):
        if kind == "flax":
            import flax.linen as nn

            return nn.max_pool(y, window, (1, 1), "SAME")
        start, reducer = {"max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min), "add": (0.0, lax.add)}[kind]  # fmt: skip
        return lax.reduce_window(
            y, np.asarray(start, y.dtype), reducer, (1, *window, 1), (1,) * 4, "SAME",
            window_dilation=(1, *dilation, 1),
        )  # fmt: skip

    def apply(x):
        rows = x.size // _last(x)
        y = x.reshape((1, 1, -1, 1) if flat else (1, rows, _last(x), 1))
        y = pooled(pooled(y) * 0.7) if repeat else pooled(y)
        return (y * (0.3 if kind == "add" else 1)).reshape(x.shape)

    return f"pool_{kind}{window}[dilation {dilation}, flat {flat}, twice {repeat}]", apply


def picking(rng):
    """Gathers whose result has the operand's shape, in every mode, with indices that are off."""
    mode = rng.choice(["clip", "fill", "promise_in_bounds", None])
    axis, seed, kind = rng.choice([0, -1]), rng.randrange(1000), rng.randrange(4)

    def apply(x):
        size, draw = x.shape[axis], np.random.default_rng(seed)
        off = 0 if mode == "promise_in_bounds" else 2
        if kind == 0:
            i = jnp.asarray(draw.integers(-off, size + off, x.shape))
            y = jnp.take_along_axis(x, i, axis, mode=mode)
        else:
            i = jnp.asarray(
                draw.integers(-off, size + off, (size,)), draw.choice(["int32", "uint8"])
            )
            if mode == "promise_in_bounds":
                i = i % size
            if kind == 1:
                at = x.at[i] if axis == 0 else x.at[..., i]
                fill = {"fill_value": 0.25} if mode == "fill" else {}
                y = at.get(mode=mode, **fill)
            elif kind == 2:
                y = jnp.take(x, i, axis, mode=rng_mode)
            else:
                y = x[i] if axis == 0 else x[..., i]
        return jnp.where(jnp.isnan(y), 0.5, y) * 0.9

    rng_mode = rng.choice(["wrap", "clip", "fill"])
    return f"picking{kind}[{mode}, {rng_mode}, axis {axis}, {seed}]", apply


def scattering(rng):
    kind = rng.choice(["add", "set", "max", "min", "mul", "segment", "apply", "rows"])
    mode, seed = rng.choice(["drop", "clip", None]), rng.randrange(1000)

    def apply(x):
        size, draw = x.shape[0], np.random.default_rng(seed)
        i = jnp.asarray(draw.integers(-1, size + 1, (size,)))
        y = jnp.sin(x) * 0.5
        if kind == "segment":
            return jax.ops.segment_sum(x, i % size, num_segments=size) * 0.5
        if kind == "mul":
            i = jnp.asarray(draw.permutation(size))
            return x.at[i].mul(y, unique_indices=True, mode=mode)
        if kind == "apply":
            return x.at[jnp.asarray(draw.permutation(size)[: size // 2 + 1])].set(0.5)
        if kind == "rows":
            return jnp.zeros_like(x).at[i].add(y, mode=mode) + x
        return getattr(x.at[i], kind)(y, mode=mode)

    return f"scatter_{kind}[{mode}, {seed}]", apply


def dynamic(rng):
    start, update = rng.randrange(-3, 6), rng.random() < 0.5

    def apply(x):
        size = max(x.shape[0] // 2, 1)
        part = lax.dynamic_slice_in_dim(x, start, size)
        if update:
            return lax.dynamic_update_slice_in_dim(x, jnp.sin(part), jnp.asarray(start + 1), 0)
        return x - jnp.sum(part, 0, keepdims=True) * 0.2

    return f"dynamic_slice[{start}, update {update}]", apply


def regions(rng):
    """Regions of the user's own, with policies and names."""
    text, inner = chain(rng, 2)
    policies = jax.checkpoint_policies
    name, policy = rng.choice([
        ("none", None),
        ("everything", policies.everything_saveable),
        ("dots", policies.dots_with_no_batch_dims_saveable),
        ("names", policies.save_only_these_names("a", "b")),
        ("except", policies.save_anything_except_these_names("a")),
    ])  # fmt: skip

    def body(x):
        return checkpoint_name(inner(checkpoint_name(jnp.sin(x), "a")) * 0.9, "b")

    prevent_cse = rng.random() < 0.5
    return f"checkpoint[{name}]({text})", jax.checkpoint(
        body, policy=policy, prevent_cse=prevent_cse
    )


def names(rng):
    name = rng.choice(["a", "h", "jaxmem:0"])
    return f"name[{name}]", lambda x: checkpoint_name(x, name)


def nested_plan(rng):
    text, inner = chain(rng, 3)
    planner = rng.choice(["dp", "dots", "sqrt"])
    return f"remat[{planner}]({text})", jaxmem.remat(inner, planner=planner)


def calls(rng):
    text, inner = chain(rng, 2)
    kind = rng.randrange(4)
    if kind == 0:
        return f"jit({text})", jax.jit(inner)
    if kind == 1:
        return f"jit_inline({text})", jax.jit(inner, inline=True)
    if kind == 2:
        return f"named({text})", jax.named_scope("block")(inner)
    return f"map({text})", lambda x: lax.map(lambda row: inner(row[None])[0], x)


def tables(rng):
    """Arrays that a jitted function closes over: operands that are no values of the program."""
    kind, jitted = rng.choice(sorted(TABLES)), rng.random() < 0.7

    def apply(x):
        number = np.cos(np.arange(x.size)).reshape(x.shape)
        return TABLES[kind](x, jnp.asarray(number, x.dtype)).astype(x.dtype)

    return f"table[{kind}, jit {jitted}]", jax.jit(apply) if jitted else apply


TABLES = {
    "times": lambda x, t: x * t,
    "over": lambda x, t: x / (t + 2),
    "divides": lambda x, t: (t + 2) / (x**2 + 2),
    "chooses": lambda x, t: jnp.where(t > 0, x, 0),
    "chosen": lambda x, t: jnp.where(x > 0, t, x),
    "sum of two": lambda x, t: x + jnp.sum(jnp.concatenate([t, t])),
    "joined": lambda x, t: jnp.concatenate([t, x])[: x.shape[0]] + x,
    "picked": lambda x, t: x + t[(x.reshape(-1)[0] > 0).astype(int)][None],
    "picked by itself": lambda x, t: x + jnp.sum(t[jnp.argsort(t, 0).reshape(-1)[:2]]),
    "written": lambda x, t: x + t.at[0].set(x[0]),
    "matmul": lambda x, t: x + (x @ jnp.swapaxes(t, -1, -2)) @ t if x.ndim > 1 else x + t,
    "largest": lambda x, t: jnp.maximum(x, t),
    "scan": lambda x, t: lax.scan(lambda c, row: (c * row[None], None), x, t[:3])[0],
}


def vmapped(rng):
    text, inner = chain(rng, 1, smooth=True)
    collective = rng.randrange(4)

    def body(row):
        y = inner(row[None])[0]
        if collective == 0:
            return y - lax.pmean(y, "rows")
        if collective == 1:
            return y * 0.5 + lax.psum(jnp.sin(y), "rows") * 0.1
        if collective == 2:
            return y + lax.all_gather(y, "rows")[0] * 0.5 + lax.axis_index("rows") * 0.1
        return y + lax.pmax(lax.stop_gradient(y), "rows")

    def apply(x):
        return jax.vmap(body, axis_name="rows")(x).astype(x.dtype)

    return f"vmap[{collective}]({text})", apply


def loops(rng):
    """Scans, static fori, and while loops under stop_gradient."""
    text, inner = chain(rng, rng.choice([1, 2]))
    kind, length = rng.randrange(8), rng.choice([1, 2, 3, 5, 7])
    options = {"reverse": rng.random() < 0.4, "unroll": rng.choice([1, 1, 2])}

    def apply(x):
        if kind == 0:  # carry only
            return lax.scan(lambda c, _: (inner(c), None), x, None, length=length, **options)[0]
        if kind == 1:  # over rows

            def step(c, row):
                c = c * 0.5 + inner(jnp.sin(row)[None])[0]
                return c, (c * 2, jnp.sum(c) > 0)

            return lax.scan(step, jnp.zeros_like(x[0]), x, **options)[1][0]
        if kind == 2:  # nested

            def outer(c, s):
                return lax.scan(
                    lambda c, t: (inner(c) * 0.7 + t * s, c[0]), c, jnp.ones(2, x.dtype)
                )

            c, ys = lax.scan(outer, x, jnp.arange(length).astype(x.dtype) * 0.1, **options)
            return c + jnp.sum(ys, (0, 1))[None]
        if kind == 3:
            return lax.fori_loop(
                0, length, lambda i, c: inner(c) * 0.9 + (i * 0.1).astype(x.dtype), x
            )
        if kind == 4:
            n, y = lax.while_loop(
                lambda s: s[0] < length,
                lambda s: (s[0] + 1, jnp.cos(s[1])),
                (0, lax.stop_gradient(x)),
            )
            return x * y + (n * 0.1)
        if kind == 5:  # region in a scan, several carries

            def step(c, k):
                a, n = c
                return (jax.checkpoint(inner)(a) * 0.8, n + k), jnp.mean(a)

            (a, n), means = lax.scan(step, (x, 0), jnp.arange(length), **options)
            return a + (n * 0.01).astype(x.dtype) + means[-1]
        if kind == 6:
            return lax.associative_scan(
                lambda a, b: a * 0.5 + b, inner(x), reverse=options["reverse"]
            )

        # a closure over x, and results nobody reads
        def step(c, k):
            return inner(c + x * 0.3) * 0.6, (c, k)

        return lax.scan(step, jnp.ones_like(x), jnp.arange(length), **options)[0]

    return f"loop{kind}[{length}, {options}]({text})", apply


def branches(rng):
    texts, funs = zip(*(chain(rng, rng.choice([1, 2])) for _ in range(3)), strict=True)
    kind = rng.randrange(3)

    def apply(x):
        where = jnp.sum(x) > 0
        if kind == 0:
            return lax.cond(where, funs[0], funs[1], x)
        if kind == 1:
            i = jnp.argmax(x.reshape(-1)) % 4  # clamped to the last branch
            return lax.switch(i, funs, x)
        return lax.cond(where, lambda a, b: (funs[0](a), b)[0], lambda a, b: a * b, x, jnp.cos(x))

    return f"branch{kind}({'; '.join(texts)})", apply


def sharded(rng):
    """`shard_map` over all devices, with collectives."""
    text, inner = chain(rng, 1, smooth=True)
    kind, check = rng.randrange(5), rng.random() < 0.6

    def body(x):
        y = inner(x)
        if kind == 0:
            return y - lax.pmean(jnp.mean(y), "s")
        if kind == 1:
            return y + lax.psum(jnp.sum(jnp.sin(y), 0, keepdims=True), "s") * 0.1
        if kind == 2:
            return y + jnp.mean(lax.all_gather(y, "s"), 0) * 0.5
        if kind == 3:
            n = lax.axis_size("s")
            return y + lax.ppermute(y, "s", [(i, (i + 1) % n) for i in range(n)]) * 0.5
        c, _ = lax.scan(lambda c, t: (inner(c) * t, None), y, jnp.ones(2, y.dtype))
        return c

    def apply(x):
        devices = jax.devices()
        if x.shape[0] % len(devices):
            return body_alone(x)
        mesh = jax.make_mesh(
            (len(devices),), ("s",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
        )
        return jax.shard_map(body, mesh=mesh, in_specs=P("s"), out_specs=P("s"), check_vma=check)(x)

    def body_alone(x):
        return inner(x)

    return f"shard_map[{kind}, check_vma={check}]({text})", apply


def noise(rng):
    seed, kind = rng.randrange(100), rng.randrange(4)

    def apply(x):
        key = jax.random.fold_in(jax.random.key(seed), 3)
        if kind == 0:
            keep = jax.random.bernoulli(key, 0.7, x.shape)
            return jnp.where(keep, x / 0.7, 0)
        if kind == 1:
            return x + jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype) * 0.1
        if kind == 2:
            return jax.random.permutation(key, x)
        old = jax.random.PRNGKey(seed)
        return x * jax.random.uniform(jax.random.split(old)[0], x.shape, jnp.float32).astype(
            x.dtype
        )

    return f"random{kind}[{seed}]", apply


def rules(rng):
    return rng.choice(RULES)(rng)


FAMILIES = [  # (weight, maps, deep): deep ones nest
    (5, SMOOTH, False), (3, KINKED, False), (3, ALIASED, False), (1, [cumulative], False),
    (1, [sorting], False), (2, [pool_same], False), (1.5, [picking], False),
    (1.2, [scattering], False), (0.6, [dynamic], False), (0.4, [names], False),
    (0.8, [noise], False), (3, [rules], False), (0.5, [regions], True), (0.4, [nested_plan], True),
    (0.5, [tables], False), (0.7, [calls], True), (0.4, [vmapped], True), (1.0, [loops], True), (0.6, [branches], True),
    (0.3, [sharded], True),
]  # fmt: skip


def draw_map(rng, deep=True, smooth=False):
    families = [f for f in FAMILIES if (deep or not f[2])] if not smooth else FAMILIES[:3]
    family = rng.choices(families, [f[0] for f in families])[0][1]
    return rng.choice(family)(rng)


def chain(rng, count, smooth=False):
    """``count`` maps, one after the other. Nested ones are not deep, so that programs end."""
    texts, funs = zip(*(draw_map(rng, False, smooth) for _ in range(count)), strict=True)

    def apply(x):
        for fun in funs:
            x = fun(x).astype(x.dtype)
        return x

    return " . ".join(texts), apply


class Builder:
    """Values and statements of a program while it is made."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.dtype = self.rng.choices(["float64", "float32", "bfloat16"], [8, 1, 1])[0]
        self.types, self.values, self.statements = {}, {}, []
        self.params, self.data, self.used = [], [], {}
        self.free = 0

    def _argument(self, value, where):
        self.free += 1
        self.values[self.free] = value
        self.types[self.free] = jax.eval_shape(lambda x: x, value)
        where.append(self.free)
        return self.free

    def param(self, shape, scale=1.0):
        value = self.numbers.normal(size=shape) * scale
        return self._argument(jnp.asarray(value, self.dtype), self.params)

    def datum(self, value):
        return self._argument(value, self.data)

    def array(self, shape):
        return self.datum(jnp.asarray(self.numbers.normal(size=shape), self.dtype))

    def integers(self, low, high, shape):
        return self.datum(jnp.asarray(self.numbers.integers(low, high, shape), jnp.int32))

    def key(self):
        return self.datum(jax.random.key(self.rng.randrange(1000)))

    def emit(self, text, fun, *inputs):
        """Adds a statement; the number of its first result. Raises what the function raises."""
        out = jax.eval_shape(fun, *(self.types[i] for i in inputs))
        outs = out if isinstance(out, tuple) else (out,)
        numbers = tuple(range(self.free + 1, self.free + 1 + len(outs)))
        self.free += len(outs)
        self.types |= dict(zip(numbers, outs, strict=True))
        self.statements.append(Statement(text, fun, tuple(inputs), numbers))
        for i in inputs:
            self.used[i] = self.used.get(i, 0) + 1
        return numbers[0]

    def shape(self, i):
        return self.types[i].shape

    def usable(self):
        """Values of the program's dtype to go on with, the newest last."""
        made = [i for s in self.statements for i in s.outputs]
        return [
            i for i in self.data + made
            if self.types[i].dtype == self.dtype and 1 <= len(self.shape(i)) <= 4
            and 2 <= np.prod(self.shape(i)) <= LARGEST and 0 not in self.shape(i)
        ]  # fmt: skip

    def pick(self, recent=0.6):
        values = self.usable()
        i = len(values) - 1
        while i > 0 and self.rng.random() > recent:
            i -= 1
        return values[i]

    def matrix(self):
        """A value in two dimensions, by an alias where it has others."""
        i = self.pick()
        shape = self.shape(i)
        if len(shape) == 2:
            return i
        return self.emit("reshape", lambda x: x.reshape(-1, x.shape[-1]), i)


# Operations: Builder -> None


def do_map(b):
    text, fun = draw_map(b.rng)
    b.emit(text, lambda x: fun(x).astype(x.dtype), b.pick())


def do_dense(b, width=None, source=None):
    i = b.matrix() if source is None else source
    width = width or b.rng.choice([2, 4, 4, 4, 8])
    if b.shape(i)[0] * width > LARGEST:
        width = 2
    w = b.param((b.shape(i)[1], width), b.shape(i)[1] ** -0.5)
    kind = b.rng.randrange(4)
    if kind == 1:
        c = b.param((width,))
        return b.emit("x @ w + b", lambda x, w, c: x @ w + c[None], i, w, c)
    if kind == 2:
        return b.emit("einsum", lambda x, w: jnp.einsum("ij,jk->ik", x, w), i, w)
    if kind == 3:
        return b.emit(
            "x @ w [bf16 -> f32]",
            lambda x, w: lax.dot_general(
                x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), (((1,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            ).astype(x.dtype),
            i, w,
        ) if b.dtype != "float64" else b.emit("x @ w [precision]", lambda x, w: jnp.dot(x, w, precision="highest", preferred_element_type=jnp.float64), i, w)  # fmt: skip
    return b.emit("x @ w", lambda x, w: x @ w, i, w)


def do_tower(b):
    """Equal layers: what planners solve once."""
    texts, funs = zip(*(draw_map(b.rng, deep=b.rng.random() < 0.2) for _ in range(2)), strict=True)
    i = b.matrix()
    width, skip = b.shape(i)[1], b.rng.random() < 0.4
    for _ in range(b.rng.choice([2, 3, 4])):
        w = b.param((width, width), width**-0.5)
        j = b.emit("x @ w", lambda x, w: x @ w, i, w)
        for text, fun in zip(texts, funs, strict=True):
            j = b.emit(text, lambda x, fun=fun: fun(x).astype(x.dtype), j)
        i = b.emit("x + y", lambda x, y: x + y, i, j) if skip else j


def do_fan_out(b):
    """A value with a custom rule that several matmuls read, through different functions."""
    text, fun = b.rng.choice(RULES)(b.rng)
    h = b.emit(text, lambda x: fun(x).astype(x.dtype), do_dense(b))
    outs = []
    for _ in range(b.rng.choice([2, 3])):
        between = b.rng.choice([None, *SMOOTH])
        j = h if between is None else b.emit(*between(b.rng), h)
        outs.append(do_dense(b, 4, j))
    for other in outs[1:]:
        b.emit("x - y", lambda x, y: x - y, outs[0], other)


def do_pool(b):
    """Windows with strides, padding and dilation of a reshaped value that others read too."""
    i = b.pick()
    size = int(np.prod(b.shape(i)))
    rows = b.rng.choice([n for n in (1, 2, 4, 8, 16) if size % n == 0])
    pads = b.rng.choice(["SAME", "VALID", ((0, 0), (1, 1), (0, 2), (0, 0))])
    window, strides = _window(b.rng), _window(b.rng)
    window = (min(window[0], rows), min(window[1], size // rows))
    kind = b.rng.choice(["max", "max", "max", "min", "add", "flax", "flax_avg", "patches"])
    back = b.rng.random() < 0.3
    view = b.rng.choice(
        [(1, rows, size // rows, 1), (1, rows, size // rows, 1), (rows, size // rows)]
    )
    base = (
        (1, 2, 1, 1)
        if b.rng.random() < 0.15 and len(view) == 4 and kind == "add"
        else (1,) * len(view)
    )
    dilation = (1, 2, 1, 1) if kind == "add" and b.rng.random() < 0.5 else (1,) * 4

    def apply(x):
        y = x.reshape(view)
        if back:
            y = jnp.swapaxes(y, -2, -3) if len(view) == 4 else y.T
        if kind.startswith("flax") and len(view) == 4:
            import flax.linen as nn

            pool = nn.max_pool if kind == "flax" else nn.avg_pool
            return pool(y, window, strides, "SAME" if pads == "SAME" else "VALID")
        if kind == "patches" and len(view) == 4:
            return lax.conv_general_dilated_patches(
                y, window, strides, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        start, reducer = {"min": (jnp.inf, lax.min), "add": (0.0, lax.add)}.get(kind, (-jnp.inf, lax.max))  # fmt: skip
        if len(view) == 2:
            return lax.reduce_window(
                y, np.asarray(start, y.dtype), reducer, window, strides,
                pads if isinstance(pads, str) else pads[1:3],
            )  # fmt: skip
        return lax.reduce_window(
            y, np.asarray(start, y.dtype), reducer, (1, *window, 1), (1, *strides, 1), pads,
            base_dilation=base, window_dilation=dilation,
        )  # fmt: skip

    def finite(x):
        y = apply(x)
        return jnp.where(jnp.isfinite(y), y, 0) * (0.3 if kind == "add" else 1)

    text = f"pool_{kind}[{view}, window {window}, strides {strides}, {pads}, {base}, {dilation}, T {back}]"
    b.emit(
        text,
        b.rng.choice(
            [finite, apply] if base == dilation == (1,) * 4 and pads != "VALID" else [finite]
        ),
        i,
    )
    if b.rng.random() < 0.4:
        b.emit("sin", jnp.sin, i)


def do_conv(b):
    i = b.matrix()
    rows, width = b.shape(i)
    groups = b.rng.choice([1, 2]) if width % 2 == 0 else 1
    features, dilation = 4, b.rng.choice([1, 2])
    kind = b.rng.randrange(3)
    stride, padding = b.rng.choice([1, 2]), b.rng.choice(["SAME", "VALID", [(1, 2)]])
    length = 1 if rows < 5 else 3
    w = b.param((length, width // groups, features), 0.5)

    def apply(x, w):
        y = x[None]
        if kind == 2:
            return lax.conv_transpose(y, w, (2,), "SAME")[0] if groups == 1 else lax.conv_general_dilated(
                y, w, (1,), [(1, 1)], lhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=groups,
            )[0]  # fmt: skip
        return lax.conv_general_dilated(
            y, w, (stride,), padding, rhs_dilation=(dilation,), feature_group_count=groups,
            dimension_numbers=("NWC", "WIO", "NWC"),
        )[0]  # fmt: skip

    b.emit(f"conv[{kind}, groups {groups}, stride {stride}, dilation {dilation}]", apply, i, w)


def do_binary(b):
    i = b.pick()
    same = [j for j in b.usable() if b.shape(j) == b.shape(i)]
    j = b.rng.choice(same)
    text, fun = b.rng.choice([
        ("x + y", lambda x, y: x + y), ("x - y/2", lambda x, y: x - y / 2),
        ("x * tanh(y)", lambda x, y: x * jnp.tanh(y)), ("max", jnp.maximum),
        ("x / (1+y*y)", lambda x, y: x / (1 + y * y)), ("where", lambda x, y: jnp.where(x > y, x, y * 0.5)),
        ("atan2", lambda x, y: jnp.arctan2(x, 1 + y * y)),
        ("concat", lambda x, y: jnp.concatenate([x, y], -1)),
        ("stack.mean", lambda x, y: jnp.mean(jnp.stack([x, y, x]), 0)),
        ("x @ y.T", lambda x, y: jnp.tanh(x.reshape(-1, x.shape[-1]) @ y.reshape(-1, y.shape[-1]).T)),
        ("attention", lambda x, y: jax.nn.softmax(x.reshape(-1, x.shape[-1]) @ y.reshape(-1, y.shape[-1]).T, -1) @ y.reshape(-1, y.shape[-1])),
        ("both", lambda x, y: (x * y, jnp.sin(x), jnp.argmax(y))),
        ("barrier", lambda x, y: lax.optimization_barrier((x, y))[0]),
    ])  # fmt: skip
    b.emit(text, fun, i, j)


def do_alias(b):
    i = b.pick()
    shape = b.shape(i)
    size = int(np.prod(shape))
    options = [
        ("ravel", lambda x: x.reshape(-1)),
        ("T", lambda x: jnp.transpose(x)),
        ("expand", lambda x: x[None]),
        ("slice", lambda x: x[: max(x.shape[0] // 2, 1)]),
        ("slice last", lambda x: x[..., 1:] if x.shape[-1] > 1 else x),
        ("strided", lambda x: x[::2]),
        ("reversed stride", lambda x: x[::-2]),
        ("row", lambda x: x[0] if x.ndim > 1 else x),
        ("squeeze", lambda x: jnp.squeeze(x[None], 0)),
        ("broadcast", lambda x: jnp.broadcast_to(x[:1], (4, *x.shape[1:]))),
        ("reshape 3d", lambda x: x.reshape(2, -1, 2) if size % 4 == 0 else x.reshape(-1, 1)),
        ("pad", lambda x: jnp.pad(x, [(0, 1)] + [(1, 0)] * (x.ndim - 1))),
        ("double", lambda x: jnp.concatenate([x, x])),
        ("as complex and back", lambda x: jnp.real(lax.complex(x.astype(jnp.float64), x.astype(jnp.float64)) * 1j).astype(x.dtype)),
        ("diag", lambda x: jnp.diagonal(x, axis1=0, axis2=-1) if x.ndim > 1 else x),
        ("moveaxis", lambda x: jnp.moveaxis(x, 0, -1)),
        ("repeat", lambda x: jnp.repeat(x, 2, 0)),
    ]  # fmt: skip
    b.emit(*b.rng.choice(options), i)


def do_pick(b):
    """Gathers and losses with labels, integer arguments among them, out of bounds too."""
    i = b.matrix()
    rows, width = b.shape(i)
    kind, mode = b.rng.randrange(7), b.rng.choice(["clip", "fill", None])
    off = b.rng.choice([0, 0, 2])
    labels = b.integers(-off, width + off, (rows,))
    rowwise = b.integers(-off, rows + off, (b.rng.choice([1, 3, rows]),))

    def finite(fun):
        return lambda *args: jnp.where(jnp.isnan(y := fun(*args)), 0.5, y)

    if kind == 0:

        def fun(x, y):
            return -jnp.take_along_axis(jax.nn.log_softmax(x, -1), y[:, None], -1, mode=mode)[:, 0]

        return b.emit(f"cross_entropy[{mode}]", finite(fun), i, labels)
    if kind == 1:
        return b.emit("x[arange, labels]", lambda x, y: x[jnp.arange(x.shape[0]), y], i, labels)
    if kind == 2:
        return b.emit(
            f"take rows[{mode}]", finite(lambda x, r: jnp.take(x, r, 0, mode=mode)), i, rowwise
        )
    if kind == 3:
        return b.emit(
            "one_hot", lambda x, y: x * jax.nn.one_hot(y, x.shape[1], dtype=x.dtype), i, labels
        )
    if kind == 4:
        return b.emit("segment_sum", lambda x, y: jax.ops.segment_sum(x, y, 3), i, labels)
    if kind == 5:
        table = b.param((5, 4))
        return b.emit(
            f"embedding[{mode}]", finite(lambda t, r: t.at[r].get(mode=mode)), table, rowwise
        )
    return b.emit(
        f"take_along_axis twice[{mode}]",
        finite(lambda x, y: jnp.take_along_axis(x, y[:, None], 1, mode=mode) + jnp.take_along_axis(jnp.sin(x), y[:, None] % 2, 1)),
        i, labels,
    )  # fmt: skip


def do_scatter(b):
    i = b.pick()
    rows = b.shape(i)[0]
    index = b.integers(-2, rows + 2, (2,))
    update = b.param((2, *b.shape(i)[1:]))
    kind, mode = b.rng.choice(["add", "set", "max", "min"]), b.rng.choice(["drop", "clip", None])
    b.emit(
        f"at.{kind}[{mode}]", lambda x, j, u: getattr(x.at[j], kind)(u, mode=mode), i, index, update
    )


def do_dynamic(b):
    i, start = b.pick(), b.datum(jnp.asarray(b.rng.randrange(-4, 9), jnp.int32))
    if b.rng.random() < 0.5:
        return b.emit(
            "dynamic_slice",
            lambda x, s: lax.dynamic_slice_in_dim(x, s, max(x.shape[0] // 2, 1)),
            i,
            start,
        )
    u = b.param((1, *b.shape(i)[1:]))
    return b.emit(
        "dynamic_update", lambda x, s, u: lax.dynamic_update_slice_in_dim(x, u, s, 0), i, start, u
    )


def do_random(b):
    i, key = b.pick(), b.key()
    text, fun = b.rng.choice([
        ("dropout", lambda x, k: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x * 2, 0)),
        ("gumbel", lambda x, k: x + jax.random.gumbel(jax.random.split(k)[1], x.shape, jnp.float32).astype(x.dtype) * 0.1),
        ("keys per row", lambda x, k: x * jax.vmap(lambda k: jax.random.uniform(k, x.shape[1:], jnp.float32))(jax.random.split(k, x.shape[0])).astype(x.dtype)),
    ])  # fmt: skip
    b.emit(text, fun, i, key)


def do_weights_scan(b):
    """A scan over stacked parameters, the common stack of layers."""
    text, inner = chain(b.rng, b.rng.choice([1, 2]))
    i = b.matrix()
    width, length = b.shape(i)[1], b.rng.choice([2, 3, 5, 7])
    ws = b.param((length, width, width), width**-0.5)
    kind, reverse = b.rng.randrange(5), b.rng.random() < 0.3

    def body(x, w):
        y = inner(x @ w)
        return x * 0.5 + y if kind == 1 else y

    def apply(x, ws):
        step = jax.checkpoint(body) if kind == 2 else body
        step = jaxmem.remat(body) if kind == 3 else step
        out, metric = lax.scan(lambda c, w: (step(c, w), jnp.mean(c)), x, ws, reverse=reverse)
        if kind == 4:
            return jnp.moveaxis(lax.scan(lambda c, w: (step(c, w),) * 2, x, ws)[1], 0, 1)[:, -1]
        return out + metric[0]

    b.emit(f"scan over weights{kind}[{length}, {reverse}]({text})", apply, i, ws)


def do_branch(b):
    text, inner = chain(b.rng, 2)
    i = b.matrix()
    w = b.param((b.shape(i)[1],) * 2)
    flag = b.datum(jnp.asarray(b.rng.random() < 0.5))
    b.emit(f"cond(flag, {text} . @ w, sin)",
           lambda f, x, w: lax.cond(f, lambda x, w: inner(x @ w), lambda x, w: jnp.sin(x), x, w),
           flag, i, w)  # fmt: skip


def do_scalar(b):
    """Python numbers and weak types among the arguments."""
    i = b.pick()
    number = b.datum(b.rng.choice([0.5, 2, True]))
    b.emit("x * number", lambda x, n: x * n, i, number)


def do_weak(b):
    i = b.pick()
    b.emit(
        "x + weak",
        lambda x: x + jnp.asarray(0.5) * lax.full((), 2.0) - jnp.where(x > 0, 1.0, 0.0),
        i,
    )


def do_complex(b):
    i = b.pick()
    z = b.emit("complex", lambda x: jnp.exp(1j * x.astype(jnp.float64)), i)
    z = b.emit("z*conj(z)+z", lambda z: z * jnp.conj(z) * 0.5 + z**2, z)
    b.emit("abs(z)", lambda z: (jnp.abs(z + 3) + jnp.imag(z)).astype(b.dtype), z)


def do_linear_algebra(b):
    i = b.matrix()
    rows = min(b.shape(i)[0], 4)

    def square(x):
        x = x[:rows].astype(jnp.float64)
        return x @ x.T * 0.1 + 2 * jnp.eye(rows)

    text, fun = b.rng.choice([
        ("cholesky", lambda x: jnp.linalg.cholesky(square(x))),
        ("solve", lambda x: jnp.linalg.solve(square(x), x[:rows].astype(jnp.float64))),
        ("slogdet", lambda x: jnp.linalg.slogdet(square(x))[1][None] * jnp.ones(2)),
        ("inv", lambda x: jnp.linalg.inv(square(x))),
        ("triangular", lambda x: jax.scipy.linalg.solve_triangular(square(x), x[:rows].astype(jnp.float64), lower=True)),
    ])  # fmt: skip
    b.emit(text, lambda x: fun(x).astype(x.dtype), i)


def do_shared(b):
    """Tied weights: one parameter that several statements read."""
    i = b.matrix()
    width = b.shape(i)[1]
    w = b.param((width, width), width**-0.5)
    j = b.emit("x @ w", lambda x, w: jnp.tanh(x @ w), i, w)
    j = b.emit(*(draw := draw_map(b.rng, False))[:1], lambda x: draw[1](x).astype(x.dtype), j)
    b.emit("x @ w.T", lambda x, w: x @ w.T, j, w)


def do_multi(b):
    """One matmul's result read through different views."""
    h = do_dense(b)
    b.emit("T", jnp.transpose, h)
    b.emit("ravel", jnp.ravel, h)
    do_pool(b)
    b.emit("sin", jnp.sin, h)


def do_module(b):
    """Layers of Flax linen, Flax nnx, Equinox and Haiku, of parameters that are arguments."""
    i = b.matrix()
    width = b.shape(i)[1]
    w, c = b.param((width, 4), width**-0.5), b.param((4,))
    text, fun = b.rng.choice([linen, linen_norm, nnx, equinox, haiku])(width)
    b.emit(text, fun, i, w, c)


def linen(width):
    import flax.linen as nn

    return "linen.Dense", lambda x, w, c: nn.Dense(4, dtype=x.dtype, param_dtype=x.dtype).apply(
        {"params": {"kernel": w, "bias": c}}, x
    )


def linen_norm(width):
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, w, train):
            x = nn.BatchNorm(use_running_average=not train, dtype=x.dtype, param_dtype=x.dtype)(
                x @ w
            )
            return nn.Dropout(0.3, deterministic=not train)(nn.relu(x))

    def apply(x, w, c):
        stats = {"BatchNorm_0": {"mean": jnp.zeros(4, x.dtype), "var": jnp.ones(4, x.dtype)}}
        variables = {
            "params": {"BatchNorm_0": {"scale": 1 + c * 0.1, "bias": c}},
            "batch_stats": stats,
        }
        y, updates = Block().apply(
            variables, x, w, True, rngs={"dropout": jax.random.key(0)}, mutable=["batch_stats"]
        )
        return y.astype(x.dtype), updates["batch_stats"]["BatchNorm_0"]["mean"].astype(x.dtype)

    return "linen.BatchNorm, Dropout", apply


def nnx(width):
    from flax import nnx

    def apply(x, w, c):
        layer = nnx.Linear(width, 4, rngs=nnx.Rngs(0), dtype=x.dtype, param_dtype=x.dtype)
        graph, state = nnx.split(layer)
        state["kernel"][...] = w
        state["bias"][...] = c
        return nnx.merge(graph, state)(x)

    return "nnx.Linear", apply


def equinox(width):
    import equinox as eqx

    def apply(x, w, c):
        layer = eqx.nn.Linear(width, 4, key=jax.random.key(0))
        layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (w.T, c))
        run = eqx.filter_checkpoint(jax.vmap(layer))
        return jax.vmap(eqx.nn.LayerNorm(4))(run(x)).astype(x.dtype)

    return "equinox.Linear, LayerNorm", apply


def haiku(width):
    try:
        import haiku as hk
    except ImportError:  # not among the test's dependencies
        return linen(width)

    def net(x):
        return hk.Linear(4)(x)

    return "haiku.Linear", lambda x, w, c: hk.transform(net).apply(
        {"linear": {"w": w, "b": c}}, None, x
    )


OPERATIONS = [
    (8, do_map), (5, do_dense), (1.5, do_tower), (2.5, do_fan_out), (2, do_pool), (0.7, do_conv),
    (2, do_binary), (2.5, do_alias), (1.2, do_pick), (0.6, do_scatter), (0.5, do_dynamic),
    (0.7, do_random), (0.8, do_weights_scan), (0.5, do_branch), (0.3, do_scalar), (0.2, do_weak),
    (0.3, do_complex), (0.3, do_linear_algebra), (0.6, do_shared), (0.8, do_multi), (0.5, do_module),
]  # fmt: skip


def program(seed):
    """The program of a seed: 5 to 25 statements, a loss of some of its values and auxiliary ones."""
    b = Builder(seed)
    rng = b.rng
    b.array((rng.choice([4, 8, 8, 16]), 4))
    wanted = rng.choice([5, 5, 8, 8, 12, 18])
    do_dense(b)
    tries = 0
    while len(b.statements) < wanted and tries < 60:
        tries += 1
        rng.choices([o for _, o in OPERATIONS], [w for w, _ in OPERATIONS])[0](b)
    if rng.random() < 0.3:
        b.param((3,))  # unused
    if rng.random() < 0.3:
        b.datum(jnp.asarray([True, False]))
    made = [i for s in b.statements for i in s.outputs]
    floats = [
        i for i in made
        if jnp.issubdtype(b.types[i].dtype, jnp.inexact) and 0 not in b.shape(i)
    ]  # fmt: skip
    unread = [i for i in floats if not b.used.get(i)]
    chosen = [floats[-1]]
    chosen += [i for i in unread if rng.random() < 0.7]  # the others are dead
    chosen += [rng.choice(floats) for _ in range(rng.randrange(2))]
    terms = tuple((i, rng.choice(sorted(TERMS))) for i in dict.fromkeys(chosen))
    aux = tuple((rng.choice(floats), rng.choice(sorted(AUX))) for _ in range(rng.randrange(4)))
    made = Program(
        seed, jnp.dtype(b.dtype), rng.randrange(4), b.values, tuple(b.params), tuple(b.data),
        tuple(b.statements), terms, aux, rng.choice([1.0, 2]),
    )  # fmt: skip
    return made.pruned() if rng.random() < 0.6 else made


def smallest(program, fails, tries=200):
    """The program with terms, statements and auxiliary values left out while ``fails(program)``."""

    def candidates(p):
        if p.aux:
            yield p.replace(aux=())
        for i in range(len(p.terms)):
            if len(p.terms) > 1:
                yield p.replace(terms=p.terms[:i] + p.terms[i + 1 :]).pruned()
        yield p.pruned()
        for n, s in enumerate(p.statements):  # bypassed: its reader takes one of its inputs
            for i in s.inputs:
                swap = lambda j, s=s, i=i: i if j == s.outputs[0] else j  # noqa: E731
                later = tuple(
                    dataclasses.replace(t, inputs=tuple(map(swap, t.inputs)))
                    for t in p.statements[n + 1 :]
                )
                yield p.replace(
                    statements=p.statements[:n] + (() if len(s.outputs) == 1 else (s,)) + later,
                    terms=tuple((swap(j), how) for j, how in p.terms),
                    aux=tuple((swap(j), how) for j, how in p.aux),
                ).pruned()
        for n, (i, how) in enumerate(p.terms):
            if how != "mean_square":
                yield p.replace(terms=(*p.terms[:n], (i, "mean_square"), *p.terms[n + 1 :]))

    def size(p):
        return (
            len(p.statements),
            len(p.terms),
            len(p.aux),
            len(p.params) + len(p.data),
            sum(how != "mean_square" for _, how in p.terms),
        )

    shrinking = True
    while shrinking and tries > 0:
        shrinking = False
        for candidate in candidates(program):
            if size(candidate) >= size(program):
                continue
            tries -= 1
            if tries <= 0 or fails(candidate):
                shrinking = tries > 0
                if shrinking:
                    program = candidate
                break
    return program
