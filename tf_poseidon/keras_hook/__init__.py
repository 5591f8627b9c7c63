"""The one package that touches Keras: where its trainer, losses and optimizers meet the job.

Keras 3 scales losses by the number of replicas, not by their rows; it clips gradients before it
reduces them; and its metrics and callbacks know one process only. `HOOKS` lists every function that
is wrapped to put that right, and why. In a job of several processes, models can be trained and used
under PoseidonStrategy only; whatever else Keras does passes through.
"""

from tf_poseidon.keras_hook.hooks import HOOKS
from tf_poseidon.keras_hook.hooks import install
from tf_poseidon.keras_hook.hooks import resolve

__all__ = ["HOOKS", "install", "resolve"]
