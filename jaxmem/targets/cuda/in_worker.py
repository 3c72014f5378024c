"""What a worker does with XLA's CUDA plugin (`jaxmem/targets/worker.py` runs this file by path)."""

import functools
import importlib
import os
import pathlib
import re
import runpy
import sys
from collections.abc import Sequence

from jaxlib import xla_client

_OPTIMISED = "_gpu_after_optimizations"
DUMPED = {
    "hlo": f"{_OPTIMISED}.txt",
    "buffer-assignment": f"{_OPTIMISED}-buffer-assignment.txt",
    "live-range": f"{_OPTIMISED}-live-range.txt",
}
_spmd = runpy.run_path(str(pathlib.Path(__file__).parent.with_name("spmd.py")))
_matmuls = runpy.run_path(str(pathlib.Path(__file__).with_name("matmuls_apart.py")))


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


def compile(
    api,
    *,
    module: bytes,
    config: str,
    count: int,
    flags: list,
    options: list,
    apart: Sequence[tuple[int, ...]] = (),
):
    """Compiles MLIR bytecode for so many GPUs with that ``GpuTargetConfigProto`` (text). Matmuls
    with results ``apart`` compute nothing of what they read."""
    topology = xla_client.make_c_api_device_topology(
        api, "", target_config=config, topology=f"1x1x{count}"
    )
    devices = topology._make_compile_only_devices()[:count]
    change = functools.partial(_matmuls["keep_apart"], shapes=apart, count=count)
    return _spmd["compile"](devices, module, [*flags, *options], change)
