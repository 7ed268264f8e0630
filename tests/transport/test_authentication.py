"""Which clients may connect: real handshakes on every socket that listens, with changing keys."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from click.testing import CliRunner

from tests.acknowledged.test_acknowledged import receiving
from tests.support import Socket, free_endpoint, log_rows, stream_options, take, wait_for
from tests.support.serving import Serving
from zmq_datasource import DurableSubscriber, Producer
from zmq_datasource.cli import main
from zmq_datasource.errors import NoPeerError, OptionError, SubscriptionError, TransactionError
from zmq_datasource.options.parser import ZmqOptions
from zmq_datasource.options.socket import Endpoints
from zmq_datasource.transport import authentication
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec, options_of


class Keys:
    """A server's key, a directory of allowed clients, and clients."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.allowed = directory, directory / "allowed"
        self.allowed.mkdir()
        for name in ("server", "friend", "stranger"):
            zmq.auth.create_certificates(directory, name)
        self.admit("friend")

    def admit(self, name: str) -> None:
        (self.allowed / f"{name}.key").write_bytes((self.directory / f"{name}.key").read_bytes())

    def dismiss(self, name: str) -> None:
        (self.allowed / f"{name}.key").unlink()

    def bind(self, *names: str) -> None:
        """Make and admit a client "owner", whose certificate alone may use these names."""
        command = ["keygen", "owner", "--directory", str(self.directory)]
        command += [word for name in names for word in ("--only", name)]
        assert CliRunner().invoke(main, command).exit_code == 0
        self.admit("owner")

    def public(self, name: str) -> bytes:
        return zmq.auth.load_certificate(self.directory / f"{name}.key")[0]

    @property
    def server(self) -> dict[str, str]:
        return {
            "zmq.curve_server": "1",
            "zmq.curve_secretkey": f"@{self.directory / 'server.key_secret'}",
            "allowedClients": str(self.allowed),
        }

    def client(self, name: str) -> dict[str, str]:
        return {
            "zmq.curve_serverkey": f"@{self.directory / 'server.key'}",
            "zmq.curve_publickey": f"@{self.directory / f'{name}.key'}",
            "zmq.curve_secretkey": f"@{self.directory / f'{name}.key_secret'}",
        }

    def connect(self, context: zmq.Context[Socket], kind: int, endpoint: str, name: str) -> Socket:
        sock = context.socket(kind)
        sock.setsockopt(zmq.CURVE_SERVERKEY, self.public("server"))
        public, secret = zmq.auth.load_certificate(self.directory / f"{name}.key_secret")
        sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, secret or b"")
        sock.connect(endpoint)
        return sock


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    (tmp_path / "keys").mkdir()
    return Keys(tmp_path / "keys")


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication.Clients, "check_seconds", 0.0)


def given(options: dict[str, str]) -> dict[str, Any]:
    return {name.replace(".", "_"): text for name, text in options.items()}


def opened(**options: Any) -> OpenSocket:
    return OpenSocket(SocketSpec.of_source(stream_options(socketType="PULL", **options)))


def attempt(sock: Socket, *frames: bytes) -> None:
    """Send as long as libzmq still has a queue for it: once it was refused, sending waits for ever."""
    with suppress(zmq.Again):
        sock.send_multipart(frames, zmq.NOBLOCK)


def refused(sock: OpenSocket) -> bool:
    sock.watch.update()
    return sock.watch.failures > 0


Guarded = tuple[OpenSocket, str]


@pytest.fixture
def guarded(keys: Keys) -> Iterator[Guarded]:
    """A PULL that admits the clients of the directory, and its endpoint."""
    endpoint = free_endpoint()
    pull = opened(bind=endpoint, **given(keys.server))
    yield pull, endpoint
    pull.close(0)


def test_only_clients_in_the_directory_connect(
    context: zmq.Context[Socket], keys: Keys, guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    pull, endpoint = guarded
    attempt(keys.connect(context, zmq.PUSH, endpoint, "stranger"), b"of a stranger")
    wait_for(lambda: refused(pull), "a refusal")
    said = "a client with the public key " + keys.public("stranger").decode() + " was refused"
    wait_for(lambda: said in caplog.text, "the stranger's name")
    keys.connect(context, zmq.PUSH, endpoint, "friend").send(b"of a friend")
    assert take(pull.socket, 1) == [[b"of a friend"]]
    assert pull.watch.protocol_errors == 0


def test_changes_of_the_directory_admit_and_refuse_clients(
    context: zmq.Context[Socket], keys: Keys, guarded: Guarded
) -> None:
    pull, endpoint = guarded
    keys.admit("stranger")
    push = keys.connect(context, zmq.PUSH, endpoint, "stranger")
    push.send(b"1")
    assert take(pull.socket, 1) == [[b"1"]]
    keys.dismiss("stranger")
    push.send(b"2")  # on the connection that there is
    assert take(pull.socket, 1) == [[b"2"]]
    push.close()
    attempt(keys.connect(context, zmq.PUSH, endpoint, "stranger"), b"3")
    wait_for(lambda: refused(pull), "a refusal")
    assert not pull.socket.poll(0)


def test_strangers_do_not_fill_the_log(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    known = authentication.Clients(str(keys.allowed))
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            assert not known.callback("", b"%040d" % number)
        assert known.callback("", keys.public("friend"))
    assert len(caplog.records) < 10


def test_options_that_admit_no_client_or_any_client_are_refused(keys: Keys, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"allowedClients": keys.allowed},
            "needs zmq.curve_server=1: without it no client is asked for a key",
        ),
        ({**given(keys.server), "allowedClients": "keys"}, "must be an absolute path"),
        ({**given(keys.server), "allowedClients": tmp_path / "none"}, "zmq-datasource keygen makes them"),
        ({"zmq_plain_server": "1"}, "PLAIN encrypts nothing; use zmq.curve_server"),
        (
            {**given(keys.server), **given(keys.client("friend")), "connect": free_endpoint()},
            "cannot be server .* and client .* at once",
        ),
    ]
    for options, said in cases:
        with pytest.raises(OptionError, match=said):
            opened(**{"bind": free_endpoint(), **options})


def _send_as(keys: Keys, endpoint: str, client: str, name: str = "orders") -> None:
    patience = "1s" if client == "stranger" else "20s"
    with Producer(endpoint, name, connectTimeout=patience, **keys.client(client)) as producer:
        producer.send(b"of a transaction")


def test_a_name_belongs_to_the_key_that_it_is_bound_to(keys: Keys, tmp_path: Path) -> None:
    """At both ROUTERs of a receiver: no client commits or reads under the name of another one."""
    keys.bind("billing", "orders-*")
    with Serving(tmp_path / "log", socketType="ROUTER", **keys.server) as served:
        with pytest.raises(NoPeerError, match="the peer refused our credentials"):
            _send_as(keys, served.pull, "stranger")
        for name in ("billing", "orders-7"):
            _send_as(keys, served.pull, "owner", name)
            with DurableSubscriber(served.durable, name, **keys.client("owner"), timeout=20) as own:
                assert own.receive(20) is not None
        for client, name in (("friend", "billing"), ("friend", "orders-8"), ("owner", "elsewhere")):
            with pytest.raises(TransactionError, match=f"the name '{name}' belongs to another key"):
                _send_as(keys, served.pull, client, name)
            with (
                pytest.raises(SubscriptionError, match=f"the name '{name}' belongs to another key"),
                DurableSubscriber(served.durable, name, **keys.client(client), timeout=20),
            ):
                pass
        _send_as(keys, served.pull, "friend", "elsewhere")


def test_brackets_in_a_bound_name_stand_for_themselves(keys: Keys) -> None:
    keys.bind("orders[eu]", "log?[a]*")
    clients = authentication.Clients(str(keys.allowed))
    owner, friend = keys.public("owner").decode(), keys.public("friend").decode()
    for name in ("orders[eu]", "log1[a]b"):
        assert clients.may_use(owner, name)
        assert not clients.may_use(friend, name)
    for name in ("orderse", "ordersu", "log1ab"):
        assert clients.may_use(friend, name)


def test_the_largest_row_arrives_encrypted(keys: Keys, tmp_path: Path) -> None:
    """libzmq compares its limit with the encrypted frame, and hangs up at a larger one."""
    endpoint, value = free_endpoint(), bytes(64 << 20)
    with (
        receiving(tmp_path / "log", endpoint, **given(keys.server)),
        Producer(endpoint, sendTimeout="20s", **keys.client("friend")) as producer,
    ):
        producer.send(value)
    assert log_rows(tmp_path / "log").column("value").to_pylist() == [value]


@pytest.mark.parametrize("fault", ["the directory is gone", "a certificate is torn"])
def test_a_disk_fault_admits_no_client_and_gives_bound_names_to_none(fault: str, keys: Keys) -> None:
    keys.bind("billing")
    clients = authentication.Clients(str(keys.allowed))
    owner, friend = keys.public("owner"), keys.public("friend")

    def rights() -> list[bool]:
        asked = ((owner, "billing"), (friend, "billing"), (friend, "free"))
        return [clients.may_use(key.decode(), name) for key, name in asked]

    assert rights() == [True, False, True]
    whole, aside = (keys.allowed / "owner.key").read_text(), keys.directory / "aside"
    if fault == "the directory is gone":
        keys.allowed.rename(aside)
    else:
        (keys.allowed / "owner.key").write_text("")
    assert not clients.callback("", owner)
    assert not clients.callback("", friend)
    assert rights() == [True, False, True]
    if fault == "the directory is gone":
        aside.rename(keys.allowed)
    else:
        (keys.allowed / "owner.key").write_text(whole)
    assert clients.callback("", owner)
    assert rights() == [True, False, True]


def test_names_stay_bound_over_a_restart_until_their_file_is_removed(keys: Keys) -> None:
    keys.bind("billing")
    owner, friend, certificate = keys.public("owner"), keys.public("friend"), keys.allowed / "owner.key"

    def restarted() -> tuple[bool, bool]:
        """Whether the owner may connect, and whether another client may use the owner's name."""
        clients = authentication.Clients(str(keys.allowed))
        return clients.callback("", owner), clients.may_use(friend.decode(), "billing")

    assert restarted() == (True, False)
    whole = certificate.read_text()
    certificate.write_text("")
    with pytest.raises(OptionError, match=r"owner\.key is not a certificate.* Restore a damaged file"):
        restarted()
    certificate.write_text(whole)
    revoked = certificate.rename(keys.allowed / "owner.revoked")
    assert restarted() == (False, False)
    revoked.unlink()
    assert restarted() == (False, True)


def test_a_name_that_no_certificate_can_hold_is_refused(tmp_path: Path) -> None:
    made = CliRunner().invoke(main, ["keygen", "x", "--directory", str(tmp_path), "--only", "two words"])
    assert made.exit_code != 0
    assert "'two words'" in made.output


def test_a_socket_is_server_where_it_binds_and_client_where_it_connects() -> None:
    both = ZmqOptions(curve_server="1", curve_secretkey="s", curve_publickey="p", curve_serverkey="k")
    endpoints = Endpoints.read(free_endpoint())
    server = options_of(SocketSpec(kind="PULL", bind=endpoints, zmq=both))
    client = options_of(SocketSpec(kind="PULL", connect=endpoints, zmq=both))
    assert (set(both) - set(server), set(both) - set(client)) == ({"curve_serverkey"}, {"curve_server"})
