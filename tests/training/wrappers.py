"""What optimizers do with gradients besides applying them: a second table, wrappers x optimizers.

Each cell trains a model whose gradients are slices, factors and plain sums, and returns its weights
and the optimizer's variables. Most of it goes wrong if gradients are inspected before they are summed.
"""

import dataclasses
import functools
import itertools

import keras
import numpy as np
from small_models import BATCH
from small_models import DenseGradientEmbedding
from small_models import ROWS


def base(optimizer, **options):
    """Returns the wrapped optimizer."""
    if optimizer == "sgd":
        return keras.optimizers.SGD(options.pop("learning_rate", 0.05), **options)
    return keras.optimizers.Adam(options.pop("learning_rate", 0.01), epsilon=1e-3, **options)


def with_options(**options):
    return lambda optimizer: base(optimizer, **options)


def loss_scale(optimizer, **options):
    return keras.optimizers.LossScaleOptimizer(base(optimizer, **options), initial_scale=2.0**10,
                                               dynamic_growth_steps=3)


def schedule(optimizer):
    return base(optimizer, learning_rate=keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5))


def multi(optimizer, **options):
    """One optimizer for the embedding, another for the rest."""
    choices = {True: keras.optimizers.SGD(0.03, momentum=0.5), False: base(optimizer, **options)}
    return keras.optimizers.MultiOptimizer(lambda v: choices["embedding" in v.path])


OPTIMIZERS = ("sgd", "adam")
WRAPPERS = {
    "clipnorm": with_options(clipnorm=0.05),
    "global_clipnorm": with_options(global_clipnorm=0.1),
    "clipvalue": with_options(clipvalue=0.01),
    "weight_decay": with_options(weight_decay=0.1),
    "ema": with_options(use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3),
    "schedule": schedule,
    "loss_scale_factor": with_options(loss_scale_factor=8.0, global_clipnorm=0.1),
    "loss_scale": loss_scale,
    "infinity": loss_scale,
    "accumulation": with_options(gradient_accumulation_steps=2),
    "accumulation_and_clipping": with_options(gradient_accumulation_steps=3, global_clipnorm=0.1),
    "accumulation_and_infinity": functools.partial(loss_scale, gradient_accumulation_steps=3),
    **({"multi": multi, "multi_accumulation": functools.partial(multi, gradient_accumulation_steps=3)}
       if hasattr(keras.optimizers, "MultiOptimizer") else {}),  # since Keras 3.15
    "frozen": base,
    "without_gradient": base,
}
RANKS, POLICIES = (2, 3), ("ps", "sfb")
JOBS = ((2, "ps"), (3, "sfb"))  # that run by default; scenarios.py has others for the second one


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """One cell of the table."""

    wrapper: str
    optimizer: str

    def __call__(self, strategy):
        with strategy.scope():
            model = self._model()
            # Not wrapped: an optimizer that Keras would put into one that scales losses.
            model.compile(WRAPPERS[self.wrapper](self.optimizer), "mse", auto_scale_loss=False)
        data, kernel = self._data(), model.layers[-1].kernel.path
        before = exchanges(strategy, kernel)
        fit = dict(batch_size=BATCH, verbose=0)
        if self.wrapper == "frozen":
            # Trains the last layer, then all: variables that the optimizer has not seen before.
            layers = [layer for layer in model.layers if layer.weights][:-1]
            for trainable in (False, True):
                for layer in layers:
                    layer.trainable = trainable
                with strategy.scope():
                    model.compile(WRAPPERS[self.wrapper](self.optimizer), "mse")
                model.fit(*data, **fit)
        else:
            model.fit(*data, epochs=2, **fit)
        variables = {f"weights/{i:02}": v for i, v in enumerate(model.weights)}
        for i, v in enumerate(model.optimizer.variables):
            # It is unspecified which rank holds how much of them; see test_accumulators_add_up.
            where = "local/accumulator" if "accum" in v.path else "optimizer"
            variables[f"{where}/{i:02}"] = v
        return {"local/exchanges": np.array(exchanges(strategy, kernel) - before),
                **{name: v.numpy() for name, v in variables.items()}}

    def _model(self):
        ids, x = keras.Input((5,), dtype="int32"), keras.Input((8,))
        h = keras.layers.Flatten()(DenseGradientEmbedding(400, 4, name="embedding")(ids))
        if self.wrapper == "without_gradient":
            h = WithUnusedWeight()(h)
        h = keras.layers.Dense(16, "tanh")(keras.layers.Concatenate()([h, x]))
        return keras.Model([ids, x], keras.layers.Dense(3)(h))

    def _data(self):
        rng = np.random.default_rng(5)
        x = rng.integers(-3, 4, (ROWS, 8)).astype("float64")
        if self.wrapper.endswith("infinity"):
            # Two rows, far apart: which ranks see them depends on how many there are.
            x[[17, 80], 2] = np.inf
        return ([rng.integers(0, 11, (ROWS, 5)).astype("int32"), x],
                rng.integers(-3, 4, (ROWS, 3)).astype("float64"))


class WithUnusedWeight(keras.layers.Layer):
    def build(self, shape):
        self.unused = self.add_weight(shape=(3,), name="unused")

    def call(self, x):
        return x


def exchanges(strategy, path):
    """Returns how often the gradient of a variable was exchanged."""
    return strategy.stats()["sites"].get(path, {"count": 0})["count"]


def table():
    """Returns all cells, by name."""
    return {f"{w}-{o}": Wrapped(w, o) for w, o in itertools.product(WRAPPERS, OPTIMIZERS)}


def full():
    """Returns (cell, ranks, policy) for every cell."""
    return list(itertools.product(table(), RANKS, POLICIES))


def cover():
    """Returns (cell, ranks, policy): each wrapper once; optimizers and jobs take turns."""
    return [(f"{wrapper}-{list(OPTIMIZERS)[(i + i // 4) % 2]}", *JOBS[(i // 2) % 2])
            for i, wrapper in enumerate(WRAPPERS)]
