"""What one rank of distribute_contract.py does: it runs the checks under a strategy, and notes their values."""

import os
import sys
import tempfile
from typing import Any

import tensorflow as tf

from evaluation.runner.notes import Notes
from evaluation.suites import contract_checks


def _strategy(notes: Notes) -> tf.distribute.Strategy:
    if notes.how == "PoseidonStrategy":
        return notes.strategy("ps")
    if notes.how == "OneDeviceStrategy":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def main(directory: str) -> None:
    notes = Notes(directory)
    strategy = _strategy(notes)

    def value(name: str) -> Any:
        with tempfile.TemporaryDirectory() as os.environ["CONTRACT_DIRECTORY"]:
            try:
                return contract_checks.plain(contract_checks.CHECKS[name](strategy))
            except Exception as error:
                return {"error": f"{type(error).__name__}: {error}"}

    notes.run(contract_checks.CHECKS, value)


if __name__ == "__main__":
    main(sys.argv[1])
