"""What users hold in their hands: the strategy, and functions distributed over ranks."""
