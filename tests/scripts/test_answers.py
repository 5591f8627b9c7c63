"""docs/answers.md: forty models, whose cells are what explain says; and the page has what is stored."""

import itertools
import json
import resource

import keras
import pytest

from evaluation import modules
from evaluation.answers import answer_page
from evaluation.answers import cells as cells_lib
from evaluation.answers import trained_model
from evaluation.answers import trained_models
from evaluation.answers import unallocated_variables
import tf_poseidon as poseidon
from tf_poseidon.explanations import prospects

STORED = modules.RESULTS / "answers.json"


# ---- what is stored --------------------------------------------------------------------------------------------------

def test_forty_models_have_an_answer_for_each_cluster():
    stored = cells_lib.read(STORED)
    assert [model["name"] for model in stored] == list(trained_models.MODELS) and len(stored) == 40
    cells = list(itertools.product(cells_lib.HOSTS, cells_lib.GBPS, cells_lib.ACCELERATORS))
    for model in stored:
        assert [(row["hosts"], row["gbps"], row["accelerator"]) for row in model["rows"]] == cells
        for row in model["rows"]:
            case = model["name"], row
            # "auto" is behind no other policy, and before nothing possible; times have four digits.
            assert max(row["ps"], 0.999 * row["all_reduce"]) <= 1.001 * row["speed_up"], case
            assert row["speed_up"] <= 1.001 * row["at_most"] <= 1.002 * row["hosts"], case
            assert sum(row["shares"].values()) == pytest.approx(1, abs=1e-3), case


def test_the_page_has_what_is_stored():
    page = (modules.ROOT / "docs" / "answers.md").read_text()
    stored = cells_lib.read(STORED)
    checked = answer_page.checks(stored, json.loads((modules.RESULTS / "answers_emulated.json").read_text()))
    assert len(checked) == 20
    assert answer_page.filled(page, stored, checked) == page


def test_what_is_written_is_read(tmp_path):
    stored = cells_lib.read(STORED)
    cells_lib.write(tmp_path / "answers.json", stored)
    assert (tmp_path / "answers.json").read_text() == STORED.read_text()


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
