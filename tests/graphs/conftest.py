"""What tests of graphs leave behind."""

import pytest

from tf_poseidon.job import communicator


@pytest.fixture(autouse=True, scope="module")
def no_ranks_are_left():
    """Other tests of this process run ops outside of a job."""
    yield
    communicator.use_ranks_for_ops([])
