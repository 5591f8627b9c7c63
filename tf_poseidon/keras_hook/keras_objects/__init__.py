"""Keras' objects in a step: variables, optimizers, layers."""
