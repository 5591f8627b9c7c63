"""Saved training graphs: rewriting them for several ranks, and looking at what was rewritten.

`rewriting.py` is where to start.
"""
