# ruff: noqa: E501 (tables, one entry a line)
"""What must hold of a planned program: each check compares it with the plain one.

A check raises `Mismatch`. `Case` says how the planned function is made; `apply` can be replaced by
one that is wrong, to see that the checks find it.
"""

import dataclasses
import functools
import random
import re
import traceback
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import metamorphic_numpy
import numpy as np
from jax.sharding import PartitionSpec as P
from metamorphic import Program, program, smallest

import jaxmem

PLANNERS = ("dp", "dots", "sqrt")
# How far a gradient may be off, relative to its largest element. float64 is tight; the others
# differ by the order in which cotangents are summed.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Mismatch(AssertionError):
    pass


class Unusable(Exception):
    """The plain program cannot be run in this way, or is not finite, or is not stable."""


@dataclasses.dataclass(frozen=True)
class Case:
    program: Program
    planner: str
    tightness: float | None  # 0: the lowest budget; 1: the plain function's bytes; None: no budget
    way: str  # "plan", "json" or "remat"
    apply: Any = None

    def planned(self, program=None, **changes):
        p = program or self.program
        if self.apply is not None:
            return self.apply(p)
        return plan(p, self.planner, self.tightness, self.way, **changes)

    def __str__(self):
        return f"planner={self.planner!r}, budget {self.tightness}, by {self.way}"


def make_plan(p, planner, tightness, fun=None):
    args, kwargs = p.arguments()
    fun = fun or p
    options = dict(planner=planner, argnums=p.argnums, has_aux=True, **kwargs)
    made = jaxmem.plan(fun, *args, **options)
    if tightness is None:
        return made
    low, high = made.projected_bytes, made.plain_bytes
    budget = int(low + tightness * (max(high, low) - low)) + (high if tightness > 1 else 0)
    return jaxmem.plan(fun, *args, budget=in_bytes(budget), **options)


def plan(p, planner, tightness, way, fun=None):
    fun = fun or p
    if way == "remat":
        budget = None if tightness is None else make_plan(p, planner, tightness, fun).budget
        return jaxmem.remat(fun, planner=planner, budget=in_bytes(budget))
    made = make_plan(p, planner, tightness, fun)
    if way == "json":
        made = jaxmem.Plan.from_json(made.to_json())
    return made.apply(fun)


def differentiated(fun, p):
    return jax.value_and_grad(fun, argnums=p.argnums, has_aux=True)


def by_numpy(fun, p, params=None):
    args, kwargs = p.arguments(params)
    return metamorphic_numpy.run(differentiated(fun, p), *args, **kwargs)


def _array(x):
    if jnp.issubdtype(getattr(x, "dtype", np.bool_), jax.dtypes.extended):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def distance(expected, found):
    """The largest difference of two trees relative to each leaf's largest element, and its place."""
    if jax.tree.structure(expected) != jax.tree.structure(found):
        raise Mismatch(f"trees differ: {jax.tree.structure(expected)}\n{jax.tree.structure(found)}")
    worst, place = 0.0, ""
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    largest = max((np.max(np.abs(_array(x)), initial=0) for _, x in leaves), default=0)
    for (path, x), y in zip(leaves, jax.tree.leaves(found), strict=True):
        x, y = _array(x), _array(y)
        if x.shape != y.shape:
            raise Mismatch(f"shapes differ at {jax.tree_util.keystr(path)}: {x.shape}, {y.shape}")
        if x.size and not np.array_equal(x, y, equal_nan=True):
            scale = np.max(np.abs(x)) + 1e-3 * largest + 1e-12
            off = np.max(np.abs(x - y)) / scale
            off = off if np.isfinite(off) else np.inf
            if off > worst:
                worst, place = float(off), jax.tree_util.keystr(path)
    return worst, place


def finite(tree):
    return all(np.isfinite(_array(x)).all() for x in jax.tree.leaves(tree))


def tolerance(p):
    """Where a float64 cotangent passes through float32, a sum of two is rounded before or after."""
    shorter = any("float32" in statement.text for statement in p.statements)
    rounding = 4 * float(jnp.finfo("float32").eps) if shorter else 0
    return max(TOLERANCE[jnp.dtype(p.dtype).name], rounding)


def same(p, expected, found, what, loose=1.0):
    """Both equal, or the plain program itself jumps at a change of the last bits."""
    off, place = distance(expected, found)
    if off <= tolerance(p) * loose:
        return
    epsilon = float(jnp.finfo(p.dtype).eps)
    plain = by_numpy(p, p)
    shaken = max(
        distance(plain, by_numpy(p, p, p.parameters(1 + f * epsilon)))[0] for f in (1, -2, 8)
    )
    if shaken * 100 > off:
        raise Unusable("unstable")
    raise Mismatch(f"{what}: relative difference {off:.3g} at {place} (allowed {tolerance(p):g})")


def plain_result(p, fun=None):
    try:
        result = by_numpy(fun, p) if fun else _plain_gradients(p)
    except Exception as error:
        raise Unusable(f"plain: {type(error).__name__}: {str(error)[:200]}") from error
    if not finite(result):
        raise Unusable("not finite")
    return result


def _or_unusable(fun):
    try:
        return fun()
    except Exception as error:
        raise Unusable(f"plain: {type(error).__name__}: {str(error)[:200]}") from error


# Checks: (case, rng) -> None


def gradients(case, rng):
    """Value, auxiliary results and gradients."""
    p = case.program
    same(p, plain_result(p), by_numpy(case.planned(), p), "gradients")


def types(case, rng):
    """Shapes, dtypes, weak types and shardings of results, with and without differentiation."""
    p = case.program
    args, kwargs = p.arguments()
    planned = case.planned()
    for change in (lambda f: f, lambda f: differentiated(f, p)):
        shapes = []
        for fun in (p, planned):
            of_arrays, arrays = metamorphic_numpy.on_arrays(change(fun), *args, **kwargs)
            shapes.append(jax.tree.map(_described, jax.eval_shape(of_arrays, *arrays)))
        if shapes[0] != shapes[1]:
            raise Mismatch(f"types: {shapes[0]}\nplanned: {shapes[1]}")


def _described(x):
    return str((x.shape, x.dtype, x.weak_type, getattr(x, "sharding", None)))


def forward(case, rng):
    """The value alone, without differentiation, and where nothing is differentiated."""
    p = case.program
    args, kwargs = p.arguments()
    plain_result(p)
    same(p, metamorphic_numpy.run(p, *args, **kwargs),
         metamorphic_numpy.run(case.planned(), *args, **kwargs), "value")  # fmt: skip


def jitted(case, rng):
    """Compiled by XLA, whole; the plain one too, for XLA rounds as it likes."""
    p = case.program
    expected = plain_result(p)
    args, kwargs = p.arguments()
    options = QUICK if rng.random() < 0.5 else None

    def compiled(fun):
        fun, arrays = metamorphic_numpy.on_arrays(differentiated(fun, p), *args, **kwargs)
        return jax.jit(fun, compiler_options=options)(*arrays)

    found = compiled(case.planned())
    if distance(expected, found)[0] > tolerance(p):
        expected = compiled(p)
    same(p, expected, found, "under jit", 10)


def kept_bytes(case, rng):
    """No more residuals than the plain function's."""
    p = case.program
    args, kwargs = p.arguments()
    plain_result(p)

    def kept(fun):
        loss, arrays = metamorphic_numpy.on_arrays(lambda *a, **k: fun(*a, **k)[0], *args, **kwargs)
        return jaxmem.residuals(loss, *arrays).total

    plain, planned = kept(p), kept(case.planned())
    # A plan may keep more, of random bits say, while its peak is lower.
    allowed = max(plain * 1.25 + 256, make_plan(p, case.planner, case.tightness).projected_bytes)
    if planned > allowed:
        raise Mismatch(f"residuals: {planned} bytes, of the plain function {plain}")


def _over_params(fun, p):
    """The gradient as a function of the parameters alone, floating results only."""

    def apply(params):
        args, kwargs = p.arguments(params)
        (loss, _aux), grads = differentiated(fun, p)(*args, **kwargs)
        return loss, grads

    return apply


def _stacked(p):
    variants = [p.parameters(), p.parameters(1.05)]
    return variants, jax.tree.map(lambda *xs: jnp.stack(xs), *variants)


def _each(p, variants):
    return [metamorphic_numpy.run(_over_params(p, p), v) for v in variants]


def vmapped(case, rng):
    """`vmap` equals the loop."""
    p = case.program
    plain_result(p)
    _, stacked = _stacked(p)
    expected = _or_unusable(lambda: metamorphic_numpy.run(jax.vmap(_over_params(p, p)), stacked))
    found = metamorphic_numpy.run(jax.vmap(_over_params(case.planned(), p)), stacked)
    same(p, expected, found, "under vmap")


def scanned(case, rng):
    """Differentiated in the body of a scan."""
    p = case.program
    plain_result(p)
    variants, stacked = _stacked(p)
    planned = case.planned()

    def body(count, params):
        return count + 1, _over_params(planned, p)(params)

    _, found = metamorphic_numpy.run(lambda s: jax.lax.scan(body, 0, s), stacked)
    for n, expected in enumerate(_each(p, variants)):
        same(p, expected, jax.tree.map(lambda x, n=n: x[n], found), f"step {n} of a scan")


def through_scan(case, rng):
    """A scan of planned losses, differentiated: the gradient of a sum."""
    p = case.program
    plain_result(p)
    variants, stacked = _stacked(p)
    if p.argnums == (0, 1):
        raise Unusable("style")
    planned = case.planned()

    def total(stacked):
        def body(sum_, params):
            args, kwargs = p.arguments(params)
            return sum_ + planned(*args, **kwargs)[0], None

        zero = jnp.zeros(
            (), jax.eval_shape(lambda: p(*p.arguments()[0], **p.arguments()[1])[0]).dtype
        )
        return jax.lax.scan(body, zero, stacked)[0]

    found = metamorphic_numpy.run(jax.grad(total), stacked)
    for n, (_, expected) in enumerate(_each(p, variants)):
        same(p, expected, jax.tree.map(lambda x, n=n: x[n], found), f"through a scan, {n}")


def linearized(case, rng):
    """`jvp`, `linearize` and `vjp`."""
    p = case.program
    plain_result(p)
    params = p.parameters()
    tangent = jax.tree.map(jnp.cos, params)
    planned = case.planned()

    def of(fun):
        def loss(params):
            args, kwargs = p.arguments(params)
            return fun(*args, **kwargs)[0]

        return loss

    jvp = lambda f: lambda t: jax.jvp(of(f), (params,), (t,))  # noqa: E731
    linearize = lambda f: lambda t: jax.linearize(of(f), params)[1](t)  # noqa: E731
    for what, change in (("jvp", jvp), ("linearize", linearize)):
        expected = _or_unusable(lambda change=change: metamorphic_numpy.run(change(p), tangent))
        same(p, expected, metamorphic_numpy.run(change(planned), tangent), what)


def sharded(case, rng):
    """Inside `shard_map`, each device with parameters of its own, or all with the same."""
    p = case.program
    plain_result(p)
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    check, split = rng.random() < 0.7, rng.random() < 0.6
    # Not by a plan from outside: what is varying is in the program, which is another one inside.
    planned = dataclasses.replace(case, way="remat").planned()
    variants = [p.parameters(1 + 0.01 * i) for i in range(len(devices) if split else 1)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *variants)
    spec = P("d") if split else P()

    def over(fun):
        def body(stacked):
            return jax.tree.map(
                lambda x: x[None], _over_params(fun, p)(jax.tree.map(lambda x: x[0], stacked))
            )

        return jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check),
            compiler_options=QUICK,
        )

    expected = _or_unusable(lambda: over(p)(stacked))
    same(
        p, expected, over(planned)(stacked), f"in shard_map (check_vma={check}, split={split})", 10
    )


def of_jit(case, rng):
    """A plan of f and one of jit(f) say the same."""
    p = case.program
    plain_result(p)
    one, two = (make_plan(p, case.planner, case.tightness, f) for f in (p, jax.jit(p)))
    # Arrays that the function closes over are inputs of one and constants of the other.
    args, kwargs = p.arguments()
    closes_over = bool(jax.make_jaxpr(p)(*args, **kwargs).consts)
    facts = [
        (len(q.regions), q.plain_bytes - q.projected_bytes, q.predicted.recompute_flops)
        for q in (one, two)
    ]
    if facts[0] != facts[1] and case.tightness is None and not closes_over:
        raise Mismatch(f"plans of f and jit(f): {facts[0]}, {facts[1]}")
    same(p, plain_result(p), by_numpy(one.apply(p), p), "plan of f")
    same(p, plain_result(p), by_numpy(two.apply(jax.jit(p)), p), "plan of jit(f)")


def permuted(case, rng):
    p = case.program
    other = p.permuted(rng.randrange(1000))
    same(p, plain_result(p), by_numpy(case.planned(other), other), "permuted statements", 10)


def with_dead_code(case, rng):
    p = case.program
    other = p.with_dead_code(rng.randrange(1000))
    same(p, plain_result(p), by_numpy(case.planned(other), other), "with dead code")


def with_identities(case, rng):
    p = case.program
    other = p.with_identities(rng.randrange(1000))
    same(p, plain_result(p), by_numpy(case.planned(other), other), "with identities")


def of_sums(case, rng):
    """The gradient of a planned sum is the sum of planned gradients."""
    p = case.program
    halves = [p.replace(terms=p.terms[n::2] or p.terms[:1]) for n in range(2)]

    def total(*args, **kwargs):
        results = [case.planned(q)(*args, **kwargs) for q in halves]
        return sum(loss for loss, _ in results), results[0][1]

    plain = lambda *a, **k: (sum(q(*a, **k)[0] for q in halves), p(*a, **k)[1])  # noqa: E731
    # Rules that are not linear see the cotangents of each half alone, in both.
    planned = lambda *a, **k: case_sum(case, plain, p)(*a, **k)  # noqa: E731
    same(p, plain_result(p, plain), by_numpy(planned, p), "planned sum")
    linear = not any("custom" in s.text or "linear_call" in s.text for s in p.statements)
    if linear:
        same(p, plain_result(p, plain), by_numpy(total, p), "sum of planned")


def case_sum(case, fun, p):
    if case.apply is not None:
        return case.apply(fun)
    return plan(p, case.planner, case.tightness, case.way, fun)


def nested(case, rng):
    """A planned function of a planned function, and inside a region of `jax.checkpoint`."""
    p = case.program
    expected = plain_result(p)
    inner = case.planned()
    other = rng.choice(PLANNERS)

    def in_region(*args, **kwargs):
        fun, arrays = metamorphic_numpy.on_arrays(inner, *args, **kwargs)
        return jax.checkpoint(fun)(*arrays)

    remat = jaxmem.remat(lambda *a, **k: inner(*a, **k), planner=other)
    for what, fun in (("remat of planned", remat), ("checkpoint of planned", in_region)):
        same(p, expected, by_numpy(fun, p), what)


def budgets(case, rng):
    """No budget, a generous one, tight ones: the same gradients."""
    p = case.program
    expected = plain_result(p)
    for tightness in (None, 2.0, 0.5, 0.0):
        case_ = dataclasses.replace(case, tightness=tightness)
        same(p, expected, by_numpy(case_.planned(), p), f"budget {tightness}")


def second(case, rng):
    """Second derivatives, but of rules of one's own: one that is not linear in the cotangent gets
    what comes from the values and from their recomputation apart, as under `jax.checkpoint`."""
    p = case.program
    if any(
        rule in s.text
        for s in p.statements
        for rule in ("custom_vjp", "linear_call", "fp8", "clip")
    ):
        raise Unusable("a rule that may not be linear")
    plain_result(p)
    params = p.parameters()

    def of(fun):
        def loss(params):
            args, kwargs = p.arguments(params)
            return fun(*args, **kwargs)[0]

        return lambda params: jax.grad(
            lambda q: sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(jax.grad(loss)(q)))
        )(params)

    expected = _or_unusable(lambda: metamorphic_numpy.run(of(p), params))
    if not finite(expected):
        raise Unusable("not finite")
    same(p, expected, metamorphic_numpy.run(of(case.planned()), params), "second derivative", 100)


CHECKS = [  # (share of programs, check)
    (1.0, gradients), (0.1, types), (0.02, forward), (0.04, jitted), (0.04, kept_bytes),
    (0.02, vmapped), (0.02, scanned), (0.02, through_scan), (0.03, linearized), (0.01, sharded),
    (0.03, of_jit), (0.03, permuted), (0.03, with_dead_code), (0.03, with_identities),
    (0.02, of_sums), (0.03, nested), (0.015, budgets), (0.015, second),
]  # fmt: skip


def case_of(seed, apply=None):
    rng = random.Random(f"case {seed}")
    return Case(
        program(seed), rng.choice(PLANNERS), rng.choice([None, None, 0.0, 0.3, 0.7, 2.0]),
        rng.choice(["plan", "plan", "json", "remat", "remat"]), apply,
    )  # fmt: skip


def attempt(check, case, seed):
    """None, or what is wrong, as text. Raises `Unusable`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(case, random.Random(f"check {seed}"))
    except Unusable:
        raise
    except Mismatch as mismatch:
        return str(mismatch)
    except jaxmem.BudgetError as error:
        return _contradiction(str(error))
    except Exception as error:
        frames = [
            f"  {f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)
            if "/jax/" not in f.filename
        ]  # fmt: skip
        return f"{type(error).__name__}: {str(error)[:1500]}\n" + "\n".join(frames[-6:])
    return None


def in_bytes(budget):
    """A small number without a unit would be taken for a forgotten one."""
    return None if budget is None else f"{int(budget)}B"


def _contradiction(text):
    """A budget that is refused although the message names a lower one that fits."""
    bytes_ = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    asked, unit = re.search(r"the budget of ([\d.]+) (\w+)", text).groups()
    lowest = int(re.search(r"\((\d+) bytes", text)[1])
    if float(asked) * bytes_[unit] > lowest * 1.01:
        return f"budget: {text}"
    raise Unusable(f"budget: {text[:60]}")


def failure(check, case, seed, wrong, shrink=True):
    """What a person needs to reproduce and understand a failure."""
    small = case.program
    if shrink:
        kind = wrong.split(":")[0]

        def fails(p):
            try:
                found = attempt(check, dataclasses.replace(case, program=p), seed)
            except Exception:
                return False
            return found is not None and found.split(":")[0] == kind

        small = smallest(small, fails, 120)
        try:
            wrong = attempt(check, dataclasses.replace(case, program=small), seed) or wrong
        except Unusable:
            small = case.program
    args, kwargs = small.arguments()
    try:
        text = str(jax.make_jaxpr(small)(*args, **kwargs))
    except Exception as error:
        text = f"no jaxpr: {error}"
    return (
        f"JAXMEM_SEED={seed} fails {check.__name__} with {case}\n{wrong}\n\n"
        f"made smaller:\n{small.listing()}\n\njaxpr:\n{text}\n"
    )


def checks_of(seed):
    rng = random.Random(f"checks {seed}")
    return [check for share, check in CHECKS if rng.random() < share]


@functools.lru_cache(maxsize=1)
def _plain_gradients(p):
    return by_numpy(p, p)


def run_seed(seed, apply=None, shrink=True, checks=None):
    """The failures of one program, as texts, and how many checks could be made."""
    case = case_of(seed, apply)
    failures, made, why = [], 0, []
    for check in checks or checks_of(seed):
        try:
            wrong = attempt(check, case, seed)
        except Unusable as unusable:
            why.append(f"{check.__name__}: {unusable}")
            if check is gradients:
                break
            continue
        made += 1
        if wrong is not None:
            failures.append(failure(check, case, seed, wrong, shrink))
            if check is gradients:
                break
    return failures, made, why
