"""Ranks that cost the others time: what each has measured, and which of them it is, while no timeline is recorded."""
