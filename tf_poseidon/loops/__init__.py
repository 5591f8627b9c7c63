"""What a training loop over `strategy.run` does in each step, and its variables."""
