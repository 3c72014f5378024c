"""Google's TPUs as a family of targets."""

import contextlib
import pathlib
from typing import Any

from jaxmem.ground.errors import JaxmemError
from jaxmem.targets.accelerator import Target
from jaxmem.targets.cache import CachedProgram
from jaxmem.targets.family import Family
from jaxmem.targets.tpu.compiler import compile_module, worker_command
from jaxmem.targets.tpu.install import LICENCE, find_compiler, install_compiler
from jaxmem.targets.tpu.target import RULES, TpuTarget, known_tpus
from jaxmem.targets.workers import start_one


class Tpu(Family):
    """XLA's compiler for TPUs."""

    name = platform = backend = "tpu"
    versions = "the libtpu that this JAX is made for"
    licence = LICENCE
    example = "v5e"
    shape_multiple = 8  # sublanes of a tile
    # Its own rematerialization has no pass to switch off by name, but a least size.
    compiler_options = {"xla_tpu_rematerialization_min_size_in_bytes": 2**40}  # noqa: RUF012
    pass_options = {"xla_tpu_rematerialization_min_size_in_bytes": 10 * 2**20}  # noqa: RUF012
    remat_pass_threshold = 0.95  # xla_jf_rematerialization_percent_shared_memory_limit
    widening_options = {"xla_allow_excess_precision": False}  # noqa: RUF012

    # As libtpu 0.0.42 numbers them: vectors, scalars, and the flags that copies wait for.
    chip_memories = {1: "VMEM", 6: "SMEM", 2: "sync flags"}  # noqa: RUF012
    # 128 MiB of VMEM on v5e and v6e; v4 has 128 MiB of CMEM beside 16 of VMEM ("TPU v4", Jouppi et
    # al. 2023).
    chip_bytes = 144 << 20
    limit_option = "xla_tpu_max_hbm_size_mib"
    rules = RULES
    verifies_codegen = False  # it takes ten to fifty times as long as the rest
    has_memory_analysis = False

    def targets(self) -> dict[str, Target]:
        """The TPUs of ``targets.csv``."""
        return known_tpus()

    def compile(
        self,
        module: bytes,
        target: Target,
        options: dict[str, Any],
        timeout: float,
        full: bool = False,
        hold: bool = False,
    ) -> CachedProgram:
        """Compiles for a TPU that need not be there."""
        assert isinstance(target, TpuTarget)
        return compile_module(
            module, target, options=options, timeout=timeout, full=full, hold=hold
        )

    def prepare(self, target: Target) -> None:
        """Starts a worker."""
        with contextlib.suppress(JaxmemError):  # no compiler: said when it is needed
            start_one(worker_command(find_compiler()))

    def install(self, version: int | None = None) -> pathlib.Path:
        """Installs libtpu, of which there is one for each JAX."""
        if version is not None:
            raise JaxmemError("There is one libtpu for each version of JAX: --tpu takes no number.")
        return install_compiler()
