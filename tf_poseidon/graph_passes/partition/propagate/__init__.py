"""Finds the state of each tensor of a flat graph."""
