"""The process that compiles: reads pickled requests on stdin, writes pickled replies on stdout.

Run by path, never imported: it loads XLA's CUDA plugin, which must not happen in the user's
process (no backend is touched there, and an abort inside XLA kills this one only). It knows jaxlib
and nothing of jaxmem.

    python -P worker.py PLUGIN.so PACKAGES PARENT

It ends when PARENT, the number of the user's process, does. Request: ``{"module": MLIR bytecode,
"config": GpuTargetConfigProto text, "count": GPUs, "options": [(flag, value)], "dump": an empty
folder if XLA's buffer assignment is to be given too, else None}``. Reply:
``{"stats": {name: bytes}, "hlo": gzipped text, "dump": {name: gzipped text}}`` or
``{"error": text}``.
"""

import functools
import gzip
import importlib
import os
import pathlib
import pickle
import re
import shutil
import sys
import threading
import time

import numpy as np
from jax._src.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir

_dump: str | None = None  # what of this compilation lies on disk


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever XLA prints must not land between replies
    plugin, packages, parent = sys.argv[1:]
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    api = xla_client.load_pjrt_plugin_dynamically("cuda", plugin)
    xla_client.initialize_pjrt_plugin("cuda")
    _register_custom_calls(api, packages)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = _compile(api, **request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        pickle.dump(reply, replies)
        replies.flush()


def _end_with(parent: int) -> None:
    """Ends this process when its parent ends, however that dies.

    A death signal (prctl) would come when the thread ends that started this process, and the end of
    stdin only when every fork of the parent has closed the pipe, and not while XLA compiles.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    if _dump is not None:
        shutil.rmtree(_dump, ignore_errors=True)
    os._exit(1)


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


def _compile(api, module: bytes, config: str, count: int, options: list, dump: str | None) -> dict:
    global _dump
    _dump = dump
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
    if dump:
        options = [*options, ("xla_dump_to", dump), ("xla_dump_hlo_as_text", True)]
    with mlir.make_ir_context():
        compile_options.env_option_overrides = options
        parsed = ir.Module.parse(module)
        executable = devices[0].client.compile(
            parsed, xla_client.DeviceList(tuple(devices)), compile_options
        )
    dumped = {
        name: gzip.compress(path.read_bytes(), 3)
        for name in ("buffer-assignment", "live-range")
        for path in (
            pathlib.Path(dump).glob(f"*_gpu_after_optimizations-{name}.txt") if dump else ()
        )
    }
    if dump and shutil.disk_usage(dump).free < 4096:
        raise OSError(f"the disk of {dump} is full, and XLA's dump may be cut short; set TMPDIR")
    stats = executable.get_compiled_memory_stats()
    suffix = "_size_in_bytes"
    return {
        "stats": {
            name.removesuffix(suffix): getattr(stats, name)
            for name in dir(stats)
            if name.endswith(suffix)
        },
        "hlo": gzip.compress(executable.hlo_modules()[0].to_string().encode(), 3),
        "dump": dumped,
    }


if __name__ == "__main__":
    main()
