"""A traced function as a flat list of operations: values, bytes, FLOPs, liveness."""

from jaxmem.program.abstract_values import size_of as size_of, type_of as type_of
from jaxmem.program.compiler_rules import apply_compiler_rules as apply_compiler_rules
from jaxmem.program.convolutions import inputs_in_another_order as inputs_in_another_order
from jaxmem.program.costs import (
    CONTRACTIONS as CONTRACTIONS,
    contraction_flops as contraction_flops,
    precision_of as precision_of,
)
from jaxmem.program.cotangents import (
    CotangentEdge as CotangentEdge,
    with_gradients as with_gradients,
)
from jaxmem.program.graph import (
    Graph as Graph,
    Node as Node,
    Read as Read,
    read_graph as read_graph,
)
from jaxmem.program.input_gradients import Become as Become, InputGradients as InputGradients
from jaxmem.program.kernel import Kernel as Kernel
from jaxmem.program.kernels import read_kernels as read_kernels
from jaxmem.program.loop_zeros import zeros_of_loops as zeros_of_loops
from jaxmem.program.operations import (
    Operation as Operation,
    Program as Program,
    gradient_size as gradient_size,
)
from jaxmem.program.readers import (
    dtype_of as dtype_of,
    has_loop as has_loop,
    parameters_as_read as parameters_as_read,
)
from jaxmem.program.reading import read_program as read_program
from jaxmem.program.stored import NAMED as NAMED
