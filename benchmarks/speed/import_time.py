"""What `import jaxmem` adds to `import jax, flax.linen, optax`: least of five fresh processes."""

import subprocess
import sys

from benchmarks._record import record

CODE = """
import time
began = time.perf_counter()
import jax, flax.linen, optax
middle = time.perf_counter()
import jaxmem
print(middle - began, time.perf_counter() - middle)
"""


def main():
    runs = [
        tuple(map(float, subprocess.check_output([sys.executable, "-c", CODE]).split()))
        for _ in range(5)
    ]
    before, added = (min(column) for column in zip(*runs, strict=True))
    record(
        "Import time",
        [
            {"import": "jax, flax.linen, optax", "seconds": f"{before:.2f}"},
            {"import": "jaxmem after them", "seconds": f"{added:.3f}"},
        ],
    )


if __name__ == "__main__":
    main()
