"""Small optimizer state: 8-bit and bfloat16 moments, bfloat16 parameters without a master copy."""

from jaxmem.optim.codecs.eight_bits import (
    Quantized as Quantized,
    dequantize as dequantize,
    quantize as quantize,
)
from jaxmem.optim.codecs.rounding import round_stochastically as round_stochastically
from jaxmem.optim.moments import SmallState as SmallState, small_moments as small_moments
from jaxmem.optim.parameters import HalfState as HalfState, half_params as half_params
