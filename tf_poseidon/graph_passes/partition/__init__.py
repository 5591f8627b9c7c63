"""Partitions the graph of a one-process training step by rows over the ranks.

In the order in which a graph passes through them: `inline`, `results`, `batches` (dilated convolutions), `sizes` (what
is known about shapes), `states` (what a rank holds of a tensor), `rules` (from the states of an op's inputs, a `Case`,
to those of its outputs, an `Outcome`), `propagate` (the states of a whole graph), `emit` (the partitioned graph),
`report`; `partitioner` calls them. `unroll` makes several steps one graph.
"""
