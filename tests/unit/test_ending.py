"""What a rank does before its process ends, in which order: nobody may wait for it, or miss its words."""

import functools
import os
import sys
from unittest import mock

import pytest

from tf_poseidon.commands import cli
from tf_poseidon.commands import job_commands
from tf_poseidon.commands.status import Status
from tf_poseidon.errors import JobEndedError
from tf_poseidon.job import ending
from tf_poseidon.job import runtime


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def rank(monkeypatch):
    """What a rank calls; its `steps` are the names of these calls and the status that it ends with, in order."""
    found = mock.Mock(steps=[])

    def step(name, then=None):
        def noted(*args):
            found.steps.append(name if then is None else (name, *args))
            if then is not None:
                raise then
        return noted

    found.communicator = mock.Mock(rank=1, failure=None, has_lost_a_host=False, abort=step("abort"))
    engine = mock.Mock(end_launcher=step("end the launcher"), disconnect=step("disconnect"))
    monkeypatch.setattr(os, "_exit", step("exit", Ended))
    monkeypatch.setattr(ending, "flush", step("flush"))
    monkeypatch.setattr(ending.time, "sleep", step("sleep"))
    found.ending = ending.Ending(found.communicator, engine)
    return found


@pytest.mark.parametrize("number, error, host_is_lost, steps", [
    (1, ValueError("boom"), False, ["flush", "abort", "disconnect", ("exit", 1)]),
    (1, ValueError("boom"), True, ["flush", "abort", "end the launcher", "disconnect", ("exit", 1)]),
    (0, KeyboardInterrupt(), False, ["flush", "abort", "disconnect", ("exit", 130)]),
    (1, KeyboardInterrupt(), False, ["flush", "abort", "sleep", "disconnect", ("exit", 130)])])
def test_after_an_exception(rank, number, error, host_is_lost, steps, capfd):
    rank.communicator.rank, rank.communicator.has_lost_a_host = number, host_is_lost
    with pytest.raises(Ended):
        rank.ending.abort(lambda kind, error, trace: None, type(error), error, None)
    assert rank.steps == steps
    says_so = "[rank 0] The job was interrupted." in capfd.readouterr().err
    assert says_so == (number == 0 and isinstance(error, KeyboardInterrupt))


def test_the_cause_of_another_rank_is_said_instead_of_its_echo(rank, capfd):
    rank.communicator.failure = "Rank 0 on a failed: ValueError: boom"
    with pytest.raises(Ended):
        rank.ending.abort(pytest.fail, JobEndedError, JobEndedError("echo"), None)
    assert capfd.readouterr().err == "[rank 1] The job has ended. Rank 0 on a failed: ValueError: boom\n"


def test_a_job_that_has_ended_does_not_succeed(rank, capfd):
    rank.communicator.goodbye.side_effect = JobEndedError("Rank 0 on a failed")
    with pytest.raises(Ended):
        rank.ending.leave()
    assert rank.steps == ["flush", "disconnect", ("exit", 1)] and "Rank 0 on a failed" in capfd.readouterr().err


def test_an_error_of_a_command_has_its_own_status(rank, monkeypatch):
    """1 is for what the command has found to be wrong."""
    monkeypatch.setattr(runtime, "_membership", mock.Mock(ending=rank.ending))
    monkeypatch.setattr(sys, "excepthook", functools.partial(rank.ending.abort, sys.__excepthook__))
    error = ValueError("boom")

    def selftest(given):
        """Fails."""
        raise error

    monkeypatch.setattr(job_commands, "selftest", selftest)
    with pytest.raises(ValueError, match="boom"):
        cli.main(["selftest"])
    with pytest.raises(Ended):
        sys.excepthook(ValueError, error, None)
    assert rank.steps[-1] == ("exit", Status.OWN_ERROR)


def test_children_end_as_they_would(rank, monkeypatch):
    """They have the handlers of the rank that they were forked from."""
    monkeypatch.setattr(rank.ending, "_pid", os.getpid() + 1)
    hook = mock.Mock()
    rank.ending.abort(hook, ValueError, ValueError(), None)
    rank.ending.leave()
    with pytest.raises(Ended):
        rank.ending.exit(0)
    assert hook.called and rank.steps == [("exit", 0)] and not rank.communicator.goodbye.called
