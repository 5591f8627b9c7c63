"""OpenMetrics text: what Prometheus' own parser reads of it, and that it is served where it should be."""

import builtins
import urllib.request

import pytest

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.reports import open_metrics

COUNTS = open_metrics.RankCounts(
    rank=1, steps=10, step_seconds=2.5, exposed_seconds=0.5, input_seconds=0.25, sent_bytes=3 << 40,
    late_seconds={0: 0.0, 1: 0.125},
    stragglers=[{"rank": 2, "host": 'a"b\\c', "cause": "link", "share": 0.25}], speedup=2.5,
    restarts=3)


def test_a_missing_library_is_named(monkeypatch):
    original = builtins.__import__

    def without(name, *args):
        if name == "prometheus_client":
            raise ModuleNotFoundError(name=name)
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match=r'no module \'prometheus_client\'; run pip install "tf_poseidon\['):
        open_metrics.OpenMetrics()


def test_text():
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    metrics = open_metrics.OpenMetrics()
    assert metrics.text() == b"# EOF\n"
    metrics.counts = COUNTS
    families = {family.name.removeprefix("tf_poseidon_"): family
                for family in parser.text_string_to_metric_families(metrics.text().decode())}
    assert {name: (family.type, family.unit) for name, family in families.items()} == {
        "steps": ("counter", ""), "step_seconds": ("counter", "seconds"), "exposed_seconds": ("counter", "seconds"),
        "input_seconds": ("counter", "seconds"), "sent_bytes": ("counter", "bytes"),
        "late_seconds": ("counter", "seconds"), "straggler_share_ratio": ("gauge", "ratio"),
        "speedup_ratio": ("gauge", "ratio"), "restarts": ("gauge", "")}
    assert all(family.documentation for family in families.values())
    samples = {(sample.name, *sample.labels.values()): sample.value for family in families.values()
               for sample in family.samples}
    assert samples["tf_poseidon_sent_bytes_total", "1"] == 3 << 40
    assert samples["tf_poseidon_exposed_seconds_total", "1"] == 0.5
    assert samples["tf_poseidon_speedup_ratio", "1"] == 2.5 and samples["tf_poseidon_restarts", "1"] == 3
    late, = (sample for sample in families["late_seconds"].samples if sample.value)
    assert late.labels == {"rank": "1", "late_rank": "1"} and late.value == 0.125
    share, = families["straggler_share_ratio"].samples
    assert share.labels == {"rank": "1", "straggler": "2", "host": 'a"b\\c', "cause": "link"} and share.value == 0.25


def test_it_is_served_as_long_as_it_should_be():
    pytest.importorskip("prometheus_client")
    metrics = open_metrics.OpenMetrics()
    metrics.counts = COUNTS
    metrics.serve(0, "127.0.0.1")
    metrics.serve(0, "127.0.0.1")  # is served already
    server, _ = metrics._server
    address = f"http://127.0.0.1:{server.server_port}/metrics"
    request = urllib.request.Request(address, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.read() == metrics.text() and "openmetrics" in answer.headers["Content-Type"]
    metrics.close()
    metrics.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(request, timeout=2)
