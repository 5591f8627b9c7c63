"""Which of Horovod's examples run, and what is made smaller in each, so that a few steps take seconds.

None of their code is here: an example names a file of a checkout of Horovod, and the few pieces of its text that are
replaced. The rest runs as it is, with 96 made images in place of MNIST.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Example:
    """How an example of Horovod is run.

    Attributes:
        path: Its file in `examples` of the checkout.
        edits: (old, new) for each piece of text that is replaced; each must occur.
        stretches: (start, end, new) for each stretch of text that is replaced, from start up to end.
        arguments: Its arguments.
    """

    path: str
    edits: tuple[tuple[str, str], ...] = ()
    stretches: tuple[tuple[str, str, str], ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The path without its suffix."""
        return self.path.removesuffix(".py")

    def small(self, text: str) -> str:
        """Returns the text of the program with its replacements.

        Raises:
            ValueError: If the text has not what is to be replaced.
        """
        for old, new in self.edits:
            if old not in text:
                raise ValueError(f"{self.path} has no text {old!r}; use the checkout of Horovod that is named here.")
            text = text.replace(old, new)
        for start, end, new in self.stretches:
            before, found, rest = text.partition(start)
            _, found_end, after = rest.partition(end)
            if not found or not found_end:
                raise ValueError(f"{self.path} has no text from {start!r} to {end!r}; use the checkout of Horovod "
                                 "that is named here.")
            text = before + new + end + after
        return text


# What remains of TensorFlow 1, in place of "import tensorflow as tf". There, Horovod's operation that broadcasts all
# variables is None, so the examples for sessions begin with the same variables on all ranks.
_SEED = "tf.set_random_seed(1)"
_V1 = (("import tensorflow as tf", f"import tensorflow.compat.v1 as tf\ntf.disable_v2_behavior()\n{_SEED}"),)
# Two steps each: in this model, rounding grows a thousandfold per step after those, with plain TensorFlow too.
_BENCHMARK = ("--model", "MobileNetV2", "--batch-size", "2", "--num-batches-per-iter", "1", "--no-cuda")

EXAMPLES = (
    Example("tensorflow2/tensorflow2_mnist.py", (("10000 // hvd.size()", "41 // hvd.size()"), ("(128)", "(16)"))),
    Example("tensorflow2/tensorflow2_keras_mnist.py",
            (("500 // hvd.size()", "6 // hvd.size()"), ("epochs=24", "epochs=2"), ("(128)", "(16)"),
             ("verbose = 1", "verbose = 2"))),  # a line when an epoch ends, not as time passes
    Example("tensorflow2/tensorflow2_synthetic_benchmark.py",
            arguments=(*_BENCHMARK, "--num-warmup-batches", "0", "--num-iters", "1")),
    Example("tensorflow2/tensorflow2_keras_synthetic_benchmark.py", arguments=(*_BENCHMARK, "--num-iters", "2")),
    Example("tensorflow/tensorflow_mnist.py", (
        *_V1, ("tf.estimator.ModeKeys.TRAIN", "'train'"), ("hvd.BroadcastGlobalVariablesHook(0),", ""),
        ("tf.app.run()", "main(None)"), ("20000 // hvd.size()", "12 // hvd.size()"),
        ("batch_size=100", "batch_size=16"), ("every_n_iter=10", "every_n_iter=1"))),
    Example("tensorflow/tensorflow_synthetic_benchmark.py", (*_V1, ("bcast_op.run()", "")),
            arguments=(*_BENCHMARK, "--num-warmup-batches", "1", "--num-iters", "1")),
    Example("tensorflow/tensorflow_word2vec.py", (
        *_V1, ("# Input data.", _SEED), ("    bcast.run()\n", ""),
        ("vocabulary_size = 50000", "vocabulary_size = 300"), ("100000 // hvd.size()", "20 // hvd.size()"),
        ("step % 2000 == 0", "True"), ("num_sampled = 64", "num_sampled = 8")), (
            ("filename = maybe_download", "print('Data size'",
             "vocabulary = [f'word{i * 7 % 299}' for i in range(3000)]\nrandom.seed(hvd.rank())\n"),)),
)
