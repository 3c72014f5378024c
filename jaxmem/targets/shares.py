"""What programs reach of the rates that a device's maker states."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class AchievableShares:
    """Shares of the stated rates that large kernels reach, and the seconds that starting one takes.

    Chosen, until ``benchmarks/gpu.py`` has run on one. Plans hardly depend on them: half and twice
    of those of matmuls and memory change the FLOPs that are recomputed by at most 0.4 points, of
    the launch by 0.9 (``benchmarks/planner/sensitivity.py``).
    """

    matmul: float = 0.6
    convolution: float = 0.6
    memory: float = 0.9
    link: float = 0.8
    launch: float = 2e-6
