"""Training steps whose gradients travel by each scheme, compared with the same steps in one process, bit for bit.

All numbers are small integers, so no order of additions rounds, also not in half precision.

Tests: tests/unit/test_selftest.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_poseidon import planning
from tf_poseidon.job.job_variables.holdings import Initial
from tf_poseidon.job.joined_job import Job
from tf_poseidon.one_process.sharding.sharded_variables import ShardedVariable
from tf_poseidon.strategy import distribution
from tf_poseidon.strategy import poseidon_strategy as strategy_lib

_ROWS_PER_RANK, _SHARING = 8, 4
_INPUTS, _OUTPUTS, _WORDS = 96, 80, 50

# Of variables, inputs and targets; returns a loss, a sum over rows.
_Loss = Callable[[Sequence[tf.Variable], tf.Tensor, tf.Tensor], tf.Tensor]


def _dense(variables: Sequence[tf.Variable], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    kernel, bias = variables
    return tf.reduce_sum((tf.matmul(x, kernel) + bias) * y)


def _half(variables: Sequence[tf.Variable], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    product = tf.matmul(tf.cast(x, tf.bfloat16), tf.cast(variables[0], tf.bfloat16))
    return tf.reduce_sum(tf.cast(product, tf.float32) * y)


def _lookup(variables: Sequence[tf.Variable], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    words = tf.cast(tf.abs(x[:, :3]) * 20 + tf.range(3.0), tf.int32)
    return tf.reduce_sum(tf.gather(variables[0], words) * y[:, tf.newaxis, :])


class _Part(NamedTuple):
    """A part of the training step.

    Attributes:
        what: What it is.
        name: Of its variables.
        scheme: How its gradients travel; SCATTER if each rank updates its shards of their sums.
        shapes: Of its variables.
        loss: Its `_Loss`, a term of that of the step.
    """

    what: str
    name: str
    scheme: str
    shapes: tuple[tuple[int, ...], ...]
    loss: _Loss


_KERNEL = (_INPUTS, _OUTPUTS)
_PARTS = (
    _Part("a dense layer", "dense", planning.PS, (_KERNEL, (_OUTPUTS,)), _dense),
    _Part("a dense layer, by its factors", "factors", planning.SFB, (_KERNEL, (_OUTPUTS,)), _dense),
    _Part("a dense layer, by half factors", "half_factors", planning.HFB, (_KERNEL, (_OUTPUTS,)), _dense),
    _Part("a layer in half precision", "half", planning.PS, (_KERNEL,), _half),
    _Part("an embedding", "embedding", planning.SPARSE, ((_WORDS, _OUTPUTS),), _lookup),
    _Part("a dense layer, updated in shards", "shards", planning.SCATTER, (_KERNEL, (_OUTPUTS,)), _dense),
)
PINS = {f"*/{part.name}/*": part.scheme for part in _PARTS if part.scheme in planning.SCHEMES}

# How the step is written, and so how it comes to the ranks.
PARTITIONED, LOOP = "partitioned by rows", "loop over strategy.run"


class _Trained(NamedTuple):
    """What a step trains.

    Attributes:
        variables: Those of each part.
        sums: For each of them, the sum of its gradients in all steps, which it is updated by; None to take the
            gradient.
    """

    variables: list[list[tf.Variable]]
    sums: list[list[tf.Variable | None]]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a part of a training step has shown.

    Attributes:
        step: PARTITIONED or LOOP.
        what: What was trained.
        scheme: How its gradients have travelled; "gather" where ranks exchange rows instead, "none" in one process.
        problem: What is wrong, a sentence; "" if nothing is.
        is_supported: Whether the engine has that scheme.
    """

    step: str
    what: str
    scheme: str
    problem: str
    is_supported: bool = True


def check(strategy: strategy_lib.PoseidonStrategy) -> list[Result]:
    """Runs both steps twice on all ranks, and compares; all ranks must call it.

    Args:
        strategy: A strategy with PINS.
    """
    return [*_check(PARTITIONED, strategy), *_check(LOOP, strategy)]


def _check(how: str, strategy: strategy_lib.PoseidonStrategy) -> list[Result]:
    parts = [part for part in _PARTS if how == PARTITIONED or part.scheme != planning.SCATTER]
    here = _trained(parts, "here")
    with strategy.scope():
        shared = _trained(parts, how.partition(" ")[0], strategy.extended.job)
    step = (_loop(shared, strategy) if how == LOOP else
            distribution.distribute(tf.function(functools.partial(_step, shared)), strategy=strategy))
    for seed in range(2):
        x, y = _batch(seed, strategy.num_replicas_in_sync)
        _step(here, x, y)
        step(x, y)
    return [_result(how, part, own, theirs, strategy) for part, own, theirs in zip(
        parts, here.variables, shared.variables)]


def _result(how: str, part: _Part, own: Sequence[tf.Variable], theirs: Sequence[tf.Variable],
            strategy: strategy_lib.PoseidonStrategy) -> Result:
    is_alone = strategy.num_replicas_in_sync == 1
    gathers = how == PARTITIONED and part.scheme == planning.SPARSE
    scheme = "none" if is_alone else "gather" if gathers else part.scheme
    for expected, variable in zip(own, theirs):
        wrong = np.flatnonzero(expected.numpy() != variable.numpy())
        if len(wrong):
            return Result(how, part.what, scheme, (
                f"{len(wrong)} of the {tf.size(variable)} numbers of '{variable.name}' are not those of one process, "
                f"the first is {variable.numpy().flat[wrong[0]]} instead of {expected.numpy().flat[wrong[0]]}"))
    if is_alone or gathers:
        return Result(how, part.what, scheme, "")
    if scheme in planning.SCHEMES and scheme not in strategy.extended.job.graph_pass.session.planner.schemes:
        return Result(how, part.what, scheme, "", is_supported=False)
    return Result(how, part.what, scheme, _otherwise(strategy.plan, theirs[0].name.partition(":")[0], scheme))


def _otherwise(plan: planning.Plan | None, variable: str, scheme: str) -> str:
    """Says so if a gradient travels in another way; then the bits above are right, but are not this scheme's."""
    if plan is None or plan.refusal:
        return f"the step was not rewritten: {plan.refusal if plan else 'TensorFlow has not called the pass'}"
    if scheme == planning.SCATTER:
        return "" if (variable, scheme) in {(exchange.site, exchange.kind) for exchange in plan.exchanges} else (
            f"ranks have not updated shards of '{variable}'")
    decision = next((decision for decision in plan.decisions if decision.site.partition("#")[0] == variable), None)
    if decision is None:
        return f"'{variable}' is not in the plan"
    return "" if decision.scheme == scheme else f"it has travelled by {decision.scheme}: {decision.reason}"


def _trained(parts: Sequence[_Part], name: str, job: Job | None = None) -> _Trained:
    """Returns new variables of parts: of this process, or of the ranks of a job."""
    variables = [[tf.Variable(tf.zeros(shape), name=f"{name}/{part.name}/{i}") for i, shape in enumerate(part.shapes)]
                 for part in parts]
    return _Trained(variables, [
        [_sum(variable, job) if part.scheme == planning.SCATTER else None for variable in of_part]
        for part, of_part in zip(parts, variables)])


def _sum(variable: tf.Variable, job: Job | None) -> tf.Variable:
    if job is None:
        return tf.Variable(tf.zeros(variable.shape))
    path = variable.name.partition(":")[0]
    return ShardedVariable(f"{path}/sum", path, variable.shape, variable.dtype,
                           Initial(lambda: tf.zeros(variable.shape), lambda size: tf.zeros([size])), job)


def _batch(seed: int, ranks: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns inputs and targets of a global batch.

    They are -1, 0 and 1. Each four ranks share the columns in which targets are not zero with few others, so that no
    sum over rows exceeds 256, up to which bfloat16 has all integers, in jobs of up to 2,560 ranks.
    """
    rng = np.random.default_rng(seed)
    rows = _ROWS_PER_RANK * ranks
    x, y = (rng.integers(-1, 2, (rows, columns)) for columns in (_INPUTS, _OUTPUTS))
    groups = min(-(-ranks // _SHARING), _OUTPUTS)
    own = np.arange(rows) // (_ROWS_PER_RANK * _SHARING) % groups
    y[own[:, np.newaxis] != np.arange(_OUTPUTS) % groups] = 0
    return tf.constant(x, tf.float32), tf.constant(y, tf.float32)


def _gradients(trained: _Trained, x: tf.Tensor, y: tf.Tensor) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = tf.add_n([part.loss(variables, x, y) for part, variables in zip(_PARTS, trained.variables)])
    return tape.gradient(loss, tf.nest.flatten(trained.variables))


def _apply(trained: _Trained, gradients: Sequence[Any]) -> None:
    for variable, of_all, gradient in zip(*map(tf.nest.flatten, trained), gradients):
        if of_all is not None:
            of_all.assign_add(gradient)
            gradient = of_all.read_value()
        variable.assign_sub(tf.convert_to_tensor(gradient))


def _step(trained: _Trained, x: tf.Tensor, y: tf.Tensor) -> None:
    """A training step of one process."""
    _apply(trained, _gradients(trained, x, y))


def _loop(trained: _Trained, strategy: strategy_lib.PoseidonStrategy) -> Callable[[tf.Tensor, tf.Tensor], None]:
    """Returns a step of a loop over `strategy.run`, which takes global batches."""

    def replica(x: tf.Tensor, y: tf.Tensor) -> None:
        _apply(trained, strategy.synchronize(_gradients(trained, x, y), tf.nest.flatten(trained.variables)))

    @tf.function
    def local_step(x: tf.Tensor, y: tf.Tensor) -> None:
        strategy.run(replica, args=(x, y))

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        own = slice(strategy.rank * _ROWS_PER_RANK, (strategy.rank + 1) * _ROWS_PER_RANK)
        local_step(x[own], y[own])

    return step
