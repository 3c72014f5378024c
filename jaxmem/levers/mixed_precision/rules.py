"""The rules of autocast: which operations compute in the shorter dtype, and which in float32."""

import difflib
import types
from collections.abc import Mapping

from jaxmem import jaxprs
from jaxmem.ground.errors import JaxmemError

COMPUTE = "conv_general_dilated dot_general ragged_dot_general"


_FOLLOW = """
    abs add add_any and argmax argmin asinh atan broadcast_in_dim cbrt ceil clamp concatenate copy
    copy_p cos cummax cummin div dynamic_slice dynamic_update_slice eq eq_to erf erfc expand_dims
    floor gather ge gt is_finite le le_to logistic lt lt_to max min mul name ne neg one_minus_square
    optimization_barrier pad reduce_max reduce_min rem reshape rev round scatter select_and_scatter
    select_and_scatter_add select_n sharding_constraint sign sin slice split squeeze stop_gradient
    sub tanh top_k transpose reduce_window_max reduce_window_min convert_element_type
"""


_FLOAT32 = """
    acos acosh asin atanh cosh cumlogsumexp cumprod cumsum digamma erf_inv exp exp2
    expm1 integer_pow lgamma log log1p pow reduce_prod reduce_sum reduce_window_sum rsqrt
    scatter-add scatter_add sinh sqrt square tan
"""
RULES: Mapping[str, str] = types.MappingProxyType(
    dict.fromkeys(COMPUTE.split(), "compute")
    | dict.fromkeys(_FLOAT32.split(), "float32")
    | dict.fromkeys(_FOLLOW.split(), "follow")
)


"""What `autocast` does with each operation, by the name it has in a jaxpr."""


# What these make of a stored array is that array in another shape.
LAYOUT = frozenset("expand_dims reshape rev slice squeeze stop_gradient transpose".split())


SEPARATE = frozenset(["optimization_barrier"])  # each operand for itself


def check_rules(rules: Mapping[str, str]) -> Mapping[str, str]:
    names = {*RULES, *(jaxprs.primitive_names() if rules else ())}
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
        if rule == "compute" and name not in COMPUTE.split():
            raise JaxmemError(
                f"rules= gives {name!r} the rule 'compute', which is for matmuls and convolutions "
                f"({', '.join(COMPUTE.split())}). Use 'follow': in low precision where its "
                "operands are."
            )
    return rules
