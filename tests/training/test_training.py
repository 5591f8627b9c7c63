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

import itertools

import numpy as np
import pytest
import scenarios
import wrappers

BOUND = 1e-9
OTHERS = scenarios.OTHERS
RANKS = 3  # of tests of a single scenario


def assert_same_bits(results):
    """All ranks hold the same bits, except where a scenario declares them local."""
    first = results[0]
    for rank, other in enumerate(results[1:], 1):
        assert first.keys() == other.keys()
        for name, value in first.items():
            if not name.startswith("local/"):
                assert value.tobytes() == other[name].tobytes(), f"{name}: ranks 0 and {rank}"


def assert_close_to_one_process(jobs, name, many):
    one = jobs.one_process(name)
    assert list(one) == list(many)
    for key, value in one.items():
        if key.startswith("local/"):
            continue
        if value.dtype.kind == "S":  # texts
            np.testing.assert_array_equal(many[key], value, err_msg=key)
            continue
        np.testing.assert_allclose(many[key], value, rtol=BOUND, atol=BOUND, err_msg=key)


def test_table(jobs, cell, ranks, policy):
    results = jobs.results(cell, ranks, policy)
    assert_same_bits(results)
    assert_close_to_one_process(jobs, cell, results[0])


def test_wrappers(jobs, wrapper, ranks, policy):
    results = jobs.results(wrapper, ranks, policy)
    assert_same_bits(results)
    assert_close_to_one_process(jobs, wrapper, results[0])


def test_accumulators_add_up(jobs, accumulating, ranks, policy):
    """The ranks' accumulated gradients add up to those of one process; rank 0 holds them all."""
    one, results = jobs.one_process(accumulating), jobs.results(accumulating, ranks, policy)
    names = [name for name in one if name.startswith("local/accumulator")]
    assert names
    for name in names:
        np.testing.assert_allclose(results[0][name], one[name], rtol=BOUND, atol=BOUND, err_msg=name)
        assert not any(np.any(result[name]) for result in results[1:])


def test_one_synchronisation_for_each_update(jobs, accumulating, ranks, policy):
    """Of eight steps; those in which an infinity was seen, up to four, do not count."""
    updates = {"accumulation": {4}, "accumulation_and_clipping": {2}, "multi_accumulation": {2},
               "accumulation_and_infinity": {1, 2}}[accumulating.partition("-")[0]]
    for result in jobs.results(accumulating, ranks, policy):
        assert int(result["local/exchanges"]) in updates


def test_ways_of_training(jobs, way, ranks):
    results = jobs.results(way, ranks, OTHERS)
    assert_same_bits(results)
    assert_close_to_one_process(jobs, way, results[0])


@pytest.mark.parametrize("name", scenarios.BITS)
def test_ranks_hold_the_same_bits(jobs, name):
    assert_same_bits(jobs.results(name, RANKS, OTHERS))


@pytest.mark.parametrize("name", scenarios.HALVES)
def test_mixed_precision(jobs, name):
    """Gradients have an error of a few roundings to half, and so have the updated variables."""
    roundoff = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8}[name]
    results = jobs.results(name, RANKS, OTHERS)
    assert_same_bits(results)
    one = jobs.one_process(name)
    weights = [key for key in one if key.startswith("weights")]
    for i, key in enumerate(weights):
        # Each rank rounds its part, and later steps begin with what earlier ones have rounded.
        np.testing.assert_allclose(results[0][key], one[key], rtol=0,
                                   atol=2 * (RANKS + 1) * roundoff * one["step"][i], err_msg=key)


def test_sums_that_overflow_lower_the_loss_scale_as_in_one_process(jobs):
    scales = jobs.one_process("loss_scales")["scales"]
    assert len(set(scales)) > 3 and (np.diff(scales) > 0).any()
    for result in jobs.results("loss_scales", RANKS, OTHERS):
        np.testing.assert_array_equal(result["scales"], scales)


@pytest.mark.parametrize("rows", [0, 1])
def test_infinity_on_one_rank_skips_the_step_on_all(jobs, rows):
    for result in jobs.results(f"recipe_infinity_on_rank_{rows}", 2, OTHERS):
        assert result["scale"] == 512 and result["unchanged"].all()


def test_two_processes_do_not_train_on_halves(jobs):
    both = jobs.results("recipe_all_rows", 2, OTHERS)[0]
    half = jobs.one_process("recipe_half_of_the_rows")
    assert np.abs(both["weights/0"] - half["weights/0"]).max() > 1e-3


def test_runs_give_the_same_bits(jobs, repeated, policy):
    first, again = (jobs.results(repeated, 3, policy, repeat)[0] for repeat in (0, 1))
    assert_same_bits([first, again])


def test_training_changes_weights(jobs):
    """The comparisons above would pass if nothing were trained at all."""
    one, other = (jobs.results(name, 2, OTHERS)[0] for name in ("eager", "clipped"))
    for name, value in one.items():
        if name.endswith("kernel"):
            assert np.abs(value - other[name]).max() > 1e-3


def test_default_batch_norm_averages_the_moments_of_the_ranks(jobs):
    """Moving statistics are the rows-weighted mean of what each rank's rows give."""
    result = jobs.results("default_batch_norm", RANKS, OTHERS)[0]
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


def test_dropout_differs_between_ranks(jobs):
    kept = {result["local/keep"].tobytes() for result in jobs.results("dropout", RANKS, OTHERS)}
    assert len(kept) == RANKS


def test_all_ranks_stop_when_one_does(jobs):
    for result in jobs.results("stopped_by_one_rank", RANKS, OTHERS):
        assert result["iterations"] == 2
        assert len(result["predict"]) == 2 * scenarios.BATCH


def test_predict_computes_each_row_once(jobs):
    results = jobs.results("rows_of_predict", RANKS, OTHERS)
    assert all(result["right"].all() for result in results)
    # Each row has two numbers of eight bytes, and goes to each of the others.
    counts = [int(result["local/sent"]) / (2 * 8 * (RANKS - 1)) for result in results]
    assert sum(counts) == 96 and max(counts) - min(counts) <= 3  # one row in each of 3 batches


def test_dropout_is_the_same_in_every_run(jobs):
    first, again = (jobs.results("dropout", 3, OTHERS, repeat) for repeat in (0, 1))
    for one, other in zip(first, again, strict=True):
        assert one["local/keep"].tobytes() == other["local/keep"].tobytes()


def test_cover_has_every_pair():
    rows = [(*cell.split("-"), job) for cell, *job in scenarios.cover()]
    found = {pair for cell in rows for pair in scenarios.pairs((*cell[:3], tuple(cell[3])))}
    models, optimizers, losses, ranks, policies = scenarios.columns()
    assert found == set().union(*map(scenarios.pairs, itertools.product(
        models, optimizers, losses, scenarios.JOBS)))
    assert {job[0] for job in scenarios.JOBS} == set(ranks)
    assert {job[1] for job in scenarios.JOBS} == set(policies)


def test_every_wrapper_meets_every_optimizer_number_of_ranks_and_policy():
    rows = [(*cell.split("-"), *rest) for cell, *rest in wrappers.cover()]
    for column, values in ((1, wrappers.OPTIMIZERS), (2, wrappers.RANKS), (3, wrappers.POLICIES)):
        assert {(row[0], row[column]) for row in rows} == set(
            itertools.product(wrappers.WRAPPERS, values))


def test_full_table_has_every_cell_and_every_policy_for_models_optimizers_and_ranks():
    models, optimizers, _, ranks, policies = scenarios.columns()
    assert {(cell, ranks) for cell, ranks, _ in scenarios.full()} == set(
        itertools.product(scenarios.table(), scenarios.RANKS))
    assert {(*cell.split("-")[:2], *rest) for cell, *rest in scenarios.full()} == set(
        itertools.product(models, optimizers, ranks, policies))
