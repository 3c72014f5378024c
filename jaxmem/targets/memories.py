"""The kinds of memory that JAX's devices address, by JAX's names."""

HOST_KIND = "pinned_host"  # where a program keeps what is to be in host memory
HOST_KINDS = (HOST_KIND, "unpinned_host")
