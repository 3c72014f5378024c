"""What the devices of a mesh send each other in a forward pass."""

from collections.abc import Callable

from jaxmem.program import Kernel, Program


def gathered_bytes(program: Program) -> int:
    """Bytes of what devices are sent before it is read, whole, in one forward pass."""

    def of(kernel: Kernel) -> int:
        devices = kernel.ring.devices if kernel.ring else 1
        return kernel.sent_bytes * devices // max(devices - 1, 1)

    return _over_forward(program, of)


def summed_bytes(program: Program) -> int:
    """Bytes that a device sends where results of matmuls are summed, in one forward pass."""
    return _over_forward(program, lambda kernel: kernel.summed_bytes)


def _over_forward(program: Program, of: Callable[[Kernel], int]) -> int:
    """The sum over all kernels of a forward pass, those of a scan as often as it runs them."""
    loops = map(program.operation_of, program.loops)
    inside = sum(loop.length * _over_forward(loop.body, of) for loop in loops if loop.body)
    return inside + sum(map(of, program.kernels))
