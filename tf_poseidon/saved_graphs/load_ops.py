"""Joins the job of this process, for programs that run rewritten graphs without a strategy.

Tests: tests/saved/test_saved_graphs.py.
"""

from collections.abc import Iterable
import typing
from typing import Any
from typing import cast

from tf_poseidon import environment
from tf_poseidon import grappler
from tf_poseidon import options as options_lib
from tf_poseidon.job import agreement
from tf_poseidon.job import communicator
from tf_poseidon.job import engines
from tf_poseidon.job import runtime
from tf_poseidon.ops import library

_alone = None


class Membership(typing.NamedTuple):
    """This process's place in the job.

    Attributes:
        rank: This rank, 0 to size - 1.
        size: Number of ranks.
    """

    rank: int
    size: int


@environment.is_asked
def load_ops(engine: str | None = None, servers: Iterable[int] | None = None, ranks_per_node: int | None = None,
             kv_pair_bytes: int | None = None, timeout_s: float = options_lib.JobOptions.timeout_s,
             startup_timeout_s: float = options_lib.JobOptions.startup_timeout_s,
             heartbeat_timeout_s: float = options_lib.JobOptions.heartbeat_timeout_s,
             staging_bytes: int | None = None, dedicated_servers: int = 0) -> Membership:
    """Prepares this process to run rewritten graphs: loads their ops, and joins the job of mpiexec.

    Call it before a rewritten graph is loaded:

    ```python
    rank, size = poseidon.load_ops()
    step = tf.saved_model.load("step_for_4").signatures["train"]
    ```

    Args:
        engine: Same as in `PoseidonStrategy`.
        servers: Same as in `PoseidonStrategy`.
        ranks_per_node: Same as in `PoseidonStrategy`.
        kv_pair_bytes: Same as in `PoseidonStrategy`.
        timeout_s: Same as in `PoseidonStrategy`.
        startup_timeout_s: Same as in `PoseidonStrategy`.
        heartbeat_timeout_s: Same as in `PoseidonStrategy`.
        staging_bytes: Same as in `PoseidonStrategy`.
        dedicated_servers: Same as in `PoseidonStrategy`; on those ranks, this call serves, and ends the process.

    Returns:
        A `Membership`, (rank, size); (0, 1) in a process that was launched alone.

    Raises:
        PoseidonError: If the job cannot be joined, or ranks differ in their packages.
    """
    global _alone
    options = options_lib.JobOptions(engine, cast(Any, servers or ()), ranks_per_node, kv_pair_bytes, timeout_s,
                                     startup_timeout_s, heartbeat_timeout_s, staging_bytes, dedicated_servers)
    runtime.check(options, options_lib.TrainingOptions())
    library.load()
    grappler.order_sums()
    engines.load(engines.launch(engine).engine).register_ops()
    joined = runtime.start(options)
    if joined is not None:
        agreement.agree_on_options(joined, servers=options.servers)
        return Membership(joined.rank, joined.size)
    if _alone is None:  # the ops need a job, if only of a single rank
        runtime.engine().start_alone()
        _alone = communicator.join_loopback(1)[0]
        _alone.use_for_ops()
    return Membership(0, 1)
