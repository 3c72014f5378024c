"""Small optimizer state: 8-bit and bfloat16 moments, bfloat16 parameters without a master copy."""

from jaxmem.optim._moments import SmallState as SmallState, small_moments as small_moments
from jaxmem.optim._params import HalfState as HalfState, half_params as half_params
from jaxmem.optim._quantize import (
    Quantized as Quantized,
    dequantize as dequantize,
    quantize as quantize,
)
from jaxmem.optim._rounding import round_stochastically as round_stochastically
