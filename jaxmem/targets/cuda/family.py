"""NVIDIA's GPUs as a family of targets."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxmem.ground.errors import JaxmemError
from jaxmem.targets.accelerator import Target
from jaxmem.targets.cache import CachedProgram
from jaxmem.targets.cuda.compiler import compile_module, worker_command
from jaxmem.targets.cuda.install import find_compiler, install_compiler
from jaxmem.targets.cuda.splitting import Splitting
from jaxmem.targets.cuda.target import CudaTarget, known_gpus
from jaxmem.targets.family import Family
from jaxmem.targets.rules import Rules
from jaxmem.targets.workers import start_one

# The least that the plugin of jax 0.12 takes. Derived: ``nvidia-cudnn-cu13`` in its metadata.
_CUDNN = 91200


class Cuda(Family):
    """XLA's compiler for CUDA."""

    name = platform = "cuda"
    backend = "gpu"
    versions = "13, or 12 for V100 (default: 13)"
    example = "h200"
    shape_multiple = 8  # tensor cores take tiles of 8 (NVIDIA, Deep learning performance guide)
    # "copy_fusion" makes the stacks that scans of one shape begin with all at once, before the
    # first of them runs: 1320 MiB and not 680 of six scans in regions (XLA of jax 0.10.2).
    # "dot-merger" makes one matmul of small ones that have an operand in common, and so all that
    # regions one after the other would compute in turn: 571 MiB and not 334 of an LSTM of 32 steps
    # (tests/test_rows.py).
    compiler_options = {  # noqa: RUF012
        "xla_disable_hlo_passes": "rematerialization,copy_fusion,dot-merger"
    }
    # XLA gives its scheduler, and the pass after it, 80 % of the memory that the device has, less
    # arguments and results, and 95 % of that (GetSchedulerMemoryLimit in
    # xla/service/gpu/gpu_hlo_schedule.cc); of nine programs that were compiled for ever smaller
    # GPUs (jax 0.10.2), seven were rematerialized from within 0.1 % of there on, two scans 2.4 %
    # later: nothing in their loops can be.
    _pass_share = 0.8
    _slop, _slop_option = 95, "xla_gpu_memory_limit_slop_factor"
    pass_options = {  # noqa: RUF012
        "xla_disable_hlo_passes": "copy_fusion,dot-merger",
        _slop_option: _slop,  # also where `copying_options` are asked for
    }
    # The pass begins at 80 % of the device's memory (xla/service/gpu/gpu_compiler.cc); a step that
    # is near it may pass it with what jaxmem does not count.
    remat_pass_threshold = 0.75
    # Else XLA leaves casts out, and keeps float32 where the program has bfloat16.
    widening_options = {"xla_allow_excess_precision": False}  # noqa: RUF012
    # Else XLA's schedule has the two halves of a copy beside one another, before Hopper always (a
    # GPT-2 medium on an RTX 3090 waits for all of its copies, 29 ms, and so for none), and where a
    # step takes more than 76 % of the memory. The factor is derived: with it the scheduler has all
    # but what CUDA takes of a GPU of 16 GiB.
    copying_options = {  # noqa: RUF012
        "xla_gpu_enable_latency_hiding_scheduler": True,
        _slop_option: 121,
    }
    # XLA of jax 0.10.2 refuses what it makes itself of some batched matrix-vector products with
    # elementwise operations behind them ("Layout is not normalized"), where Triton is to run them.
    fallback_options = {"xla_gpu_enable_triton_gemm": False}  # noqa: RUF012

    custom_calls = {  # noqa: RUF012
        "__cublas$": "dot",
        "__cudnn$convBackwardInput": "gradient of the input",
        "__cudnn$convBackwardFilter": "gradient of the kernel",
        "__cudnn$conv": "convolution",
        "__cudnn$fmha": "attention",
    }

    splitting = Splitting

    @property
    def rules(self) -> Rules:  # type: ignore[override]
        """Those of the GPU that is planned for where none is named."""
        return known_gpus()[self.example].rules

    def pass_limit(self, target: Target, boundary: int, options: Mapping[str, Any]) -> int | None:
        """What is left of the scheduler's memory for temporary values."""
        off = str(options.get("xla_disable_hlo_passes", "")).split(",")
        if "rematerialization" in off:
            return None
        left = self._pass_share * target.memory_bytes - boundary
        return max(int(left * self._part(options)), 0)

    def with_pass_limit(
        self, target: Target, boundary: int, options: Mapping[str, Any], limit: int
    ) -> Target:
        """A GPU of less memory, or of more."""
        memory = (limit / self._part(options) + boundary) / self._pass_share
        return dataclasses.replace(target, memory_bytes=int(memory))

    def _part(self, options: Mapping[str, Any]) -> float:
        return int(options.get(self._slop_option, self._slop)) / 100

    def targets(self) -> dict[str, Target]:
        """The GPUs of ``targets.csv``."""
        return known_gpus()

    def device_queries(self, target: Target) -> dict[str, Callable[..., Any]]:
        """For `jax.nn.dot_product_attention` by cuDNN."""
        assert isinstance(target, CudaTarget)
        has = target.compute_capability

        def parsed(capability: str) -> tuple[int, ...]:
            return tuple(map(int, capability.split(".")))

        return {
            "check_cudnn_version": lambda: _CUDNN,
            "check_compute_capability": lambda least: has >= parsed(least),
            "is_cuda_compute_capability_equal": lambda one: has == parsed(one),
        }

    def attention(self, target: Target) -> str:
        """By cuDNN, whose kernel is for Ampere and later."""
        assert isinstance(target, CudaTarget)
        return "cudnn" if target.compute_capability >= (8, 0) else ""

    def compile(
        self,
        module: bytes,
        target: Target,
        options: dict[str, Any],
        timeout: float,
        full: bool = False,
        hold: bool = False,
    ) -> CachedProgram:
        """Compiles for a GPU that need not be there."""
        assert isinstance(target, CudaTarget)
        return compile_module(
            module, target, options=options, timeout=timeout, full=full, hold=hold
        )

    def prepare(self, target: Target) -> None:
        """Starts a worker for the GPU's version of CUDA."""
        assert isinstance(target, CudaTarget)
        with contextlib.suppress(JaxmemError):  # no compiler: said when it is needed
            start_one(worker_command(find_compiler(target.cuda)))

    def install(self, version: int | None = None) -> pathlib.Path:
        """Installs the compiler for a major version of CUDA."""
        return install_compiler() if version is None else install_compiler(version)
