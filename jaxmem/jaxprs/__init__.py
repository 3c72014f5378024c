"""JAX's inside: every use of what its documentation does not promise, in one wing.

Tested on jax 0.10.2 to 0.12. What differs between versions is met here and nowhere else.
"""

from jaxmem.jaxprs.attached import in_place_of_attached as in_place_of_attached
from jaxmem.jaxprs.barriers import (
    BARRIERS as BARRIERS,
    barrier as barrier,
    cotangent_barrier as cotangent_barrier,
    order_after as order_after,
    order_cotangent_after as order_cotangent_after,
)
from jaxmem.jaxprs.equations import (
    CUSTOM_RULES as CUSTOM_RULES,
    closed_of as closed_of,
    custom_function as custom_function,
    expression_of as expression_of,
    find_callback as find_callback,
    inner_jaxprs as inner_jaxprs,
    is_callback as is_callback,
    is_region as is_region,
    is_zero as is_zero,
    line_of as line_of,
    operation_of as operation_of,
    parameters_of as parameters_of,
    primitive_names as primitive_names,
    result_of as result_of,
)
from jaxmem.jaxprs.flat import (
    FlatJaxpr as FlatJaxpr,
    FlatStep as FlatStep,
    apply as apply,
    as_array as as_array,
    context as context,
    evaluate as evaluate,
    inside as inside,
    read as read,
    side_effects as side_effects,
)
from jaxmem.jaxprs.flattening import (
    flatten as flatten,
    flatten_jaxpr as flatten_jaxpr,
    output_avals as output_avals,
    traced_jaxpr as traced_jaxpr,
)
from jaxmem.jaxprs.forward_backward import (
    ForwardBackward as ForwardBackward,
    trace_forward_backward as trace_forward_backward,
)
from jaxmem.jaxprs.layouts import row_major as row_major
from jaxmem.jaxprs.leaks import (
    check_rules as check_rules,
    taken_derivatives as taken_derivatives,
)
from jaxmem.jaxprs.lowering import (
    argument_names as argument_names,
    compiler_options as compiler_options,
    donated_on_host as donated_on_host,
    kept_arguments as kept_arguments,
    kept_on_host as kept_on_host,
    lower_for as lower_for,
    results_on_host as results_on_host,
    to_bytecode as to_bytecode,
)
from jaxmem.jaxprs.mapped import mapped_like as mapped_like
from jaxmem.jaxprs.merging import literal_key as literal_key, parameters_key as parameters_key
from jaxmem.jaxprs.names import (
    RegionStructure as RegionStructure,
    given_name as given_name,
    names_in as names_in,
    region_structure as region_structure,
    with_policy as with_policy,
)
from jaxmem.jaxprs.nested import (
    NestedLoop as NestedLoop,
    branches_of as branches_of,
    called_jaxpr as called_jaxpr,
    inner_in as inner_in,
    loop_of as loop_of,
    mapped_body as mapped_body,
    picked_axis as picked_axis,
)
from jaxmem.jaxprs.operands import (
    inputs_read as inputs_read,
    is_array as is_array,
    is_extended as is_extended,
    is_opaque as is_opaque,
    restrict_to as restrict_to,
    split_arrays as split_arrays,
)
from jaxmem.jaxprs.passthrough import resolve_passthrough as resolve_passthrough
from jaxmem.jaxprs.placement import (
    DEVICE as DEVICE,
    HOST as HOST,
    abstract as abstract,
    canonical_sharding as canonical_sharding,
    check_devices as check_devices,
    check_on_device as check_on_device,
    element_of as element_of,
    filled as filled,
    has_explicit_axes as has_explicit_axes,
    host_sharding as host_sharding,
    in_automatic_axes as in_automatic_axes,
    is_committed as is_committed,
    match_varying_axes as match_varying_axes,
    match_weak_type as match_weak_type,
    memory_kinds as memory_kinds,
    memory_of as memory_of,
    memory_space as memory_space,
    mesh_in_force as mesh_in_force,
    of_shape as of_shape,
    on_several_devices as on_several_devices,
    replicated_like as replicated_like,
    spec_of as spec_of,
    struct_of as struct_of,
)
from jaxmem.jaxprs.regions import (
    NamePolicy as NamePolicy,
    OperationPolicy as OperationPolicy,
    checkpoint_like as checkpoint_like,
    named as named,
    policy_saves as policy_saves,
)
from jaxmem.jaxprs.residuals import (
    SavedResidual as SavedResidual,
    making_order as making_order,
    original as original,
    saved_residuals as saved_residuals,
    scan_residuals as scan_residuals,
)
from jaxmem.jaxprs.shardings import (
    Shardings as Shardings,
    gradient_shards as gradient_shards,
    propagate_shardings as propagate_shardings,
)
