"""One process's part in a job: joining it, its communicator, what its ranks must agree on."""
