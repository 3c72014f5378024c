"""What a step is compiled for: an accelerator that need not be there, or the attached one."""

import dataclasses
from typing import ClassVar

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import JaxmemError
from jaxmem.targets.links import Group, Links, sent_in_ring
from jaxmem.targets.peaks import Peaks, passes_of
from jaxmem.targets.rules import Rules
from jaxmem.targets.shares import AchievableShares

_SHARES = AchievableShares()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """An accelerator to compile for, present or not. Each family of targets has a subclass.

    `jaxmem.target` gives the known ones; `dataclasses.replace` makes another from one of them:

    >>> import dataclasses, jaxmem
    >>> half = dataclasses.replace(
    ...     jaxmem.target("a100-40gb"), name="a100-half", memory_bytes=20 * 2**30)

    Rates are FLOPs per second (a multiply-add counts 2) and bytes per second; sizes are bytes.
    ``shares`` are what programs reach of the rates.
    ``count`` of the kind are compiled for together, as one SPMD program. ``time_error`` is how
    far predicted step times were from published ones of such a device (0.2: by a fifth, in the
    median of ``benchmarks/speed/published.py``); None: there are none. ``calibrated`` is the day on
    which `jaxmem.calibrate` measured rates, shares and that error on this machine; empty: they are
    the maker's figures and jaxmem's own.
    """

    family: ClassVar[str]  # the name of an entry of `jaxmem.targets.FAMILIES`

    name: str
    description: str
    memory_bytes: int
    memory_bandwidth: float
    peaks: Peaks
    host_bandwidth: float
    links: Links
    source: str
    shares: AchievableShares = _SHARES
    count: int = 1
    time_error: float | None = None
    calibrated: str = ""

    def __post_init__(self):
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise JaxmemError(
                f"A target is at least one device; {self.name!r} was asked for with "
                f"count={self.count!r}. Pass an int of 1 or more."
            )

    def of_count(self, count: int) -> "Target":
        """So many of them, which run the step together."""
        return dataclasses.replace(self, count=count)

    def of_topology(self, topology: str) -> "Target":
        """A slice of that shape.

        Raises:
            JaxmemError: there is none.
        """
        raise JaxmemError(
            f"{self.description} has no topology; got topology={topology!r}. Pass count= alone."
        )

    @property
    def device_kind(self) -> str:
        """What JAX calls the attached one."""
        return self.description

    @property
    def known(self) -> "Target":
        """The target whose figures are planned with."""
        return self

    @property
    def kind(self) -> str:
        """The kind of device, in a sentence."""
        return self.description

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device that a step can have."""
        return self.memory_bytes

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes in bfloat16; XLA does in float32 what it does not."""
        return True

    @property
    def rules(self) -> Rules:
        """How its compiler fuses and lays out."""
        return Rules(computes_bfloat16="all" if self.has_bfloat16 else "none")

    @property
    def checked(self) -> str:
        """How far predicted times may be off, in words."""
        if self.time_error is None:
            return "unchecked"
        if self.calibrated:
            return f"±{self.time_error:.0%}, measured on your {self.description}"
        return f"±{self.time_error:.0%}, the median of published step times"

    def flops_per_second(self, dtype, precision: str = "default") -> float:
        """Peak rate of matmuls and convolutions.

        Args:
            dtype: of the operands, or its name.
            precision: that of `jax.lax.Precision`, which says how float32 is multiplied
                (``"default"``, ``"high"`` or ``"highest"``), or a type and a number of passes
                (``"bfloat16x3"``), as of a `jax.lax.DotAlgorithmPreset`.
        """
        if str(dtype) not in ("float32", "complex64"):
            return self.peaks.of(dtype)
        if precision in ("default", "high"):
            return self._rounded_float32(precision)
        if precision == "highest":
            return self.peaks.float32
        kind, passes = passes_of(precision)
        return (getattr(self.peaks, kind) or self.peaks.float32) / passes

    def _rounded_float32(self, precision: str) -> float:
        """The rate of float32 at the precisions that may round it."""
        return self.peaks.float32

    def sending_seconds(self, sent: float, device_count: int, stride: int = 1) -> float:
        """How long a device takes to be sent so many bytes by others, in a group of
        ``device_count``, every ``stride``-th one."""
        links = self.links.reached(self.shares)
        return sent / links.bandwidth_in(links.ring(device_count, stride))

    def collective_seconds(self, kind: str, size: int, group: Group) -> float:
        """How long a collective of a compiled program takes.

        Args:
            kind: ``"all-reduce"`` or another one, as XLA calls it.
            size: bytes, counted as in `jaxmem.reports.xla.schedule.Collectives`.
            group: who takes part.
        """
        sent = sent_in_ring(kind, size, group.devices)
        rate = self.links.reached(self.shares).bandwidth_in(group)
        return sent / rate + self.shares.launch

    def feeding_seconds(self, flops: float, dtype) -> float:
        """How much longer a matmul or a convolution of so many FLOPs takes because its operands
        come to the cores from a cache."""
        return 0.0

    def bytes_beside_rows(self, table: int, moved: int, piece: int) -> int:
        """Bytes that are moved beside those of rows of a table, which lie here and there in pieces
        of so many bytes."""
        return 0

    def convolving(
        self, window: tuple[int, ...], channels_last: bool, dtype, precision: str = "default"
    ) -> tuple[float, float]:
        """Of a convolution the share of its products that is computed, and how often its arrays are
        moved beside being read and written. ``window`` are the lengths that slide along the
        operand, one element at a time; empty: it slides otherwise."""
        return 1.0, 0.0

    def share_of(self, rows: int, columns: int, depth: int, batch: int = 1) -> float:
        """The share of the device that a matmul of that size has work for: ``batch`` products of
        ``rows`` by ``depth`` and ``depth`` by ``columns``."""
        return 1.0

    def __str__(self):
        many = f"{self.count} x " if self.count > 1 else ""
        return (
            f"{self.name}: {many}{self.description}, {format_bytes(self.memory_bytes)} "
            f"({format_bytes(self.usable_bytes)} usable)"
        )


@dataclasses.dataclass(frozen=True)
class LocalDevice:
    """The attached device, compiled for by JAX's own backend.

    ``known`` is the target whose figures it has, if any.
    """

    platform: str
    description: str
    memory_bytes: int  # 0: not known
    known: Target | None = None
    name: str = "local"
    count: int = 1

    @property
    def usable_bytes(self) -> int:
        """Bytes that its allocator may hand out."""
        return self.memory_bytes

    def __str__(self):
        return f"local: {self.description}, {format_bytes(self.memory_bytes)}"
