"""What a function of one process is partitioned for.

Tests: tests/graphs/test_partition_functions.py.
"""

from collections.abc import Mapping
import dataclasses

from tf_poseidon.graph_passes import session as session_lib
from tf_poseidon.graph_passes.find import training_step
from tf_poseidon.job.verify import Verifier


@dataclasses.dataclass(frozen=True)
class PartitionOptions:
    """What a partitioned function is made for.

    Attributes:
        size: Number of ranks.
        rows: Usual number of rows of a global batch, None if unknown.
        trains: Whether ranks compare what it exchanges.
        wire_dtype, strict: Same as in `PoseidonStrategy`.
        verifier: The `verify.Verifier` that compares what it exchanges, None without one.
        inlines: Whether its graphs have its nodes, for those who read them, and do not call them.
        session: What plans how gradients travel, to know which of them need not become shards; None if all may.
        layouts: By identity, the layouts of variables that may hold shards without being `ShardedVariable`s, where the
            function is planned and never runs.
        masters: Likewise, by identity, the layouts of weights that may hold shards beside working copies without being
            `MasterWeight`s.
        loads: The bytes of variables that each rank owns that may own some, see `partitioner.KnownVariables`.
        shard_update: Whether variables may become shards, apart from those of weights that are divided.
        only_if_shorter: Whether variables become shards only if a step is no longer for it, or if memory is short.
        memory_bytes: The memory of a rank, which is short if the function's variables take more than half of it; None
            if it never is.
    """

    size: int
    rows: int | None = None
    trains: bool = False
    wire_dtype: str | None = None
    strict: bool = False
    verifier: Verifier | None = None
    inlines: bool = False
    session: session_lib.RewriteSession | None = None
    layouts: Mapping[int, str] = dataclasses.field(default_factory=dict)
    masters: Mapping[int, str] = dataclasses.field(default_factory=dict)
    loads: Mapping[int, int] = dataclasses.field(default_factory=dict)
    shard_update: bool = True
    only_if_shorter: bool = False
    memory_bytes: int | None = None

    @property
    def rows_of_rank(self) -> int | None:
        """Rows of a global batch that one rank computes, rounded up; None if unknown."""
        return None if self.rows is None else -(-self.rows // self.size)

    def is_memory_short(self, num_bytes: int) -> bool:
        """Whether a rank has too little memory for so many bytes of variables, and for what a step computes."""
        return self.memory_bytes is not None and num_bytes > self.memory_bytes // 2

    @property
    def facts(self) -> training_step.StepFacts:
        """What plans must know about a step."""
        return training_step.StepFacts(rows=self.rows_of_rank, global_rows=self.rows)
