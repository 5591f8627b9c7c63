"""The commands of `tf-poseidon`."""
