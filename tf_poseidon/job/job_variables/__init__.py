"""Variables of a job that do not simply have the same value on all ranks."""
