"""Operations that keep less for the backward pass than plain JAX with a plan can."""

from jaxmem.ops.dot_product_attention import attention as attention
from jaxmem.ops.losses import softmax_cross_entropy as softmax_cross_entropy
from jaxmem.ops.swapping import swap as swap
