"""Shows people what a job would do: `explain`, and the page of a plan."""
