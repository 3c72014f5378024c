"""Every use of JAX that its documentation does not promise, in one place.

Tested on jax 0.10.2 to 0.12. What differs between versions is met here and nowhere else.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax._src.core import NamedAxisEffect
from jax._src.interpreters import ad, batching, mlir, partial_eval
from jax._src.lax.lax import _optimization_barrier_lowering_rule
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxlib.mlir.passmanager import PassManager

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device
_HOST_KINDS = ("pinned_host", "unpinned_host")

# Code that is never the user's own.
_LIBRARIES = ("chex", "equinox", "flax", "haiku", "optax")

# `jax.checkpoint`, under the names that it has had.
_REGIONS = frozenset({"checkpoint", "remat", "remat2"})
# With the flag jax_remat3 it is a class of "call_hi_primitive", and so is `checkpoint_name`.
_HIGH = {"RematTraced": "checkpoint", "CheckpointName": "name"}
_RESHAPES = frozenset({"convert_element_type", "copy", "reshape", "squeeze", "transpose"})
# Calls that are only a boundary for tracing; what is in them is planned as if written in place.
_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One equation of a flat jaxpr: operands are value numbers or literals; ``callers`` are the
    calls that it was inlined from, the innermost first."""

    equation: JaxprEqn
    inputs: tuple[int | Literal, ...]
    outputs: tuple[int, ...]
    name_stack: Any
    callers: tuple[JaxprEqn, ...] = ()

    @property
    def uses(self) -> Iterator[int]:
        """The numbers of the values it reads."""
        return (value for value in self.inputs if isinstance(value, int))

    @property
    def primitive(self) -> str:
        return operation_of(self.equation)

    @property
    def line(self) -> str:
        """``file:line (function)`` of the user's frame that made it."""
        lines = map(_line, (self.equation, *self.callers))
        return next((line for line in lines if line != "unknown"), "unknown")


def _line(equation: JaxprEqn) -> str:
    """``file.py:line (function)`` of the innermost frame of the user's own code."""
    frames = list(source_info_util.user_frames(equation.source_info.traceback))
    own = (frame for frame in frames if not _is_library(frame.file_name))
    frame = next(own, frames[0] if frames else None)
    if frame is None:
        return "unknown"
    return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})"


@functools.cache
def _is_library(file: str) -> bool:
    folders = (os.path.dirname(__file__), *(os.path.join(os.sep, name, "") for name in _LIBRARIES))
    return file.startswith(folders[0]) or any(folder in file for folder in folders[1:])


@dataclasses.dataclass(frozen=True)
class FlatJaxpr:
    """A traced function as one list of equations over numbered values.

    Values 0 to ``len(consts) + number of array arguments - 1`` are its inputs, the closed-over
    ones (``consts``, possibly tracers) first.
    """

    steps: tuple[Step, ...]
    avals: tuple[Any, ...]
    consts: tuple[Any, ...]
    input_count: int
    outputs: tuple[int | Literal, ...]
    out_tree: Any
    regions: tuple[tuple[int, int], ...] = ()

    @property
    def arrays_closed_over(self) -> set[int]:
        """Numbers of the constants that are arrays, which no derivative is taken of; of a tracer
        one may be."""
        return {at for at, one in enumerate(self.consts) if not isinstance(one, jax.core.Tracer)}

    def aval(self, value: int | Literal) -> Any:
        """The shape and dtype of one of its values."""
        return self.avals[value] if isinstance(value, int) else value.aval

    def run(self, steps: Iterable[Step], values: dict[int, Any]) -> None:
        """Evaluates equations, reading and writing ``values`` by number."""
        for step in steps:
            results = evaluate(step, [read(values, operand) for operand in step.inputs])
            values.update(zip(step.outputs, results, strict=True))


def evaluate(step: Step, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """The results of one equation on other operands, with parameters changed as given."""
    equation = step.equation
    parameters = equation.primitive.get_bind_params({**equation.params, **changed})
    with context(step):
        results = equation.primitive.bind(*operands, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def apply(step: Step, *operands: Any) -> Any:
    """The only result of one equation on other operands."""
    (result,) = evaluate(step, operands)
    return result


@contextlib.contextmanager
def context(step: Step) -> Iterator[None]:
    """What is bound inside belongs to the line and the module of the step."""
    equation = step.equation
    stack = source_info_util.current_name_stack() + step.name_stack
    traceback = equation.source_info.traceback
    with source_info_util.user_context(traceback, name_stack=stack), equation.ctx.manager:
        yield


def inside(step: Step) -> Step:
    """The step as it is in its own `context`, which has its name stack already."""
    return dataclasses.replace(step, name_stack=source_info_util.new_name_stack())


def read(values: dict[int, Any], operand: int | Literal) -> Any:
    """The value of an operand of a step."""
    return values[operand] if isinstance(operand, int) else operand.val


def split_arrays(fun: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Callable]:
    """The array leaves of a call, and the call as a function of them alone."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    at = [index for index, leaf in enumerate(leaves) if is_array(leaf)]

    def call(*filled):
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        return fun(*inner_args, **inner_kwargs)

    return [leaves[index] for index in at], of_some(at, call, leaves)


def of_some(at: Sequence[int], fun: Callable, operands: Sequence[Any]) -> Callable:
    """A function as one of those of its operands that stand at some places."""

    def of_chosen(*chosen):
        filled = list(operands)
        for place, value in zip(at, chosen, strict=True):
            filled[place] = value
        return fun(*filled)

    return of_chosen


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def flatten(fun: Callable, leaves: Sequence[Any], open_regions: bool = False) -> FlatJaxpr:
    """Traces ``fun(*leaves)`` and inlines its jit-like calls into one flat list; with
    ``open_regions`` the user's own regions too, whose bounds ``regions`` then has."""
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*leaves)
    return flatten_jaxpr(closed, jax.tree.structure(shape), open_regions)


def flatten_jaxpr(closed, out_tree: Any = None, open_regions: bool = False) -> FlatJaxpr:
    """A jaxpr (closed, or open and without constants) as one flat list."""
    closed = _closed(closed)
    if out_tree is None:
        out_tree = jax.tree.structure(list(closed.out_avals))
    regions: list[tuple[int, int]] = []
    avals: list[Any] = []
    steps: list[Step] = []

    def new(variable) -> int:
        avals.append(variable.aval)
        return len(avals) - 1

    def walk(jaxpr, numbers: dict, stack, callers=()) -> list[int | Literal]:
        def number(atom):
            return atom if isinstance(atom, Literal) else numbers[atom]

        for equation in jaxpr.eqns:
            inputs = tuple(map(number, equation.invars))
            inner = _inlinable(equation)
            opened = open_regions and is_region(equation)
            if opened:
                inner = _closed(_parameters(equation)["jaxpr"])
            names = stack + equation.source_info.name_stack
            if inner is None:
                made = tuple(map(new, equation.outvars))
                steps.append(Step(equation, inputs, made, names, callers))
                numbers.update(zip(equation.outvars, made, strict=True))
            else:
                variables = [*inner.jaxpr.constvars, *inner.jaxpr.invars]
                constants = [new_const(value) for value in inner.consts]
                start = len(steps)
                values = dict(zip(variables, [*constants, *inputs], strict=True))
                results = walk(inner.jaxpr, values, names, (equation, *callers))
                if opened:
                    regions.append((start, len(steps)))
                numbers.update(zip(equation.outvars, results, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def new_const(value) -> Literal:
        value = _as_jax(value)
        return Literal(value, jax.typeof(value))

    variables = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    numbers = {variable: new(variable) for variable in variables}
    input_count = len(avals)
    outputs = walk(closed.jaxpr, numbers, source_info_util.new_name_stack())
    return FlatJaxpr(
        tuple(steps),
        tuple(avals),
        tuple(map(_as_jax, closed.consts)),
        input_count,
        tuple(outputs),
        out_tree,
        tuple(regions),
    )


def _as_jax(value) -> Any:
    """A constant of a jaxpr as a JAX array: custom rules may index it with a tracer."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _inlinable(equation: JaxprEqn):
    """The jaxpr of a call that can be written in place, or None."""
    parameters = equation.params
    if equation.primitive.name not in _INLINED:
        return None
    for placed in ("in_shardings", "out_shardings"):
        if any(isinstance(sharding, Sharding) for sharding in parameters.get(placed, ())):
            return None
    inner = parameters.get("jaxpr", parameters.get("call_jaxpr"))
    return inner if hasattr(inner, "consts") else None


def scan_residuals(equation: JaxprEqn, constant: Sequence[bool]) -> list[Any]:
    """Abstract values that each iteration of a scan keeps for its derivative: what JAX saves of
    the body, but for slices and constants, which are there anyway. Operands that are ``constant``
    are not differentiated: a `jax.custom_vjp` refuses that of arrays that it closes over."""
    closed = equation.params["jaxpr"]
    avals = closed.in_avals  # themselves: inside `jax.shard_map` they vary over axes of the mesh
    body = jaxpr_as_fun(closed)
    real = [
        at for at, aval in enumerate(avals)
        if jnp.issubdtype(aval.dtype, jnp.inexact) and not constant[at]
    ]  # fmt: skip

    def residuals(*operands):
        of_real = of_some(real, body, operands)
        return jax.vjp(of_real, *(operands[at] for at in real))[1]

    carry = loop_of(equation).carry
    others = avals[: carry.start] + avals[carry.stop :]
    there = collections.Counter((aval.shape, aval.dtype) for aval in others)
    kept = []
    for leaf in jax.tree.leaves(jax.eval_shape(residuals, *avals)):
        if there[leaf.shape, leaf.dtype]:
            there[leaf.shape, leaf.dtype] -= 1
        else:
            kept.append(leaf)
    return kept


def operation_of(equation: JaxprEqn) -> str:
    """The name of what an equation does."""
    high = equation.params.get("_prim")
    return _HIGH.get(type(high).__name__, "") or equation.primitive.name


def is_region(equation: JaxprEqn) -> bool:
    """Whether it is a `jax.checkpoint` of the user's own."""
    return operation_of(equation) in _REGIONS


# Primitives of JAX whose transpose is the user's own function.
_OWN_TRANSPOSES = frozenset({"custom_lin", "custom_transpose_call", "linear_call"})
_linear_rules: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def has_linear_rule(equation: JaxprEqn) -> bool:
    """Whether the rule of a `jax.custom_jvp` equation is transposed by rules of JAX's own alone,
    which are linear in the cotangent. Rules of the user's own (`linear_call`, primitives that come
    from elsewhere) need not be, and a rule that cannot be traced is not known to be."""
    key = getattr(equation.params["call_jaxpr"], "jaxpr", equation.params["call_jaxpr"])
    if key not in _linear_rules:
        avals = [variable.aval for variable in equation.invars]
        moving = [at for at, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]

        def along(*operands):
            def called(*operands):
                parameters = equation.primitive.get_bind_params(equation.params)
                return equation.primitive.bind(*operands, **parameters)

            chosen = tuple(operands[at] for at in moving)
            return jax.jvp(of_some(moving, called, operands), chosen, chosen)

        try:
            with equation.ctx.manager:
                _linear_rules[key] = _transposed_by_jax(jax.make_jaxpr(along)(*avals).jaxpr)
        except Exception:  # a rule may refuse, in its own words, what is not differentiated
            _linear_rules[key] = False
    return _linear_rules[key]


def _transposed_by_jax(jaxpr) -> bool:
    for equation in jaxpr.eqns:
        transpose = ad.primitive_transposes.get(equation.primitive)
        while isinstance(transpose, functools.partial):
            transpose = transpose.func
        own = transpose is None or transpose.__module__.partition(".")[0] == "jax"
        if not own or equation.primitive.name in _OWN_TRANSPOSES:
            return False
        if not all(map(_transposed_by_jax, inner_jaxprs(equation))):
            return False
    return True


def _parameters(equation: JaxprEqn) -> dict[str, Any]:
    """An equation's parameters; those of the class, where it is of "call_hi_primitive"."""
    high = equation.params.get("_prim")
    return equation.params if high is None else vars(high)


def _closed(jaxpr):
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def inner_jaxprs(equation: JaxprEqn) -> list[Any]:
    """The jaxprs among an equation's parameters (of scan, cond, checkpoint, custom rules)."""
    found = []
    for value in _parameters(equation).values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                found.append(getattr(item, "jaxpr", item))
    return found


def inner_in(equation: JaxprEqn, dtype: Any) -> dict[str, Any]:
    """The jaxprs of an equation that combine two numbers (of a scatter, a reduction or a window),
    traced anew for numbers of another dtype."""

    def cast(value):
        return jnp.asarray(
            value, dtype if jnp.issubdtype(jnp.result_type(value), jnp.floating) else None
        )

    def again(jaxpr):
        flat = flatten_jaxpr(jaxpr)

        def combine(*numbers):
            values = dict(enumerate([*flat.consts, *numbers]))
            for step in flat.steps:
                operands = [cast(read(values, operand)) for operand in step.inputs]
                values.update(zip(step.outputs, evaluate(step, operands), strict=True))
            return [cast(read(values, output)) for output in flat.outputs]

        count = flat.input_count - len(flat.consts)
        new = jax.make_jaxpr(combine)(*[jax.ShapeDtypeStruct((), dtype)] * count)
        return new if hasattr(jaxpr, "consts") else new.jaxpr

    given = equation.params.items()
    return {name: again(value) for name, value in given if hasattr(value, "eqns")}


def primitive_names() -> set[str]:
    """The names of JAX's operations, as they stand in a jaxpr."""
    return {primitive.name for primitive in {*mlir._lowerings, *ad.primitive_jvps}}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan (``condition`` is None) or a while loop, in the terms of `jax.lax`."""

    body: FlatJaxpr
    condition: FlatJaxpr | None
    body_consts: slice
    condition_consts: slice
    carry: slice
    options: dict[str, Any]


def loop_of(equation: JaxprEqn) -> Loop:
    """What a scan or while equation is made of; slices are of its operands."""
    given = equation.params
    if equation.primitive.name == "scan":
        if "ft_in" in given:  # jax 0.11
            consts, carry, _ = (len(list(part)) for part in given["ft_in"].unpack())
        else:
            consts, carry = given["num_consts"], given["num_carry"]
        options = {name: given[name] for name in ("length", "reverse", "unroll")}
        parts = slice(0, consts), slice(0, 0), slice(consts, consts + carry)
        return Loop(flatten_jaxpr(given["jaxpr"]), None, *parts, options)
    first, consts = given["cond_nconsts"], given["body_nconsts"]
    parts = slice(first, first + consts), slice(0, first), slice(first + consts, None)
    condition = flatten_jaxpr(given["cond_jaxpr"])
    return Loop(flatten_jaxpr(given["body_jaxpr"]), condition, *parts, {})


def branches_of(equation: JaxprEqn) -> list[FlatJaxpr] | None:
    """The branches of a cond; None where the platform chooses among them."""
    if equation.params.get("branches_platforms") is not None:
        return None
    return [flatten_jaxpr(branch) for branch in equation.params["branches"]]


def called_jaxpr(equation: JaxprEqn) -> FlatJaxpr:
    """What a checkpoint, custom_jvp or custom_vjp equation computes."""
    parameters = _parameters(equation)
    for name in ("call_jaxpr", "fun_jaxpr", "jaxpr"):
        if name in parameters:
            return flatten_jaxpr(parameters[name])
    raise NotImplementedError(operation_of(equation))


def picked_axis(equation: JaxprEqn) -> int | None:
    """The axis along which a gather takes one element of every row, as `jnp.take_along_axis` does;
    None: it takes something else."""
    operand, indices = (variable.aval for variable in equation.invars)
    numbers, shape = equation.params["dimension_numbers"], operand.shape
    if len(numbers.start_index_map) != 1 or set(equation.params["slice_sizes"]) != {1}:
        return None
    axis = int(numbers.start_index_map[0])
    rows, of_rows = map(list, (numbers.operand_batching_dims, numbers.start_indices_batching_dims))
    in_order = rows == sorted(rows) and of_rows == sorted(of_rows)
    others = {at for at, size in enumerate(shape) if size > 1} - {axis}
    one_each = others <= set(rows) and indices.size * shape[axis] == operand.size
    return axis if in_order and one_each else None


def checkpoint_like(step: Step, fun: Callable, operands: Sequence[Any]) -> list[Any]:
    """``fun(*operands)`` under the same `jax.checkpoint` as a step's."""
    if "_prim" in step.equation.params:
        with context(step):
            policy = _parameters(step.equation)["policy"]
            return jax.checkpoint(fun, policy=policy)(*operands)
    closed = jax.make_jaxpr(fun)(*operands)
    jaxpr = partial_eval.convert_constvars_jaxpr(closed.jaxpr)
    return evaluate(step, [*closed.consts, *operands], jaxpr=jaxpr)


# With the flag jax_remat3, jax 0.10 knows a policy of names by its class.
_SAVE_ONLY: type = type(jax.checkpoint_policies.save_only_these_names())


@dataclasses.dataclass(frozen=True)
class NamePolicy(_SAVE_ONLY if dataclasses.is_dataclass(_SAVE_ONLY) else object):  # type: ignore[misc]
    """A policy of `jax.checkpoint`: values of ``saveable_names`` are saved, and those of the names
    ``offloaded`` sent to host memory. (JAX's own policies fail at primitives that have a parameter
    named ``prim``, as Equinox's.)"""

    saveable_names: frozenset[str]
    offloaded: frozenset[str] = frozenset()

    def __call__(self, primitive, /, *avals, **parameters):
        name = parameters["name"] if primitive.name == "name" else None
        if name in self.offloaded:
            return partial_eval.Offloadable(src="device", dst="pinned_host")
        saves = name in self.saveable_names
        if not self.offloaded:
            return saves
        return partial_eval.Saveable if saves else partial_eval.Recompute


@dataclasses.dataclass(frozen=True)
class OperationPolicy:
    """A policy of `jax.checkpoint` that decides by operation: ``saves(primitive, *avals,
    **parameters)``."""

    saves: Callable[..., bool]

    def __post_init__(self):
        _ask_policies()

    def __call__(self, primitive, /, *avals, **parameters) -> bool:
        return self.saves(primitive, *avals, **parameters)


@functools.cache
def _ask_policies() -> None:
    """With the flag jax_remat3 JAX asks policies of names alone: of matmuls and convolutions it
    asks an `OperationPolicy` too, from now on, and treats other policies as before."""
    try:
        from jax._src.ad_checkpoint import primal_left_tangent_right
        from jax._src.interpreters import remat
    except ImportError:
        return  # there is no such flag
    new = "custom_vjp_rules" in inspect.signature(remat.RematTrace).parameters  # jax 0.12

    def rule_of(primitive, before):
        def rule(trace, *values, **parameters):
            policy = trace.policy if new else trace
            if not isinstance(policy, OperationPolicy) and before is not None:
                return before(trace, *values, **parameters)
            again = functools.partial(primitive.bind, **parameters)
            out = again(*values)
            saves = isinstance(policy, OperationPolicy) and policy(
                primitive, *map(jax.typeof, values), **parameters
            )

            def recompute(saved, *values):
                return (
                    primal_left_tangent_right(*saved, again(*values)) if saves else again(*values)
                )

            saved = (out,) if saves else ()
            if new:
                return out, saved, recompute
            return out, functools.partial(recompute, saved)

        return rule

    for primitive in (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p):
        remat.rules[primitive] = rule_of(primitive, remat.rules.get(primitive))


def together(values: Sequence[Any]) -> list[Any]:
    """The values, none of which is there before all are: `jax.lax.optimization_barrier`, but
    cotangents are none of it (XLA may fuse them), and a value that nothing needs is not computed
    for the others."""
    return _together.bind(*values) if values else []


def back_together(values: Sequence[Any]) -> list[Any]:
    """The values as they are; of their cotangents none is there before all are."""
    return _back_together.bind(*values) if values else []


def after(value: Any, other: Any) -> Any:
    """The value, which is not there before ``other`` is; cotangents are none of it."""
    return _after.bind(value, other)[0]


def _barrier(name: str) -> Primitive:
    barrier = Primitive(name)
    barrier.multiple_results = True
    barrier.def_impl(lambda *values: list(values))
    barrier.def_abstract_eval(lambda *values: values)
    ad.primitive_jvps[barrier] = lambda values, tangents: (barrier.bind(*values), tangents)
    batching.primitive_batchers[barrier] = lambda values, axes: (barrier.bind(*values), axes)
    mlir.register_lowering(barrier, _optimization_barrier_lowering_rule)
    return barrier


def _needed_together(used: list[bool], *rest):
    equation = rest[-1]  # jax 0.12 tells in between which operands are alive
    if not any(used):
        return used, None
    needed = {
        name: [x for x, use in zip(getattr(equation, name), used, strict=True) if use]
        for name in ("invars", "outvars")
    }
    return used, equation.replace(**needed)


_together, _after = _barrier("together"), _barrier("after")
partial_eval.dce_rules[_together] = _needed_together


def _among_those_there(fun: Callable, values: Sequence) -> list[Any]:
    """A function of all values at once, applied to those that are no symbolic zeros. A zero that is
    made an array depends on nothing, and `jax.checkpoint` cannot transpose what has such results.
    """
    there = [value for value in values if type(value) is not ad.Zero]
    made = iter(fun(*there) if there else [])
    return [value if type(value) is ad.Zero else next(made) for value in values]


# A primitive, since only a primitive can say how it is transposed.
_back_together = Primitive("back_together")
_back_together.multiple_results = True
_back_together.def_impl(lambda *values: list(values))
_back_together.def_abstract_eval(lambda *values: values)
ad.primitive_jvps[_back_together] = lambda values, tangents: (
    list(values),
    _among_those_there(_back_together.bind, tangents),
)
ad.primitive_transposes[_back_together] = lambda cotangents, *_: _among_those_there(
    _together.bind, cotangents
)
batching.primitive_batchers[_back_together] = lambda values, axes: (
    _back_together.bind(*values),
    axes,
)
mlir.register_lowering(_back_together, lambda _, *values: list(values))
partial_eval.dce_rules[_back_together] = _needed_together


def result_of(primitive, avals: Sequence[Any], parameters: dict) -> Any:
    """The abstract result of a primitive of one result."""
    result, _ = primitive.abstract_eval(*avals, **parameters)
    return result


def side_effects(step: Step) -> list[str]:
    """Names of the effects that must happen exactly once (a collective's axis is not one)."""
    return sorted(
        type(effect).__name__
        for effect in step.equation.effects
        if not isinstance(effect, NamedAxisEffect)
    )


def to_bytecode(lowered, locations: bool = True) -> tuple[bytes, int]:
    """A lowered step as MLIR bytecode, with or without modules and lines of code, and the number of
    partitions it was lowered for."""
    module = lowered.compiler_ir("stablehlo")
    partitions = module.operation.attributes["mhlo.num_partitions"].value
    if not locations:
        with module.context:
            module = module.operation.clone()
            PassManager.parse("builtin.module(strip-debuginfo)").run(module)
    return mlir.module_to_bytecode(module), partitions


def lower_for_cuda(traced):
    """Lowers a traced step for CUDA on whatever machine this is. Calls into Python are left out:
    what they return is an array of zeros that is written to memory."""
    rules = tuple((primitive, _left_out) for primitive in _callbacks())
    parameters = mlir.LoweringParameters(override_lowering_rules=rules)
    return traced.lower(lowering_platforms=("cuda",), _private_parameters=parameters)


@functools.cache
def _callbacks() -> list[Primitive]:
    """JAX's operations that call into Python."""
    from jax._src import callback, debugging

    found = [value for part in (callback, debugging) for value in vars(part).values()]
    return [one for one in found if isinstance(one, Primitive) and is_callback(one.name)]


def is_callback(name: str) -> bool:
    """Whether an operation calls into Python."""
    return "callback" in name or name == "debug_print"


def _left_out(ctx, *_, **__):
    def zeros():
        return together([jnp.zeros(aval.shape, aval.dtype) for aval in ctx.avals_out])

    made = mlir.lower_fun(zeros, multiple_results=True)(ctx.replace(avals_in=[]))
    ctx.set_tokens_out(ctx.tokens_in)
    return made


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A value that a vjp keeps: the number of the argument that it is, or the equation that made
    it; neither: a constant."""

    aval: Any
    argument: int | None = None
    equation: JaxprEqn | None = None

    @property
    def operation(self) -> str:
        return self.equation.primitive.name if self.equation else ""

    @property
    def name_stack(self) -> str:
        return str(self.equation.source_info.name_stack) if self.equation else ""

    @property
    def frames(self) -> list[tuple[str, str, int]]:
        """File, function and line of the Python stack, innermost first."""
        traceback = self.equation.source_info.traceback if self.equation else None
        frames = traceback.frames if traceback else ()
        return [(frame.file_name, frame.function_name, frame.line_num) for frame in frames]


def saved_residuals(fun: Callable, leaves: Sequence[Any]) -> list[Kept]:
    """What the forward pass of ``fun(*leaves)`` keeps for its backward pass, each value once."""
    closed, shapes = jax.make_jaxpr(lambda *xs: jax.vjp(fun, *xs), return_shape=True)(*leaves)
    jaxpr = getattr(closed, "jaxpr", closed)
    count = jax.tree.structure(shapes[1]).num_leaves
    made = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    found: dict[Any, Kept] = {}
    for variable in jaxpr.outvars[len(jaxpr.outvars) - count :]:
        equation = None
        while not isinstance(variable, Literal):
            equation = made.get(variable)
            # These only mark or round what another operation made.
            if equation is None or operation_of(equation) not in ("reduce_precision", "name"):
                break
            variable = equation.invars[0]
        if isinstance(variable, Literal):
            continue
        number = jaxpr.invars.index(variable) if variable in jaxpr.invars else None
        found[variable] = Kept(variable.aval, number, equation)
    return list(found.values())


def argument_names(traced) -> tuple[str, ...]:
    """Paths of the arrays that a traced step takes, in order: ``state.params['w']``."""
    return tuple(traced.jaxpr.jaxpr.debug_info.arg_names)


def kept_arguments(lowered) -> list[int]:
    """The numbers of the arrays that the lowered program takes; jit drops those it never reads."""
    return sorted(lowered._lowering.compile_args["kept_var_idx"])


def compiler_options(lowered) -> dict[str, Any]:
    """The XLA flags that a step was jitted with."""
    return dict(lowered._lowering._compiler_options_kvs)


def find_callback(jaxpr) -> str | None:
    """The first call from the device to Python in a jaxpr, and where it stands; None: none."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if is_callback(name):
            return f"{name} at {_line(equation)}"
        for inner in inner_jaxprs(equation):
            found = find_callback(inner)
            if found:
                return found
    return None


def results_on_host(traced) -> list[bool] | None:
    """Whether each of a traced step's results should be in host memory; None: not known, since
    some result is an argument and need not be in the compiled program."""
    jaxpr = traced.jaxpr.jaxpr
    if not {id(variable) for variable in jaxpr.outvars}.isdisjoint(map(id, jaxpr.invars)):
        return None
    return [memory_space(variable.aval) is HOST for variable in jaxpr.outvars]


def donated_on_host(traced, lowered) -> set[int]:
    """The numbers of the arrays in host memory that a step donates."""
    given = jax.tree.leaves(lowered.args_info)
    return {
        number
        for number, (one, variable) in enumerate(zip(given, traced.jaxpr.jaxpr.invars, strict=True))
        if one.donated and memory_space(variable.aval) is HOST
    }


def kept_on_host(traced) -> tuple[int, str]:
    """The most bytes that a traced step keeps in host memory between where it sends values there
    and where it uses them (results apart), and the line that sends the first of those."""
    flat = flatten_jaxpr(traced.jaxpr)
    last = {value: at for at, step in enumerate(flat.steps) for value in step.uses}
    sent: dict[int, Step] = {}
    for step in flat.steps:
        carry = loop_of(step.equation).carry if step.primitive == "scan" else slice(0, 0)
        if step.primitive in ("device_put", "scan"):
            own = step.outputs[carry.stop - carry.start :]  # what a loop carries was there before
            sent |= {value: step for value in own if memory_space(flat.avals[value]) is HOST}
    for value in flat.outputs:
        sent.pop(value, None) if isinstance(value, int) else None
    most, line, alive = 0, "", dict[int, Step]()
    for at, step in enumerate(flat.steps):
        alive |= {value: step for value in step.outputs if value in sent}
        total = sum(flat.avals[value].size * flat.avals[value].dtype.itemsize for value in alive)
        if total > most:
            most, line = total, next(iter(alive.values())).line
        alive = {value: step for value, step in alive.items() if last.get(value, 0) > at}
    return most, line


def making_order(values: Sequence[Any]) -> list[int]:
    """For each of some tracers the number of the equation that makes it, casts and changes of shape
    apart (those of all gradients come at the end); 0 where it is not known."""
    if not values:
        return []
    frame = getattr(getattr(values[0], "_trace", None), "frame", None)
    equations = [one() if callable(one) else one for one in getattr(frame, "tracing_eqns", ())]
    number = {id(equation): at for at, equation in enumerate(equations) if equation is not None}

    def made_at(value) -> int:
        maker = getattr(value, "parent", None)
        while maker is not None and maker.primitive.name in _RESHAPES:
            above = getattr(maker.in_tracers[0], "parent", None)
            if above is None:
                break
            maker = above
        return number.get(id(maker), 0)

    return [made_at(value) for value in values]


# ---- memory kinds


def memory_kinds() -> list[str]:
    """The kinds of memory that the attached devices address."""
    return [memory.kind for memory in jax.devices()[0].addressable_memories()]


def memory_space(value) -> Any:
    """`HOST` or `DEVICE`: where an array, a tracer or an abstract value lives."""
    if isinstance(value, jax.ShapeDtypeStruct):
        kind = getattr(value.sharding, "memory_kind", None)
        space = getattr(value, "_memory_space", None)  # jax 0.12
        return HOST if space is HOST or kind in _HOST_KINDS else DEVICE
    aval = jax.typeof(value) if isinstance(value, jax.Array) else value
    return getattr(aval, "memory_space", DEVICE)


def is_committed(value) -> bool:
    """Whether an array is bound to the device or mesh it is on."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and getattr(value, "committed", False)
    )


def memory_of(value) -> Any:
    """Where the first piece of an array lies; None: it has none here, or is no array of JAX's."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return None
    if value.is_deleted() or not value.size or not value.addressable_shards:
        return None
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        value = jax.random.key_data(value)
    piece = value.addressable_shards[0].data
    return piece.sharding, piece.unsafe_buffer_pointer()


def copied_on(sharding: Sharding) -> Sharding:
    """A sharding with a copy on each device of another."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    (device,) = sharding.device_set
    return SingleDeviceSharding(device)


def shortest(sharding: Sharding) -> Sharding:
    """A sharding as XLA's programs return it: without what says that an axis is whole."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    parts: list[Any] = []
    for part in sharding.spec:
        axes = part if isinstance(part, tuple) else (part,)
        wide = tuple(axis for axis in axes if axis is not None and sharding.mesh.shape[axis] > 1)
        parts.append(wide if len(wide) > 1 else wide[0] if wide else None)
    while parts and parts[-1] is None:
        parts.pop()
    return sharding.update(spec=PartitionSpec(*parts))


def varying(value: jax.Array, *others: Any) -> jax.Array:
    """The value, varying over the mesh axes of `jax.shard_map` that any of the others varies
    over: the carry of a loop does not begin to vary in it."""
    axes = frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(others)))
    axes -= jax.typeof(value).mat.varying
    return jax.lax.pcast(value, tuple(sorted(axes)), to="varying") if axes else value


def is_opaque(value) -> bool:
    """Whether the elements of a constant cannot be looked at: a tracer, or random keys."""
    return isinstance(value, jax.core.Tracer) or jnp.issubdtype(
        getattr(value, "dtype", None) or np.result_type(value), jax.dtypes.extended
    )


def custom_function(equation: JaxprEqn) -> str:
    """``name at file:line`` of the function that a custom_jvp or custom_vjp equation calls."""
    for name in ("call_jaxpr", "fun_jaxpr"):
        if name in equation.params:
            inner = equation.params[name]
            return str(getattr(inner, "jaxpr", inner).debug_info.func_src_info)
    return ""


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or a cotangent is known to be zero when a custom rule is traced."""
    return isinstance(tangent, SymbolicZero)


def of_shape(aval, shape: tuple[int, ...]) -> Any:
    """An abstract value of another shape, varying over the same axes of `jax.shard_map`."""
    spec = PartitionSpec(*[None] * len(shape))
    return aval.update(shape=shape, sharding=aval.sharding.update(spec=spec))


def abstract(value) -> Any:
    """A leaf as a ShapeDtypeStruct that keeps its sharding and its memory kind.

    jax 0.10 forgets the memory kind of a single-device sharding on a ShapeDtypeStruct, so what
    is on the host is given a mesh of one device.
    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return value
    sharding = None
    if isinstance(value, jax.ShapeDtypeStruct) or is_committed(value):
        sharding = value.sharding
    on_host = memory_space(value) is HOST or getattr(sharding, "memory_kind", "") in _HOST_KINDS
    if on_host and not isinstance(sharding, NamedSharding):
        sharding = host_sharding()
    weak_type = getattr(value, "weak_type", False)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding, weak_type=weak_type)


def host_sharding() -> NamedSharding:
    """Host memory of the first attached device, in a form that tracing keeps."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("host",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")


def output_avals(fun: Callable, args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
    """Abstract outputs of a function, memory space included, and their tree."""
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
    return list(closed.out_avals), jax.tree.structure(shape)


def spec_of(sharding) -> tuple[Any, ...]:
    """The axes of the mesh for each axis of an array; ('?',) where they are not known."""
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ("?",)


def on_several_devices(value) -> bool:
    """Whether an array or tracer is known to lie on a mesh of more than one device."""
    mesh = getattr(getattr(jax.typeof(value), "sharding", None), "mesh", None)
    return getattr(mesh, "size", 1) > 1
