"""The batches of all ranks, and each rank's rows of them."""
