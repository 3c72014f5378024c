"""Operations that keep less for the backward pass than plain JAX with a plan can."""

from jaxmem.ops.attention import attention as attention
from jaxmem.ops.cross_entropy import softmax_cross_entropy as softmax_cross_entropy
from jaxmem.ops.swap import swap as swap
