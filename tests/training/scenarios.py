"""The scenarios of the training tests: each trains something and returns arrays to compare.

A scenario is a function of the strategy. The same scenario runs on 1, 2, 3 and 4 ranks: all ranks
must return the same bits, and the result of one process up to rounding. Computation is in float64,
so that rounding (1e-16) and mistakes (1e-3 and more) are far apart; see test_training.py for the
bound.
"""

import collections
import dataclasses
import itertools

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

RANKS = (2, 3, 4)
POLICIES = ("ps", "sfb", "auto")
# Starting a job takes as long as many cells, so only these of all pairs run by default.
JOBS = ((2, "ps"), (2, "sfb"), (2, "auto"), (3, "ps"), (3, "sfb"), (4, "auto"))
OTHERS = "sfb"  # the policy of scenarios that are in no table


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
    """Returns (cell, ranks, policy) such that every pair of values of two columns occurs."""
    rows = list(itertools.product(*columns()[:3], JOBS))
    missing = {pair for row in rows for pair in pairs(row)}
    chosen = []
    jobs = collections.Counter()  # so that they take turns
    while missing:
        best = max(rows, key=lambda row: (len(missing.intersection(pairs(row))), -jobs[row[3]]))
        missing.difference_update(pairs(best))
        jobs[best[3]] += 1
        chosen.append(("-".join(best[:3]), *best[3]))
    return chosen


def pairs(row):
    """Returns the pairs of values of a row, each value with the number of its column."""
    return set(itertools.combinations(enumerate(row), 2))


def full():
    """Returns (cell, ranks, policy) for every cell and number of ranks.

    Policies take turns, such that each meets every model, optimizer and number of ranks.
    """
    models, optimizers, losses, ranks, policies = map(list, columns())
    return [("-".join((models[m], optimizers[o], losses[i])), ranks[r],
             policies[(m + o + i + r) % len(policies)])
            for m, o, i, r in itertools.product(*(range(len(c)) for c in (models, optimizers, losses,
                                                                           ranks)))]


def others(full):
    """Returns (scenario, ranks) of those that are in no table."""
    return [(name, ranks) for name in (*WAYS, *BITS, *HALVES, *SCALES)
            for ranks in ((2,) if name in RECIPES or name in WAYS and not full else
                          (2, 3) if full else (3,))]


SCENARIOS = {**table(), **wrappers.table(), **WAYS, **BITS, **HALVES, **SCALES}
