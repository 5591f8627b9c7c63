"""Training and kernels on a GPU."""
