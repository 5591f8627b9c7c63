"""What ranks do alike between steps: callbacks, and comparisons of state."""
