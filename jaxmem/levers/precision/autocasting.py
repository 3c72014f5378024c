"""Mixed precision by operation: which dtype each operation of a traced function works in."""

import contextlib
import difflib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import jaxprs
from jaxmem.frameworks.modules import on_arrays
from jaxmem.ground.checks import shown
from jaxmem.ground.errors import JaxmemError
from jaxmem.levers.precision.policy import Precision, precision as parse_precision

_COMPUTE = "conv_general_dilated dot_general ragged_dot_general"
_FLOAT32 = """
    acos acosh asin atanh cosh cumlogsumexp cumprod cumsum digamma erf_inv exp exp2
    expm1 integer_pow lgamma log log1p pow reduce_prod reduce_sum reduce_window_sum rsqrt
    scatter-add scatter_add sinh sqrt square tan
"""
_FOLLOW = """
    abs add add_any and argmax argmin asinh atan broadcast_in_dim cbrt ceil clamp concatenate copy
    copy_p cos cummax cummin div dynamic_slice dynamic_update_slice eq erf erfc expand_dims floor
    gather ge gt is_finite le logistic lt max min mul name ne neg optimization_barrier pad
    reduce_max reduce_min rem reshape rev round scatter select_and_scatter
    select_and_scatter_add select_n sharding_constraint sign sin slice split squeeze
    stop_gradient sub tanh top_k transpose
    reduce_window_max reduce_window_min convert_element_type
"""

RULES: Mapping[str, str] = types.MappingProxyType(
    dict.fromkeys(_COMPUTE.split(), "compute")
    | dict.fromkeys(_FLOAT32.split(), "float32")
    | dict.fromkeys(_FOLLOW.split(), "follow")
)
"""What `autocast` does with each operation, by the name it has in a jaxpr."""

# What these make of a stored array is that array in another shape.
_LAYOUT = frozenset("expand_dims reshape rev slice squeeze stop_gradient transpose".split())
_SEPARATE = frozenset(["optimization_barrier"])  # each operand for itself


def autocast(
    fun: Callable,
    precision: str | Precision,
    *,
    rules: Mapping[str, str] | None = None,
) -> Callable:
    """``fun`` with each of its operations in the dtype that suits it.

    The function is traced in float32, as it is written, and evaluated operation by operation:

    ============  ==================================================================================
    ``compute``   matmuls and convolutions: operands and result in the ``compute`` dtype, each
                  operand cast where it is used, products summed in float32 inside the operation
    ``float32``   exp, log, pow, squares, roots, sums (of segments too), products and cumulative
                  sums, and with them softmax, norms, variances and losses
    ``follow``    the rest of arithmetic, comparisons, selections and layout: the widest of its
                  operands of full size. Scalars, biases and what else is broadcast (a norm's mean
                  and scale) do not count: with them the operation runs in float32, and its result
                  is rounded once such operations are done with it: float32 ones read it as it is.
    as traced     everything else (kernels, collectives, linear algebra, random bits), and all that
                  is float64, or bfloat16 and float16 by an explicit cast of the function's own
    ============  ==================================================================================

    The lists are those of PyTorch's autocast where JAX has the operation, but for
    ``scatter-add``: a thousand messages to one node of a graph, each 1, add up to 256 in bfloat16.
    Norms have their statistics in float32 and come out as what is normalised, as PyTorch's batch
    norm (not its layer norm, which comes out in float32).

    Arguments are never cast as a whole. A matmul that reads a parameter casts it in the forward
    and again in the backward pass (a `jax.checkpoint` round the one operation), so that no
    low-precision copy of it lives in between. The bodies of scan, while, cond, `jax.checkpoint` and
    of functions with custom derivatives are cast too, a loop's carry keeping the dtype it starts in
    unless the body widens it; those of `jax.shard_map` and of Pallas kernels are not. Works on a
    gradient function as on what it is the gradient of, and under `jit`, `grad`, `vmap` and `scan`.

    Args:
        fun: any JAX function.
        precision: a `Precision` or its text; its ``compute`` dtype is that of the matmuls. Results
            that ``fun`` has in float32 come out in its ``output`` dtype. float16 needs a
            `LossScale` to train, bfloat16 does not.
        rules: changes to `jaxmem.autocast.RULES`: ``{"tanh": "float32", "reduce_sum": "follow"}``.

    Raises:
        JaxmemError: the precision does not parse, or computes in neither bfloat16 nor float16
            nor float32; or a rule is not one of the above, or for an operation that JAX has not.

    >>> import jax, jax.numpy as jnp, jaxmem
    >>> def layer(w, x):
    ...     return jax.nn.softmax(x @ w)
    >>> w, x = jnp.eye(3, dtype="float32"), jnp.ones((2, 3), "float32")
    >>> print(jax.make_jaxpr(jaxmem.autocast(layer, "bf16"))(w, x).eqns[0].outvars[0].aval)
    bfloat16[2,3]
    """
    if not callable(fun):
        raise JaxmemError(f"jaxmem.autocast takes a function; got {shown(fun)}.")
    chosen = parse_precision(precision)
    changes = _check_rules(rules or {})
    if chosen.compute == np.float32:
        return fun
    if chosen.compute.itemsize != 2:
        raise JaxmemError(
            f"jaxmem.autocast computes in bfloat16 or float16; got {chosen}. Cast the arguments "
            "themselves with Precision.cast_to_compute."
        )
    caster = _Caster(chosen.compute, {**RULES, **changes}, recast=True)
    return _wrap(fun, caster, chosen.output)


def autocast_inside_regions(fun: Callable, precision: Precision) -> Callable:
    """`autocast` of a function that is going to be cut into regions, whose recompute makes the
    casts of parameters again anyway."""
    return _wrap(fun, _Caster(precision.compute, RULES, recast=False), precision.output)


def _wrap(fun: Callable, caster: "_Caster", output: np.dtype) -> Callable:
    def evaluate(call, leaves):
        flat = jaxprs.flatten(call, leaves)
        stored = [*([False] * len(flat.consts)), *([True] * len(leaves))]
        results = caster.run(flat, [*flat.consts, *leaves], stored, output.itemsize > 2)
        results = [
            _to(result, output) if traced == np.float32 else result
            for result, traced in zip(results, _output_dtypes(flat), strict=True)
        ]
        return jax.tree.unflatten(flat.out_tree, results)

    @functools.wraps(fun)
    def cast(*args, **kwargs):
        return on_arrays(evaluate, fun, args, kwargs)

    return cast


def _check_rules(rules: Mapping[str, str]) -> Mapping[str, str]:
    names = {*RULES, *jaxprs.primitive_names()}
    for name, rule in rules.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 3)
            raise JaxmemError(
                f"rules= has a rule for {name!r}, and JAX has no operation of that name"
                f"{': ' if near else ''}{' or '.join(map(repr, near))}"
                f"{' perhaps' if near else ''}. Names are those that print(jax.make_jaxpr(fun)"
                "(*args)) shows."
            )
        if rule not in ("compute", "float32", "follow", "traced"):
            raise JaxmemError(
                f"rules= gives {name!r} the rule {rule!r}; the rules are 'compute', 'float32', "
                "'follow' and 'traced'."
            )
        if rule == "compute" and name not in _COMPUTE.split():
            raise JaxmemError(
                f"rules= gives {name!r} the rule 'compute', which is for matmuls and convolutions "
                f"({', '.join(_COMPUTE.split())}). Use 'follow': in low precision where its "
                "operands are."
            )
    return rules


class _Caster:
    """Evaluates flat jaxprs, traced in float32, with some values in the compute dtype."""

    def __init__(self, compute: np.dtype, rules: Mapping[str, str], recast: bool):
        self.compute, self.rules, self.recast = compute, rules, recast
        self.calls = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "checkpoint": self._checkpoint,
            "remat2": self._checkpoint,
            "custom_jvp_call": self._custom_jvp,
            "custom_vjp_call": self._custom_vjp,
            "custom_vjp_call_jaxpr": self._custom_vjp,
        }

    def run(
        self,
        flat: jaxprs.FlatJaxpr,
        inputs: Sequence[Any],
        stored: Sequence[bool],
        wide_outputs: bool = False,
    ) -> list[Any]:
        """The outputs, each in the dtype that it comes out in.

        ``stored`` tells which inputs are arguments of the whole function, in memory all along;
        ``wide_outputs`` that outputs are wanted in float32.
        """
        values = dict(enumerate(inputs))
        exact: dict[int, Any] = {}  # float32 values of what was rounded
        flags = _Flags(flat, stored, self.compute)
        wide = self._read_in_float32(flat, flags, wide_outputs)
        for index, step in enumerate(flat.steps):
            operands = [jaxprs.read(values, operand) for operand in step.inputs]
            call = self.calls.get(step.primitive)
            kept = [_among(i, flags.stored) for i in step.inputs]
            with jaxprs.context(step):  # its casts too
                inside = jaxprs.inside(step)
                if call is not None:
                    results = call(inside, operands, kept)
                else:
                    results = self._operation(inside, operands, flags, index in wide, exact)
            values.update(zip(step.outputs, results, strict=True))
        return [jaxprs.read(values, output) for output in flat.outputs]

    # ---- operations

    def _rule(self, step: jaxprs.Step) -> str:
        name = step.primitive
        if name == "div" and _is_scalar(step.equation.invars[0].aval):
            return "float32"  # a reciprocal
        if name == "convert_element_type" and step.equation.params["new_dtype"] != np.float32:
            return "any"
        return self.rules.get(name, "traced")

    def _operation(self, step, operands, flags, wide: bool, exact: dict[int, Any]) -> list[Any]:
        rule = self._rule(step)
        traced = [_dtype(variable.aval) for variable in step.equation.invars]
        floats = {dtype for dtype in traced if _is_floating(dtype)}
        if rule == "any":
            return jaxprs.evaluate(step, operands)
        if floats != {np.dtype(np.float32)}:
            rule = "traced"
        if rule == "compute":
            return self._contraction(step, operands, flags)
        if rule == "traced":
            return jaxprs.evaluate(step, list(map(_to, operands, traced)))
        if step.primitive in _SEPARATE:
            return jaxprs.evaluate(step, operands)
        follows = (
            rule == "follow"
            and not wide
            and all(_dtype(operands[i]) == self.compute for i in flags.deciding(step))
        )
        one_number = map(flags.is_scalar, step.inputs)
        if follows and all(
            one or not np.ndim(x) or not _is_floating(_dtype(x)) or _dtype(x) == self.compute
            for x, one in zip(operands, one_number, strict=True)
        ):
            regions = jaxprs.inner_in(step.equation, self.compute)
            return jaxprs.evaluate(step, [_to(x, self.compute) for x in operands], **regions)
        results = jaxprs.evaluate(
            step,
            [
                _to(exact.get(number, x) if isinstance(number, int) else x, np.dtype(np.float32))
                for number, x in zip(step.inputs, operands, strict=True)
            ],
        )
        if not follows:
            return results
        # Statistics or parameters among them: what is of their kind reads the result unrounded.
        exact.update(zip(step.outputs, results, strict=True))
        return [_to(x, self.compute) for x in results]

    def _contraction(self, step, operands, flags) -> list[Any]:
        preferred = step.equation.params.get("preferred_element_type")
        changed = {} if preferred is None else {"preferred_element_type": self.compute}

        def contract(*operands):
            return jaxprs.evaluate(step, [_to(x, self.compute) for x in operands], **changed)

        # Under a region of its own, only the cast is done again: the derivative of a contraction
        # reads its operands.
        kept = [_among(i, flags.stored) for i in step.inputs]
        if not self.recast or not any(kept):
            return contract(*(_to(x, self.compute) for x in operands))
        given = [x if k else _to(x, self.compute) for x, k in zip(operands, kept, strict=True)]
        return jax.checkpoint(contract)(*given)

    def _read_in_float32(self, flat: jaxprs.FlatJaxpr, flags, wide_outputs: bool) -> set[int]:
        """The steps that follow their operands and that only float32 operations read."""
        float32: set[int] = set()
        for step in flat.steps:
            rule = self._rule(step)
            decides = flags.deciding(step) if rule == "follow" else []
            if rule == "float32" or any(_among(step.inputs[i], float32) for i in decides):
                float32.update(step.outputs)
        others: set[int] = set()
        if not wide_outputs:
            others.update(value for value in flat.outputs if isinstance(value, int))
        wide = set()
        for index, step in reversed(list(enumerate(flat.steps))):
            rule = self._rule(step)
            reads_wide = rule == "float32" or (
                rule == "follow"
                and not float32.isdisjoint(step.outputs)
                and step.primitive not in _SEPARATE
            )
            if rule == "follow" and others.isdisjoint(step.outputs):
                wide.add(index)
                reads_wide = step.primitive not in _SEPARATE
            if not reads_wide:
                others.update(step.uses)
        return wide

    # ---- loops, branches, regions, custom derivatives

    def _scan(self, step, operands, stored) -> list[Any]:
        loop = jaxprs.loop_of(step.equation)
        consts, count = operands[loop.body_consts], len(operands[loop.carry])
        first = operands[loop.carry]
        kept = [*stored[loop.body_consts], *([False] * count), *stored[loop.carry.stop :]]

        def body(carry, slices):
            return split(self.run(loop.body, [*consts, *carry, *slices], kept))

        def split(results):
            return results[:count], results[count:]

        slices = operands[loop.carry.stop :]
        one = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in slices]
        first, body = _steady(first, lambda carry: body_shapes(body, carry, one), body)
        last, stacked = jax.lax.scan(body, first, slices, **loop.options)
        return [*last, *stacked]

    def _while(self, step, operands, stored) -> list[Any]:
        loop = jaxprs.loop_of(step.equation)
        assert loop.condition is not None
        condition, first = loop.condition, operands[loop.carry]
        outer = operands[loop.condition_consts], operands[loop.body_consts]
        no = [False] * len(first)
        kept = [*stored[loop.condition_consts], *no], [*stored[loop.body_consts], *no]

        def body(carry, _):
            return self.run(loop.body, [*outer[1], *carry], kept[1]), ()

        def goes_on(carry):
            return self.run(condition, [*outer[0], *carry], kept[0])[0]

        first, body = _steady(first, lambda carry: body_shapes(body, carry, ()), body)
        return jax.lax.while_loop(goes_on, lambda carry: body(carry, ())[0], first)

    def _cond(self, step, operands, stored) -> list[Any]:
        branches = jaxprs.branches_of(step.equation)
        if branches is None:
            return self._as_traced(step, operands)
        index, *rest = operands

        def cast_branch(branch):
            return lambda *values: self.run(branch, values, stored[1:])

        functions = [cast_branch(branch) for branch in branches]
        results = [jax.eval_shape(function, *rest) for function in functions]
        dtypes = [
            functools.reduce(_wider, map(_dtype, each)) for each in zip(*results, strict=True)
        ]

        def unified(function):
            return lambda *values: list(map(_to, function(*values), dtypes))

        return jax.lax.switch(index, list(map(unified, functions)), *rest)

    def _checkpoint(self, step, operands, stored) -> list[Any]:
        flat = jaxprs.called_jaxpr(step.equation)
        return jaxprs.checkpoint_like(
            step, lambda *values: self.run(flat, values, stored), operands
        )

    def _custom_jvp(self, step, operands, stored) -> list[Any]:
        flat = jaxprs.called_jaxpr(step.equation)
        call = jax.custom_jvp(lambda *values: self.run(flat, values, stored))
        original, traced = _original(step)

        def rule(values, tangents):
            floats = [i for i, aval in enumerate(traced) if _is_floating(aval.dtype)]
            at = [i for i in floats if not jaxprs.is_zero(tangents[i])]

            def derivative(*given):
                values, tangents = given[: len(traced)], given[len(traced) :]
                along = jaxprs.of_some(at, original, values)
                return jax.jvp(along, tuple(values[i] for i in at), tangents)

            likes = jax.eval_shape(lambda *x: self.run(flat, x, stored), *values)
            with _rule_of(step):
                rule_flat = jaxprs.flatten(derivative, [*traced, *(traced[i] for i in at)])
            inputs = [*rule_flat.consts, *values, *(tangents[i] for i in at)]
            found = self.run(rule_flat, inputs, [False] * len(inputs))
            half = len(likes)
            outs = [_to(out, like.dtype) for out, like in zip(found[:half], likes, strict=True)]
            tangent = [
                _to(out, like.dtype) if _is_floating(like.dtype) else out
                for out, like in zip(found[half:], likes, strict=True)
            ]
            return outs, tangent

        call.defjvp(rule, symbolic_zeros=True)
        return call(*operands)

    def _custom_vjp(self, step, operands, stored) -> list[Any]:
        flat = jaxprs.called_jaxpr(step.equation)
        call = jax.custom_vjp(lambda *values: self.run(flat, values, stored))
        original, traced = _original(step)

        def fwd(*given):
            values = [one.value for one in given]
            floats = [i for i, aval in enumerate(traced) if _is_floating(aval.dtype)]
            at = [i for i in floats if given[i].perturbed]

            def forward_of(*values):
                along = jaxprs.of_some(at, original, values)
                return jax.vjp(along, *[values[i] for i in at])

            with _rule_of(step):
                forward = jaxprs.flatten(forward_of, traced)
            _, pullback_tree = forward.out_tree.children()
            avals = [_struct(forward, output) for output in forward.outputs]
            outs, kept = avals[: len(flat.outputs)], avals[len(flat.outputs) :]
            likes = jax.eval_shape(lambda *x: self.run(flat, x, stored), *values)
            inputs = [*forward.consts, *values]
            found = self.run(forward, inputs, [False] * len(inputs))
            dtypes = [_dtype(value) for value in values]

            def pull_back(residuals, cotangents):
                cotangents = [
                    jnp.zeros(aval.shape, aval.dtype) if jaxprs.is_zero(one) else one
                    for one, aval in zip(cotangents, outs, strict=True)
                    if _is_floating(aval.dtype)
                ]

                def backward_of(*given):
                    pull, floats = given[: len(kept)], iter(given[len(kept) :])
                    every = [
                        next(floats)
                        if _is_floating(aval.dtype)
                        else np.zeros(aval.shape, jax.dtypes.float0)
                        for aval in outs
                    ]
                    return jax.tree.unflatten(pullback_tree, pull)(every)

                given = [aval for aval in outs if _is_floating(aval.dtype)]
                with _rule_of(step):
                    backward = jaxprs.flatten(backward_of, [*kept, *given])
                    inputs = [*backward.consts, *residuals, *cotangents]
                    found = self.run(backward, inputs, [False] * len(inputs))
                gradients: list[Any] = [None] * len(traced)
                for i, gradient in zip(at, found, strict=True):
                    gradients[i] = _to(gradient, dtypes[i])
                return tuple(gradients)

            rounded = [_to(x, like.dtype) for x, like in zip(found, likes, strict=False)]
            return rounded, jax.tree_util.Partial(pull_back, found[len(outs) :])

        # Rules may tell operands that are differentiated from others, and refuse the others.
        call.defvjp(fwd, lambda pull_back, cotangents: pull_back(cotangents), symbolic_zeros=True)
        return call(*operands)

    def _as_traced(self, step, operands) -> list[Any]:
        dtypes = [_dtype(variable.aval) for variable in step.equation.invars]
        return jaxprs.evaluate(step, list(map(_to, operands, dtypes)))


class _Flags:
    """Which values are arguments, in memory all along, and which take others' dtypes."""

    def __init__(self, flat: jaxprs.FlatJaxpr, stored: Sequence[bool], compute: np.dtype):
        self._largest = float(jnp.finfo(compute).max)
        self.stored = {number for number, flag in enumerate(stored) if flag}
        self._scalars = {number for number, aval in enumerate(flat.avals) if _is_scalar(aval)}
        self._grown: set[int] = set()
        for number in self.stored:
            if len(flat.avals[number].shape) == 1:
                self._grown.add(number)  # a bias, perhaps
        for step in flat.steps:
            first = step.inputs[0] if step.inputs else None
            if step.primitive in _LAYOUT:
                for kind in (self.stored, self._grown):
                    if _among(first, kind):
                        kind.update(step.outputs)
            if step.primitive == "broadcast_in_dim":
                if self.is_scalar(first):
                    self._scalars.update(step.outputs)
                if step.equation.invars[0].aval.size < step.equation.outvars[0].aval.size:
                    self._grown.update(step.outputs)

    def is_scalar(self, operand) -> bool:
        """Whether an operand is one number, or many times the same, that the dtype can hold."""
        if isinstance(operand, int):
            return operand in self._scalars
        if np.ndim(operand.val) or not _is_floating(_dtype(operand.val)):
            return False
        value = abs(float(operand.val))
        return value <= self._largest or not np.isfinite(value)

    def deciding(self, step: jaxprs.Step) -> list[int]:
        """Which operands an operation follows: those of its result's size that were not broadcast
        (as a bias is, or the mean and scale of a norm), or else all but scalars, or else all."""
        avals = [variable.aval for variable in step.equation.invars]
        size = max((variable.aval.size for variable in step.equation.outvars), default=0)
        floats = [i for i, aval in enumerate(avals) if _is_floating(_dtype(aval))]
        arrays = [i for i in floats if not self.is_scalar(step.inputs[i])]
        full = [
            i for i in arrays if avals[i].size >= size and not _among(step.inputs[i], self._grown)
        ]
        return full or arrays or floats


def body_shapes(body: Callable, carry: list[Any], slices: Sequence[Any]) -> list[Any]:
    """The abstract carry that a loop's body returns."""
    return jax.eval_shape(lambda *args: body(*args)[0], carry, slices)


def _steady(first: list[Any], shapes: Callable, body: Callable) -> tuple[list[Any], Callable]:
    """A loop's first carry and its body, in dtypes that stay the same from round to round."""
    first = [_strong(x) for x in first]
    while True:
        found = [_wider(x.dtype, new.dtype) for x, new in zip(first, shapes(first), strict=True)]
        if found == [x.dtype for x in first]:
            break
        first = list(map(_to, first, found))

    def steady(carry, slices):
        carry, stacked = body(carry, slices)
        return list(map(_to, carry, found)), stacked

    return first, steady


def _original(step: jaxprs.Step) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """A call as it was traced: a function of its operands, and what they were."""
    traced = [
        jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
        for variable in step.equation.invars
    ]
    return lambda *values: jaxprs.evaluate(step, values), traced


@contextlib.contextmanager
def _rule_of(step: jaxprs.Step) -> Iterator[None]:
    """The rule of a custom derivative is traced inside."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise JaxmemError(
            f"The derivative rule of {step.primitive} at {step.line} reads a value that the "
            "function around it computed. JAX cannot differentiate that once the function is "
            "traced, under jax.jit and jax.checkpoint neither. Make the value an argument of the "
            "function that has the rule."
        ) from error


def _struct(flat: jaxprs.FlatJaxpr, output) -> jax.ShapeDtypeStruct:
    aval = flat.avals[output] if isinstance(output, int) else output.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _output_dtypes(flat: jaxprs.FlatJaxpr) -> list[Any]:
    return [_dtype(flat.avals[o] if isinstance(o, int) else o.aval) for o in flat.outputs]


def _dtype(value: Any) -> Any:
    return getattr(value, "dtype", None) if hasattr(value, "dtype") else np.result_type(value)


def _is_floating(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _among(operand: Any, numbers: set[int]) -> bool:
    return isinstance(operand, int) and operand in numbers


def _is_scalar(aval: Any) -> bool:
    return getattr(aval, "shape", None) == ()


def _wider(first: Any, second: Any) -> Any:
    both = _is_floating(first) and _is_floating(second)
    return first if not both or first.itemsize >= second.itemsize else second


def _strong(value: Any) -> Any:
    value = jnp.asarray(value)
    return jax.lax.convert_element_type(value, value.dtype) if _is_floating(value.dtype) else value


def _to(value: Any, dtype: Any) -> Any:
    """A floating-point value in a dtype; anything else as it is."""
    if not _is_floating(_dtype(value)) or not _is_floating(dtype) or _dtype(value) == dtype:
        return value
    return jax.lax.convert_element_type(value, dtype)
