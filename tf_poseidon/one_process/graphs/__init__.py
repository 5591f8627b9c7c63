"""Traced functions, as flat graphs and as texts."""
