"""What JAX's operation for attention costs, which a kernel of the device's own computes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Widths of keys and of values by which a score is multiplied. Derived: two matmuls, and five in the
# derivative, which makes the scores again (Dao 2023, FlashAttention-2).
_FORWARD, _DERIVATIVE = (1, 1), (3, 2)


def _names(way: str) -> frozenset[str]:
    kinds = (f"dot_product_attention_{kind}{way}" for kind in ("", "fp8_"))
    return frozenset(f"{name}{end}" for name in kinds for end in ("", "_wrapper"))


ATTENTION_DERIVATIVES = _names("bwd")
ATTENTION = _names("fwd") | ATTENTION_DERIVATIVES


def matmuls_of_scores(derivative: bool) -> int:
    """How often a kernel multiplies scores."""
    return sum(_DERIVATIVE if derivative else _FORWARD)


def computed_scores(scores: int, keys: int, causal: bool, window: int) -> int:
    """How many of the scores of queries with so many ``keys`` a kernel computes: not those that a
    causal mask leaves out, nor those that are farther away than a ``window`` (0: there is none)."""
    computed = scores // 2 if causal else scores
    return min(computed, scores * window // max(keys, 1)) if window else computed


def flops_of_scores(scores: int, width: int, value_width: int, derivative: bool) -> int:
    """FLOPs of a kernel that computes so many scores of keys and values of these widths, or takes
    their ``derivative``."""
    of_keys, of_values = _DERIVATIVE if derivative else _FORWARD
    return 2 * scores * (of_keys * width + of_values * value_width)


def attention_flops(name: str, operands: Sequence[Any], parameters: Mapping[str, Any]) -> int:
    """FLOPs of one of `ATTENTION`, from its name, its abstract operands and parameters."""
    query, key, value = (operand.shape for operand in operands[:3])
    batch, *rest, width = query
    # [batch, length, heads, width], or in layout 1 [batch, heads, length, width]
    keys = key[1 + parameters["layout"]]
    causal = "CAUSAL" in str(parameters.get("mask_type"))
    window = parameters.get("sliding_window_length") or 0
    scores = computed_scores(batch * math.prod(rest) * keys, keys, causal, window)
    return flops_of_scores(scores, width, value[-1], name in ATTENTION_DERIVATIVES)
