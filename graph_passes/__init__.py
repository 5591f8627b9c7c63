"""Passes over training graphs; installed as `tf_poseidon.graph_passes`."""
