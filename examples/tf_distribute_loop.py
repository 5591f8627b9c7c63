"""A usual training loop for MultiWorkerMirroredStrategy: it does not use tf_poseidon.

Each process is started separately, with its own TF_CONFIG. Two lines at the top make it exchange factors:
`import tf_poseidon as poseidon; poseidon.enable()`.
"""

import argparse

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--batch", type=int, default=32, help="rows of each process")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--save", help="write the weights to this .npz file")
arguments = parser.parse_args()

initial = tf.random.Generator.from_seed(1)


def dense(rows, columns):
    kernel = initial.normal([rows, columns], stddev=rows**-0.5)
    return tf.Variable(kernel), tf.Variable(tf.zeros([columns]))


with strategy.scope():
    layers = [dense(64, arguments.width), dense(arguments.width, arguments.width),
              dense(arguments.width, 10)]
    variables = [variable for layer in layers for variable in layer]
    momenta = [tf.Variable(tf.zeros(variable.shape)) for variable in variables]


def logits_of(x):
    for kernel, bias in layers[:-1]:
        x = tf.nn.tanh(x @ kernel + bias)
    kernel, bias = layers[-1]
    return x @ kernel + bias


def replica_step(x, y):
    size = strategy.num_replicas_in_sync
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits_of(x))) / size
        loss += 1e-4 / size * tf.add_n([tf.nn.l2_loss(kernel) for kernel, _ in layers])
    gradients = tape.gradient(loss, variables)
    context = tf.distribute.get_replica_context()
    gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
    for variable, momentum, gradient in zip(variables, momenta, gradients):
        momentum.assign(0.9 * momentum + gradient)
        variable.assign_sub(0.1 * momentum)
    return loss


@tf.function
def train_step(x, y):
    return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)


rank = strategy.cluster_resolver.task_id
data = np.random.default_rng(rank)
for step in range(arguments.steps):
    x = data.normal(size=(arguments.batch, 64)).astype(np.float32)
    loss = train_step(tf.constant(x), tf.constant(np.argmax(x[:, :10], 1)))
    if rank == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.4f}", flush=True)
if arguments.save and rank == 0:
    np.savez(arguments.save, *[variable.numpy() for variable in variables])
