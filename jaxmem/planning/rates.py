"""How long a kernel takes on a device."""

import dataclasses
from collections.abc import Callable

from jaxmem.program import Kernel, Program
from jaxmem.targets import Target

# Times that arithmetic counts in choosing: it is known better than the time of what moves bytes.
# Chosen (benchmarks/planner/sensitivity.py).
ARITHMETIC_WEIGHT = 6

# Of a matmul's two derivatives one is summed among devices where it is itself, or where it is not;
# each as much as the other (Shoeybi et al. 2019: two sums forward, two backward). A step is taken
# for three times its forward pass, so a sum counts as two thirds. Derived.
_SUMS = 2 / 3


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """``device`` says how fast it multiplies and reads its memory; ``host`` are bytes per second of
    the link to the host (0: nothing is offloaded)."""

    device: Target
    host: float = 0.0

    def seconds(self, kernel: Kernel) -> float:
        """Of one kernel: its arithmetic and its memory traffic one after the other.

        A roofline takes the longer of the two, as if they overlapped wholly, which real kernels
        do not.
        """
        return self._arithmetic(kernel) + self._traffic(kernel) + self.device.shares.launch

    def price(self, kernel: Kernel) -> float:
        """What making a kernel's results again counts where plans are compared, in seconds: its
        arithmetic several times. That is certain, while its traffic is what XLA's fusions leave of
        it; so of plans that are predicted to take about as long, the one of fewer FLOPs. float32
        counts as if it was not rounded: with the rates of TF32 in its place, plans for 4 GiB of
        ResNet50 recompute more for less traffic, and compile to 19 % more than projected."""
        arithmetic = self._arithmetic(kernel, "highest")
        return self._traffic(kernel) + self.device.shares.launch + ARITHMETIC_WEIGHT * arithmetic

    def forward(self, program: Program) -> float:
        """Seconds of one forward pass, those of its loops' iterations among them."""
        return sum(of_each(program, self.seconds))

    def _arithmetic(self, kernel: Kernel, precision: str = "") -> float:
        if not kernel.flops:
            return 0.0
        dtype = kernel.dtype or "float32"
        peak = self.device.flops_per_second(dtype, precision or kernel.precision)
        feeding = self.device.feeding_seconds(kernel.flops, dtype)
        return kernel.flops / (self.device.shares.matmul * peak) + feeding

    def _traffic(self, kernel: Kernel) -> float:
        device = self.device
        read = kernel.moved / (device.shares.memory * device.memory_bandwidth)
        ring = kernel.ring
        if ring is None:
            return read
        sent = device.sending_seconds(kernel.sent_bytes, ring.devices, ring.stride)
        return read + sent + sums_seconds(device, kernel.summed_bytes, ring.devices, ring.stride)


def sums_seconds(device: Target, sent: float, device_count: int, stride: int) -> float:
    """What the sums of matmuls among devices take of a forward pass."""
    return _SUMS * device.sending_seconds(sent, device_count, stride)


def waiting_weight(seconds: float, price: float) -> float:
    """What a second of waiting for copies counts in choosing: as much as one of the work that the
    copies spare, which takes so many seconds and has such a price."""
    return price / seconds if seconds else ARITHMETIC_WEIGHT


def of_each(program: Program, rate: Callable[[Kernel], float]) -> list[float]:
    """A rate of each kernel; of a scan, that of all its iterations."""
    found = [rate(kernel) for kernel in program.kernels]
    for number in program.loops:
        loop = program.operation_of(number)
        assert loop.body is not None
        found[number] = loop.length * sum(of_each(loop.body, rate))
    return found
