"""The scenarios of the training tests: each trains something and returns arrays to compare.

A scenario is a function of the strategy. The same scenario runs on 1, 2, 3 and 4 ranks: all ranks
must return the same bits, and the result of one process up to rounding. Computation is in float64,
so that rounding (1e-16) and mistakes (1e-3 and more) are far apart; see test_training.py for the
bound.
"""

import dataclasses
import itertools

import jobs
import keras
import numpy as np
from recipes import RECIPES
from same_bits import BITS
from same_bits import HALVES
from same_bits import SCALES
from small_models import BATCH
from small_models import flat
from small_models import LOSSES
from small_models import make_data
from small_models import MaskRows
from small_models import MODELS
from small_models import OPTIMIZERS
from small_models import result
from small_models import ROWS
from ways_to_train import WAYS
import wrappers

FILE = "run_scenarios.py"
RANKS = (2, 3, 4)
POLICIES = ("ps", "sfb", "auto")
# Starting a job takes as long as many cells, so only these of all pairs run by default.
JOBS = ((2, "auto"), (3, "sfb"))
# Models of the second one: factors with a regularizer, moments, slices. Others run there with --full.
SECOND = ("wide", "batch_norm", "embedding")
OTHERS = "sfb"  # the policy of scenarios that are in no table
# Ways to train that run with --full alone: others have much in common with them.
LIKE_OTHERS = (
    "regularized", "scaled_gradients_of_transposed_kernel", "other_seeds", "own_batches_in_executions_of_three_steps",
    "own_batches_in_eager_steps", "predictions_of_two_outputs", "metrics_with_weights", "logs_of_batches", "float8",
    "terminated_on_nan", "unusual_predictions", "unusual_metrics", "repeated_data_by_steps", "canonical_train_step",
    "recipe_not_clipped", "recipe_clipvalue", "recipe_global_clipnorm", "generator", "predictions_as_long_as_a_batch",
    "metrics_shown_and_left", "custom_loop_that_builds_the_model", "rows_reduced_along_their_axis")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the table models x optimizers x losses."""

    model: str
    optimizer: str
    loss: str

    def __call__(self, strategy):
        with strategy.scope():
            inputs, outputs = next(m for m in MODELS if m.__name__ == self.model)()
            if self.loss == "masked":
                first = inputs[0] if isinstance(inputs, list) else inputs
                outputs = keras.tree.map_structure(lambda y: MaskRows()([first, y]), outputs)
            model = keras.Model(inputs, outputs)
            loss = LOSSES[self.loss]()
            several = len(model.outputs) > 1
            metric = keras.metrics.MeanAbsoluteError
            model.compile(OPTIMIZERS[self.optimizer](), [loss] * 2 if several else loss,
                          metrics=[[metric("mae")], [metric("mae")]] if several else [metric("mae")])
        x, y = make_data(model)
        weights = None
        if self.loss.startswith("weighted"):
            weights = np.random.default_rng(6).integers(1, 5, ROWS).astype("float64")
            weights = [weights, weights] if several else weights
        history = model.fit(x, y, sample_weight=weights, batch_size=BATCH, epochs=2, verbose=0)
        evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        return result(model, evaluate=evaluated, **flat(history))


def table():
    """Returns all cells, by name."""
    cells = itertools.product([m.__name__ for m in MODELS], OPTIMIZERS, LOSSES)
    return {"-".join(cell): Cell(*cell) for cell in cells}


def columns():
    """Returns the values of each column of the table."""
    return [m.__name__ for m in MODELS], list(OPTIMIZERS), list(LOSSES), RANKS, POLICIES


def cover():
    """Returns (cell, ranks, policy): each model, some of them in each job; optimizers and losses take turns."""
    models, optimizers, losses = map(list, columns()[:3])
    return [("-".join((model, optimizers[(m + 3 * j) % len(optimizers)], losses[(m + j) % len(losses)])), *job)
            for j, job in enumerate(JOBS) for m, model in enumerate(models) if j == 0 or model in SECOND]


def full():
    """Returns (cell, ranks, policy) for every cell and number of ranks.

    Policies take turns, such that each meets every model, optimizer and number of ranks.
    """
    models, optimizers, losses, ranks, policies = map(list, columns())
    return [("-".join((models[m], optimizers[o], losses[i])), ranks[r],
             policies[(m + o + i + r) % len(policies)])
            for m, o, i, r in itertools.product(*(range(len(c)) for c in (models, optimizers, losses,
                                                                           ranks)))]


def case(name, ranks=3, policy=OTHERS):
    """Returns the case of a scenario; on three ranks, where it is alone."""
    return jobs.Case(FILE, name, ranks, policy)


def cells(is_full):
    """Returns the cases of the table."""
    return list(itertools.starmap(case, full() if is_full else cover()))


def wrapped(is_full):
    """Returns the cases of the wrappers of optimizers."""
    return list(itertools.starmap(case, wrappers.full() if is_full else wrappers.cover()))


def accumulating(is_full):
    """Returns the cases of wrappers that accumulate gradients."""
    return [each for each in wrapped(is_full) if "accumulation" in each.name]


def ways(is_full):
    """Returns the cases of ways to train."""
    return [case(name, ranks) for name in WAYS if is_full or name not in LIKE_OTHERS
            for ranks in ((2, 3) if is_full and name not in RECIPES else (2,))]


def repeated(is_full):
    """Returns the second runs of cases that must give the same bits twice."""
    found = [each for each in cells(is_full) if each.ranks == 3] if is_full else [
        each for each in cells(False) if each.name.partition("-")[0] in ("embedding", "batch_norm") and each.ranks == 3]
    return [each.again() for each in (*found, *map(case, BITS if is_full else ("float32", "bfloat16")))]


SCENARIOS = {**table(), **wrappers.table(), **WAYS, **BITS, **HALVES, **SCALES}
