"""Keras' loops over batches: fit, evaluate, predict, and the methods for one batch."""
