"""State and gradients in host memory."""
