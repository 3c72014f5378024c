"""The figures of a TPU, of those that are known, and of slices of them."""

import csv
import dataclasses
import functools
import importlib.resources
import math

from jaxmem.ground.errors import JaxmemError
from jaxmem.targets.accelerator import Target
from jaxmem.targets.links import TURNS, Group, Links, sent_in_ring
from jaxmem.targets.peaks import Peaks
from jaxmem.targets.rules import LoopRules, Rules

_CHIPS_OF_A_HOST = {2: (2, 2), 3: (2, 2, 1)}  # a topology is of whole hosts, or of one chip

# Seconds from a chip to the next. Measured by others: How to Scale Your Model (Austin et al. 2025).
_HOP = 1e-6

# Found in what libtpu 0.0.42 makes of GPT-2, ViT, EfficientNet, DenseNet and ResNet50 for a v5e.
RULES = Rules(
    fuses_operands=True,
    writes_concatenations=True,
    writes_gathered=True,
    blocks_of_rows=False,
    copies_groups=False,
    channels_last=None,
    tile=(8, 128),
    picks_poolings=False,
    loops=LoopRules(row_major=False, hosts_in_regions=False),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuTarget(Target):
    """A device of a TPU slice: a chip, or one of its two cores where JAX takes these for devices.

    ``topology`` is the slice's shape in chips (``"4x8"``, ``"2x2x4"``); ``count`` follows from it.
    ``memory_bytes`` is what the hardware has, ``usable`` what XLA's compiler hands out of it.
    """

    family = "tpu"

    dimensions: int
    cores: int
    usable: int
    topology: str
    jax_kind: str

    @property
    def device_kind(self) -> str:
        """What JAX calls the attached one."""
        return self.jax_kind

    @property
    def rules(self) -> Rules:
        """How its compiler fuses and lays out."""
        return RULES

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device that a step can have: the limit of XLA's compiler."""
        return self.usable

    @property
    def chips(self) -> tuple[int, ...]:
        """Chips along each dimension of the slice."""
        return tuple(map(int, self.topology.split("x")))

    @property
    def is_single(self) -> bool:
        """Whether the slice is one chip."""
        return math.prod(self.chips) == 1

    def _rounded_float32(self, precision: str) -> float:
        """At JAX's default precision a TPU rounds float32 operands to bfloat16, so they are as
        fast; at the high one they take three passes."""
        return self.peaks.bfloat16 / (3 if precision == "high" else 1)

    def collective_seconds(self, kind: str, size: int, group: Group) -> float:
        """In a ring of links, both ways around it at once (How to Scale Your Model, Austin et al.
        2025)."""
        rate = self.shares.link * self.links.inside
        if kind == "collective-permute":  # one way, to the next
            return 2 * size / rate + _HOP
        if kind == "all-to-all":  # what is for a chip passes all between, a quarter of the ring
            return size * group.devices / 4 / rate + group.devices // 2 * _HOP
        sent = sent_in_ring(kind, size, group.devices)
        return sent / rate + TURNS[kind] * (group.devices // 2) * _HOP

    def of_count(self, count: int) -> "TpuTarget":
        """The slice of so many devices that is nearest to a cube, or one device of a chip.

        Raises:
            JaxmemError: no slice has so many; those that are nearest are told.
        """
        one = "x".join("1" * self.dimensions)
        shapes = {self.cores * math.prod(shape): shape for shape in _shapes(self.dimensions)}
        if count in (1, self.cores):
            return dataclasses.replace(self, topology=one, count=count)
        if count not in shapes:
            known = sorted({1, self.cores, *shapes}, key=lambda known: abs(known - count))
            near = ", ".join(map(str, sorted(known[:3])))
            raise JaxmemError(
                f"No slice of {self.description} that jaxmem makes from a count has {count} "
                f"devices; the nearest have {near}. topology= names any other."
            )
        return self.of_topology("x".join(map(str, shapes[count])))

    def of_topology(self, topology: str) -> "TpuTarget":
        """The slice of that shape.

        Raises:
            JaxmemError: it is none of this generation.
        """
        parts = topology.split("x") if isinstance(topology, str) else []
        shape = [int(part) for part in parts if part.isdecimal()]
        host = _CHIPS_OF_A_HOST[self.dimensions]
        whole = all(chips and chips % own == 0 for chips, own in zip(shape, host, strict=False))
        right = len(shape) == len(parts) == self.dimensions
        if not right or not (whole or set(shape) == {1}):
            one, many = ("x".join(map(str, each)) for each in ([1] * self.dimensions, host))
            raise JaxmemError(
                f"{topology!r} is no topology of {self.description}: its slices have "
                f"{self.dimensions} dimensions, and are of one chip ({one!r}) or of whole hosts of "
                f"{many} chips ('{'x'.join(map(str, _shapes(self.dimensions)[3]))}')."
            )
        return dataclasses.replace(self, topology=topology, count=math.prod(shape) * self.cores)

    def __str__(self):
        shape = "" if self.is_single else f", {self.topology} chips"
        return super().__str__() + shape


def _shapes(dimensions: int) -> list[tuple[int, ...]]:
    """One shape of a slice for each power of two of hosts: the smallest side doubles."""
    shapes = [_CHIPS_OF_A_HOST[dimensions]]
    while math.prod(shapes[-1]) < 2**13:
        shape = list(shapes[-1])
        shape[max(range(dimensions), key=lambda axis: (-shape[axis], axis))] *= 2
        shapes.append(tuple(shape))
    return shapes


@functools.cache
def known_tpus() -> dict[str, Target]:
    """The TPUs of ``targets.csv``, one chip of each, by name."""
    text = importlib.resources.files("jaxmem.targets.tpu").joinpath("targets.csv").read_text()
    return {row["name"]: _from_row(row) for row in csv.DictReader(text.splitlines())}


def _from_row(row: dict[str, str]) -> TpuTarget:
    dimensions, cores = int(row["dimensions"]), int(row["cores"])
    flops = float(row["bf16_tflops"]) * 1e12
    links = float(row["device_link_bytes_per_s"])
    return TpuTarget(
        name=row["name"],
        description=row["description"],
        dimensions=dimensions,
        cores=cores,
        topology="x".join("1" * dimensions),
        jax_kind=row["jax_kind"],
        memory_bytes=int(row["hbm_bytes"]),
        # As the compiler's own message rounds it, down to its next MiB.
        usable=int(float(row["usable_gib"]) * 1024) * 2**20,
        memory_bandwidth=float(row["memory_bandwidth_bytes_per_s"]),
        # At the highest precision float32 takes six passes in bfloat16. float16 is converted.
        peaks=Peaks(
            float32=flops / 6,
            bfloat16=flops,
            float16=flops,
            int8=float(row["int8_tops"]) * 1e12,
        ),
        host_bandwidth=float(row["host_link_bytes_per_s"]),
        # Every chip of a slice is linked with its neighbours.
        links=Links(inside=links, network=links, kind="ICI"),
        source=row["source"],
    )
