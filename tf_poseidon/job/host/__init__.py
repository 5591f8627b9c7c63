"""The processes of one host, and what they need of it: launching, MPI, GPUs' driver, forks, interrupts."""
