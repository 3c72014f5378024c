"""What programs reach of the rates that a device's maker states."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the stated rates that large kernels reach, and the seconds that starting one takes.

    The defaults were chosen; those of a family are fitted by ``benchmarks/speed/published.py``.
    """

    matmul: float = 0.6
    convolution: float = 0.6
    memory: float = 0.9
    link: float = 0.8
    launch: float = 2e-6
