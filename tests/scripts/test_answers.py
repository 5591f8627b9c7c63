"""docs/answers.md: its cells are what explain says."""

import resource

import keras
import pytest

from evaluation.answers import cells as cells_lib
from evaluation.answers import trained_model
from evaluation.answers import unallocated_variables
import tf_poseidon as poseidon
from tf_poseidon.explanations import prospects

# ---- how it is made --------------------------------------------------------------------------------------------------

def test_models_of_any_size_take_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with unallocated_variables.scope():
        model = trained_model.perceptron(10_000, 100_000, 1_000_000)
        model.compile("adam")
        model.optimizer.build(model.trainable_variables)
    assert model.count_params() == 10_000 * 100_000 + 100_000 * 1_000_000 + 1_100_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # of KiB


HEAD = trained_model.TrainedModel("a head", "", 16, lambda: trained_model.perceptron(64, 256, 50_000), "")
DEEP = trained_model.TrainedModel("a deep one", "", 8, lambda: trained_model.perceptron(512, 512, 512, 512), "")
TABLE = trained_model.TrainedModel("a table", "", 8, lambda: keras.Sequential([
    keras.Input((20,), dtype="int32"), keras.layers.Embedding(10_000, 64), keras.layers.GRU(32),
    keras.layers.Dense(10)]), "")


@pytest.mark.parametrize(("model", "divides"), [(HEAD, True), (DEEP, False), (TABLE, False)],
                         ids=lambda value: getattr(value, "name", ""))
def test_cells_are_what_explain_says(model, divides):
    traced = cells_lib.traced(model, (4, 8))
    assert bool(traced.divided) == divides
    for hosts, gbps, accelerator in ((4, 1, "h100"), (8, 25, "v100")):
        cell = dict(zip(cells_lib.COLUMNS, cells_lib.answer(traced, hosts, gbps, accelerator), strict=True))
        advice = poseidon.advise(model.compiled(), model.batch_size, hosts, network=f"{gbps}GbE",
                                 accelerator=accelerator)
        policies = {each.name: each.speed_up for each in advice.policies}
        memory = advice.plan.memory
        assert cell["speed_up"] == pytest.approx(policies["auto"], rel=1e-3)
        assert cell["all_reduce"] == pytest.approx(policies[prospects.ALL_REDUCE], rel=1e-3)
        assert cell["ps"] == pytest.approx(policies["ps"], rel=1e-3)
        assert cell["num_bytes"] == pytest.approx(advice.plan.total_bytes, rel=1e-3)
        assert (cell["weights"], cell["gradients"], cell["slots"]) == (memory.weights, memory.gradients, memory.slots)
