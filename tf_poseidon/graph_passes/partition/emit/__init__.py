"""Writes the partitioned graph: ops, conversions between states, exchanges and their names."""
