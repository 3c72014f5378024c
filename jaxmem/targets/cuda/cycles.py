"""Cycles of element-by-element operations on NVIDIA's GPUs, as XLA counts them."""

import functools

# Of one element of float32, by compute capability: xla/service/gpu/model/hlo_op_profiles_data.h, as
# it is in the XLA of jax 0.10.2 and 0.12.0. What is not there counts 3. Of capabilities that are
# not there XLA takes those of 8.6.
_PROFILES = {
    (7, 0): "cbrt 189 cos 373 exp 79 expm1 205 log 180 log1p 217 rsqrt 76 sin 373 sqrt 76 tanh 269 "
    "atan2 406 div 21 pow 673",
    (7, 5): "cbrt 783 cos 737 exp 83 expm1 319 log 201 log1p 218 rsqrt 74 sin 717 sqrt 74 tanh 167 "
    "atan2 414 pow 1085",
    (8, 0): "log 259 tanh 504 pow 1221",
    (8, 6): "cbrt 867 cos 662 exp 86 expm1 381 log 244 log1p 262 rsqrt 75 sin 662 sqrt 75 tanh 190 "
    "atan2 486 pow 925",
    (9, 0): "cbrt 178 cos 978 exp 79 expm1 190 log 166 log1p 229 rsqrt 75 sin 958 sqrt 75 tanh 467 "
    "atan2 431 div 19 pow 510",
    (10, 0): "cbrt 180 cos 1002 exp 82 expm1 196 log 165 log1p 200 rsqrt 74 sin 990 sqrt 74 "
    "tanh 137 atan2 373 div 23 erf 161 pow 463",
}
_USUAL = 3  # of what XLA has no cycles for. Derived: as XLA counts (gpu_hlo_cost_analysis.cc).
# Seconds that a kernel more takes. Derived: as XLA counts (gpu_performance_model_base.h).
LAUNCH = 1e-6
_PRODUCTS_AND_SUMS = {(7, 0): 6, (9, 0): 5, (10, 0): 7}  # on average
# What JAX or XLA writes in other operations, and how many products and sums beside. (Of `erfc` two
# series are computed, and one is selected: about a hundred keep it for an exact GELU in float32 on
# an H100, as XLA does, and not on an RTX 3090; tests/test_repeats.py.)
_MADE_OF: dict[str, tuple[str, int]] = {
    "cosh": ("exp exp", 2),
    "erf_inv": ("log1p sqrt", 20),
    "erfc": ("exp div", 100),
    "exp2": ("exp", 1),
    "logistic": ("exp div", 2),
    "random_bits": ("", 115),  # twenty rounds of Threefry of five each, and keys in between
    "sinh": ("exp exp", 2),
}


@functools.cache
def dear_operations(capability: tuple[int, int]) -> tuple[tuple[str, int], ...]:
    """Primitives that are expensive on GPUs of a compute capability, and what one element takes."""
    words = _PROFILES.get(capability, _PROFILES[8, 6]).split()
    own = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    one = _PRODUCTS_AND_SUMS.get(capability, _USUAL)
    made = {
        name: sum(own.get(part, _USUAL) for part in parts.split()) + one * more
        for name, (parts, more) in _MADE_OF.items()
    }
    return tuple((made | own).items())
