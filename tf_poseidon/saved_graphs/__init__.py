"""Saved training graphs: rewrites them for several ranks, and inspects and verifies the results.

Start with `rewriting.py`.
"""
