"""The tiers of tests: which command runs a test, and how long all tests of a tier may take.

unit      `make test-unit`: what needs no job of several processes; a first answer.
test      `make test` runs it after "unit": a cover of all that users can reach.
rest      `make test-all` runs it after `make test`: what finds what those cannot.
nightly   `make nightly`: long searches, other programs and libraries, launchers, hosts; with all cells of all tables.
"""

import fnmatch
import os

TIERS = ("unit", "test", "rest", "nightly")

# Seconds of all workers on two cores of which nobody else uses any; recorded durations must stay below.
BUDGETS_S = {"unit": 240.0, "test": 950.0, "rest": 1650.0}

# The first pattern that a test's name has decides: room/file.py::function[cell].
_RULES: tuple[tuple[str, str], ...] = (
    # What tables say of themselves, and reports made of given values.
    ("*::test_ends_that_are_wrong*", "unit"),
    ("faults/test_faults.py::test_a_program_without_its_fault_is_wrong", "rest"),
    ("faults/test_faults.py::*", "unit"),
    ("faults/test_kills.py::test_what_differs_after_a_kill_is_named*", "unit"),
    ("faults/test_kills.py::test_the_page_of_kills_counts_them_by_place", "unit"),
    ("faults/test_long_runs.py::test_growth*", "unit"),
    ("scripts/test_docs.py::test_every_public_name_is_in_the_reference", "unit"),
    ("scripts/test_docs.py::test_messages_exist*", "unit"),
    ("scripts/test_answers.py::test_cells*", "rest"),
    ("scripts/test_answers.py::*", "unit"),
    ("scripts/test_planted_table.py::*", "unit"),
    ("scripts/test_release.py::*", "test"),

    ("unit/test_calibration.py::test_all_ranks_agree_on_what_was_measured", "test"),
    ("unit/test_compat.py::test_other_versions_are_refused*", "rest"),  # they import TensorFlow
    ("unit/test_data.py::*", "test"),
    ("unit/test_files.py::*", "test"),
    ("unit/test_published_inputs.py::*", "nightly"),
    ("unit/test_reports.py::*", "rest"),  # a browser
    ("unit/test_resuming.py::test_ends*[[]arrays-12-options2]", "test"),
    ("unit/test_resuming.py::test_ends*[[]arrays-13-options0]", "rest"),
    ("unit/test_resuming.py::test_ends*[[]arrays-4-options4]", "rest"),
    ("unit/test_resuming.py::test_ends*", "nightly"),
    ("unit/test_resuming.py::test_data_continue*[[]reshuffled dataset]", "test"),
    ("unit/test_resuming.py::test_data_continue*", "nightly"),
    ("unit/test_resuming.py::*", "test"),
    *((f"unit/test_row_selection.py::test_each_rank_makes_its_own_rows[[]{name}*-(1, 1)]", "test")
      for name in ("shuffled", "zipped", "padded", "map of")),
    ("unit/test_row_selection.py::test_each_rank_makes_its_own_rows*", "nightly"),
    ("unit/test_row_selection.py::test_what_cannot_be_moved_stays_whole*", "test"),
    ("unit/test_row_selection.py::*", "test"),
    ("unit/test_row_selection_fuzz.py::*", "rest"),
    ("unit/test_schemes.py::test_it_trains_with_the_bits_of_the_parameter_server", "test"),
    ("unit/test_selftest.py::test_every_scheme_has_the_bits_of_one_process[[]arguments0-0-8]", "test"),
    ("unit/test_selftest.py::test_every_scheme_has_the_bits_of_one_process*", "nightly"),
    ("unit/test_selftest.py::test_faults_are_found*", "rest"),
    ("unit/test_selftest.py::test_ranks_of_its_own_or_of_mpiexec", "rest"),
    ("unit/test_turns_model.py::test_no_schedule*[[]options[01]-*", "unit"),
    ("unit/test_turns_model.py::test_schedules*", "unit"),
    ("unit/test_turns_model.py::*", "rest"),
    ("unit/*", "unit"),

    ("communicator/test_ops.py::test_values*-536870915]", "nightly"),
    ("communicator/test_ops.py::test_values*", "test"),
    ("communicator/test_ops.py::test_syncs_of_one_function_do_not_wait_for_each_other", "test"),
    ("communicator/test_ops.py::test_a_group_that_stays_incomplete_leaves_without_the_others", "rest"),
    ("communicator/test_ops.py::test_many_pairs_over_tcp", "rest"),
    ("communicator/test_factors.py::*", "test"),
    ("communicator/*", "unit"),

    # Searches with random graphs, and what is tried with every rule.
    ("graphs/test_*_fuzz.py::*", "rest"),
    ("graphs/test_partition.py::test_wrong_rules_are_noticed*", "nightly"),
    ("graphs/test_partition_families.py::*", "test"),
    ("graphs/test_partition_columns.py::test_heads*", "unit"),
    ("graphs/test_partition_columns.py::*", "test"),
    ("graphs/test_partition_functions.py::*", "test"),
    ("graphs/*", "unit"),

    ("training/test_training.py::test_table*-2-auto]", "test"),
    ("training/test_training.py::test_*cover*", "unit"),
    ("training/test_training.py::test_full_table*", "unit"),
    ("training/test_clocks.py::test_replayed_versions*DSSP*", "nightly"),
    ("training/test_clocks.py::test_later_steps*[[]SSP(0)]", "nightly"),
    ("training/test_clocks.py::test_no_staleness*", "test"),
    ("training/test_clocks.py::test_ranks_with_other_bounds*[[]SSP(3)]", "nightly"),
    ("training/test_distribution.py::test_program_computes*-fit-*", "rest"),
    ("training/test_distribution.py::test_program_computes*", "test"),
    ("training/test_distribution.py::test_functions_that_cannot_be_distributed_are_refused_by_name*", "test"),
    ("training/test_distribution.py::test_what_it_takes*", "test"),
    ("training/test_divided_plans.py::*", "test"),
    ("training/test_explaining.py::test_explained_plan_is_the_executed_one*", "rest"),
    ("training/test_explaining.py::test_plans_are_mixed", "rest"),
    ("training/test_explaining.py::*", "test"),
    ("training/test_function_jobs.py::test_training", "nightly"),
    ("training/test_keras_programs.py::*", "test"),
    ("training/test_own_rows.py::*equal]", "test"),
    ("training/test_own_rows.py::*", "nightly"),
    ("training/test_row_shares.py::test_shares_train*7, 1, 2*", "test"),
    ("training/test_row_shares.py::test_balanced*", "rest"),
    ("training/test_row_shares.py::*", "nightly"),
    *((f"training/test_rewritten.py::test_{name}]", "nightly") for name in (
        "plans_are_followed_and_replayed[[]options0-schemes0", "bfloat16_on_the_wire[[]options0",
        "model_on_an_accelerator[[]ps", "training_is_right*[[]disabled", "training_is_right*[[]other_optimizations",
        "strict_ends_all_ranks[[]fails_later_on_rank_1", "strict_ends_all_ranks[[]disabled*",
        "strict_ends_all_ranks[[]other_optimizations", "strict_ends_all_ranks[[]other_shapes",
        "training_is_right*[[]disabled_on_rank_1",
        "disagreement_ends_all_ranks[[]*Ranks differ in *")),
    ("training/test_saving.py::test_resumed_job_has_the_bits*", "rest"),
    ("training/test_saving.py::*", "test"),
    ("training/test_slow_ranks.py::test_the_slow_rank_is_named*overlapping*", "rest"),
    ("training/test_slow_ranks.py::*", "test"),
    ("training/test_summary.py::*", "test"),
    ("training/test_timeline.py::*", "test"),
    ("training/test_unusual_programs.py::*[[]ctc_in_steps_of_one_execution-*", "nightly"),
    ("training/test_verify.py::test_right_training_passes*", "nightly"),
    ("training/test_verify.py::*", "test"),
    ("training/test_waiting_for_data.py::*", "test"),

    ("engines/test_connections.py::*", "test"),
    ("engines/test_drop_in.py::test_loops_for_tf_distribute", "rest"),
    ("engines/test_drop_in.py::*", "test"),
    ("engines/test_horovod.py::test_verify_mode[[]none*", "nightly"),
    ("engines/test_horovod.py::test_verify_mode[[]sums*", "nightly"),
    ("engines/test_horovod.py::test_pass_that_does_not_run[[]fails*", "nightly"),
    ("engines/test_horovod.py::test_types_that_differ*", "nightly"),
    ("engines/test_horovod.py::test_two_lines_in_a_program[[]mpiexec]", "nightly"),

    # Of jobs that end, some of each kind.
    ("faults/test_hosts.py::*", "nightly"),
    ("faults/test_kills.py::*", "nightly"),
    ("faults/test_long_runs.py::*", "nightly"),
    ("faults/test_failures.py::test_what_cannot_be_trained_is_refused", "test"),
    ("faults/test_failures.py::test_job_ends_well_when_all_ranks_reach_the_end", "test"),
    ("faults/test_failures.py::test_program_runs_alone", "test"),
    *(("faults/test_failures.py::test_fault_ends*" + name, tier) for tier, names in {
        "test": ("[[]an exception on one rank]", "[[]a rank is ended by SIGKILL]",
                 "[[]ranks that differ: an activation]", "[[]data that differ: values]"),
        "rest": ("[[]an op fails on one rank]",
                 "[[]an exception on one rank, where*", "[[]another learning rate*every 3 steps]",
                 "[[]a rank ends early, with status 0 (ps)]", "[[]a rank leaves without a word, with status 0]",
                 "[[]a rank is ended, and its child*", "[[]Ctrl-C*", "[[]the launcher is ended by SIGTERM]",
                 "[[]a rank is killed while*", "[[]a rank stalls (ps)]",
                 "[[]a loss is NaN]", "[[]functions that differ between ranks: an op]",
                 "[[]other kernels on one rank: det*", "[[]other variables*", "[[]ranks that differ: `fit` and*",
                 "[[]two threads*", "[[]/dev/shm*"),
        "nightly": ("*",)}.items() for name in names),

    ("saved/test_saved_commands.py::test_rewrite_diff_and_strip_work_on_each_others_files", "test"),
    ("saved/test_saved_commands.py::test_disk_is_full_when_a_file*", "nightly"),
    ("saved/test_saved_damage.py::test_random_damage*", "nightly"),
    ("saved/test_saved_graphs.py::test_graph_of_keras_applications", "nightly"),
    ("saved/test_saved_graphs.py::test_trains_as_one_process*-1]", "nightly"),
    ("saved/test_saved_graphs.py::*", "test"),
    ("saved/test_saved_inputs.py::*", "unit"),
    ("saved/test_verification.py::*", "unit"),

    # Hosts, launchers, other libraries and their test suites, and whole programs.
    ("scripts/test_benchmark.py::test_real_computing", "rest"),
    ("scripts/test_simulation.py::test_auto_is_as_fast*[[]resnet152]", "nightly"),
    ("scripts/test_simulation.py::test_auto_is_as_fast*[[]inception_v3]", "nightly"),
    ("scripts/test_benchmark.py::test_under_horovodrun", "nightly"),
    ("scripts/test_benchmark.py::test_an_accelerator_that_cannot_be_shared*", "nightly"),
    ("scripts/test_bench_crossover.py::test_small_jobs*", "nightly"),
    ("scripts/test_distribute_contract.py::test_checks_run*", "nightly"),
    ("scripts/test_docs.py::test_programs_run_on_two_ranks", "test"),
    ("scripts/test_docs.py::test_saved_graphs", "nightly"),
    ("scripts/test_docs.py::test_tutorial", "nightly"),
    ("scripts/test_emulated_cluster.py::test_bytes_rate_and_status", "rest"),
    ("scripts/test_emulated_cluster.py::test_*_are_refused*", "rest"),
    ("scripts/test_emulated_cluster.py::*", "nightly"),
    ("scripts/test_emulation_without_root.py::*", "rest"),
    ("scripts/test_examples.py::test_digits", "rest"),
    ("scripts/test_examples.py::*", "nightly"),
    ("scripts/test_gpu_train.py::test_rehearsal", "rest"),
    ("scripts/test_gpu_train.py::*", "unit"),
    ("scripts/test_horovod_suites.py::*", "nightly"),
    ("scripts/test_keras_suites.py::test_tests_run_plainly_and_in_the_scope", "nightly"),
    ("scripts/test_kubernetes.py::*", "nightly"),
    ("scripts/test_own_mpi.py::*", "nightly"),
    ("scripts/test_programs.py::test_programs_are_run_and_compared", "nightly"),
    ("scripts/test_programs.py::test_program_that_differs_is_found", "nightly"),
    ("scripts/test_runner.py::test_jobs_go_on_after_tests_that_die_or_hang", "nightly"),
    ("scripts/test_runner.py::test_test_that_takes_too_long", "nightly"),
    ("scripts/test_slurm.py::*", "nightly"),
    ("gpu/test_cuda_kernels.py::test_compiles_without_local_memory", "nightly"),  # for all GPUs
    ("*", "rest"),
)


def tier_of(name: str) -> str:
    """Returns the tier of a test, which is named by its path from the root of the sources, as pytest does."""
    name = name.removeprefix("tests/")
    return next(tier for pattern, tier in _RULES if fnmatch.fnmatchcase(name, pattern))


def check_may_start_jobs() -> None:
    """Raises AssertionError in a test of the tier that starts none."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    assert not name or tier_of(name) != "unit", (
        f"'{name}' starts a job, and is listed among the tests that start none; add it to tests/support/tiers.py.")
