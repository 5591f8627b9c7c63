"""What one process needs of its host: launching, MPI, connections, GPUs' driver, forks, interrupts."""
