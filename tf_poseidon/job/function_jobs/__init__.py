"""Functions that a program, or a notebook, calls on the ranks of a job: `poseidon.run`."""
