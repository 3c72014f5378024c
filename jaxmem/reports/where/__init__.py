"""Which line, module and phase made each buffer."""
