"""Training on many nodes, simulated."""
