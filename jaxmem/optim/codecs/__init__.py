"""How optimizer state is stored in fewer bits, one codec a file."""

from jaxmem.optim.codecs.codec import Codec as Codec
from jaxmem.optim.codecs.eight_bits import EightBits
from jaxmem.optim.codecs.rounding import Bfloat16

# By the name that `jaxmem.optim.small_moments` takes.
CODECS: dict[str, Codec] = {"8bit": EightBits(), "bfloat16": Bfloat16()}
