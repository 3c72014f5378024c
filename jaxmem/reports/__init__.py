"""What a step costs in bytes, by XLA's own buffer assignment, and who takes them."""

from jaxmem.reports.calibrating.calibration import (
    Calibration as Calibration,
    calibrate as calibrate,
)
from jaxmem.reports.cliff import Cliff as Cliff, Rematerialized as Rematerialized
from jaxmem.reports.compiled import begin as begin, memory as memory
from jaxmem.reports.compiling import Compiling as Compiling
from jaxmem.reports.difference import Diff as Diff, diff as diff, read_report as read_report
from jaxmem.reports.drawn.plot import check_plot as check_plot
from jaxmem.reports.measured import Measured as Measured, measure as measure
from jaxmem.reports.plain_data import summary as summary
from jaxmem.reports.report import MemoryReport as MemoryReport
from jaxmem.reports.residual_report import Residuals as Residuals, residuals as residuals
from jaxmem.reports.xla.header import donated_arguments as donated_arguments
