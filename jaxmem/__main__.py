"""``python -m jaxmem``."""

import sys

from jaxmem.cli import main

if __name__ == "__main__":
    sys.exit(main())
