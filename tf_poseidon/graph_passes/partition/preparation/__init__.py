"""What changes the graph of one process before it is partitioned."""
