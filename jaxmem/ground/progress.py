"""What is said while a search runs: records of the logger ``jaxmem``, at level INFO."""

import logging
import sys


class _Stderr(logging.Handler):
    """Writes to whatever is stderr by then; nothing where the program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            print(self.format(record), file=sys.stderr)


logger = logging.getLogger("jaxmem")
if not logger.handlers:  # else the program has chosen already
    logger.addHandler(_Stderr())
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def tell(text: str) -> None:
    """One line of progress. ``logging.getLogger("jaxmem").setLevel("WARNING")`` silences all."""
    logger.info(text)
