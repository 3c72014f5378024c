"""What one operation costs: FLOPs of its matmuls and convolutions, and whether XLA fuses it."""

import dataclasses
import math
import weakref
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.jaxprs.custom_jvp import called_by
from jaxmem.jaxprs.custom_vjp import form_of, is_linear, results_of, traced_rules
from jaxmem.jaxprs.equations import CUSTOM_VJPS, called_by_rule, inner_jaxprs, operation_of
from jaxmem.jaxprs.expansion import EXPANDED, expansion
from jaxmem.jaxprs.flat import FlatStep
from jaxmem.jaxprs.linearity import has_linear_rule
from jaxmem.program.attention import ATTENTION, attention_flops
from jaxmem.program.derivatives import DERIVATIVES

# XLA fuses these into their consumers or producers: recomputing one costs no FLOPs worth counting
# and no trip to memory of its own. What is not listed here (matmul, convolution, gather, sort,
# scan, kernels, whatever comes new) is taken to be dear.
_FUSED = frozenset(
    """
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type
    broadcast_in_dim cbrt ceil clamp complex concatenate conj convert_element_type copy copy_p cos
    cosh pad device_put digamma div eq eq_to erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt
    imag integer_pow iota is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul
    name ne neg mesh_cast nextafter not one_minus_square optimization_barrier or population_count
    polynomial pow pvary real reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum rem
    reshape reshard rev round row_major rsqrt select_n sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square squeeze
    stop_gradient sub tan tanh transpose xor
    """.split()
)
# The derivative of these reads none of their operands or results.
_LINEAR = frozenset(
    """
    add add_any broadcast_in_dim complex concatenate conj convert_element_type copy copy_p cumsum
    device_put expand_dims fft imag iota mesh_cast name neg optimization_barrier pad pvary real
    reduce_sum reduce_window_sum reshape reshard rev row_major sharding_constraint slice split
    squeeze sub transpose
    """.split()
)
# JAX takes no derivative of these (of `sign` but for that of complex numbers): what they make
# depends on nothing, and what they are made of has no cotangent from them.
_FLAT = frozenset("bitcast_convert_type ceil floor round sign stop_gradient".split())
_PRECISIONS = ("default", "high", "highest")
# The presets of `jax.lax.DotAlgorithmPreset` that say how float32 is multiplied.
_ALGORITHMS = {
    "BF16_BF16_BF16": "bfloat16",
    "BF16_BF16_F32": "bfloat16",
    "BF16_BF16_F32_X3": "bfloat16x3",
    "BF16_BF16_F32_X6": "bfloat16x6",
    "BF16_BF16_F32_X9": "bfloat16x9",
    "F16_F16_F16": "float16",
    "F16_F16_F32": "float16",
    "F32_F32_F32": "highest",
    "TF32_TF32_F32": "tfloat32",
    "TF32_TF32_F32_X3": "tfloat32x3",
}
CONTRACTIONS = frozenset({"dot_general", "conv_general_dilated"})
# The derivative of these reads, for one operand, the other.
_BILINEAR = frozenset({"mul", *CONTRACTIONS})
# The derivative of these reads their result alone.
_BY_RESULT = frozenset("cbrt erf_inv exp exp2 expm1 logistic rsqrt sqrt tan tanh".split())
# Rules that call one another, each other than the one before. Chosen: three functions may; on ever
# other shapes a rule calls itself for ever, or for long.
_NESTED = 3
# Whether a `jax.custom_vjp` is fused, by the program of its function.
_judged: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, slots=True)
class OperandAxes:
    """Of an operand of a matmul, the axes that are summed, and those that the result has, but for
    the batch's."""

    summed: tuple[int, ...]
    kept: tuple[int, ...]


def is_fused(equation) -> bool:
    """Whether XLA computes the operation inside its neighbours' kernels, and a plan may do so too.

    A fused operation is copied into every kernel that reads it, and each copy is differentiated
    with its part of the cotangent. The parts add up to what plain JAX has only where the rule of
    the derivative is linear in the cotangent. A `jax.custom_vjp` need not be (gradient clipping,
    quantisation), so none of them is ever copied; nor is `jax.lax.reduce_precision`, which rounds
    its cotangent. (So does a cast to a shorter dtype; its parts differ from their sum in the last
    bits of that dtype, as they do where XLA fuses.)
    """
    name = operation_of(equation)
    if name in CUSTOM_VJPS:
        return _is_fused_by_rules(equation)
    if name in ("custom_jvp_call", "jit", "pjit"):
        inside = all(is_fused(inner) for jaxpr in _forward(equation) for inner in jaxpr.eqns)
        return inside and (name != "custom_jvp_call" or has_linear_rule(equation))
    if name in _FUSED or is_product(equation) or _counts_bits(equation):
        return True
    return _own_cost(equation) == 0


def _is_fused_by_rules(equation) -> bool:
    """Whether all that a `jax.custom_vjp` runs is fused, forward and backward; and all that it
    calls, whose rules are those of second derivatives."""
    key = called_by(equation)
    if key not in _judged:
        _judged[key] = _is_fused_within(equation, frozenset())
    return _judged[key]


def _is_fused_within(equation, judged: Set[tuple]) -> bool:
    """That, of one that others call, which are being judged: a rule often calls its own function,
    to have its result."""
    rules = traced_rules(equation)
    if rules is None:
        return False
    same = form_of(rules)
    if same in judged:
        return True
    if len(judged) == _NESTED:
        return False
    if not all(is_fused(step.equation) for step in rules.flat.steps) or not is_linear(rules):
        return False
    return all(_is_fused_within(one, judged | {same}) for one in rules.rules)


def _counts_bits(equation) -> bool:
    """Whether it draws random bits by Threefry, which makes each of them of its own number (Salmon
    et al. 2011): XLA writes what becomes of them, a mask of a byte each."""
    return operation_of(equation) == "random_bits" and (
        str(equation.invars[0].aval.dtype) == "key<fry>"
    )


def _own_cost(equation) -> int | None:
    """What a derivative of our own says that an operation costs."""
    costs = (one.cost(equation) for one in DERIVATIVES)
    return next((cost for cost in costs if cost is not None), None)


def calls(equation) -> tuple[str, ...]:
    """The primitives inside of a call that is fused."""
    if operation_of(equation) in CUSTOM_VJPS:
        rules = traced_rules(equation)
        inner = results_of(rules) if rules else []
    elif operation_of(equation) in ("custom_jvp_call", "jit", "pjit"):
        inner = [one for jaxpr in _forward(equation) for one in jaxpr.eqns]
    else:
        inner = []
    return tuple(name for one in inner for name in (operation_of(one), *calls(one)))


def is_known(step: FlatStep) -> bool:
    """Whether what its derivative reads is known here (`derivative_reads`); of others (a sort, a
    scatter, a Cholesky decomposition, what comes new) JAX has to be asked."""
    return derivative_reads(step) != "operands" or is_fused(step.equation)


def contraction_flops(name: str, operands, result, parameters) -> int:
    """FLOPs of one `dot_general` or `conv_general_dilated`, from its abstract values; a complex
    product is four real ones."""
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        taps = math.prod(operands[0].shape[axis] for axis in contracted)
    else:
        kernel = operands[1].shape
        out_features = kernel[parameters["dimension_numbers"].rhs_spec[0]]
        taps = math.prod(kernel) // max(out_features, 1)
    parts = 4 if jnp.issubdtype(result.dtype, jnp.complexfloating) else 1
    return 2 * parts * math.prod(result.shape) * taps


def derivative_reads(step: FlatStep) -> str:
    """What the operation's derivative reads of the values of a program: ``"nothing"``, its
    ``"result"``, its ``"operands"``; all of them but the first (``"indices"``), that one alone
    (``"predicate"``), the second and, where that has a cotangent, the first (``"divisor"``), or for
    each that has a cotangent the other (``"other"``). ``"flat"``: there is no derivative. Literals
    are operands, and no values."""
    name = step.primitive
    literal = [not isinstance(operand, int) for operand in step.inputs]
    if name in _FLAT and (name != "sign" or _is_real(step)):
        return "flat"
    if name in ("gather", "dynamic_slice"):
        return "nothing" if literal[0] else "indices"
    if name == "dynamic_update_slice":
        return "places"
    if name == "select_n":
        return "nothing" if literal[0] else "predicate"
    if name == "div":
        return "nothing" if literal[1] else "operands" if literal[0] else "divisor"
    if name in _BILINEAR:
        return "nothing" if any(literal) else "other"
    return "nothing" if name in _LINEAR else "result" if name in _BY_RESULT else "operands"


def _is_real(step: FlatStep) -> bool:
    return not jnp.issubdtype(step.equation.outvars[0].aval.dtype, jnp.complexfloating)


def is_batched(equation) -> bool:
    """Whether it is a matmul with batch dimensions."""
    if operation_of(equation) != "dot_general":
        return False
    _, (batch, _) = equation.params["dimension_numbers"]
    return bool(batch)


def name_of(equation) -> str:
    """What an operation is to XLA: a matmul that sums nothing is a product, and what moves no axes
    but those of one element changes no more than the shape."""
    if is_product(equation):
        return "mul"
    if equation.primitive.name == "transpose":
        shape = equation.invars[0].aval.shape
        moved = [axis for axis in equation.params["permutation"] if shape[axis] != 1]
        return "reshape" if moved == sorted(moved) else "transpose"
    return equation.primitive.name


def is_product(equation) -> bool:
    """Whether it is a matmul with batch dimensions that sums nothing: XLA multiplies element by
    element, and sums so in the derivative. (That of an outer product is a matmul.)"""
    if not is_batched(equation):
        return False
    (summed, _), _ = equation.params["dimension_numbers"]
    return not summed


def is_of_vectors(equation) -> bool:
    """Whether it is a matmul with batch dimensions of which one operand has no others of its own:
    of one row, or one column, each time."""
    if not is_batched(equation) or is_product(equation):
        return False
    (summed, _), (batch, _) = equation.params["dimension_numbers"]
    ranks = [len(operand.aval.shape) for operand in equation.invars]
    return min(ranks) == len(summed) + len(batch)


def overlaps(equation) -> bool:
    """Whether the windows of a pooling overlap."""
    if not equation.primitive.name.startswith("reduce_window"):
        return False
    windows, dilations, strides = (
        equation.params[f"window_{name}"] for name in ("dimensions", "dilation", "strides")
    )
    return any(
        (length - 1) * dilation >= stride
        for length, dilation, stride in zip(windows, dilations, strides, strict=True)
    )


def slides(equation) -> frozenset[int]:
    """The axes of a convolution's result that its windows slide along."""
    if operation_of(equation) != "conv_general_dilated":
        return frozenset()
    return frozenset(equation.params["dimension_numbers"].out_spec[2:])


def operand_axes(equation) -> tuple[OperandAxes, ...]:
    """Those of a matmul; of other operations none."""
    if equation.primitive.name != "dot_general":
        return ()
    summed, batch = equation.params["dimension_numbers"]
    return tuple(
        OperandAxes(tuple(own), tuple({*range(variable.aval.ndim)} - {*own, *shared}))
        for variable, own, shared in zip(equation.invars, summed, batch, strict=True)
    )


def precision_of(parameters) -> str:
    """How exactly a matmul or a convolution multiplies float32: ``"default"``, ``"high"`` or
    ``"highest"`` (`jax.lax.Precision`), or the type and the passes that a
    `jax.lax.DotAlgorithmPreset` names (``"bfloat16x3"``)."""
    asked = parameters.get("precision")
    if isinstance(asked, jax.lax.DotAlgorithmPreset):
        return _ALGORITHMS.get(asked.name, "default")
    both = asked if isinstance(asked, tuple) else (asked,)
    names = [one.name.lower() for one in both if isinstance(one, jax.lax.Precision)]
    return max(names, key=_PRECISIONS.index, default="default")


def flops(equation) -> int:
    """FLOPs of the matmuls and convolutions of one equation (a multiply-add counts 2).

    A scan counts its body once per iteration, a cond its dearest branch, a while loop its body
    once (its length is not known), a Pallas kernel what its ``cost_estimate`` says, or its body
    once for each place of its grid, one with a derivative of our own what that says.
    """
    name, own = operation_of(equation), _own_cost(equation)
    if is_product(equation):
        return 0
    if own is not None:
        return own
    if name in CONTRACTIONS:
        avals = [variable.aval for variable in equation.invars]
        return contraction_flops(name, avals, equation.outvars[0].aval, equation.params)
    if name in EXPANDED:
        return sum(map(flops, expansion(equation).jaxpr.eqns))
    if name in ATTENTION:
        avals = [variable.aval for variable in equation.invars]
        return attention_flops(name, avals, equation.params)
    bodies = [sum(map(flops, jaxpr.eqns)) for jaxpr in _forward(equation)]
    if name == "cond":
        return max(bodies, default=0)
    if name == "pallas_call":
        estimate = equation.params.get("cost_estimate")
        grid = equation.params["grid_mapping"].grid
        places = math.prod(size for size in grid if isinstance(size, int))
        return estimate.flops if estimate else sum(bodies) * places
    return sum(bodies) * equation.params.get("length", 1 if bodies else 0)


def _forward(equation) -> list:
    """The jaxprs of an equation that a plain evaluation runs."""
    called = called_by_rule(equation)
    return [called.jaxpr] if called else inner_jaxprs(equation)
