"""What kernels reach on the attached device, measured."""
