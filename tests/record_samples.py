"""Records XLA's dumps of the five programs with the jax at hand.

    python tests/record_samples.py

The tests read them with every jax, so that a change to the adapter is tried on each known format.
"""

import dataclasses
import gzip
import importlib.util
import json
import pathlib
import re

import jax
import programs

SAMPLES = pathlib.Path(__file__).with_name("samples")


def main():
    jax.config.update("jax_platforms", "cpu")
    SAMPLES.mkdir(exist_ok=True)
    for program in programs.FIVE:
        report = programs.report(program)
        sample = {
            "jax": jax.__version__,
            "totals": {
                name: getattr(report, name)
                for role in ("argument", "output", "alias", "temp")
                for name in (role, f"host_{role}")
            },
            "arguments": [known and dataclasses.asdict(known) for known in report.arguments],
            "hlo": _anonymous(re.sub(r", backend_config=.*", "", report.hlo)),
            **{name: gzip.decompress(part).decode() for name, part in report.dump.items()},
        }
        path = SAMPLES / f"{program.__name__}-jax-{jax.__version__}.json.gz"
        with gzip.GzipFile(path, "wb", mtime=0) as file:
            file.write(json.dumps(sample).encode())
        print(f"{path.name}: {path.stat().st_size} bytes")


def _anonymous(hlo: str) -> str:
    """The paths of this machine's files as they would be anywhere."""
    tests = pathlib.Path(__file__).parent
    hlo = hlo.replace(f'"{tests}/', '"/home/someone/')
    for package in ("jax", "jaxlib", "flax", "optax", "jaxmem"):
        spec = importlib.util.find_spec(package)
        folder = pathlib.Path(spec.origin).parent
        hlo = hlo.replace(f'"{folder}/', f'"/usr/lib/site-packages/{package}/')
    return re.sub(r'"/[^"]*/(lib/python3[^"]*")', r'"/usr/\1', hlo)


if __name__ == "__main__":
    main()
