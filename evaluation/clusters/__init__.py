"""Emulated clusters: hosts with links of a given rate, Slurm, and an MPIJob of Kubernetes."""
