"""What measures tf_poseidon, and compares it with others: see README.md."""
