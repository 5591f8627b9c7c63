"""Partitions the graph of a one-process training step by rows over the ranks.

Files, in the order in which a graph passes through them: `batches` (dilated convolutions), `sizes` (what is known about
shapes), `states` (what a rank holds of a tensor), `rules` (from the states of an op's inputs to those of its outputs),
`propagate` (the states of a whole graph), `cuts` (where summands become whole), `dividing` (products of whole tensors),
`frames` (loops), `lists`, `write` (the partitioned graph), `report`, and `partition`, which calls them.
"""
