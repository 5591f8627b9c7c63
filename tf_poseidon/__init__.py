"""Poseidon for TensorFlow: train Keras models on several machines.

```python
import tf_poseidon as poseidon

strategy = poseidon.PoseidonStrategy()
with strategy.scope():
    model = ...
```

Importing this package starts nothing and loads nothing; creating a strategy, or calling `load_ops()`, joins
the job.
"""
# Tests: tests/unit/test_package.py, tests/scripts/test_docs.py.

import importlib

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import GraphError
from tf_poseidon.errors import JobEndedError
from tf_poseidon.errors import JobError
from tf_poseidon.errors import PlanError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.planning import Cluster
from tf_poseidon.planning import Plan
from tf_poseidon.staleness.bounds import DSSP
from tf_poseidon.staleness.bounds import SSP
from tf_poseidon.staleness.version_log import VersionLog

# Modules of the names whose import loads TensorFlow, or much else; they are imported on first use.
_LATE = {
    "PoseidonStrategy": "strategy.poseidon_strategy",
    "Summary": "keras_hook.coordination.summary",
    "advise": "explanations.explaining",
    "calibrate": "job.calibration",
    "diff": "saved_graphs.differences",
    "distribute": "strategy.distribution",
    "enable": "drop_in",
    "explain": "explanations.explaining",
    "load_ops": "saved_graphs.load_ops",
    "rewrite_graph_def": "saved_graphs.rewriting",
    "rewrite_meta_graph": "saved_graphs.rewriting",
    "rewrite_saved_model": "saved_graphs.rewriting",
    "run": "job.function_jobs.function_job",
    "strip": "saved_graphs.rewriting",
}

__all__ = ["Cluster", "ConfigurationError", "DSSP", "GraphError", "JobEndedError", "JobError", "Plan", "PlanError",
           "PoseidonError", "SSP", "VersionLog", *_LATE]


def __getattr__(name: str) -> object:
    if name == "callbacks":
        return importlib.import_module("tf_poseidon.callbacks")
    if name in _LATE:
        return getattr(importlib.import_module(f"tf_poseidon.{_LATE[name]}"), name)
    raise AttributeError(f"module 'tf_poseidon' has no attribute '{name}'")
