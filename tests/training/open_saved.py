"""Opens what train_saving.py has saved, in a TensorFlow without tf_poseidon: open_saved.py DIRECTORY."""

import sys

sys.modules["tf_poseidon"] = None  # importing it is an error from here on

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.saved_model import loader_impl


def main(directory):
    keras.config.set_floatx("float64")
    state = np.load(f"{directory}/state.0.npz")
    x = state["x"]

    def check(kind, predictions):
        np.testing.assert_allclose(predictions, state["predictions"], 1e-12, 1e-12, err_msg=kind)

    model = keras.models.load_model(f"{directory}/model.keras")
    check("model", model.predict(x, verbose=0))
    assert model.optimizer.iterations == state["iterations"]

    def blank():
        keras.utils.set_random_seed(9)
        return keras.models.clone_model(model)

    by_weights, by_checkpoint = blank(), blank()
    by_weights.load_weights(f"{directory}/model.weights.h5")
    check("weights", by_weights.predict(x, verbose=0))
    tf.train.Checkpoint(model=by_checkpoint).read(f"{directory}/checkpoint").expect_partial()
    check("checkpoint", by_checkpoint.predict(x, verbose=0))

    exported, saved = (tf.saved_model.load(f"{directory}/{name}") for name in ("exported", "saved"))
    check("exported", exported.serve(x))
    check("saved", saved.signatures["serving_default"](tf.constant(x))["output_0"])
    for name in ("exported", "saved"):
        meta_graph, = loader_impl.parse_saved_model(f"{directory}/{name}").meta_graphs
        graph = meta_graph.graph_def
        ops = {node.op for node in graph.node}
        ops.update(node.op for function in graph.library.function for node in function.node_def)
        assert "MatMul" in ops
        assert not [op for op in ops if op.startswith(("Poseidon", "SufficientFactor"))]


if __name__ == "__main__":
    main(*sys.argv[1:])
