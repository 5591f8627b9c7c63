"""Whole training steps beside those of other systems."""
