"""Poseidon for TensorFlow: train Keras models on several machines.

```python
import tf_poseidon as poseidon

strategy = poseidon.PoseidonStrategy()
with strategy.scope():
    model = ...
```

Importing this package starts nothing and loads nothing; creating a strategy joins the job.
"""

from tf_poseidon.errors import JobEndedError
from tf_poseidon.errors import PoseidonError

__all__ = ["JobEndedError", "PoseidonError", "PoseidonStrategy"]


def __getattr__(name):
    if name == "PoseidonStrategy":  # late, since it imports TensorFlow
        from tf_poseidon.strategy import PoseidonStrategy
        return PoseidonStrategy
    raise AttributeError(f"module 'tf_poseidon' has no attribute '{name}'")
