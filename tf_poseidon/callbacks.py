"""Callbacks for Keras' `fit`: `poseidon.callbacks.Communication` and `poseidon.callbacks.Summary`.

Tests: tests/training/test_slow_ranks.py.
"""

from tf_poseidon.keras_hook.coordination.communication import Communication
from tf_poseidon.keras_hook.coordination.summary import Summary

__all__ = ["Communication", "Summary"]
