"""Saves a training step of MobileNetV2: save_mobilenet.py FOLDER."""

import sys

import keras
import tensorflow as tf

ROW = (32, 32, 3)


def main(path):
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV2(ROW, alpha=0.35, weights=None, classes=10)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    module = tf.Module()
    module.all = [v.value for v in (*model.variables, *optimizer.variables)]

    @tf.function(input_signature=[tf.TensorSpec([None, *ROW]), tf.TensorSpec([None], tf.int32)])
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x, training=True)))
        optimizer.apply(tape.gradient(loss, [v.value for v in model.trainable_variables]),
                        model.trainable_variables)
        return {"loss": loss}

    tf.saved_model.save(module, path, signatures={"train": train})


if __name__ == "__main__":
    main(sys.argv[1])
