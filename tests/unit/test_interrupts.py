"""Ctrl-C that compiled code has turned into another exception; in processes of their own, which it ends."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from tf_poseidon.commands import cli
from tf_poseidon.commands import graph_commands

def lost(given):
    try:
        os.kill(os.getpid(), {number})
        signal.pause()
    except KeyboardInterrupt as cause:
        raise {error}("returned a result with an exception set") from cause

signal.signal(signal.SIGUSR1, signal.default_int_handler)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
lost.__name__ = "diff"
graph_commands.diff = lost
cli.main(["diff", "one", "two"])
"""
INTERRUPTED = (130, "tf-poseidon diff: interrupted")
OWN_ERROR = (70, "tf-poseidon diff: this is an error of tf-poseidon itself; please report it with the lines above.")


@pytest.mark.parametrize("number, error, ends", [
    ("signal.SIGINT", "SystemError", INTERRUPTED),
    ("signal.SIGINT", "ValueError", OWN_ERROR),
    ("signal.SIGUSR1", "SystemError", OWN_ERROR)])
def test_interrupt_that_became_an_error(number, error, ends):
    ended = subprocess.run([sys.executable, "-c", PROGRAM.format(number=number, error=error)], text=True, timeout=60,
                           stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == ends
    assert ("Traceback" in ended.stderr) == (ends is OWN_ERROR)
