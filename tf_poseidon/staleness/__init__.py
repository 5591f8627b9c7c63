"""Stale synchronous parallel training: which version of the weights a worker reads. No TensorFlow in here."""
