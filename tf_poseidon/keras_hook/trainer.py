"""What Keras' fit, evaluate and predict do in a job of several processes."""

import functools
import inspect

import keras
import tensorflow as tf

from tf_poseidon import data
from tf_poseidon import runtime
from tf_poseidon import step as step_lib
from tf_poseidon.errors import PoseidonError


def train_or_evaluate(original, model, *args, **kwargs):
    """Checks the model, and shows progress on rank 0 only."""
    strategy = check_model(model)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    if strategy.rank != 0:
        bound.arguments["verbose"] = 0
    return original(*bound.args, **bound.kwargs)


def on_batch(original, model, *args, **kwargs):
    """Checks the model; every rank computes the whole batch."""
    check_model(model)
    return original(model, *args, **kwargs)


def predict(original, model, *args, **kwargs):
    """Computes all rows on every rank: the result is whole, and the same everywhere."""
    extended = check_model(model).extended
    extended.replicates_input = True
    try:
        return train_or_evaluate(original, model, *args, **kwargs)
    finally:
        extended.replicates_input = False


def check_model(model):
    """Returns the strategy of a model that can be used in this job, or says why it cannot."""
    strategy = model.distribute_strategy
    if not is_ours(strategy):
        raise PoseidonError(
            f"The model '{model.name}' was built outside of strategy.scope(), so its "
            f"{runtime.communicator().size} processes would train apart from each other; build "
            "and compile it inside `with strategy.scope():`.")
    for variable in model.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise PoseidonError(
                f"The variable '{variable.path}' of model '{model.name}' was created outside of "
                "strategy.scope(), so it may differ between processes; create all layers inside "
                "`with strategy.scope():`.")
    if model.optimizer is not None and not is_ours(model.optimizer._distribution_strategy):
        raise PoseidonError(
            f"The optimizer '{model.optimizer.name}' of model '{model.name}' was created outside of "
            "strategy.scope(); create it inside `with strategy.scope():`, as the model.")
    if model.jit_compile:
        raise PoseidonError(
            f"The model '{model.name}' is compiled with jit_compile=True, but XLA cannot compile "
            "the exchange with other processes; use compile(jit_compile=False).")
    return strategy


def maybe_symbolic_build(original, model, iterator=None, data_batch=None):
    """Builds the model by the shapes of the data; Keras would read a batch, and a generator lose it."""
    if iterator is not None and hasattr(model.distribute_strategy.extended, "communicator"):
        specs = keras.tree.map_structure(_tensor_spec, iterator._distributed_dataset.element_spec)
        shapes = [spec.shape for spec in keras.tree.flatten(specs) if spec is not None]
        if all(shape.rank is not None and shape[1:].is_fully_defined() for shape in shapes):
            return original(model, data_batch=specs)
    return original(model, iterator, data_batch)


def _tensor_spec(spec):
    """Returns the spec of one part of a batch as Keras' steps see it."""
    if isinstance(spec, data.Rows.Spec):
        return spec.value
    return None if isinstance(spec, tf.OptionalSpec) else spec


def get_tf_dataset(original, adapter):
    """Remembers the batch size of arrays, which their dataset does not tell."""
    dataset = original(adapter)
    data.batch_sizes[dataset] = adapter.batch_size
    return dataset


def make_function(original, model, step_function):
    """Marks train and test steps, in which losses are scaled for the user."""

    @functools.wraps(step_function)
    def keras_step(batch):
        step = step_lib.current()
        if step is not None:
            step.is_keras_step = True
            model.distribute_strategy.extended.last_share.assign(step.share(tf.float64))
        return step_function(batch)

    return original(model, keras_step)


def is_ours(strategy):
    # By what it can do, since strategy.py imports this module.
    return getattr(strategy.extended, "communicator", None) is not None
