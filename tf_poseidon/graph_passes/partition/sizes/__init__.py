"""Which sizes of a graph's tensors depend on the number of rows."""
