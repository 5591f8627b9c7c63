"""Ranks that have columns of weights compute what one process does, and send nothing that grows with the columns."""

import dataclasses

from jobs import assert_same_as_one_process
from jobs import Case
import launch
import numpy as np
import pytest
import train_divided

FILE = "train_divided.py"
BOUND = 1e-9  # as in test_training.py
# Ranks round what they have summed over rows or columns: eight roundings to 8 or 11 bits.
BOUND_OF_MIXED = {"mixed_float16": 8 * 2.0**-11, "mixed_bfloat16": 8 * 2.0**-8}
# Bytes that a rank may send more: of this program's four counts of each class, which are read at the ends of its seven
# epochs and of their evaluations.
COUNTS = {"counted": 2 * 7 * 4 * 8 * (train_divided.MANY - train_divided.CLASSES)}
# The programs that are run in other jobs, too; with shards by default the first three.
SHARDED = ("softmax", "table", "pair", "adam", "accumulation")
SERVED = ("softmax", "adam", "tied")
# Those of which others are so much alike that `make nightly` alone runs them.
ALIKE = ("momentum", "adamw", "lamb", "clipnorm", "clipvalue", "schedule", "accumulation_and_infinity", "smoothed",
         "class_weighted", "without_xla", "temperature", "table-rmsprop", "ema", "loss_scale", "global_clipnorm",
         "accumulation")


def cases(is_full):
    """Returns the cases of programs: on 2 and 3 ranks in turn."""
    names = [name for name in train_divided.PROGRAMS if is_full or name not in ALIKE]
    return [Case(FILE, name, ranks, "ps") for i, name in enumerate(names)
            for ranks in ((2, 3) if is_full else (2 + i % 2,))]


def of_heads(is_full):
    """Returns the cases of programs of any number of classes, on 2 ranks, and of many on as many."""
    return [Case(FILE, name, 2, "ps") for name in train_divided.HEADS]


def sharded(is_full):
    """Returns the cases of programs of which all other weights are updated by shards."""
    return [Case(FILE, name, 3, "ps", ("--sharded",)) for name in SHARDED[:None if is_full else 3]]


def with_many(case):
    return dataclasses.replace(case, name=f"{case.name}-{train_divided.MANY}")


def assert_divided(held):
    """Asserts that all ranks together have each weight, and each of its slots, once."""
    assert len(held[0])
    of_ranks = np.array(held)
    assert (of_ranks[:, :, 0].sum(0) == of_ranks[0, :, 1]).all()


@pytest.mark.table(cases=cases)
def test_ranks_compute_what_one_process_does(jobs, case):
    """The update of one step, which shows a wrong scale, and that of many; logs, predictions, and slots."""
    arrays = jobs.arrays(case)
    assert_same_as_one_process(jobs.one_process(case), arrays, {"float64": BOUND, "float32": BOUND})
    assert_divided([each["local/held"] for each in arrays])


@pytest.mark.parametrize("case", [Case(FILE, name, 2, "ps") for name in train_divided.MIXED], ids=str)
def test_mixed_precision(jobs, case):
    arrays, bound = jobs.arrays(case), BOUND_OF_MIXED[case.name]
    assert_same_as_one_process(jobs.one_process(case), arrays, {"float32": bound, "float64": bound})
    assert_divided([each["local/held"] for each in arrays])


@pytest.mark.between_ranks
@pytest.mark.needs(*map(with_many, of_heads(False)))
@pytest.mark.table(cases=of_heads)
def test_what_ranks_send_does_not_grow_with_the_columns(jobs, case):
    """Not by the weight, its gradient, accumulated gradients, logits, probabilities, or labels of each class."""
    for few, many in zip(jobs.arrays(case), jobs.arrays(with_many(case))):
        assert many["local/sent"] <= few["local/sent"] + COUNTS.get(case.name, 0)


@pytest.mark.parametrize("case", [Case(FILE, "few_classes", 3, "ps")], ids=str)
def test_ranks_may_have_no_columns(jobs, case):
    """Columns are divided by blocks of 16."""
    test_ranks_compute_what_one_process_does(jobs, case)
    assert sorted(np.array([arrays["local/held"][1, 0] for arrays in jobs.arrays(case)])) == [0, 0, 5]


@pytest.mark.parametrize("case", [Case(FILE, "pair", 2, "ps")], ids=str)
def test_the_second_layer_of_a_pair_takes_columns(jobs, case):
    """Its weight has rows for them; otherwise half of its columns, 24, which are 32 and 16 in blocks of 16."""
    for arrays in jobs.arrays(case):
        (held, whole), = [shape for shape in arrays["local/held"] if shape[1] == 64 * 48]
        assert 2 * held == whole


@pytest.mark.table(cases=sharded)
def test_beside_weights_that_ranks_update_by_shards(jobs, case):
    test_ranks_compute_what_one_process_does(jobs, case)


@pytest.mark.needs(*(Case(FILE, name, 2, "ps") for name in SERVED))
def test_with_dedicated_servers(jobs, tmp_path):
    """The servers have none of the columns."""
    launch.run_ok([FILE, tmp_path, "ps", "--served", *SERVED], 3, timeout_s=120)
    for name in SERVED:
        arrays = [dict(np.load(tmp_path / f"{name}.{rank}.npz")) for rank in range(2)]
        assert_same_as_one_process(jobs.one_process(Case(FILE, name, 2, "ps")), arrays, {"float64": BOUND})
        assert_divided([each["local/held"] for each in arrays])
