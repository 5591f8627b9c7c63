"""Passes over training graphs; installed as `tf_poseidon.graph_passes`.

A folder for each stage, in the order in which a graph passes through them:

    graph/      GraphDefs as the passes see them
    partition/  the graph of one process, partitioned by rows
    find/       what it synchronises, and the operations before each exchange
    match/      what gradients are made of
    write/      the nodes that carry out a plan
    saved/      saved graphs, rewritten as a whole

The partitioner runs first, where functions are traced (`one_process/`). Start with `session.py`, which runs the passes
behind it when TensorFlow optimizes a graph, and says why.
"""
