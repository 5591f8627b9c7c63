"""Partitions the graph of a training step that was written for one process by rows over the ranks.

Files, in the order in which a graph passes through them: `batches` (dilated convolutions), `sizes` (what is known
of shapes), `states` (what a rank holds of a tensor), `rules` (what an op makes of the states of its inputs),
`propagate` (the states of a whole graph), `frames` (loops), `lists`, `write` (the partitioned graph), `report`, and
`partition`, which calls them.
"""
