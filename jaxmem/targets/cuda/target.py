"""The figures of an NVIDIA GPU, and of those that are known."""

import csv
import dataclasses
import functools
import importlib.resources
import math

import jax
import jaxlib.version

from jaxmem.targets.accelerator import Target
from jaxmem.targets.cuda import nccl
from jaxmem.targets.cuda.cycles import LAUNCH, dear_operations
from jaxmem.targets.cuda.splitting import Splitting
from jaxmem.targets.links import Group, Links
from jaxmem.targets.peaks import Peaks, product_bytes
from jaxmem.targets.rules import Cycles, ElementRules, LoopRules, Rules

# What a CUDA context, its kernels and cuDNN take before the first array. Measured by others: about
# half a GiB on every GPU of the table.
CONTEXT_BYTES = 512 * 2**20

# The tile of a result that one core computes at a time, as most of cuBLAS's kernels for large
# matmuls have it, and the shortest sum that is split among cores. Chosen: plans do not depend on
# them. With half of both, reports' times of perceptrons of 256 to 4,096 units stay within 1 %. With
# twice, matmuls of few tiles take up to 2.9 times as long: libraries have smaller tiles for these.
_TILE, _SPLIT = 128, 256

# Bytes that a core reads in a cycle from the L2 cache. Measured by others (Jia et al. 2018,
# "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking").
_CACHE_BYTES = 64
# Bytes that are read of memory at once. Derived (NVIDIA, CUDA C++ Best Practices Guide, 10.2.1).
_SECTOR = 32
# Of the products of a convolution of 3 by 3, those that the fastest algorithm computes. Derived:
# Lavin and Gray 2016 have 16 in place of 36. Libraries have it for float32 and float16, where units
# for matrices are no faster: published times of an RTX 3090, whose TF32 is as fast as its float32,
# are nearer with it.
_FEWER_PRODUCTS = 16 / 36
# Units for matrices read channels last: a library turns what is in another order, and its result.
# Derived: that reads and writes each of them once more.
_TURNED = 2.0

# What cuBLAS multiplies on all GPUs, and on those before Ampere, for which XLA has no kernels.
_COMPLEX = ("complex64", "complex128")
_REAL = ("bfloat16", "float16", "float32", "float64")

# Of all GPUs: found in what XLA makes of matmuls of many shapes for an H100 and a T4
# (tests/test_vectors.py), of graph networks and pair potentials (tests/test_graphs.py), and of
# plans of perceptrons and residual networks for both (tests/test_written_over.py).
# What of them is of one version. Measured with jaxlib 0.10.2 and 0.12.0: the zeros of loops for an
# H100, an A100 and a T4 (tests/test_loop_zeros.py, tests/test_operand_pieces.py).
_IS_NEW = jaxlib.version.__version_info__ >= (0, 12)
RULES = Rules(
    multiplies_vectors=True,
    fuses_gathers=True,
    fuses_derivatives=True,
    loops=LoopRules(shares_zeros=not _IS_NEW),
)
_ELEMENTS = ElementRules(behind_pieces=_IS_NEW)

# The columns of their rates, those of the makers' documents without sparsity and summed in float32:
# a GeForce card multiplies float16 half as fast so as where it sums in float16, which XLA does not.
_PEAKS = {
    "float64": "fp64_tflops",
    "float32": "fp32_tflops",
    "tfloat32": "tf32_tflops",
    "float16": "fp16_tflops",
    "bfloat16": "bf16_tflops",
    "float8": "fp8_tflops",
    "int8": "int8_tops",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaTarget(Target):
    """A GPU, with what XLA's compiler asks of it beside the figures of every target."""

    family = "cuda"

    compute_capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    threads_per_core: int

    @property
    def kind(self) -> str:
        """The kind of GPU, in a sentence."""
        return "a GPU of compute capability {}.{}".format(*self.compute_capability)

    @property
    def usable_bytes(self) -> int:
        """Bytes of one GPU that a step can have: its memory less the CUDA context's."""
        return self.memory_bytes - CONTEXT_BYTES

    @property
    def cuda(self) -> int:
        """Major version of CUDA whose compiler knows this GPU; 13 dropped everything below 7.5."""
        return 13 if self.compute_capability >= (7, 5) else 12

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes in bfloat16; XLA does in float32 what it does not."""
        return self.compute_capability >= (8, 0)

    @property
    def rules(self) -> Rules:
        """How its compiler fuses. From Ampere on it writes kernels of blocks (Triton); before, it
        merges reductions with their neighbours instead (measured on a T4 and an RTX 2080 Ti with
        the losses of tests/test_row_norms.py)."""
        ampere = self.has_bfloat16
        # XLA counts a multiply-add twice.
        cycles_per_second = 2e9 * self.clock_ghz * self.core_count * self.fpus_per_core
        return dataclasses.replace(
            RULES,
            computes_bfloat16=_computes_bfloat16(self.compute_capability),
            fuses_elements=_ELEMENTS if ampere else None,
            blocks_of_rows=ampere,
            channels_last=_channels_last(self.compute_capability),
            merges_reductions=not ampere,
            library=(
                _COMPLEX if ampere else (*_COMPLEX, *_REAL),
                _workspace(self.compute_capability),
            ),
            parts=Splitting(self.core_count, self.compute_capability) if ampere else None,
            cycles=Cycles(
                dear_operations(self.compute_capability),
                per_byte=cycles_per_second / self.memory_bandwidth,
                per_kernel=cycles_per_second * LAUNCH,
                cached_bytes=self.l2_bytes,
            ),
        )

    def _rounded_float32(self, precision: str) -> float:
        """XLA multiplies float32 as TF32 where the GPU can, but at the highest precision."""
        return self.peaks.tfloat32 or self.peaks.float32

    def collective_seconds(self, kind: str, size: int, group: Group) -> float:
        """By the algorithm that NCCL takes."""
        return nccl.seconds(kind, size, group, self.links.reached(self.shares))

    def feeding_seconds(self, flops: float, dtype) -> float:
        """A tile reads as many elements of its rows and of its columns as it adds products to each
        of its own: a byte counts for the more, the larger tiles and the shorter dtypes are. The
        faster the units for matrices are beside the cache, the less of their rate is reached. (It
        makes 0.8 of the float16 rate on an RTX 3090, where a core computes 512 FLOPs in a cycle,
        and 0.4 on an H100, where it computes 3,786: as published times of BERT have it. The best
        kernels for Hopper have larger tiles, and reach more.)"""
        read = flops * product_bytes(dtype) / _TILE
        cycles = self.core_count * self.clock_ghz * 1e9
        return read / (self.shares.cache * _CACHE_BYTES * cycles)

    def bytes_beside_rows(self, table: int, moved: int, piece: int) -> int:
        """Memory is read and written in sectors; a table that fits the cache is read once."""
        if table <= self.l2_bytes or not piece:
            return 0
        sectors = math.ceil(piece / _SECTOR)
        return moved * sectors * _SECTOR // piece - moved

    def convolving(
        self, window: tuple[int, ...], channels_last: bool, dtype, precision: str = "default"
    ) -> tuple[float, float]:
        """As cuDNN computes it."""
        if self.flops_per_second(dtype, precision) > self.peaks.float32:
            return 1.0, 0.0 if channels_last else _TURNED
        fewer = window == (3, 3) and str(dtype) not in ("float64", "complex64", "complex128")
        return _FEWER_PRODUCTS if fewer else 1.0, 0.0

    def share_of(self, rows: int, columns: int, depth: int, batch: int = 1) -> float:
        """Tiles of 128 by 128 on as many cores as there are, in waves; a long sum is split where
        there are fewer tiles than cores (as cuBLAS and Triton do)."""
        tiles = batch * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
        if tiles < self.core_count:
            tiles *= min(max(depth // _SPLIT, 1), self.core_count // tiles)
        return tiles / (math.ceil(tiles / self.core_count) * self.core_count)

    def config(self) -> str:
        """The GPU as XLA's ``GpuTargetConfigProto`` in text format."""
        major, minor = self.compute_capability
        return (
            "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 "
            f"shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory_per_core} "
            f"threads_per_core_limit: {self.threads_per_core} core_count: {self.core_count} "
            f"fpus_per_core: {self.fpus_per_core} block_dim_limit_x: 2147483647 "
            "block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
            f"memory_bandwidth: {int(self.memory_bandwidth)} l2_cache_size: {self.l2_bytes} "
            f"clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory_bytes} "
            f"shared_memory_per_block_optin: {self.shared_memory_per_block} "
            f"cuda_compute_capability {{ major: {major} minor: {minor} }} "
            "registers_per_core_limit: 65536 registers_per_block_limit: 65536 } "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 patch: 0 } '
            f'device_description_str: "{self.description}"'
        )

    __str__ = Target.__str__


def _computes_bfloat16(capability: tuple[int, int]) -> str:
    """As XLA has it (float_support.cc), and as is measured for six GPUs (tests/test_views.py)."""
    if capability < (8, 0):
        return "none"
    return "matmuls" if capability < (9, 0) else "all"


def _channels_last(capability: tuple[int, int]) -> tuple[tuple[str, int], ...] | None:
    """Measured for seven GPUs (tests/test_channel_orders.py)."""
    if capability >= (9, 0):
        return RULES.channels_last
    return (("bfloat16", 2), ("float16", 2)) if capability >= (8, 0) else (("float16", 2),)


def _workspace(capability: tuple[int, int]) -> int:
    """Bytes that XLA gives each call of cuBLAS (measured for six GPUs: tests/test_library.py)."""
    more = capability >= (9, 0) and jax.__version_info__ < (0, 12)
    return (32 if more else 4) * 2**20


@functools.cache
def known_gpus() -> dict[str, Target]:
    """The GPUs of ``targets.csv``, by name."""
    text = importlib.resources.files("jaxmem.targets.cuda").joinpath("targets.csv").read_text()
    return {row["name"]: _from_row(row) for row in csv.DictReader(text.splitlines())}


def _from_row(row: dict[str, str]) -> CudaTarget:
    major, _, minor = row["compute_capability"].partition(".")
    return CudaTarget(
        name=row["name"],
        description=row["description"],
        compute_capability=(int(major), int(minor)),
        core_count=int(row["core_count"]),
        fpus_per_core=int(row["fpus_per_core"]),
        clock_ghz=float(row["clock_ghz"]),
        memory_bytes=int(row["memory_bytes"]),
        memory_bandwidth=float(row["memory_bandwidth_bytes_per_s"]),
        l2_bytes=int(row["l2_bytes"]),
        shared_memory_per_core=int(row["shared_memory_per_core"]),
        shared_memory_per_block=int(row["shared_memory_per_block_optin"]),
        threads_per_core=int(row["threads_per_core_limit"]),
        peaks=Peaks(**{kind: float(row[column]) * 1e12 for kind, column in _PEAKS.items()}),
        host_bandwidth=float(row["host_link_bytes_per_s"]),
        links=Links(
            inside=float(row["device_link_bytes_per_s"]),
            network=float(row["network_bytes_per_s"]),
            kind=row["device_link"],
            sums=float(row["switch_sums"] or 0),
        ),
        source=row["source"],
        time_error=float(row["time_error"]) if row["time_error"] else None,
    )
