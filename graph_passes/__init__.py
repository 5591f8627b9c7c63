"""Passes over training graphs; installed as `tf_poseidon.graph_passes`.

`pipeline.py` is where to start: it says which pass runs when, and why.
"""
