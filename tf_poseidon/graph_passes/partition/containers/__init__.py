"""Lists of tensors, stacks and TensorArrays of a flat graph: where they come from, and what is put into them."""
