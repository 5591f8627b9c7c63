"""What a training graph synchronises, and what comes before it."""
