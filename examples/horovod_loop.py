"""A usual training loop for Horovod: it does not use tf_poseidon.

    horovodrun --gloo -np 2 python examples/horovod_loop.py

Two lines after hvd.init() make it exchange factors: `import tf_poseidon as poseidon; poseidon.enable()`.
"""

import argparse

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--batch", type=int, default=32, help="rows of each process")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--predivide", type=float, default=1.0, help="Horovod's gradient_predivide_factor")
parser.add_argument("--groups", type=int, default=0, help="Horovod's num_groups")
parser.add_argument("--save", help="write the weights to this .npz file")
arguments = parser.parse_args()

initial = tf.random.Generator.from_seed(1)


def dense(rows, columns):
    kernel = initial.normal([rows, columns], stddev=rows**-0.5)
    return tf.Variable(kernel), tf.Variable(tf.zeros([columns]))


layers = [dense(64, arguments.width), dense(arguments.width, arguments.width), dense(arguments.width, 10)]
variables = [variable for layer in layers for variable in layer]
momenta = [tf.Variable(tf.zeros_like(variable)) for variable in variables]


def logits_of(x):
    for kernel, bias in layers[:-1]:
        x = tf.nn.tanh(x @ kernel + bias)
    kernel, bias = layers[-1]
    return x @ kernel + bias


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits_of(x)))
        loss += 1e-4 * tf.add_n([tf.nn.l2_loss(kernel) for kernel, _ in layers])
    tape = hvd.DistributedGradientTape(tape, gradient_predivide_factor=arguments.predivide,
                                       num_groups=arguments.groups)
    for variable, momentum, gradient in zip(variables, momenta, tape.gradient(loss, variables)):
        momentum.assign(0.9 * momentum + gradient)
        variable.assign_sub(0.1 * momentum)
    return loss


data = np.random.default_rng(hvd.rank())
hvd.broadcast_variables(variables, root_rank=0)
for step in range(arguments.steps):
    x = data.normal(size=(arguments.batch, 64)).astype(np.float32)
    loss = train_step(x, np.argmax(x[:, :10], 1))
    if hvd.rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {loss:.4f}", flush=True)
if arguments.save and hvd.rank() == 0:
    np.savez(arguments.save, *[variable.numpy() for variable in variables])
