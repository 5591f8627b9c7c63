"""A rank of one job that trains a network with another library, or with this one.

    mpiexec -n 4 -hosts a,b,c,d python -m evaluation.comparisons.alternatives --system pytorch --master a --json out

    poseidon    Keras' fit on TensorFlow under PoseidonStrategy
    horovod     Keras' fit on TensorFlow, with a train_step whose tape is Horovod's, over Gloo
    jax         Keras' fit on JAX under DataParallel
    pytorch     a loop with DistributedDataParallel over Gloo

Each takes steps of SGD on the same batches. Rank 0 compares the weights after the first step with what its library
computes in one process: by the mean over the ranks' parts of the batch, as batch normalisation is of each rank's rows;
with JAX, where it is of all rows, from the whole batch. Each rank writes OUT.RANK.json: the times of epochs after the
first, the processor times that they took, and losses. evaluation/comparisons/bench_alternatives.py compares.
"""

import dataclasses
import json
import os
import pathlib
import resource
import time
from typing import Any

from absl import app
from absl import flags
import numpy as np

SYSTEMS = ("poseidon", "horovod", "pytorch", "jax")

_SYSTEM = flags.DEFINE_enum("system", "poseidon", SYSTEMS, "What to train with.")
_NETWORK = flags.DEFINE_string("network", "mlp", "One of NETWORKS.")
_JSON = flags.DEFINE_string("json", None, "Files for the results, without '.RANK.json'.", required=True)
_MASTER = flags.DEFINE_string("master", "localhost", "Host of rank 0, for libraries that ask for it.")
_STEPS = flags.DEFINE_integer("steps", 10, "Steps of an epoch.")
_EPOCHS = flags.DEFINE_integer("epochs", 5, "Epochs, of which the first is not timed.")

RATE = 0.01
_PORT = 2300
# The error of the first update, relative to the update: up to 0.02 by rounding in deep networks with batch
# normalisation. Without exchange, or with moments of other rows, it is 0.9 and more.
_BOUND = 5e-2


@dataclasses.dataclass(frozen=True)
class Network:
    """A network, and its batches.

    Attributes:
        inputs: Shape of a row.
        rows: Rows of each rank.
        classes: How many.
        words: If rows are words: how many there are.
        application: Its names in keras.applications and torchvision.models; empty: a function here makes it.
    """

    inputs: tuple[int, ...]
    rows: int
    classes: int = 1000
    words: int = 0
    application: tuple[str, ...] = ()


NETWORKS = {
    "mlp": Network((1024,), 32),
    "mobilenet_v2": Network((32, 32, 3), 32, application=("MobileNetV2", "mobilenet_v2")),
    "efficientnet_b0": Network((32, 32, 3), 32, application=("EfficientNetB0", "efficientnet_b0")),
    "resnet50": Network((32, 32, 3), 32, application=("ResNet50", "resnet50")),
    "transformer_12": Network((128,), 2, words=1000),
}
_LAYERS = (4096, 4096)  # the hidden ones of the mlp
_BLOCKS, _HEADS, _WIDTH = 12, 4, 256  # of the transformer


def main(_):
    network, size = NETWORKS[_NETWORK.value], int(os.environ.get("PMI_SIZE", 1))
    rank = int(os.environ.get("PMI_RANK", 0))
    train = (PyTorch if _SYSTEM.value == "pytorch" else Keras)(network, rank, size)
    x, y = batches(network, size)
    before = train.weights()
    train.fit(x[:1], y[:1], 1)
    after = train.weights()
    epochs = train.fit(x, y, _EPOCHS.value)
    if rank == 0:
        parts = np.split(x[0], size), np.split(y[0], size)
        batches_of_one = [(x[0], y[0])] if _SYSTEM.value == "jax" else zip(*parts)
        expected = np.mean([train.update(before, *batch) for batch in batches_of_one], axis=0)
        difference = np.linalg.norm(flat(after) - flat(before) - expected) / np.linalg.norm(expected)
        if not difference <= _BOUND:
            raise SystemExit(f"The first update of {_SYSTEM.value} differs by {difference:.2g} from that of one "
                             f"process, expected at most {_BOUND}: it trains something else.")
    pathlib.Path(f"{_JSON.value}.{rank}.json").write_text(json.dumps({
        "losses": [loss for loss, _, _ in epochs], "difference": float(difference) if rank == 0 else None,
        "step_seconds": [seconds / _STEPS.value for _, seconds, _ in epochs[1:]],
        "processor_seconds": [seconds / _STEPS.value for _, _, seconds in epochs[1:]]}))


def batches(network, size):
    """Returns the rows of an epoch and their labels: an array of batches each, ordered by ranks."""
    rng = np.random.default_rng(1)
    shape = _STEPS.value, network.rows * size, *network.inputs
    x = rng.integers(network.words, size=shape) if network.words else rng.normal(size=shape).astype(np.float32)
    return x, rng.integers(network.classes, size=shape[:2])


class Clock:
    """Tells the wall and the processor time that pass between its calls, in seconds."""

    def __init__(self):
        self._last = self._now()

    def __call__(self):
        last, self._last = self._last, self._now()
        return self._last - last

    @staticmethod
    def _now():
        used = resource.getrusage(resource.RUSAGE_SELF)
        return np.array([time.perf_counter(), used.ru_utime + used.ru_stime])


def flat(values):
    """Returns arrays as one."""
    return np.concatenate([np.asarray(value, np.float64).ravel() for value in values])


class Keras:
    """A model of Keras, trained by `fit`."""

    def __init__(self, network, rank, size):
        os.environ["KERAS_BACKEND"] = "jax" if _SYSTEM.value == "jax" else "tensorflow"
        import keras
        self._network, self._rank, self._size = network, rank, size
        if _SYSTEM.value == "poseidon":
            import tf_poseidon as poseidon
            with poseidon.PoseidonStrategy().scope():
                self._model = self._made()
        elif _SYSTEM.value == "jax":
            keras.distribution.initialize(f"{_MASTER.value}:{_PORT}", size, rank)
            keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
            self._model = self._made()
        else:
            from mpi4py import MPI

            from evaluation import peers
            horovod = peers.start_horovod(MPI.COMM_WORLD)
            self._model = self._made(_horovod_model(horovod))
            horovod.broadcast_variables([variable.value for variable in self._model.variables], root_rank=0)

    def _made(self, model_class=None):
        import keras
        keras.utils.set_random_seed(1)
        inputs, outputs = _keras_network(self._network)
        model = (model_class or keras.Model)(inputs, outputs)
        model.compile(keras.optimizers.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def weights(self):
        """Returns the values of the trainable variables."""
        return [variable.numpy() for variable in self._model.trainable_variables]

    def fit(self, x, y, epochs):
        """Trains; returns (loss, wall time, processor time) of each epoch."""
        import keras
        rows, clock, times = x.shape[1], Clock(), []
        if _SYSTEM.value != "poseidon":  # which computes its rows of global batches: these are given their own
            rows //= self._size
            x, y = (value[:, self._rank * rows:(self._rank + 1) * rows] for value in (x, y))
        x, y = (value.reshape(-1, *value.shape[2:]) for value in (x, y))
        history = self._model.fit(
            x, y, batch_size=rows, epochs=epochs, shuffle=False, verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: times.append(clock()))])
        return [(loss, *time) for loss, time in zip(history.history["loss"], times)]

    def update(self, weights, x, y):
        """Returns by what a step on a batch changes weights in one process."""
        import keras
        if _SYSTEM.value == "jax":
            keras.distribution.set_distribution(None)
        model = self._made()
        for variable, value in zip(model.trainable_variables, weights, strict=True):
            variable.assign(value)
        if _SYSTEM.value == "jax":
            model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
            return flat(model.trainable_variables) - flat(weights)
        import tensorflow as tf
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        return flat(-RATE * tf.convert_to_tensor(gradient) for gradient in gradients)


def _horovod_model(hvd):
    """Returns a class of models as Horovod's users write them for Keras 3, whose optimizers Horovod does not know."""
    import keras
    import tensorflow as tf

    class HorovodModel(keras.Model):
        def train_step(self, data):
            x, y = data
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self._loss_tracker.update_state(loss)
            gradients = tape.gradient(loss, [variable.value for variable in self.trainable_variables])
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

    return HorovodModel


def _keras_network(network):
    """Returns inputs and outputs; nothing in it is random, so that libraries compute the same."""
    import keras
    from keras import layers
    if network.application:
        model = getattr(keras.applications, network.application[0])(
            weights=None, input_shape=network.inputs, classes=network.classes, classifier_activation=None)
        for layer in model.layers:
            if isinstance(layer, layers.Dropout):  # also of whole branches
                layer.rate = 0
        return model.inputs[0], model.outputs[0]
    inputs = x = keras.Input(network.inputs, dtype="int32" if network.words else "float32")
    if not network.words:
        for units in _LAYERS:
            x = layers.Dense(units, activation="relu", kernel_initializer="he_normal")(x)
        return inputs, layers.Dense(network.classes)(x)
    x = layers.Embedding(network.words, _WIDTH)(x)
    for _ in range(_BLOCKS):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(_WIDTH)(layers.Dense(4 * _WIDTH, "gelu")(x)))
    return inputs, layers.Dense(network.classes)(layers.GlobalAveragePooling1D()(x))


class PyTorch:
    """A module of PyTorch, trained in a loop."""

    def __init__(self, network, rank, size):
        import torch
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
        torch.distributed.init_process_group("gloo", f"tcp://{_MASTER.value}:{_PORT}", rank=rank, world_size=size)
        self._network, self._rank, self._size = network, rank, size
        self._module = _torch_network(network)
        self._model = torch.nn.parallel.DistributedDataParallel(self._module)
        self._optimizer = torch.optim.SGD(self._module.parameters(), RATE)

    def weights(self):
        """Returns the values of the trainable variables."""
        return [parameter.detach().numpy().copy() for parameter in self._module.parameters()]

    def fit(self, x, y, epochs):
        """Trains; returns (loss, wall time, processor time) of each epoch."""
        import torch
        own = slice(self._rank * self._network.rows, (self._rank + 1) * self._network.rows)
        x, y = self._tensors(x[:, own]), self._tensors(y[:, own])
        clock, results = Clock(), []
        for _ in range(epochs):
            total = sum(self._step(self._model, self._optimizer, *batch) for batch in zip(x, y))
            torch.distributed.all_reduce(total)
            results.append((total.item() / (self._size * len(x)), *clock()))
        return results

    def update(self, weights, x, y):
        """Returns by what a step on a batch changes weights in one process."""
        import torch
        module = _torch_network(self._network)
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), weights, strict=True):
                parameter.copy_(torch.from_numpy(value))
        self._step(module, torch.optim.SGD(module.parameters(), RATE), self._tensors(x), self._tensors(y))
        return flat(parameter.detach() for parameter in module.parameters()) - flat(weights)

    def _tensors(self, values):
        import torch
        # Images of torchvision have their channels first.
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(values, -1, -3) if values.ndim > 3 else values))

    @staticmethod
    def _step(model, optimizer, x, y):
        import torch
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()


def _torch_network(network) -> Any:
    import torch
    from torch import nn
    torch.manual_seed(1)
    if network.application:
        import torchvision
        model = getattr(torchvision.models, network.application[1])(num_classes=network.classes)
        for module in model.modules():
            if isinstance(module, (nn.Dropout, torchvision.ops.StochasticDepth)):
                module.p = 0.0
        return model
    if not network.words:
        sizes = (*network.inputs, *_LAYERS, network.classes)
        layers = [nn.Linear(before, after) for before, after in zip(sizes, sizes[1:])]
        return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    block = nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, 0.0, "gelu", batch_first=True)
    return nn.Sequential(nn.Embedding(network.words, _WIDTH), nn.TransformerEncoder(block, _BLOCKS), Mean(),
                         nn.Linear(_WIDTH, network.classes))


if __name__ == "__main__":
    app.run(main)
