"""Passes over training graphs; installed as `tf_poseidon.graph_passes`.

A folder for each stage, in the order in which a graph passes through them:

    graph/      what a GraphDef is to the passes
    partition/  the graph of one process, partitioned by rows
    find/       what it synchronises, and what comes before that
    match/      what gradients are made of
    write/      the nodes that carry out a plan
    saved/      graphs in files, rewritten whole

`session.py` is where to start: it says which pass runs when, and why.
"""
