"""Writes the nodes that carry out a decision: one file for the ops of each engine."""
