"""This process's part in a job of several processes, as one frozen value.

Who needs ranks is handed it; nothing below a strategy asks the strategy, nor the process, for them.

Tests: tests/training/test_training.py.
"""

import dataclasses

from tf_poseidon import grappler
from tf_poseidon.job import failures
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.job_variables import held_variables
from tf_poseidon.job.job_variables import new_variables
from tf_poseidon.job.job_variables.shard_service import ShardService
from tf_poseidon.job.row_shares import RowShares
from tf_poseidon.job.verify import Verifier
from tf_poseidon.job.worker_clocks import Clocks


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What a strategy has joined.

    Attributes:
        communicator: This rank's communicator.
        graph_pass: The passes that TensorFlow runs on the functions of this process.
        wire_dtype: Same as in `PoseidonStrategy`.
        verifier: Compares gradients and weights, None without verify mode.
        held: The variables that hold summands.
        new_variables: The variables that wait for rank 0's values.
        errors: Watches over this rank's errors.
        row_shares: How ranks share the rows of global batches.
        shards: The variables of which ranks hold shards.
        shard_update: Whether variables may become shards.
        shards_if_shorter: Whether they do only if steps are no longer for it, or if memory is short.
        memory_bytes: The memory of the rank that has least; None if nothing depends on it.
        clocks: The clocks of this rank's worker and server, where workers may read stale weights.
    """

    communicator: Communicator
    graph_pass: grappler.GraphPass
    wire_dtype: str | None
    verifier: Verifier | None
    held: held_variables.Held
    new_variables: new_variables.NewVariables
    errors: failures.ErrorWatch
    row_shares: RowShares
    shards: ShardService
    shard_update: bool
    shards_if_shorter: bool
    memory_bytes: int | None
    clocks: Clocks

    @property
    def rank(self) -> int:
        """This process, 0 to size - 1."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.communicator.size

    @property
    def divides_weights(self) -> bool:
        """Whether ranks may hold columns of weights: some are to, or plans may say so."""
        session = self.graph_pass.session
        return session.planner.divides_weights or session.planner.may_divide and not session.has_to_agree

    def may_divide(self, shape: tuple[int, ...]) -> bool:
        """Whether ranks may hold columns of a weight of some shape, or what belongs to columns, as biases do."""
        return self.divides_weights and self.graph_pass.session.planner.can_divide(shape)

    def is_to_divide(self, path: str) -> bool:
        """Whether ranks are to hold columns of the weight of a path, if they can: by a pin, or by a given plan."""
        return bool(self.graph_pass.session.planner.divided_among([path]))

    @property
    def strict(self) -> bool:
        """Same as in `PoseidonStrategy`."""
        return self.graph_pass.strict
