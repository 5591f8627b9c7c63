"""How ranks find each other by sockets, with strangers about: ranks are threads of this process."""

import concurrent.futures
import errno
import os
import socket
import threading
import time

import pytest

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import JobError
from tf_poseidon.job.host import connections

KEY = bytes(range(32))


def here(network="here", *addresses):
    return connections.Host(network, addresses)


def meet(size, keys=None, timeout_s=20.0, late=(), disturb=lambda port: None):
    """Connects ranks; returns what each got: its sockets, or an error. Those of `late` come 1 s later."""
    listeners = [connections.listen(here(), [here()]) for _ in range(size)]
    places = [[listener.getsockname() for listener in each] for each in listeners]

    def rank(number):
        if number in late:
            time.sleep(1)
        try:
            return connections.connect(number, places, listeners[number], (keys or [KEY] * size)[number], timeout_s)
        except JobError as error:
            return error

    for each in places:
        disturb(each[0])
    with concurrent.futures.ThreadPoolExecutor(size) as executor:
        return list(executor.map(rank, range(size)))


def assert_connected(ranks):
    for number, sockets in enumerate(ranks):
        assert not isinstance(sockets, JobError), sockets
        assert sockets[number] is None
        for peer, connection in enumerate(sockets):
            if connection is not None:
                connection.sendall(bytes([number, peer]))
    for number, sockets in enumerate(ranks):
        for peer, connection in enumerate(sockets):
            if connection is not None:
                assert connection.recv(2, socket.MSG_WAITALL) == bytes([peer, number])
                connection.close()


@pytest.mark.parametrize("size, late", [(1, ()), (2, ()), (5, (0,)), (5, (1, 4))])
def test_every_rank_is_connected_with_every_other(size, late):
    assert_connected(meet(size, late=late))


def idle(connection):
    time.sleep(8)


def drip(connection):
    for _ in range(80):
        connection.sendall(b"\0")
        time.sleep(0.1)


def claim_rank(connection):
    connection.sendall((2).to_bytes(4, "big") + bytes(16))
    connection.recv(48, socket.MSG_WAITALL)
    connection.sendall(bytes(32))
    assert connection.recv(1) == b""


def talk(connection):
    connection.sendall(os.urandom(1 << 16))


@pytest.mark.parametrize("stranger", [idle, drip, claim_rank, talk, socket.socket.close])
def test_strangers_are_not_waited_for(stranger):
    """Twenty of them connect before any rank does."""
    def disturb(place):
        for _ in range(20):
            connection = socket.create_connection(place)
            threading.Thread(target=ignoring_errors, args=(stranger, connection), daemon=True).start()

    def ignoring_errors(function, connection):
        try:
            function(connection)
        except OSError:
            pass

    begin = time.monotonic()
    assert_connected(meet(3, late=(2,), disturb=disturb))
    assert time.monotonic() - begin < 5


def test_rank_of_another_job_is_a_stranger():
    ranks = meet(3, keys=[KEY, KEY, bytes(32)], timeout_s=2)
    assert all(isinstance(rank, JobError) for rank in ranks)
    assert "waited 2 s for connections with the ranks [2]" in str(ranks[0])
    assert "rank 0: 127.0.0.1: another program" in str(ranks[2]) and "rank 1: " in str(ranks[2])


def test_rank_that_never_comes_is_named():
    listeners = connections.listen(here(), [here()])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        places = [[silent.getsockname()], [listeners[0].getsockname()], [("127.0.0.1", 9)]]
        begin = time.monotonic()
        with pytest.raises(JobError, match=r"Rank 1 on .* waited 1 s for connections with the ranks \[0, 2\]"):
            connections.connect(1, places, listeners, KEY, timeout_s=1)
    assert time.monotonic() - begin < 3


def test_ranks_of_one_network_listen_on_loopback_alone():
    for listener in connections.listen(here("one", "10.1.2.3"), [here("one", "10.1.2.3")]):
        with listener:
            assert listener.getsockname()[0] == "127.0.0.1"


def test_host_that_reaches_no_other_is_refused():
    with pytest.raises(JobError, match="has the addresses 192.0.2.7, by none of which it reaches another host"):
        connections.listen(here("one", "192.0.2.7"), [here("two", "192.0.2.7")])


def test_interface_is_the_users_choice():
    pytest.importorskip("psutil")
    everything = connections.this_host({})
    assert everything.network == connections.this_host({}).network
    assert connections.this_host({"TF_POSEIDON_INTERFACE": "lo"}).addresses == ()
    with pytest.raises(ConfigurationError, match="TF_POSEIDON_INTERFACE=moon0, but .* expected one of .*lo"):
        connections.this_host({"TF_POSEIDON_INTERFACE": "moon0"})


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", ""])
def test_ports_are_the_users_choice(address):
    """Another program has the first one."""
    with connections.listen_at("127.0.0.1", {}) as other:
        port = other.getsockname()[1]
        allowed = {"TF_POSEIDON_PORT_RANGE": f"{port}-{min(port + 20, 65535)}"}
        with connections.listen_at(address, allowed) as listener:
            assert listener.getsockname()[1] in range(port + (address != "::1"), port + 21)


def test_ports_are_all_taken():
    with connections.listen_at("127.0.0.1", {}) as other:
        port = other.getsockname()[1]
        with pytest.raises(JobError, match=f"has no free port among {port}-{port}, which TF_POSEIDON_PORT_RANGE allow"):
            connections.listen_at("127.0.0.1", {"TF_POSEIDON_PORT_RANGE": f"{port}-{port}"})


def test_ports_that_the_user_may_not_have(monkeypatch):
    def refuses(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuses)
    with pytest.raises(ConfigurationError, match="TF_POSEIDON_PORT_RANGE is '80-90', but this user may not listen on"):
        connections.listen_at("127.0.0.1", {"TF_POSEIDON_PORT_RANGE": "80-90"})


@pytest.mark.parametrize("text", ["30000", "2-1", "0-5", "1-65536", "a-b", "-1-5", "30000:30010"])
def test_ports_that_are_none(text):
    with pytest.raises(ConfigurationError, match="TF_POSEIDON_PORT_RANGE is .*, expected the first and the last of"):
        connections.listen_at("127.0.0.1", {"TF_POSEIDON_PORT_RANGE": text})
