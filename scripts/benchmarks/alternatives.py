"""A rank of one job that trains a network of dense layers with another library, or with this one.

    mpiexec -n 4 -hosts a,b,c,d python scripts/benchmarks/alternatives.py --system pytorch --master a --json out.json

    poseidon    Keras' fit on TensorFlow under PoseidonStrategy
    jax         the same program with Keras on JAX and DataParallel
    pytorch     DistributedDataParallel over Gloo

Each starts from the same weights, reads the same batches and takes steps of SGD, so the losses are the same. Rank 0
writes them with the times of epochs after the first. scripts/benchmarks/bench_alternatives.py compares.
"""

import json
import os
import time

from absl import app
from absl import flags
import numpy as np

_SYSTEM = flags.DEFINE_enum("system", "poseidon", ["poseidon", "jax", "pytorch"], "What to train with.")
_JSON = flags.DEFINE_string("json", None, "File for the result.")
_MASTER = flags.DEFINE_string("master", "localhost", "Host of rank 0, for libraries that ask for it.")
_STEPS = flags.DEFINE_integer("steps", 6, "Steps of an epoch.")
_EPOCHS = flags.DEFINE_integer("epochs", 3, "Epochs, of which the first is not timed.")

SIZES = (1024, 4096, 4096, 1000)  # of layers, as of `mlp` in zoo.py
ROWS = 32  # of each rank
RATE = 0.01
_PORT = 2300


def main(_):
    rank, size = int(os.environ.get("PMI_RANK", 0)), int(os.environ.get("PMI_SIZE", 1))
    epochs = {"poseidon": keras_epochs, "jax": keras_epochs, "pytorch": pytorch_epochs}[_SYSTEM.value](rank, size)
    if rank == 0 and _JSON.value:
        losses, seconds = zip(*epochs)
        with open(_JSON.value, "w") as file:
            json.dump({"losses": losses, "step_seconds": [each / _STEPS.value for each in seconds[1:]]}, file)


def batches(size):
    """Returns the rows of an epoch and their labels."""
    rng = np.random.default_rng(1)
    rows = _STEPS.value * ROWS * size
    return rng.normal(size=(rows, SIZES[0])).astype(np.float32), rng.integers(0, SIZES[-1], rows)


def weights():
    """Returns [kernel, bias, kernel, bias, ...]."""
    rng = np.random.default_rng(2)
    return [value for before, after in zip(SIZES, SIZES[1:])
            for value in (rng.normal(scale=(2 / before) ** 0.5, size=(before, after)).astype(np.float32),
                          np.zeros(after, np.float32))]


def keras_epochs(rank, size):
    """Returns the loss and the seconds of each epoch of `fit`."""
    os.environ["KERAS_BACKEND"] = {"poseidon": "tensorflow", "jax": "jax"}[_SYSTEM.value]
    import keras

    def build():
        model = keras.Sequential([keras.Input((SIZES[0],)),
                                  *(keras.layers.Dense(units, activation="relu") for units in SIZES[1:-1]),
                                  keras.layers.Dense(SIZES[-1])])
        model.compile(keras.optimizers.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.set_weights(weights())
        return model

    x, y = batches(size)
    if _SYSTEM.value == "poseidon":
        import tf_poseidon as poseidon
        with poseidon.PoseidonStrategy().scope():
            model, batch_size = build(), ROWS * size  # global batches, of which each rank computes its rows
    else:
        keras.distribution.initialize(f"{_MASTER.value}:{_PORT}", size, rank)
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
        model, batch_size = build(), ROWS  # each process is given its own rows
        x, y = (value.reshape(_STEPS.value, size, ROWS, *value.shape[1:])[:, rank].reshape(-1, *value.shape[1:])
                for value in (x, y))
    epochs = []
    for _ in range(_EPOCHS.value):
        begin = time.perf_counter()
        history = model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        epochs.append((history.history["loss"][0], time.perf_counter() - begin))
    return epochs


def pytorch_epochs(rank, size):
    """Returns the loss and the seconds of each epoch of a loop with DistributedDataParallel."""
    import torch
    from torch import distributed
    from torch import nn
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
    distributed.init_process_group("gloo", f"tcp://{_MASTER.value}:{_PORT}", rank=rank, world_size=size)
    layers = [nn.Linear(before, after) for before, after in zip(SIZES, SIZES[1:])]
    values = weights()
    with torch.no_grad():
        for layer, kernel, bias in zip(layers, values[::2], values[1::2]):
            layer.weight.copy_(torch.from_numpy(kernel.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias))
    network = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]
    model, loss_of = nn.parallel.DistributedDataParallel(network), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    x, y = (torch.from_numpy(value).reshape(_STEPS.value, size, ROWS, *value.shape[1:])[:, rank]
            for value in batches(size))
    epochs = []
    for _ in range(_EPOCHS.value):
        begin, total = time.perf_counter(), torch.zeros(())
        for inputs, labels in zip(x, y):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        seconds = time.perf_counter() - begin
        distributed.all_reduce(total)
        epochs.append((total.item() / (size * _STEPS.value), seconds))
    return epochs


if __name__ == "__main__":
    app.run(main)
