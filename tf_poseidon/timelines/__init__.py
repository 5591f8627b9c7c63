"""The timeline of steps: what every rank did when, as a trace to look at and a table to read."""
