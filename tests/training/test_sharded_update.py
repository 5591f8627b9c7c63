"""Ranks that update shards compute what one process does, elementwise with the bits of ranks that update all."""

import dataclasses
import os

from jobs import assert_same_as_one_process
from jobs import Case
import numpy as np
import pytest
import train_sharded

FILE = "train_sharded.py"
BOUND = 1e-9  # as in test_training.py
# Whose norms are sums of shards, so in another order.
OF_NORMS = ("clipnorm-adam", "global_clipnorm-adam", "loss_scale_factor-adam", "accumulation_and_clipping-adam",
            "adafactor", "recompiled-adafactor", "lamb")
STEPS = 2 * -(-train_sharded.ROWS // train_sharded.BATCH)
# Whose ranks round what they compute of their rows.
ROUNDED = ("mixed_bfloat16",)


# Those of which others are so much alike that `make nightly` alone runs them.
ALIKE = ("nesterov", "adagrad", "adadelta", "adamw", "adamax", "nadam", "lion", "clipnorm-adam", "clipvalue-adam",
         "weight_decay-adam", "schedule-adam", "accumulation_and_infinity-adam", "multi-adam", "overlapping-muon",
         "recompiled-adafactor", "bfloat16-momentum")
# Those of which a comparison with one process says nearly as much as one with ranks that hold all.
NEEDS_NO_WHOLE = ("loss_scale-adam", "infinity-adam", "frozen-adam", "without_gradient-adam", "alone", "alone-muon",
                  "redivided", "eager")


def cases(is_full):
    """Returns the cases of programs: on 2 and 3 ranks in turn."""
    return [Case(FILE, name, ranks, "ps") for i, name in enumerate(_programs(train_sharded.PROGRAMS, is_full))
            for ranks in ((2, 3) if is_full else (2 + i % 2,))]


def _programs(names, is_full):
    return [name for name in names if is_full or name not in ALIKE]


def of_one_process(is_full):
    """Returns the cases of programs that are not rounded."""
    return [case for case in cases(is_full) if case.name not in ROUNDED]


def rounded(is_full):
    return [case for case in cases(is_full) if case.name in ROUNDED]


def of_whole(is_full):
    """Returns the cases of programs whose updates are computed element by element, and run on whole variables."""
    return [dataclasses.replace(case, options=("--whole",)) for case in cases(is_full)
            if case.name not in OF_NORMS and (is_full or case.name not in NEEDS_NO_WHOLE)]


def mixed(is_full):
    """Returns the cases of programs in mixed precision, run on whole variables."""
    return [Case(FILE, name, ranks, "ps", ("--whole",)) for i, name in enumerate(
        _programs(train_sharded.MIXED, is_full))
            for ranks in ((2, 3) if is_full else (2 + i % 2,))]


# Programs that are also run with half factors: in one function and in several, in steps that overlap, and with slots
# that are assigned; and where an owner, norms or a loop make ranks keep whole variables, or shards of another kind.
AS_HALF_FACTORS = ("adam", "bfloat16-adamw", "recompiled", "momentum", "muon", "global_clipnorm-adam", "distributed",
                   "overlapping", "looped", "float16-adam", "used")


def as_half_factors(is_full):
    """Returns the cases of programs whose matrices travel as half factors: all of them, or the first two."""
    return [Case(FILE, name, ranks, "ps", ("--hfb",))
            for i, name in enumerate(AS_HALF_FACTORS if is_full else AS_HALF_FACTORS[:2])
            for ranks in ((2, 3) if is_full else (2 + i % 2,))]


@pytest.mark.table(cases=lambda is_full: [case for case in as_half_factors(is_full)
                                          if case.name not in train_sharded.MIXED])
def test_ranks_that_update_columns_compute_what_one_process_does(jobs, case):
    test_ranks_compute_what_one_process_does(jobs, case)


@pytest.mark.between_ranks
@pytest.mark.needs(*(dataclasses.replace(case, options=("--hfb", "--whole")) for case in as_half_factors(False)))
@pytest.mark.table(cases=lambda is_full: [case for case in as_half_factors(is_full) if case.name not in OF_NORMS])
def test_columns_have_the_bits_of_the_whole(jobs, case):
    whole = jobs.arrays(dataclasses.replace(case, options=("--hfb", "--whole")))[0]
    for name, value in jobs.arrays(case)[0].items():
        if not name.startswith("local/"):
            assert whole[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("name", ["adam", "bfloat16-adamw"])
def test_each_rank_holds_its_columns_or_rows(jobs, name):
    """Of slots, and of weights that layers cast; in blocks of 16. Biases that are made of factors stay whole."""
    case = next(case for case in as_half_factors(False) if case.name == name)
    for key in ("local/slots", *(["local/weights"] if name in train_sharded.MIXED else [])):
        of_ranks = np.array([arrays[key] for arrays in jobs.arrays(case)])
        held, whole = of_ranks[..., 0], of_ranks[0, :, 1]
        matrices = np.isin(whole, (8 * 300, 300 * 160))
        assert matrices.any() and (held[:, matrices].sum(0) == whole[matrices]).all()
        assert (held[:, matrices] <= whole[matrices] * (1 / case.ranks + 16 / 300)).all()


@pytest.mark.table(cases=of_one_process)
def test_ranks_compute_what_one_process_does(jobs, case):
    one = jobs.one_process(case)
    assert_same_as_one_process(one, jobs.arrays(case), {"float64": BOUND, "float32": BOUND}, least=1.0)


@pytest.mark.between_ranks
@pytest.mark.needs(*(dataclasses.replace(case, options=()) for case in mixed("POSEIDON_ALL_CELLS" in os.environ)))
@pytest.mark.table(cases=lambda is_full: [*of_whole(is_full), *mixed(is_full)])
def test_shards_have_the_bits_of_the_whole(jobs, case):
    of_shards = jobs.arrays(dataclasses.replace(case, options=()))[0]
    for name, value in jobs.arrays(case)[0].items():
        if not name.startswith("local/"):
            assert of_shards[name].tobytes() == value.tobytes(), name


@pytest.mark.between_ranks
@pytest.mark.table(cases=rounded)
def test_gradients_that_were_cast_have_half_of_the_bytes(jobs, case):
    """So have the weights that come down; each fourth batch has one row, so one rank alone sends its part up."""
    up, down = np.sum([arrays["local/sent"] for arrays in jobs.arrays(case)], 0)
    assert up == pytest.approx(down * (3 + 1 / case.ranks) / 4, rel=1e-3)
    assert down == pytest.approx(STEPS * 2 * 300 * 160 * (case.ranks - 1), rel=1e-3)


@pytest.mark.parametrize("name", ["alone", "alone-muon"])
def test_a_rank_that_reads_alone_gets_what_one_process_has_then(jobs, name):
    case = next(case for case in cases(False) if case.name == name)
    one, ranks = jobs.one_process(case), jobs.arrays(case)
    for key in (key for key in one if key.startswith("local/alone/")):
        read, = (arrays[key] for arrays in ranks if arrays[key].size)
        np.testing.assert_allclose(read, one[key], rtol=BOUND, atol=BOUND, err_msg=key)


@pytest.mark.parametrize("case", [Case(FILE, "adam", 2, "sfb")], ids=str)
def test_variables_whose_gradient_travels_as_factors_stay_whole(jobs, case):
    test_ranks_compute_what_one_process_does(jobs, case)
    for arrays in jobs.arrays(case):
        held, whole = arrays["local/held"]
        assert held == whole


@pytest.mark.parametrize("case, is_divided", [
    (Case(FILE, "adam", 2, "ps", ("--auto",)), True), (Case(FILE, "muon", 2, "ps", ("--auto",)), False)], ids=str)
def test_auto_divides_what_makes_no_step_longer(jobs, case, is_divided):
    """Nearly all of what Muon updates is one matrix, so one rank's."""
    test_ranks_compute_what_one_process_does(jobs, case)
    for arrays in jobs.arrays(case):
        held, whole = arrays["local/held"]
        assert (held < whole) == is_divided


@pytest.mark.between_ranks
@pytest.mark.table(cases=lambda is_full: [case for case in cases(is_full) if case.name in train_sharded.ELEMENTWISE])
def test_each_rank_holds_its_share(jobs, case):
    held, whole = np.array([arrays["local/held"] for arrays in jobs.arrays(case)]).T
    small = 2 * (16 << 10) / 8  # tensors of up to 16 KiB are on one rank
    assert held.sum() == whole[0] and held.max() < 1.05 * whole[0] / case.ranks + small


@pytest.mark.between_ranks
@pytest.mark.table(cases=lambda is_full: [dataclasses.replace(case, options=()) for case in mixed(is_full)])
def test_ranks_divide_weights_that_layers_cast(jobs, case):
    """The last layer is in float; of what a graph uses that is not partitioned, every rank holds all."""
    weights = np.array([arrays["local/weights"] for arrays in jobs.arrays(case)])
    held, whole = weights[..., 0], weights[0, :, 1]
    is_divided = [case.name != "used", True, True, True, case.name == "used", case.name == "used"]
    assert (held.sum(0) == np.where(is_divided, 1, case.ranks) * whole).all()


@pytest.mark.parametrize("name", train_sharded.OWNED)
def test_one_rank_owns_what_no_shard_can_update(jobs, name):
    """Each slot of a matrix is on one rank; that of the largest matrix owns no other."""
    case = next(case for case in cases(False) if case.name == name)
    owned = np.array([arrays["local/owned"] for arrays in jobs.arrays(case)])
    held, whole = owned[..., 0], owned[0, :, 1]
    assert len(whole) == train_sharded.OWNED[name]
    assert ((held == 0) | (held == whole)).all() and (held.sum(0) == whole).all()
    assert held.sum(1).max() < 1.02 * whole.max()
