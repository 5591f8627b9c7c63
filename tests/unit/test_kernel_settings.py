"""Settings that change the bits of kernels: which are noticed, and which are not compared."""

import tensorflow as tf

from tf_poseidon.job.host import kernel_settings


def test_variables():
    def flags(environment):
        return kernel_settings.settings(environment)["the environment variable XLA_FLAGS"]

    assert flags({}) == flags({"XLA_FLAGS": ""}) == flags({"XLA_FLAGS": "--xla_dump_to=/tmp/rank0"}) == "not set"
    assert flags({"XLA_FLAGS": "--b --xla_dump_to=/tmp --a=1"}) == flags({"XLA_FLAGS": "--a=1 --b"}) == "'--a=1 --b'"
    assert kernel_settings.settings({"NVIDIA_TF32_OVERRIDE": "0", "TF_CONFIG": "{}"}) == {
        **kernel_settings.settings({}), "the environment variable NVIDIA_TF32_OVERRIDE": "'0'"}


def test_what_the_program_sets():
    before = kernel_settings.settings({})
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})
    try:
        now = kernel_settings.settings({})
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision": False})
    assert {name.partition(" (")[0]: value for name, value in now.items() if before[name] != value} == {
        "TensorFloat-32": "disabled", "options of the graph optimizer": "{'auto_mixed_precision': True}"}
    assert kernel_settings.settings({}) == before


def test_threads():
    assert [kernel_settings.chosen_threads(environment) for environment in (
        {}, {"TF_NUM_INTRAOP_THREADS": "3"}, {"TF_NUM_INTRAOP_THREADS": "many"})] == [0, 3, 0]
