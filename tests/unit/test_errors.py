"""Texts of errors: what is left of long ones, and of what UTF-8 does not have; and what tf_poseidon adds to them."""

import os
import traceback

import pytest

from tf_poseidon.errors import encoded
from tf_poseidon.errors import shortened
from tf_poseidon.job import failures
from tf_poseidon.job.communicator import join_loopback

NAME = os.fsdecode(b"photo\xe9.jpg")


def test_long_texts_keep_their_ends():
    assert shortened("x" * 4000) == "x" * 4000
    text = shortened("begin" + "x" * 3_000_000 + "end")
    assert len(text) < 4100 and text.startswith("begin") and text.endswith("end") and "(2996008 characters are" in text


def test_texts_that_are_not_utf_8():
    assert encoded(NAME) == b"photo\\udce9.jpg"
    rank, = join_loopback(1)
    assert rank.broadcast_text(NAME, NAME) == NAME
    rank.abort(NAME)
    assert rank.failure == "photo\\udce9.jpg"
    rank.leave()


def raised():
    try:
        try:
            raise OSError("x" * 10_000)
        except OSError as error:
            raise ValueError("short") from error
    except ValueError as error:
        return error


def test_what_is_printed_of_an_error():
    error = raised()
    text = failures.printed(error, error.__traceback__)
    assert len(text) < 6000 and text.endswith("ValueError: short\n") and "left out" in text
    error.__cause__ = None
    error.__context__ = None
    assert failures.printed(error, error.__traceback__) == "".join(traceback.format_exception(error))


@pytest.mark.parametrize("message", ["short", "short\n\t [[node]] [Op:x]"])
def test_explanations_follow_the_message(message):
    error = ValueError(message)
    for _ in range(2):
        failures.explain(error, "It was partitioned.")
    assert failures.cause(3, error).endswith(" failed: ValueError: short It was partitioned.")
    assert failures.cause(3, error).startswith("Rank 3 on ")
