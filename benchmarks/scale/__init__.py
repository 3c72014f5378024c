"""Models larger than a GPU, and several GPUs."""
