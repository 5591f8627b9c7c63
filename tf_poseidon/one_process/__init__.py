"""Functions with the meaning that they have in one process, run on the ranks of a job; not a job of one process.

A function is traced for global batches, with an unknown number of rows. Its graph is partitioned by rows
(graph_passes/partition), and the result runs in its place. If it cannot be partitioned, and is the same on all ranks,
it runs unmodified, on the global batch on every rank: correct, and as slow as one process. A function that is not the
same on all ranks ends the job, since their variables would drift apart. Inside it there is one replica.
"""
