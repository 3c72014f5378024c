"""A program compiled for devices that are not there (run by path, in a worker).

To import JAX, which has the same, takes four fifths of the time in which a worker starts.
"""

from collections.abc import Callable

import numpy as np
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo


def compile(
    devices: list,
    module: bytes,
    options: list,
    change: Callable[[ir.Module], None] = lambda _: None,
):
    """Compiles MLIR bytecode, which may be changed first, as one program over compile-only
    devices."""
    count = len(devices)
    compile_options = xla_client.CompileOptions()
    build = compile_options.executable_build_options
    compile_options.num_replicas = build.num_replicas = 1
    compile_options.num_partitions = build.num_partitions = count
    assignment = xla_client.DeviceAssignment.create(np.arange(count).reshape(1, count))
    compile_options.device_assignment = build.device_assignment = assignment
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    compile_options.env_option_overrides = options
    with _context():
        parsed = ir.Module.parse(module)
        change(parsed)
        return devices[0].client.compile(
            parsed, xla_client.DeviceList(tuple(devices)), compile_options
        )


def _context() -> ir.Context:
    """With the dialects that JAX lowers to, as ``jax._src.interpreters.mlir.make_ir_context``."""
    known = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(known)
    context = ir.Context()
    context.append_dialect_registry(known)
    context.load_all_available_dialects()
    for dialect in (sdy, mpmd, chlo, stablehlo):
        dialect.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    return context
