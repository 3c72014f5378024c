"""What programs reach of the rates that a device's maker states."""

import dataclasses

# More of the cache than any kernel needs, where a share of matmuls was measured: the time that
# operands take to come from the cache is in that share.
UNLIMITED = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class AchievableShares:
    """Shares of the stated rates that large kernels reach, and the seconds that starting one takes.

    ``matmul``, ``convolution``, ``memory`` and ``cache`` are fitted to half of the published times
    of training of ``benchmarks/speed/published.py``. Those of the other half were predicted to 11 %
    in the median; what these are shares of was decided with all of them in view. ``cache`` is what
    cores reach of the bytes that they can read of operands from their cache
    (`Target.feeding_seconds`). ``link`` and ``network``, of links between devices of a node and
    between nodes, are fitted to half of the published times of collectives of
    ``benchmarks/speed/collectives.py``; those of the other half were predicted to 14 %.
    ``launch`` is chosen. Plans hardly depend on them: half and twice of those of matmuls, memory
    and the launch change the FLOPs that are recomputed within a budget by at most 0.1 points, and
    those of the plan of the fewest bytes at one more forward pass by at most 5.4
    (``benchmarks/planner/sensitivity.py``).
    """

    matmul: float = 0.93
    convolution: float = 0.71
    memory: float = 0.78
    cache: float = 0.65
    link: float = 0.78
    network: float = 1.0
    launch: float = 2e-6
