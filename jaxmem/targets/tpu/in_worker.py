"""What a worker does with libtpu (`jaxmem/targets/worker.py` runs this file by path)."""

import os
import pathlib
import runpy

from jaxlib import xla_client

# libtpu writes this one last.
_OPTIMISED = ".after_optimizations"
DUMPED = {
    "hlo": f"{_OPTIMISED}_after_buffer_assignment.txt",
    "buffer-assignment": f"{_OPTIMISED}-buffer-assignment.txt",
    "live-range": f"{_OPTIMISED}-live-range.txt",
}
# Without the first libtpu waits for a cloud's metadata server, without the second two processes
# cannot load it at once; the others keep it quiet.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_spmd = runpy.run_path(str(pathlib.Path(__file__).parent.with_name("spmd.py")))


def prepare(plugin: str):
    """Loads libtpu."""
    os.environ.update(_ENVIRONMENT)
    api = xla_client.load_pjrt_plugin_dynamically("tpu", plugin)
    xla_client.initialize_pjrt_plugin("tpu")
    return api


def compile(api, *, module: bytes, topology: dict, count: int, flags: list, options: list):
    """Compiles MLIR bytecode for so many devices of a slice."""
    found = xla_client.make_c_api_device_topology(api, **topology)
    devices = found._make_compile_only_devices()[:count]
    return _spmd["compile"](devices, module, [*flags, *options])
