"""The nodes that carry out a decision: one file for each engine's ops."""
