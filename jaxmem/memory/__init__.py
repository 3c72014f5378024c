"""What a step costs in bytes, by XLA's own buffer assignment, and who takes them."""

from jaxmem.memory._diff import Diff as Diff, diff as diff, read_report as read_report
from jaxmem.memory._hlo import donated_arguments as donated_arguments
from jaxmem.memory._measure import Measured as Measured, measure as measure
from jaxmem.memory._memory import memory as memory
from jaxmem.memory._plot import check_plot as check_plot
from jaxmem.memory._report import MemoryReport as MemoryReport
from jaxmem.memory._residuals import Residuals as Residuals, residuals as residuals
