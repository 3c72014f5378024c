"""What a worker does with XLA's CUDA plugin (`jaxmem/targets/worker.py` runs this file by path)."""

import functools
import importlib
import os
import re
import sys

import numpy as np
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo

_OPTIMISED = "_gpu_after_optimizations"
DUMPED = {
    "hlo": f"{_OPTIMISED}.txt",
    "buffer-assignment": f"{_OPTIMISED}-buffer-assignment.txt",
    "live-range": f"{_OPTIMISED}-live-range.txt",
}


def prepare(plugin: str, packages: str):
    """Loads XLA's compiler."""
    api = xla_client.load_pjrt_plugin_dynamically("cuda", plugin)
    xla_client.initialize_pjrt_plugin("cuda")
    _register_custom_calls(api, packages)
    return api


def _register_custom_calls(api, packages: str) -> None:
    """Makes the kernels known that come with JAX and not with XLA: XLA refuses to compile a call
    to one that it does not know (``jnp.linalg``'s, mostly)."""
    sys.path.append(packages)
    found = [name for name in os.listdir(packages) if re.fullmatch(r"jax_cuda\d+_plugin", name)]
    for package in found:
        try:
            extension = importlib.import_module(f"{package}.cuda_plugin_extension")
        except ImportError:  # made for another version of Python
            continue
        xla_client.register_custom_call_handler(
            "CUDA", functools.partial(extension.register_custom_call_target, api)
        )
        for name in ("_solver", "_linalg", "_prng", "_hybrid", "_sparse", "_triton", "_rnn"):
            try:
                module = importlib.import_module(f"{package}.{name}")
            except ImportError:
                continue
            listed = getattr(module, "registrations", None) or module.ffi_registrations
            for target, value in listed().items():
                xla_client.register_custom_call_target(
                    target, value, platform="CUDA", api_version=1
                )


def compile(api, *, module: bytes, config: str, count: int, flags: list, options: list):
    """Compiles MLIR bytecode for so many GPUs with that ``GpuTargetConfigProto`` (text)."""
    topology = xla_client.make_c_api_device_topology(
        api, "", target_config=config, topology=f"1x1x{count}"
    )
    devices = topology._make_compile_only_devices()[:count]
    compile_options = xla_client.CompileOptions()
    build = compile_options.executable_build_options
    compile_options.num_replicas = build.num_replicas = 1
    compile_options.num_partitions = build.num_partitions = count
    assignment = xla_client.DeviceAssignment.create(np.arange(count).reshape(1, count))
    compile_options.device_assignment = build.device_assignment = assignment
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    compile_options.env_option_overrides = [*flags, *options]
    with _context():
        return devices[0].client.compile(
            ir.Module.parse(module), xla_client.DeviceList(tuple(devices)), compile_options
        )


def _context() -> ir.Context:
    """With the dialects that JAX lowers to, as in ``jax._src.interpreters.mlir.make_ir_context``:
    to import that takes four fifths of the time in which a worker starts."""
    known = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(known)
    context = ir.Context()
    context.append_dialect_registry(known)
    context.load_all_available_dialects()
    for dialect in (sdy, mpmd, chlo, stablehlo):
        dialect.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    return context
