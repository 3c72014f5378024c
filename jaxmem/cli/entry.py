"""The command line: ``jaxmem`` and ``python -m jaxmem``.

A step is named ``module:function``: a function without arguments, in a module that Python finds
from the working directory, that returns ``(step, args)``: a function or jitted function, and the
tuple of its arguments, real or `jax.ShapeDtypeStruct`. For ``max-batch`` it takes the batch size;
for ``plan`` it returns ``(loss, args)``, and for ``fit``, ``explore`` and ``devices`` what
`jaxmem.fit` takes,
``(loss_fn, optimizer, params, batch)`` and perhaps a dict of its options, over which the command
line wins.

Exit codes: 0; 1: an error, which is printed; 2: wrong usage; 3: the step does not fit the budget.
"""

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence

from jaxmem.cli.calibrate import add_calibrate
from jaxmem.cli.compare import add_diff
from jaxmem.cli.devices import add_devices
from jaxmem.cli.estimate import add_estimate
from jaxmem.cli.explore import add_explore
from jaxmem.cli.fit import add_fit
from jaxmem.cli.install import add_install
from jaxmem.cli.max_batch import add_max_batch
from jaxmem.cli.output import MISSED
from jaxmem.cli.plan import add_plan
from jaxmem.cli.profile import add_profile
from jaxmem.cli.targets import add_targets
from jaxmem.ground.errors import BudgetError, JaxmemError, JaxmemWarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="jaxmem", description="Memory tools for JAX and Flax.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for add in (
        *(add_estimate, add_profile, add_plan, add_fit, add_explore, add_max_batch, add_diff),
        *(add_devices, add_calibrate, add_targets, add_install),
    ):
        add(commands)
    options = parser.parse_args(arguments)
    try:
        with _plain_warnings():
            code = options.run(options)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # whoever reads, `head` for example, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except JaxmemError as error:
        print(f"jaxmem: {error}", file=sys.stderr)
        return MISSED if isinstance(error, BudgetError) and error.lowest else 1


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as a sentence, without the line of jaxmem's source that they come from."""
    usual = warnings.formatwarning

    def plain(message, category, *rest, **more):
        if issubclass(category, JaxmemWarning):
            return f"jaxmem: warning: {message}\n"
        return usual(message, category, *rest, **more)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual
