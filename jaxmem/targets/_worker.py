"""The process that compiles: reads pickled requests on stdin, writes pickled replies on stdout.

Run by path, never imported: it loads XLA's CUDA plugin, which must not happen in the user's
process (no backend is touched there, and an abort inside XLA kills this one only). It knows jaxlib
and nothing of jaxmem.

    python -P _worker.py PLUGIN.so

Request: ``{"module": MLIR bytecode, "config": GpuTargetConfigProto text, "count": GPUs,
"options": [(flag, value)]}``. Reply: ``{"stats": {name: bytes}, "hlo": gzipped text}`` or
``{"error": text}``.
"""

import gzip
import os
import pickle
import sys

import numpy as np
from jax._src.interpreters import mlir
from jaxlib import xla_client
from jaxlib.mlir import ir


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever XLA prints must not land between replies
    plugin = sys.argv[1]
    api = xla_client.load_pjrt_plugin_dynamically("cuda", plugin)
    xla_client.initialize_pjrt_plugin("cuda")
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


def _compile(api, module: bytes, config: str, count: int, options: list) -> dict:
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
    compile_options.env_option_overrides = options
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        executable = devices[0].client.compile(
            parsed, xla_client.DeviceList(tuple(devices)), compile_options
        )
    stats = executable.get_compiled_memory_stats()
    suffix = "_size_in_bytes"
    return {
        "stats": {
            name.removesuffix(suffix): getattr(stats, name)
            for name in dir(stats)
            if name.endswith(suffix)
        },
        "hlo": gzip.compress(executable.hlo_modules()[0].to_string().encode(), 3),
    }


if __name__ == "__main__":
    main()
