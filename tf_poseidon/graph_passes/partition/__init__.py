"""Partitions the graph of a one-process training step by rows over the ranks.

Before: `inline` (a graph without calls), `results` (what is computed when it is read). `partitioner` then calls, in
this order: `batches` (dilated convolutions), `sizes` (what is known about shapes; `containers`: lists, stacks),
`row_loops` (loops with an iteration for each row), `propagate` (the state of each tensor: `states`, found by `rules`
from the states of an op's inputs, a `Case`, to an `Outcome`), `emit` (the partitioned graph, in which rules write with
a `node_writer`), `report`. Afterwards `unroll` makes several steps one graph. `frames` are the loops of a graph,
`variables` where its resources come from.
"""
