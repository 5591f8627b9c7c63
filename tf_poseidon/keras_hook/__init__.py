"""The one package that touches Keras: where its trainer, callbacks and optimizers meet the job.

The steps of `fit`, `evaluate` and `predict` are handed over as those of one process. Callbacks know one process only,
batch normalisation keeps to each rank's rows, and in loops over `strategy.run` Keras clips gradients before it reduces
them. `HOOKS` lists every function that is wrapped for that, and why. In a job of several processes, models can be
trained and used under PoseidonStrategy only; whatever else Keras does passes through.
"""

from tf_poseidon.keras_hook.hooks import HOOKS
from tf_poseidon.keras_hook.hooks import install
from tf_poseidon.keras_hook.hooks import resolve

__all__ = ["HOOKS", "install", "resolve"]
