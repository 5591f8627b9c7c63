"""Ops that are sources of values: inputs with rows, random numbers, readers.

Tests: tests/graphs/test_partition_families.py.
"""

from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import WHOLE


def inputs_with_rows(case: Case) -> Outcome:
    """PoseidonRows: each rank takes its rows of the global batch, which all ranks have, or was given them alone."""
    return Outcome((WHOLE,) * len(case.inputs), tuple(map(Rows, case.attr("dimensions").list.i)))


def drawn(case: Case) -> Outcome | None:
    """Random numbers without a seed differ between processes: all ranks take those of rank 0."""
    if any(case.attr(name).i for name in ("seed", "seed2")):
        return None
    return case.all({}, WHOLE, write=_write_taken)


def taken_from_one(case: Case) -> Outcome:
    """Values that differ between processes, such as the time: all ranks take those of rank 0."""
    return case.all({}, WHOLE, write=_write_taken)


def _write_taken(writer: NodeWriter) -> list[str]:
    return writer.of_one_rank(writer.same("here"))


UNSEEDED = ("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle",
            "Multinomial", "RandomGamma", "RandomPoissonV2", "ParameterizedTruncatedNormal",
            "UniformCandidateSampler", "LogUniformCandidateSampler", "LearnedUnigramCandidateSampler",
            "FixedUnigramCandidateSampler", "AllCandidateSampler", "SampleDistortedBoundingBoxV2",
            "FractionalMaxPool", "FractionalAvgPool")

# Their outputs depend on the timing of threads, or on how often they were read.
READERS = ("IteratorGetNext", "IteratorGetNextSync", "QueueDequeueV2", "QueueDequeueManyV2", "QueueDequeueUpToV2",
           "QueueDequeue", "QueueDequeueMany", "QueueDequeueUpTo")

RULES: dict[str, Rule] = {
    "PoseidonRows": inputs_with_rows,
    **dict.fromkeys(UNSEEDED, drawn),
    **dict.fromkeys(("Timestamp", "NonDeterministicInts", *READERS), taken_from_one),
}
# Ops whose rules also apply to whole inputs.
ALWAYS = frozenset(RULES)
