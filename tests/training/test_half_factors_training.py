"""Training with half factors: the weights are those of the parameter server, on all ranks."""

import json

import launch
import numpy as np
import pytest


def run(path, ranks, scheme, how):
    """Returns (weights, report) of each rank."""
    path = path / f"{scheme}.{how}.{ranks}"
    launch.run_ok(["half_factors_program.py", scheme, how, path], ranks, timeout_s=120)
    return [(list(np.load(f"{path}.{rank}.npz").values()), json.loads(path.with_name(f"{path.name}.{rank}.json")
                                                                      .read_text())) for rank in range(ranks)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return run(tmp_path_factory.mktemp("ps"), 2, "ps", "rewritten")[0][0]


@pytest.mark.parametrize("ranks, how", [(2, "rewritten"), (3, "rewritten"), (2, "verified"), (2, "not_on_rank_1"),
                                        (2, "sharded"), (3, "sharded")])
def test_weights_are_those_of_the_parameter_server(tmp_path, ranks, how, expected):
    found = run(tmp_path, ranks, "hfb", how)
    for weights, report in found:
        for weight, of_servers in zip(weights, expected, strict=True):
            np.testing.assert_array_equal(weight, of_servers)
        if report["plan"]:
            assert {site: (scheme, leader) for site, (scheme, _, leader) in report["plan"].items()
                    if site.startswith("sequential")} == {
                "sequential/wide/kernel": ("hfb", None),
                **({} if how == "sharded" else {"sequential/wide/bias": ("ps", None)}),
                "sequential/narrow/kernel": ("hfb", None),
                "sequential/narrow/bias": ("hfb", "sequential/narrow/kernel")}
    if how in ("rewritten", "sharded"):
        for site in ("sequential/wide/kernel", "sequential/narrow/kernel"):
            assert {report["sites"][site][0] for _, report in found} == {1}
            each = sum(sum(report["sites"][site][1:]) for _, report in found) / ranks
            assert each == pytest.approx(found[0][1]["plan"][site][1], rel=0.03)  # 3 ranks have 32 rows
        assert all("sequential/narrow/bias" not in report["sites"] for _, report in found)
