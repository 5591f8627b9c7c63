"""The timeline of steps: what every rank did, and when, as a trace and as a table."""
