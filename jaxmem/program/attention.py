"""What JAX's operation for attention costs, which a kernel of the device's own computes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Widths of keys and of values by which a score is multiplied: two matmuls, and five in the
# derivative, which makes the scores again (Dao 2023, FlashAttention-2).
_FORWARD, _DERIVATIVE = (1, 1), (3, 2)


def _names(way: str) -> frozenset[str]:
    kinds = (f"dot_product_attention_{kind}{way}" for kind in ("", "fp8_"))
    return frozenset(f"{name}{end}" for name in kinds for end in ("", "_wrapper"))


ATTENTION_DERIVATIVES = _names("bwd")
ATTENTION = _names("fwd") | ATTENTION_DERIVATIVES


def attention_flops(name: str, operands: Sequence[Any], parameters: Mapping[str, Any]) -> int:
    """FLOPs of one of `ATTENTION`, from its name, its abstract operands and parameters. For scores
    that a causal mask leaves out such a kernel does no work."""
    query, key, value = (operand.shape for operand in operands[:3])
    batch, *rest, width = query
    # [batch, length, heads, width], or in layout 1 [batch, heads, length, width]
    scores = batch * math.prod(rest) * key[1 + parameters["layout"]]
    of_keys, of_values = _DERIVATIVE if name in ATTENTION_DERIVATIVES else _FORWARD
    total = 2 * scores * (of_keys * width + of_values * value[-1])
    return total // (2 if "CAUSAL" in str(parameters.get("mask_type")) else 1)
