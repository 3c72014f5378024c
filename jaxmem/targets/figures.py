"""The figures of a GPU that a step is planned and compiled for."""

import csv
import dataclasses
import difflib
import functools
import importlib.resources
import os

from jaxmem.ground.bytes import format_bytes
from jaxmem.ground.errors import JaxmemError

# What a CUDA context, its kernels and cuDNN take before the first array: about half a GiB on
# every GPU of the table.
CONTEXT_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU to compile for, present or not.

    `jaxmem.target` gives the known ones; `dataclasses.replace` makes another from one of them:

    >>> import dataclasses, jaxmem
    >>> half = dataclasses.replace(
    ...     jaxmem.target("a100-40gb"), name="a100-half", memory_bytes=20 * 2**30)

    Rates are FLOPs per second (a multiply-add counts 2) and bytes per second; sizes are bytes.
    ``count`` GPUs of the kind are compiled for together, as one SPMD program. ``time_error`` is how
    far measured step times were from predicted ones on such a GPU (0.2: by a fifth, in the median
    of ``benchmarks/gpu.py``); None: they have not been compared.
    """

    name: str
    description: str
    compute_capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    clock_ghz: float
    memory_bytes: int
    memory_bandwidth: float
    l2_bytes: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    threads_per_core: int
    fp32_flops: float
    half_flops: float
    host_bandwidth: float
    source: str
    count: int = 1
    time_error: float | None = None

    def __post_init__(self):
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise JaxmemError(
                f"A target is at least one GPU; {self.name!r} was asked for with "
                f"count={self.count!r}. Pass an int of 1 or more."
            )

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

    def flops_per_second(self, dtype) -> float:
        """Peak rate of matmuls and convolutions whose operands have ``dtype``."""
        if dtype.itemsize > 2 or (dtype == "bfloat16" and not self.has_bfloat16):
            return self.fp32_flops
        return self.half_flops

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

    def __str__(self):
        many = f"{self.count} x " if self.count > 1 else ""
        return (
            f"{self.name}: {many}{self.description}, {format_bytes(self.memory_bytes)} "
            f"({format_bytes(self.usable_bytes)} usable)"
        )


@dataclasses.dataclass(frozen=True)
class LocalDevice:
    """The attached device, compiled for by JAX's own backend.

    ``gpu`` is the known target whose figures it has, if any.
    """

    platform: str
    description: str
    memory_bytes: int  # 0: not known
    gpu: Target | None = None
    name: str = "local"
    count: int = 1

    @property
    def usable_bytes(self) -> int:
        """Bytes that its allocator may hand out."""
        return self.memory_bytes

    def __str__(self):
        return f"local: {self.description}, {format_bytes(self.memory_bytes)}"


@functools.cache
def known_targets() -> dict[str, Target]:
    """The GPUs that jaxmem knows, by name.

    >>> "rtx-2080-ti" in known_targets()
    True
    """
    text = importlib.resources.files("jaxmem.targets").joinpath("targets.csv").read_text()
    return {row["name"]: _from_row(row) for row in csv.DictReader(text.splitlines())}


def _from_row(row: dict[str, str]) -> Target:
    major, _, minor = row["compute_capability"].partition(".")
    return Target(
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
        fp32_flops=float(row["fp32_tflops"]) * 1e12,
        half_flops=float(row["bf16_fp16_matmul_tflops"]) * 1e12,
        host_bandwidth=float(row["host_link_bytes_per_s"]),
        source=row["source"],
        time_error=float(row["time_error"]) if row["time_error"] else None,
    )


def target(name: str, *, count: int = 1) -> Target | LocalDevice:
    """The GPU of that name, to plan and compile for.

    Args:
        name: one of `known_targets`, or ``"local"`` for the attached device.
        count: how many of them run the step together (SPMD over a mesh).

    Raises:
        JaxmemError: the name is not known (the message lists the known ones).

    >>> import jaxmem
    >>> print(jaxmem.target("rtx-2080-ti"))
    rtx-2080-ti: NVIDIA GeForce RTX 2080 Ti, 10.76 GiB (10.26 GiB usable)
    """
    if name == "local":
        return _local(count)
    known = known_targets()
    if not isinstance(name, str) or name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise JaxmemError(
            f"There is no target named {name!r}.{hint} The known ones are "
            f"{', '.join(known)}, and 'local' for the attached device. For another GPU, "
            "dataclasses.replace() the figures of the nearest one."
        )
    return dataclasses.replace(known[name], count=count)


def resolve(spec: "str | Target | LocalDevice | None") -> Target | LocalDevice:
    """A target from what a ``target=`` argument may be; None is the attached device."""
    if isinstance(spec, Target | LocalDevice):
        return spec
    if spec is None or isinstance(spec, str):
        return target(spec or "local")
    raise JaxmemError(
        f"target= takes a name such as 'h200', 'local', or a jaxmem.Target; got {spec!r} of type "
        f"{type(spec).__name__}."
    )


def _local(count: int) -> LocalDevice:
    import jax

    devices = jax.local_devices()
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(devices):
        raise JaxmemError(
            f"target('local', count={count!r}) takes 1 to {len(devices)} devices, those that are "
            "attached. Name a GPU to compile for ones that are not there."
        )
    device = devices[0]
    gpu = None
    if device.platform == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        kinds = {known.description: known for known in known_targets().values()}
        gpu = kinds.get(device.device_kind)
        # Without a limit of its own (the platform allocator has none) all of the GPU is there.
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = limit or (gpu.usable_bytes if gpu else 0)
    return LocalDevice(device.platform, device.device_kind, memory, gpu, count=count)
