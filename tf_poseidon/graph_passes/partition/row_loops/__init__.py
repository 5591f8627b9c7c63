"""Loops with an iteration for each row: what their tensors are, and how each rank runs the iterations of its rows."""
