"""Graphs as they are saved: rewriting them whole, and reading back what was inserted."""
