"""What forked processes keep of the one that forked them."""

import os
import socket

from tf_poseidon.job.host import forks


def in_child(function):
    """Returns what a function returns in a forked process: whether something is so."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = int(function())
        finally:
            os._exit(status)
    return bool({0: 0, 1: 1}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])])


def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_children_do_not_have_the_connections_and_keep_all_other_files():
    kept, other = socket.socketpair()
    with kept, other:
        forks.keep_from_children([kept.fileno()])
        assert not in_child(lambda: is_open(kept.fileno()))
        assert in_child(lambda: is_open(other.fileno()))
        assert not os.get_inheritable(kept.fileno())

        def child_of_child_keeps_a_file_by_the_same_number():
            os.dup2(other.fileno(), kept.fileno())
            return in_child(lambda: is_open(kept.fileno()))

        assert in_child(child_of_child_keeps_a_file_by_the_same_number)
        assert is_open(kept.fileno())


def test_others_notice_the_end_of_a_process_whose_child_goes_on():
    mine, theirs = socket.socketpair()
    ends, end = os.pipe()

    def connected_process_with_a_child():
        forks.keep_from_children([theirs.fileno()])
        mine.close()
        os.close(end)
        if os.fork() == 0:
            os.read(ends, 1)
            os._exit(0)
        return True

    assert in_child(connected_process_with_a_child)
    theirs.close()
    mine.settimeout(10)
    assert mine.recv(1) == b""
    os.close(end)  # the child ends
    os.close(ends)
    mine.close()
