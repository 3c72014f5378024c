"""A traced function as a flat list of operations: values, bytes, FLOPs, liveness."""

from jaxmem.program._costs import CONTRACTIONS as CONTRACTIONS
from jaxmem.program._costs import contraction_flops as contraction_flops
from jaxmem.program._program import Operation as Operation
from jaxmem.program._program import Program as Program
from jaxmem.program._program import read_program as read_program
from jaxmem.program._program import size_of as size_of
