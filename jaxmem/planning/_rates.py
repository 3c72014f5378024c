"""How long a kernel takes on a GPU."""

import dataclasses

from jaxmem.program import Kernel

# What large matmuls and plain copies reach of the rates that a GPU's maker states.
_ARITHMETIC = 0.6
_BANDWIDTH = 0.9
_LAUNCH = 2e-6  # seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """FLOPs per second of matmuls in full and in half precision, and bytes per second of memory.

    The rates of an H200 by default; a plan hardly depends on more than their ratio.
    """

    single: float = 67e12
    half: float = 989e12
    bandwidth: float = 4.8e12

    def seconds(self, kernel: Kernel) -> float:
        """Of one kernel: its arithmetic and its memory traffic one after the other.

        A roofline takes the longer of the two, as if they overlapped wholly, which real kernels
        do not; the sum also prefers fewer FLOPs among plans of equal traffic.
        """
        half = kernel.dtype.startswith(("bfloat16", "float16", "float8"))
        arithmetic = kernel.flops / (_ARITHMETIC * (self.half if half else self.single))
        return arithmetic + kernel.moved / (_BANDWIDTH * self.bandwidth) + _LAUNCH
