"""Poseidon for TensorFlow: train Keras models on several machines.

```python
import tf_poseidon as poseidon

strategy = poseidon.PoseidonStrategy()
with strategy.scope():
    model = ...
```

Importing this package starts nothing and loads nothing; creating a strategy joins the job.
"""

import importlib

from tf_poseidon.errors import JobEndedError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.planning import Cluster
from tf_poseidon.planning import Plan

__all__ = ["Cluster", "JobEndedError", "Plan", "PoseidonError", "PoseidonStrategy", "calibrate",
           "explain"]

# Late, since they import TensorFlow: which module has them.
_LATE = {"PoseidonStrategy": "strategy", "calibrate": "calibration", "explain": "keras_hook.explaining"}


def __getattr__(name):
    if name in _LATE:
        return getattr(importlib.import_module(f"tf_poseidon.{_LATE[name]}"), name)
    raise AttributeError(f"module 'tf_poseidon' has no attribute '{name}'")
