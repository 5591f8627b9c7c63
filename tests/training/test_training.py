"""N processes compute what one process computes, and the same bits on every rank and in every run.

The bound. Scenarios compute in float64 with u = 1.1e-16. One process and N differ only in the order
in which they add: rows within a batch, and with them everything that is summed over rows. The
longest sum of a step has n = 32 rows x 16 positions = 512 terms, is passed through at most d = 10
further operations forth and back, and the scenarios make at most s = 8 steps; the relative error
that this makes is at most s (n + d) u = 4.6e-13. Updates depend on gradients with a slope of at
most lr / epsilon = 10 (Adam, RMSprop), and on weights with a slope of about 1, so an error grows
by at most 10 in the step that makes it and is carried on: 4.6e-12, relative to the largest term,
which is below 100 for these data. That gives 4.6e-10; the tests use 1e-9. Mistakes are far larger:
1/ranks instead of the share of the rows, for one batch of 97 rows, changes weights by 1e-3.
"""

import dataclasses
import itertools

from jobs import assert_same_as_one_process
from jobs import assert_same_bits
import numpy as np
import pytest
import scenarios
from scenarios import case
import wrappers

BOUND = 1e-9
RANKS = 3  # of tests of a single scenario


def check(jobs, case):
    one = jobs.one_process(case)
    assert_same_as_one_process(one, jobs.arrays(case), {"float64": BOUND, "float32": BOUND}, least=1.0)


@pytest.mark.table(cases=scenarios.cells)
def test_table(jobs, case):
    check(jobs, case)


@pytest.mark.table(cases=scenarios.wrapped)
def test_wrappers(jobs, case):
    check(jobs, case)


@pytest.mark.table(cases=scenarios.ways)
def test_ways_of_training(jobs, case):
    check(jobs, case)


@pytest.mark.table(cases=scenarios.accumulating)
def test_accumulators_add_up(jobs, case):
    """The ranks' accumulated gradients add up to those of one process; rank 0 holds them all."""
    one, results = jobs.one_process(case), jobs.arrays(case)
    names = [name for name in one if name.startswith("local/accumulator")]
    assert names
    for name in names:
        np.testing.assert_allclose(results[0][name], one[name], rtol=BOUND, atol=BOUND, err_msg=name)
        assert not any(np.any(result[name]) for result in results[1:])


@pytest.mark.table(cases=scenarios.accumulating)
def test_one_synchronisation_for_each_update(jobs, case):
    """Of eight steps; those in which an infinity was seen, up to four, do not count."""
    updates = {"accumulation": {4}, "accumulation_and_clipping": {2}, "multi_accumulation": {2},
               "accumulation_and_infinity": {1, 2}}[case.name.partition("-")[0]]
    for result in jobs.arrays(case):
        assert int(result["local/exchanges"]) in updates


@pytest.mark.between_ranks
@pytest.mark.parametrize("case", [*map(case, scenarios.BITS)], ids=str)
def test_ranks_hold_the_same_bits(jobs, case):
    assert_same_bits(jobs.arrays(case))


@pytest.mark.parametrize("case", [*map(case, scenarios.HALVES)], ids=str)
def test_mixed_precision(jobs, case):
    """Gradients have an error of a few roundings to half, and so have the updated variables."""
    roundoff = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8}[case.name]
    results = jobs.arrays(case)
    assert_same_bits(results)
    one = jobs.one_process(case)
    weights = [key for key in one if key.startswith("weights")]
    for i, key in enumerate(weights):
        # Each rank rounds its part, and later steps begin with what earlier ones have rounded.
        np.testing.assert_allclose(results[0][key], one[key], rtol=0,
                                   atol=2 * (RANKS + 1) * roundoff * one["step"][i], err_msg=key)


@pytest.mark.parametrize("case", [*map(case, scenarios.SCALES)], ids=str)
def test_sums_that_overflow_lower_the_loss_scale_as_in_one_process(jobs, case):
    scales = jobs.one_process(case)["scales"]
    assert len(set(scales)) > 3 and (np.diff(scales) > 0).any()
    for result in jobs.arrays(case):
        np.testing.assert_array_equal(result["scales"], scales)


@pytest.mark.between_ranks
@pytest.mark.parametrize("case", [case(f"recipe_infinity_on_rank_{rank}", 2) for rank in (0, 1)], ids=str)
def test_infinity_on_one_rank_skips_the_step_on_all(jobs, case):
    for result in jobs.arrays(case):
        assert result["scale"] == 512 and result["unchanged"].all()


@pytest.mark.needs(case("recipe_all_rows", 2), case("recipe_half_of_the_rows", 2))
def test_two_processes_do_not_train_on_halves(jobs):
    both = jobs.arrays(case("recipe_all_rows", 2))[0]
    half = jobs.one_process(case("recipe_half_of_the_rows"))
    assert np.abs(both["weights/0"] - half["weights/0"]).max() > 1e-3


@pytest.mark.between_ranks
@pytest.mark.table(cases=scenarios.repeated)
def test_runs_give_the_same_bits(jobs, case):
    assert_same_bits([jobs.arrays(dataclasses.replace(case, repeat=repeat))[0] for repeat in (0, 1)])


@pytest.mark.between_ranks
@pytest.mark.needs(case("eager", 2), case("clipped", 2))
def test_training_changes_weights(jobs):
    """The comparisons above would pass if nothing were trained at all."""
    one, other = (jobs.arrays(case(name, 2))[0] for name in ("eager", "clipped"))
    for name, value in one.items():
        if name.endswith("kernel"):
            assert np.abs(value - other[name]).max() > 1e-3


@pytest.mark.between_ranks
@pytest.mark.needs(case("default_batch_norm"))
def test_default_batch_norm_averages_the_moments_of_the_ranks(jobs):
    """Moving statistics are the rows-weighted mean of what each rank's rows give."""
    result = jobs.arrays(case("default_batch_norm"))[0]
    mean, variance = np.zeros(4), np.ones(4)
    for begin in range(0, scenarios.ROWS, scenarios.BATCH):
        batch = result["x"][begin:begin + scenarios.BATCH]
        parts = [part for part in np.array_split(batch, RANKS) if len(part)]
        shares = [len(part) / len(batch) for part in parts]
        mean = 0.5 * mean + 0.5 * sum(s * p.mean(0) for s, p in zip(shares, parts))
        variance = 0.5 * variance + 0.5 * sum(s * p.var(0) for s, p in zip(shares, parts))
    moving = {name.rpartition("/")[2]: value for name, value in result.items()}
    np.testing.assert_allclose(moving["moving_mean"], mean, rtol=BOUND, atol=BOUND)
    np.testing.assert_allclose(moving["moving_variance"], variance, rtol=BOUND, atol=BOUND)


@pytest.mark.between_ranks
@pytest.mark.needs(case("dropout"))
def test_dropout_differs_between_ranks(jobs):
    kept = {result["local/keep"].tobytes() for result in jobs.arrays(case("dropout"))}
    assert len(kept) == RANKS


@pytest.mark.between_ranks
@pytest.mark.needs(case("stopped_by_one_rank"))
def test_all_ranks_stop_when_one_does(jobs):
    for result in jobs.arrays(case("stopped_by_one_rank")):
        assert result["iterations"] == 2
        assert len(result["predict"]) == 2 * scenarios.BATCH


@pytest.mark.between_ranks
@pytest.mark.needs(case("rows_of_predict"))
def test_predict_computes_each_row_once(jobs):
    results = jobs.arrays(case("rows_of_predict"))
    assert all(result["right"].all() for result in results)
    assert all(result["local/of_predict"] == result["local/sent"] for result in results)  # none in a step
    # Each row has two numbers of eight bytes, and goes to each of the others.
    counts = [int(result["local/sent"]) / (2 * 8 * (RANKS - 1)) for result in results]
    assert sum(counts) == 96 and max(counts) - min(counts) <= 3  # one row in each of 3 batches


@pytest.mark.between_ranks
@pytest.mark.needs(case("dropout").again())
def test_dropout_is_the_same_in_every_run(jobs):
    first, again = (jobs.arrays(each) for each in (case("dropout"), case("dropout").again()))
    for one, other in zip(first, again, strict=True):
        assert one["local/keep"].tobytes() == other["local/keep"].tobytes()


def test_cover_has_every_model_and_job_and_every_other_value():
    rows = [(*cell.split("-"), job) for cell, *job in scenarios.cover()]
    models, optimizers, losses, _, _ = scenarios.columns()
    assert [row[0] for row in rows if tuple(row[3]) == scenarios.JOBS[0]] == models
    assert {tuple(row[3]) for row in rows} == set(scenarios.JOBS)
    assert {row[1] for row in rows} == set(optimizers) and {row[2] for row in rows} == set(losses)
    policies = {job[1] for job in scenarios.JOBS} | set(wrappers.POLICIES)
    assert policies == set(scenarios.POLICIES)


def test_cover_has_every_wrapper_and_every_other_value():
    rows = [(*cell.split("-"), *rest) for cell, *rest in wrappers.cover()]
    for column, values in enumerate((wrappers.WRAPPERS, wrappers.OPTIMIZERS, wrappers.RANKS, wrappers.POLICIES)):
        assert {row[column] for row in rows} == set(values)
    assert {(row[1], row[2:]) for row in rows} == set(itertools.product(wrappers.OPTIMIZERS, wrappers.JOBS))


def test_full_table_has_every_cell_and_every_policy_for_models_optimizers_and_ranks():
    models, optimizers, _, ranks, policies = scenarios.columns()
    assert {(cell, ranks) for cell, ranks, _ in scenarios.full()} == set(
        itertools.product(scenarios.table(), scenarios.RANKS))
    assert {(*cell.split("-")[:2], *rest) for cell, *rest in scenarios.full()} == set(
        itertools.product(models, optimizers, ranks, policies))
