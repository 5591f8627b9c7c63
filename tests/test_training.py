"""N processes compute what one process computes, and the same bits on every rank and in every run.

The bound. Scenarios compute in float64 with u = 1.1e-16. One process and N differ only in the order
in which they add: rows within a batch, and with them everything that is summed over rows. The
longest sum of a step has n = 32 rows x 16 positions = 512 terms, is passed through at most d = 10
further operations forth and back, and the scenarios make at most s = 8 steps; the relative error
that this makes is at most s (n + d) u = 4.6e-13. Updates depend on gradients with a slope of at
most lr / epsilon = 10 (Adam, RMSprop), and on weights with a slope of about 1, so an error grows
by at most 10 in the step that makes it and is carried on: 4.6e-12, relative to the largest term,
which is below 100 for these data. That gives 4.6e-10; the tests use 1e-9. A mistake is far from it:
1/ranks instead of the share of the rows, for one batch of 97 rows, changes weights by 1e-3.
"""

import itertools

import numpy as np
import pytest
import scenarios
import wrappers

BOUND = 1e-9
OTHERS, OTHER_RANKS = scenarios.OTHERS, scenarios.OTHER_RANKS


def assert_same_bits(results):
    """All ranks hold the same bits, except where a scenario says that they are local."""
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


@pytest.mark.parametrize("wrapper, ranks, policy", wrappers.full())
def test_wrappers(jobs, wrapper, ranks, policy):
    results = jobs.results(wrapper, ranks, policy)
    assert_same_bits(results)
    assert_close_to_one_process(jobs, wrapper, results[0])


@pytest.mark.parametrize("ranks", wrappers.RANKS)
@pytest.mark.parametrize("wrapper", [name for name in wrappers.table() if "accumulation" in name])
def test_accumulators_add_up(jobs, wrapper, ranks):
    """The ranks' accumulated gradients add up to those of one process; rank 0 holds them all."""
    one, results = jobs.one_process(wrapper), jobs.results(wrapper, ranks, OTHERS)
    names = [name for name in one if name.startswith("local/accumulator")]
    assert names
    for name in names:
        np.testing.assert_allclose(results[0][name], one[name], rtol=BOUND, atol=BOUND, err_msg=name)
        assert not any(np.any(result[name]) for result in results[1:])


@pytest.mark.parametrize("wrapper, updates", [
    ("clipnorm-sgd", 8), ("accumulation-sgd", 4), ("accumulation_and_clipping-adam", 2),
    ("multi_accumulation-sgd", 2)])
def test_one_synchronisation_for_each_update(jobs, wrapper, updates):
    for result in jobs.results(wrapper, 2, OTHERS):
        assert result["local/exchanges"] == updates


@pytest.mark.parametrize("ranks", OTHER_RANKS)
@pytest.mark.parametrize("way", scenarios.WAYS)
def test_ways_of_training(jobs, way, ranks):
    results = jobs.results(way, ranks, OTHERS)
    assert_same_bits(results)
    assert_close_to_one_process(jobs, way, results[0])


@pytest.mark.parametrize("ranks", OTHER_RANKS)
@pytest.mark.parametrize("name", scenarios.BITS)
def test_ranks_hold_the_same_bits(jobs, name, ranks):
    assert_same_bits(jobs.results(name, ranks, OTHERS))


@pytest.mark.parametrize("ranks", OTHER_RANKS)
@pytest.mark.parametrize("name", scenarios.HALVES)
def test_mixed_precision(jobs, name, ranks):
    """Gradients have an error of a few roundings to half, and so has what they change."""
    roundoff = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8}[name]
    results = jobs.results(name, ranks, OTHERS)
    assert_same_bits(results)
    one = jobs.one_process(name)
    weights = [key for key in one if key.startswith("weights")]
    for i, key in enumerate(weights):
        # Each rank rounds its part, and later steps begin with what earlier ones have rounded.
        np.testing.assert_allclose(results[0][key], one[key], rtol=0,
                                   atol=2 * (ranks + 1) * roundoff * one["step"][i], err_msg=key)


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
    """The comparisons above would pass if nothing was trained at all."""
    one, other = (jobs.results(name, 2, OTHERS)[0] for name in ("eager", "clipped"))
    for name, value in one.items():
        if name.endswith("kernel"):
            assert np.abs(value - other[name]).max() > 1e-3


@pytest.mark.parametrize("ranks", OTHER_RANKS)
def test_default_batch_norm_averages_the_moments_of_the_ranks(jobs, ranks):
    """Moving statistics are the rows-weighted mean of what each rank's rows give."""
    result = jobs.results("default_batch_norm", ranks, OTHERS)[0]
    mean, variance = np.zeros(4), np.ones(4)
    for begin in range(0, scenarios.ROWS, scenarios.BATCH):
        batch = result["x"][begin:begin + scenarios.BATCH]
        parts = [part for part in np.array_split(batch, ranks) if len(part)]
        shares = [len(part) / len(batch) for part in parts]
        mean = 0.5 * mean + 0.5 * sum(s * p.mean(0) for s, p in zip(shares, parts))
        variance = 0.5 * variance + 0.5 * sum(s * p.var(0) for s, p in zip(shares, parts))
    moving = {name.rpartition("/")[2]: value for name, value in result.items()}
    np.testing.assert_allclose(moving["moving_mean"], mean, rtol=BOUND, atol=BOUND)
    np.testing.assert_allclose(moving["moving_variance"], variance, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("ranks", OTHER_RANKS)
def test_dropout_differs_between_ranks(jobs, ranks):
    kept = {result["local/keep"].tobytes() for result in jobs.results("dropout", ranks, OTHERS)}
    assert len(kept) == ranks


@pytest.mark.parametrize("ranks", OTHER_RANKS)
def test_all_ranks_stop_when_one_does(jobs, ranks):
    for result in jobs.results("stopped_by_one_rank", ranks, OTHERS):
        assert result["iterations"] == 2
        assert len(result["predict"]) == 2 * scenarios.BATCH


@pytest.mark.parametrize("ranks", OTHER_RANKS)
def test_predict_computes_each_row_once(jobs, ranks):
    results = jobs.results("rows_of_predict", ranks, OTHERS)
    assert all(result["right"].all() for result in results)
    counts = [int(result["local/rows"]) for result in results]
    assert sum(counts) == 96 and max(counts) - min(counts) <= 3  # one row in each of 3 batches


def test_dropout_is_the_same_in_every_run(jobs):
    first, again = (jobs.results("dropout", 3, OTHERS, repeat) for repeat in (0, 1))
    for one, other in zip(first, again, strict=True):
        assert one["local/keep"].tobytes() == other["local/keep"].tobytes()


def test_cover_has_every_pair():
    def pairs(rows):
        return set().union(*(scenarios.pairs((*cell.split("-"), *rest)) for cell, *rest in rows))

    assert pairs(scenarios.cover()) == set().union(
        *map(scenarios.pairs, itertools.product(*scenarios.columns())))


def test_full_table_has_every_cell_and_every_policy_for_models_optimizers_and_ranks():
    models, optimizers, _, ranks, policies = scenarios.columns()
    assert {(cell, ranks) for cell, ranks, _ in scenarios.full()} == set(
        itertools.product(scenarios.table(), scenarios.RANKS))
    assert {(*cell.split("-")[:2], *rest) for cell, *rest in scenarios.full()} == set(
        itertools.product(models, optimizers, ranks, policies))
