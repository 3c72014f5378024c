"""What a step costs in bytes, by XLA's own buffer assignment."""

from jaxmem.memory._hlo import donated_arguments as donated_arguments
from jaxmem.memory._report import MemoryReport as MemoryReport, memory as memory
