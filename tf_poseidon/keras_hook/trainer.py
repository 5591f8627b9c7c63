"""What Keras' fit, evaluate and predict do in a job of several processes."""

import functools
import inspect
import itertools

import keras
from keras.src.utils import python_utils
import tensorflow as tf

from tf_poseidon import data
from tf_poseidon import runtime
from tf_poseidon import step as step_lib
from tf_poseidon.errors import PoseidonError
from tf_poseidon.keras_hook import callbacks as callbacks_lib
from tf_poseidon.keras_hook import comparing
from tf_poseidon.keras_hook import logs as logs_lib
from tf_poseidon.keras_hook import losses
from tf_poseidon.keras_hook.common import is_ours


def run(original, model, *args, **kwargs):
    """Checks the model, coordinates callbacks, and shows progress on rank 0 only."""
    strategy = check_model(model)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.arguments["callbacks"] = callbacks_lib.coordinate(
        bound.arguments.get("callbacks"), strategy.extended.communicator,
        method=original.__name__)
    if strategy.rank != 0:
        bound.arguments["verbose"] = 0
    return original(*bound.args, **bound.kwargs)


def on_batch(original, model, *args, return_dict=False, **kwargs):
    """Trains or tests on one global batch; its logs are those of all ranks."""
    check_model(model)
    names = list(inspect.signature(original).parameters)
    if "return_dict" in names[:len(args) + 1]:  # given by position
        *args, return_dict = args
    own = original(model, *args, return_dict=True, **kwargs)
    logs = python_utils.pythonify_logs(model._get_metrics_result_or_logs(own))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def predict_on_batch(original, model, x):
    """Checks the model."""
    check_model(model)
    return original(model, x)


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
    optimizer = getattr(model, "optimizer", None)  # of models that are not compiled, too
    if optimizer is not None and not is_ours(optimizer._distribution_strategy):
        raise PoseidonError(
            f"The optimizer '{optimizer.name}' of model '{model.name}' was created outside of "
            "strategy.scope(); create it inside `with strategy.scope():`, as the model.")
    if getattr(model, "jit_compile", False):
        raise PoseidonError(
            f"The model '{model.name}' is compiled with jit_compile=True, but XLA cannot compile "
            "the exchange with other processes; use compile(jit_compile=False).")
    return strategy


def maybe_symbolic_build(original, model, iterator=None, data_batch=None):
    """Builds the model by the shapes of the data; Keras would read a batch, and a generator lose it."""
    is_alone_or_ours = hasattr(model.distribute_strategy.extended, "communicator")
    if is_alone_or_ours and type(model).call is keras.Model.call:
        return None  # its train_step calls other models, as that of a GAN: nothing to build
    if iterator is not None and is_alone_or_ours:
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
    strategy = model.distribute_strategy
    if not is_ours(strategy):
        return original(model, step_function)

    @functools.wraps(step_function)
    def keras_step(batch):
        step = step_lib.current()
        step.is_keras_step = True
        strategy.extended.last_share.assign(step.share(tf.float64))
        with losses.scaled_as_a_whole(model, step), logs_lib.noting_sources(model) as note:
            logs = step_function(batch)
            note(logs)
        if strategy.extended.global_batch_logs:
            logs = logs_lib.global_batch_logs(model, step, logs)
        return logs

    function = original(model, keras_step)

    trains, calls = step_function == model.train_step, itertools.count(1)

    def with_split_batches(iterator):
        if not isinstance(iterator, tf.data.Iterator):  # of train_on_batch, test_on_batch
            iterator = (_split(strategy, batch) for batch in iterator)
        logs = function(iterator)
        if trains and (number := next(calls)) % comparing.EVERY == 0:
            callbacks_lib.compare_state(model, f"the end of call {number} of its steps")
        return logs

    return with_split_batches


def make_predict_function(original, model, force=False):
    """Lets predict_on_batch split its batch."""
    before = model.predict_function
    original(model, force)
    function, strategy = model.predict_function, model.distribute_strategy
    if function is before or not is_ours(strategy):
        return

    def with_split_batches(batches):
        strategy.extended.is_predicting = True
        try:
            return function([batch if data.first_rows(batch) is not None else
                             _split(strategy, batch) for batch in batches])
        finally:
            strategy.extended.is_predicting = False

    model.predict_function = with_split_batches


def _split(strategy, batch):
    """Returns this rank's part of a global batch of arrays."""
    batch = tf.nest.map_structure(lambda x: x if x is None else tf.convert_to_tensor(x), batch)
    return data.split_batch(batch, strategy.rank, strategy.num_replicas_in_sync)


def reduce_per_replica(original, values, strategy, reduction):
    """Puts the predictions of all ranks together."""
    if is_ours(strategy) and reduction == "concat":
        return strategy.extended.gather(values)
    return original(values, strategy, reduction)
