"""A rank that is slower than others is named, in `fit` and in loops; `Communication` reports what was measured."""

import json

import launch
import pytest

SECONDS, SLOW_AFTER, STEPS = 0.04, 20, 60  # of train_with_straggler.py


def train(tmp_path, how, factor, ranks=3, has_metrics=False):
    environment = {"TF_POSEIDON_OPENMETRICS_PATH": str(tmp_path / "{job}-{rank}.prom"), "TF_POSEIDON_JOB": "5"}
    launch.run_ok(["train_with_straggler.py", how, str(factor), str(tmp_path)], ranks, timeout_s=90,
                  environment=environment if has_metrics else {})
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(max(ranks, 1))]


@pytest.mark.parametrize("how, factor", [("fit", 4), ("callback", 4), ("loop", 2), ("input", 4), ("overlapping", 4)])
def test_the_slow_rank_is_named(how, factor, tmp_path):
    if how == "fit":
        pytest.importorskip("prometheus_client")
    reports = train(tmp_path, how, factor, has_metrics=how == "fit")
    straggler, = (each for each in reports[0]["stragglers"] if each["rank"] == 2)
    assert straggler["cause"] == ("input" if how == "input" else "arithmetic")
    assert straggler["since_step"] <= SLOW_AFTER + 10  # or before, where another program has slowed it down
    assert all(report["stragglers"] == reports[0]["stragglers"] for report in reports)
    assert straggler["host"]
    expected = SECONDS * (factor - 1)
    if how not in ("input", "overlapping"):
        own, median = straggler["own_seconds"], straggler["median_seconds"]
        assert own - median == pytest.approx(expected, rel=0.3)
        # Some of what others wait is the network's, where processors are busy.
        assert 0.5 * (own - median) / own < straggler["share"] < (own - median) / own + 0.1
    warnings = [[each for each in report["warnings"] if each[1].startswith("Rank 2 (host ")] for report in reports]
    (step, warning), = warnings[0]
    says = "it waits for its batches" if how == "input" else "its arithmetic takes"
    assert warning.startswith(f"Rank 2 (host {straggler['host']}) costs") and says in warning
    if how in ("callback", "loop"):  # which count steps; other programs may hide for longer what is twice as slow
        assert SLOW_AFTER < step <= SLOW_AFTER + (20 if factor > 2 else 40)
    assert not warnings[1] and not warnings[2]
    assert "stragglers" not in reports[0]["sites"]
    if how != "loop":
        check_logs(reports[0]["logs"], expected, how)
        assert list((tmp_path / "logs").glob("events.*"))
    if how == "fit":
        for rank in range(3):
            check_metrics((tmp_path / f"{rank}.prom").read_text(), rank)
        assert not list(tmp_path.glob("5-*.prom"))  # the program says where they go


def check_logs(logs, expected, how):
    """Rank 0's."""
    assert {"loss", "step_ms", "exposed_ms", "input_ms", "sent_bytes", "slowest_rank", "speedup"} <= logs.keys()
    assert logs["slowest_rank"][1] == 2 and all(number > 0 for number in logs["sent_bytes"])
    if how == "fit":  # of the second epoch, all steps are slow
        assert 1e3 * expected * 0.7 < logs["exposed_ms"][1] < logs["step_ms"][1]


def check_metrics(text, rank):
    from prometheus_client.openmetrics import parser
    assert text.endswith("# EOF\n")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    own = {name.removeprefix("tf_poseidon_"): family.samples[0].value for name, family in families.items()}
    assert own["steps"] == STEPS - 1 and families["tf_poseidon_steps"].samples[0].name == "tf_poseidon_steps_total"
    exposed, sent = families["tf_poseidon_exposed_seconds"], families["tf_poseidon_sent_bytes"]
    assert exposed.type == sent.type == "counter" and exposed.unit == "seconds" and sent.unit == "bytes"
    assert (own["exposed_seconds"] < 2) == (rank == 2)  # the others wait for 4.8 s
    late = {sample.labels["late_rank"]: sample.value for sample in families["tf_poseidon_late_seconds"].samples}
    assert max(late, key=late.get) == "2"
    shares = families["tf_poseidon_straggler_share_ratio"].samples
    sample, = (each for each in shares if each.labels["straggler"] == "2")
    assert sample.labels["cause"] == "arithmetic" and 0.5 < sample.value < 1


def test_equal_ranks_are_no_stragglers(tmp_path):
    pytest.importorskip("prometheus_client")
    reports = train(tmp_path, "callback", 1, ranks=2, has_metrics=True)
    for rank in range(2):  # where the environment says
        steps = f'\ntf_poseidon_steps_total{{job_name="5",rank="{rank}"}} {STEPS - 1}.0\n'
        assert steps in (tmp_path / f"5-{rank}.prom").read_text()
    assert not reports[0]["stragglers"] and not any(" costs " in text for _, text in reports[0]["warnings"])


def test_one_process_waits_for_nobody(tmp_path):
    report, = train(tmp_path, "callback", 1, ranks=0)
    assert report["stragglers"] == [] and report["late"] == {}
    assert report["logs"]["exposed_ms"] == [0, 0] and report["logs"]["slowest_rank"] == [-1, -1]
