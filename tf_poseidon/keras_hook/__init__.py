"""The only package that touches Keras: it connects Keras' trainer, callbacks and optimizers to the job.

The steps of `fit`, `evaluate` and `predict` are handed over as those of one process. Callbacks only know one process,
batch normalisation uses each rank's own rows, and in loops over `strategy.run`, Keras clips gradients before it reduces
them. `HOOKS` lists every function that is wrapped for this, and why. In a job of several processes, models can only be
trained and used under PoseidonStrategy; everything else in Keras passes through.
"""

from tf_poseidon.keras_hook.hooks import HOOKS
from tf_poseidon.keras_hook.hooks import install
from tf_poseidon.keras_hook.hooks import resolve

__all__ = ["HOOKS", "install", "resolve"]
