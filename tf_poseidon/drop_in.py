"""`enable()`: programs written for Horovod or tf.distribute exchange factors.

Such a program is otherwise unchanged, and is launched as before. Its graphs are rewritten when they first run:
if a gradient that it sums over the ranks is a product of factors, and these arrive sooner, the factors are
gathered instead, by the ops of the same library.

Tests: tests/engines/test_drop_in.py, tests/engines/test_horovod.py.
"""

from collections.abc import Mapping
import functools
import os
import sys
from typing import Any

import tensorflow as tf

from tf_poseidon import environment
from tf_poseidon import grappler
from tf_poseidon import options
from tf_poseidon import planning
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.graph_passes import session as session_lib
from tf_poseidon.job import agreement
from tf_poseidon.job import calibration
from tf_poseidon.job.engines import horovod
from tf_poseidon.ops import library

# Speed of a processor, if nothing was measured.
_GFLOPS = 50.0


@environment.is_asked
def enable(policy: str = "auto", cluster: planning.Cluster | None = None, pins: Mapping[str, str] | None = None,
           timeout_s: float = 600.0) -> grappler.GraphPass:
    """Speeds up a program that sums its gradients with Horovod's or TensorFlow's own collectives.

    ```python
    import horovod.tensorflow as hvd
    import tf_poseidon as poseidon

    hvd.init()
    poseidon.enable()
    ```

    or, with `tf.distribute.MultiWorkerMirroredStrategy` and TF_CONFIG,

    ```python
    poseidon.enable()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    ```

    All ranks must call it. From then on, `tf.function`s that contain such sums are rewritten when they first
    run; `print(enabled.plan)` of the returned object shows what was done, and why. Weights change as they
    would have, up to rounding, if the trained variables are equal on all ranks when training begins, as both
    libraries require: broadcast them.

    Args:
        policy: Same as in `PoseidonStrategy`. "ps" stands for the program's own reductions.
        cluster: The `Cluster` to plan for. None measures it with Horovod, and assumes 10 Gbit/s with
            tf.distribute, where nothing can be measured before the strategy is created.
        pins: Same as in `PoseidonStrategy`.
        timeout_s: Longest wait for another rank, in seconds.

    Returns:
        The passes that run: `plan` is that of the latest rewritten function, None before the first.

    Raises:
        PoseidonError: If neither library is in use yet, the program has no eager execution, or an option is out of
            range.
    """
    hvd = sys.modules.get("horovod.tensorflow")
    if hvd is not None and hvd.is_initialized():
        rank, size = hvd.rank(), hvd.size()
    elif os.environ.get("TF_CONFIG"):
        rank, size = _place_in_tf_config()
    else:
        raise ConfigurationError("poseidon.enable() was called where neither Horovod is initialised nor TF_CONFIG "
                                 "is set; call it after hvd.init(), or set TF_CONFIG as MultiWorkerMirroredStrategy "
                                 "requires.")
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ConfigurationError("poseidon.enable() was called in a program without eager execution, as "
                                 "tf.disable_v2_behavior() and tf.Graph().as_default() make it; it exchanges what it "
                                 "measures eagerly. Call it outside of the graph, and train in a tf.function.")
    pairs, job = tuple((pins or {}).items()), options.JobOptions(timeout_s=timeout_s)
    for name in ("ranks_per_node", "gpus_per_node"):
        if cluster is not None and getattr(cluster, name) > 1:
            raise ConfigurationError(f"The cluster has {name}={getattr(cluster, name)}, but only sums of "
                                     f"PoseidonStrategy combine the ranks of a node; give it {name}=1.")
    planning.make_plan((), policy, planning.Cluster(max(size, 1)), pairs)  # checks them
    options.check_divides_nothing(pairs)
    library.load()
    comparison: session_lib.TextComparison
    if size == 1:
        comparison = agreement.SingleRankComparison()
    elif hvd is not None:
        communicator = horovod.connect(job, may_leave=True)
        comparison = agreement.CommunicatorComparison(communicator)
        if cluster is None and policy == "auto":
            cluster = calibration.measure(communicator, horovod.sum_in_place, planning.Cluster(communicator.size))
    else:
        comparison = agreement.CoordinationServiceComparison(rank, size, job.timeout_s)
    if cluster is None:
        cluster = planning.Cluster(size, gflops=_GFLOPS)
    planner = planning.Planner(cluster, policy, pairs)
    session = session_lib.RewriteSession(planner, is_foreign=True, comparison=comparison)
    passes = grappler.enable(rank, session, strict=False)
    if hvd is not None:
        _refuse_join(hvd, passes)
    return passes


def _refuse_join(hvd: Any, passes: grappler.GraphPass) -> None:
    """Makes `hvd.join()` fail once factors are gathered: the ranks that go on would wait for those of this rank."""
    join = hvd.join
    if hasattr(join, "__wrapped__"):
        return

    @functools.wraps(join)
    def checked() -> Any:
        if passes.session.gathers:
            raise ConfigurationError("hvd.join() was called where poseidon.enable() has made ranks gather the factors "
                                     "of gradients, which a rank that has joined cannot take part in; give all ranks "
                                     "the same number of steps, or call poseidon.enable(policy='ps').")
        return join()

    hvd.join = checked


def _place_in_tf_config() -> tuple[int, int]:
    """Returns (rank, size): this process's place among those that train."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = resolver.cluster_spec().as_dict()
    order = [(job, i) for job in ("chief", "worker") for i in range(len(spec.get(job, ())))]
    task = resolver.task_type, resolver.task_id
    if task not in order:
        raise ConfigurationError(f"TF_CONFIG says that this is task {task}, and that these tasks train: {order}; give "
                                 "each of them its own index.")
    return order.index(task), len(order)
