"""Messages as lines of JSON: what they say, when they are asked for, and where they cannot be written."""

import datetime
import io
import json
import logging
import os
import sys

import pytest

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.job import log_lines

LOG = logging.getLogger("tf_poseidon")


@pytest.fixture
def stderr(monkeypatch, capsys):
    """Returns what was written to the standard error; afterwards, messages go where they went before."""
    before = LOG.handlers[:], LOG.propagate, LOG.level
    for name in (log_lines.VARIABLE, log_lines.JOB, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    yield lambda: capsys.readouterr().err
    LOG.handlers[:], LOG.propagate = before[:2]
    LOG.setLevel(before[2])
    log_lines.is_rank(None)


def test_text(stderr, monkeypatch):
    monkeypatch.setenv(log_lines.VARIABLE, "text")
    log_lines.begin()
    log_lines.say("begins")
    log_lines.say("a\nb\n", logging.ERROR)
    assert stderr() == "begins\na\nb\n"


def test_lines(stderr, monkeypatch):
    monkeypatch.setenv(log_lines.VARIABLE, "json")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    log_lines.begin()
    log_lines.begin()
    log_lines.say("begins")
    log_lines.is_rank(3)
    monkeypatch.setenv(log_lines.JOB, "night")
    LOG.warning("late: %s", "100 %")
    log_lines.say("Traceback\n  Error\n", logging.ERROR)
    LOG.debug("unseen")
    LOG.setLevel(logging.ERROR)
    log_lines.say("ends")
    lines = [json.loads(line) for line in stderr().splitlines()]
    assert [(line["level"], line["message"], line["rank"], line["job"], line["pid"]) for line in lines] == [
        ("info", "begins", None, "17", os.getpid()), ("warning", "late: 100 %", 3, "night", os.getpid()),
        ("error", "Traceback\n  Error", 3, "night", os.getpid()), ("info", "ends", 3, "night", os.getpid())]
    assert log_lines.job({"SLURM_JOB_ID": "5"}) == "5" and log_lines.job({}) is None
    now = datetime.datetime.now(datetime.timezone.utc)
    assert all(0 <= (now - datetime.datetime.fromisoformat(line["time"])).total_seconds() < 60 for line in lines)


@pytest.mark.parametrize("how", ["text", "json"])
def test_a_standard_error_that_is_closed(how, stderr, monkeypatch):
    monkeypatch.setenv(log_lines.VARIABLE, how)
    log_lines.begin()
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log_lines.say("not heard")


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv(log_lines.VARIABLE, "xml")
    with pytest.raises(ConfigurationError, match=r"TF_POSEIDON_LOGS is 'xml', expected json or text; change it"):
        log_lines.begin()
