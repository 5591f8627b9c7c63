"""Finds what a training graph synchronises, and the operations before each exchange."""
