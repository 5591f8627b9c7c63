"""Options from the environment: all that the strategy has, parsed as programs would give them, and refused by name."""

import inspect
import pathlib
import re

import pytest

import tf_poseidon as poseidon
from tf_poseidon import drop_in
from tf_poseidon import environment
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.saved_graphs import load_ops
from tf_poseidon.strategy import poseidon_strategy

ROOT = pathlib.Path(__file__).parents[2]
TEXTS = {
    "policy": ("ps", "ps"), "plan": ("plan.json", "plan.json"), "wire_dtype": ("bfloat16", "bfloat16"),
    "pins": ("*/a=ps,x=y=sfb", {"*/a": "ps", "x=y": "sfb"}),
    "cluster": ("workers=4,bandwidth_gbps=2.5,accelerators=true",
                poseidon.Cluster(4, bandwidth_gbps=2.5, accelerators=True)),
    "merge": ("true", True), "servers": ("0,2", (0, 2)), "ranks_per_node": ("2", 2), "strict": ("0", False),
    "global_batch_norm": ("1", True), "verify": ("10", 10), "rows": ("3,1", (3, 1)), "input": ("independent",) * 2,
    "shard_update": ("auto", "auto"), "synchrony": ("dssp:1,5", poseidon.DSSP(1, 5)), "versions": ("log", "log"),
    "crossover": ("a-1", "a-1"), "engine": ("mpi", "mpi"), "kv_pair_bytes": ("4096", 4096), "timeout_s": ("1.5", 1.5),
    "startup_timeout_s": ("inf", float("inf")), "heartbeat_timeout_s": ("60", 60.0), "staging_bytes": ("1", 1),
    "dedicated_servers": ("2", 2)}


def test_every_option_has_a_variable():
    names = [*inspect.signature(poseidon_strategy.PoseidonStrategy.__init__).parameters][1:]
    variables = {f"TF_POSEIDON_{name.upper()}": TEXTS[name][0] for name in names}
    assert environment.defaults(names, variables) == {name: TEXTS[name][1] for name in names}
    assert environment.variables(variables) == variables
    assert not environment.variables(dict.fromkeys(variables, "")) and not environment.defaults(names, {})
    assert environment.unknown({**variables, "TF_POSEIDON_POLCY": "ps", "POLICY": "ps"}) == ["TF_POSEIDON_POLCY"]


def test_no_variable_of_ours_is_unknown():
    folders = [ROOT / name for name in ("tf_poseidon", "kernels", "evaluation", "scripts")]
    files = [ROOT / "setup.py", *(path for folder in folders for path in folder.rglob("*")
                                  if path.suffix in (".py", ".sh", ".cc", ".h"))]
    used = {name for path in files for name in re.findall(r"\bTF_POSEIDON_[A-Z_]*[A-Z]\b", path.read_text())}
    assert not environment.unknown(dict.fromkeys(used, "")) and "TF_POSEIDON_RESTARTS" in used


@pytest.mark.parametrize("option, text, expected", [
    ("merge", "maybe", "true or false"), ("shard_update", "yes", "true, false or auto"), ("verify", "-1", "a whole"),
    ("timeout_s", "soon", "a number"), ("servers", "0,", "whole numbers"), ("rows", "1:2", "whole numbers"),
    ("synchrony", "ssp", "bsp, ssp:STALENESS"), ("pins", "a", "PATTERN=SCHEME"),
    ("cluster", "workers=4,rate=1", "NAME="), ("cluster", "bandwidth_gbps=1", "NAME="),
    ("cluster", "workers=x", "a whole number")])
def test_what_no_option_can_be_is_refused(option, text, expected):
    variable = f"TF_POSEIDON_{option.upper()}"
    message = rf"^The environment variable {variable} is '{text}', expected {expected}.*; change it, or unset it\.$"
    with pytest.raises(ConfigurationError, match=message):
        environment.defaults([option], {variable: text})


def test_a_cluster_that_cannot_be_is_refused_by_its_variable():
    message = r"^workers=0, .* The environment has TF_POSEIDON_CLUSTER='workers=0'\.$"
    with pytest.raises(ConfigurationError, match=message):
        environment.defaults(["cluster"], {"TF_POSEIDON_CLUSTER": "workers=0"})


def test_what_a_program_gives_stays(monkeypatch):
    monkeypatch.setenv("TF_POSEIDON_POLICY", "ps")
    monkeypatch.setenv("TF_POSEIDON_TIMEOUT_S", "5")
    monkeypatch.setenv("TF_POSEIDON_ENGINE", "")

    @environment.is_asked
    def options(policy="auto", *, engine=None, timeout_s=600.0, other=1):
        return policy, engine, timeout_s, other

    assert options() == ("ps", None, 5.0, 1)
    assert options("sfb", other=2) == ("sfb", None, 5.0, 2)
    assert options(timeout_s=7) == ("ps", None, 7, 1)
    with pytest.raises(TypeError, match="unknown"):
        options(unknown=1)


@pytest.mark.parametrize("call", [poseidon_strategy.PoseidonStrategy, load_ops.load_ops, drop_in.enable])
def test_an_error_names_the_variable(call, monkeypatch):
    monkeypatch.setenv("TF_POSEIDON_TIMEOUT_S", "-1")
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    with pytest.raises(ConfigurationError, match=r"^timeout_s=-1.0, expected a positive number of seconds\. "
                                                 r"The environment has TF_POSEIDON_TIMEOUT_S=-1\.$"):
        call()
