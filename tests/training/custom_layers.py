"""Custom training steps, layers and metrics, as users write them."""

import keras
import tensorflow as tf


class OwnStep(keras.Model):
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {"own_loss": loss}


class CanonicalStep(keras.Model):
    """The train_step of Keras' own guide."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables),
                             self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class ScaledStep(keras.Model):
    """Halves its gradients, those of a transposed kernel and its bias too."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply([g / 2 for g in gradients], self.trainable_variables)
        return {"loss": loss}


class TransposedDense(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(16, shape[-1]), name="kernel")
        self.bias = self.add_weight(shape=(16,), name="bias")

    def call(self, x):
        return tf.nn.bias_add(tf.matmul(x, self.kernel, transpose_b=True), self.bias)


class NoisyDense(keras.layers.Layer):
    """Weights with noise that each rank draws separately: it must not be assumed to be the same."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1], 16), name="mean")
        self.deviation = self.add_weight(shape=(shape[-1], 16), name="deviation")
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x):
        noise = keras.random.normal(self.mean.shape, dtype="float64", seed=self.seed)
        return keras.ops.matmul(x, self.mean + self.deviation * noise)


class Positives(keras.metrics.Metric):
    """A metric whose result is its state variable."""

    def __init__(self):
        super().__init__(name="positives")
        self.count = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.sum(keras.ops.cast(y_true > 0, self.dtype)))

    def result(self):
        return self.count


class Largest(keras.metrics.Metric):
    """A metric that adds nothing up."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(keras.ops.abs(y_true - y_pred))))

    def result(self):
        return self.value


class OwnResults(keras.Model):
    """Returns from its test step what Keras does not: of metrics alone, of rows alone, of both."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sums = keras.metrics.Sum(name="sums")
        self.steps = keras.metrics.Sum(name="steps")
        self.largest = Largest()

    def test_step(self, batch):
        x, y = batch
        error = y - self(x, training=False)
        before = self.sums.result()
        self.sums.update_state(tf.square(error))
        self.steps.update_state(1.0)
        self.largest.update_state(y, self(x, training=False))
        mean = self.sums.result() / self.steps.result()
        return {"mean": {"half": mean / 2, "root": tf.sqrt(mean)}, "rows": tf.reduce_sum(error),
                "both": mean + tf.reduce_max(error), "before": before, "largest": self.largest.result()}


class Gan(keras.Model):
    """Two models, each with its optimizer, and a loss that is computed twice."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"),
                                           keras.layers.Dense(3)])
        self.critic = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "tanh"),
                                        keras.layers.Dense(1)])
        self.losses_of = [keras.metrics.Mean(name="generator"), keras.metrics.Mean(name="critic")]

    def compile(self, generator_optimizer, critic_optimizer):
        super().compile()
        self.optimizers = [generator_optimizer, critic_optimizer]
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, batch):
        noise, real = batch
        for i, model in enumerate((self.critic, self.generator)):
            with tf.GradientTape() as tape:
                fake = self.critic(self.generator(noise, training=True), training=True)
                if model is self.critic:
                    truth = self.critic(real, training=True)
                    loss = (self.loss_fn(tf.ones_like(truth), truth)
                            + self.loss_fn(tf.zeros_like(fake), fake))
                else:
                    loss = self.loss_fn(tf.ones_like(fake), fake)
            self.optimizers[1 - i].apply(tape.gradient(loss, model.trainable_variables),
                                         model.trainable_variables)
            self.losses_of[1 - i].update_state(loss)
        return {metric.name: metric.result() for metric in self.losses_of}

    @property
    def metrics(self):
        return self.losses_of


class Regression(tf.Module):
    """A model without Keras."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = tf.Variable(tf.zeros([inputs, outputs], tf.float64), name="kernel")
        self.table = tf.Variable(tf.zeros([400, outputs], tf.float64), name="table")

    def __call__(self, x, ids):
        return x @ self.kernel + tf.gather(self.table, ids)


class PenaltyInLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.3 * tf.reduce_mean(tf.square(y_pred))


class LossOfRows(keras.Model):
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            rows = keras.losses.MeanSquaredError(reduction="none")(y, self(x, training=True))
            loss = tf.reduce_mean(rows)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.update_state(loss)
        # Names of its own: the metric's is another, and this epoch's last batch has one row.
        return {"mse": self.mean.result(), "rate": self.optimizer.learning_rate}


class SimilarRows(keras.Model):
    """Predicts how similar the rows of a batch are, so that a row is as long as its batch; means; and its inputs."""

    def predict_step(self, batch):
        x, labels = batch
        y = self(x)
        return {"rows": y, "similar": tf.matmul(y, y, transpose_b=True), "inputs": x, "labels": labels,
                "nothing": y[:, :0],
                "means": [tf.reduce_mean(y), tf.reduce_mean(y, 0)]}


class UnusualPredictions(keras.Model):
    def predict_step(self, batch):
        y = self(keras.utils.unpack_x_y_sample_weight(batch)[0])
        numbers = tf.argmax(y, 1)
        return {"twice": tf.repeat(y, 2, axis=0), "text": tf.strings.as_string(numbers),
                "number": numbers, "is_zero": numbers == 0,
                "ragged": tf.RaggedTensor.from_row_lengths(tf.range(tf.reduce_sum(numbers)),
                                                           numbers)}
