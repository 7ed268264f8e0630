"""Keys and passwords: nowhere but in their files, proved by looking for them everywhere after a run of each kind."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq
import zmq.auth
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from tests.spark.test_sink import numbers, write
from tests.support import Socket, free_endpoint, wait_for
from tests.support.streams import feed, running, wait_for_rows
from zmq_datasource import DurableSubscriber, NoPeerError, Producer, Proxy

pytestmark = pytest.mark.spark

PASSWORD = "correct horse battery staple"


class Secrets:
    """Keys of a server and a client as options, and what is looked for."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        for name in ("server", "client"):
            zmq.auth.create_certificates(directory, name)
            (directory / f"{name}.key_secret").chmod(0o600)
        (directory / "password").write_text(PASSWORD)
        (directory / "password").chmod(0o600)
        found = [
            zmq.auth.load_certificate(directory / f"{name}.key_secret")[1] for name in ("server", "client")
        ]
        self.keys = [key.decode() for key in found if key is not None]
        self.directory = directory
        self.server = {
            "zmq.curve_server": "1",
            "zmq.curve_secretkey": f"@{directory / 'server.key_secret'}",
        }
        self.client = {
            "zmq.curve_serverkey": f"@{directory / 'server.key'}",
            "zmq.curve_publickey": f"@{directory / 'client.key'}",
            "zmq.curve_secretkey": f"@{directory / 'client.key_secret'}",
        }
        self.plain_client = {"zmq.plain_username": "me", "zmq.plain_password": f"@{directory / 'password'}"}

    def in_text(self, text: str) -> bool:
        return any(secret in text or json.dumps(secret)[1:-1] in text for secret in (*self.keys, PASSWORD))

    def in_file(self, path: Path) -> bool:
        content = path.read_bytes()
        raw = [z85.decode(key) for key in self.keys]
        return any(secret in content for secret in (*raw, *(s.encode() for s in (*self.keys, PASSWORD))))


def in_processes(secrets: Secrets) -> bool:
    for process in psutil.process_iter():
        try:
            if secrets.in_text(" ".join(process.cmdline())):
                return True
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return False


@contextmanager
def event_log(spark: SparkSession, directory: Path) -> Iterator[None]:
    """What a history server would show of what happens meanwhile."""
    directory.mkdir()
    context = spark.sparkContext
    jvm, java = context._jvm, context._jsc.sc()
    assert jvm is not None
    conf = java.conf().clone().set("spark.eventLog.compress", "false")
    log = jvm.org.apache.spark.scheduler.EventLoggingListener(
        "secrets",
        jvm.scala.Option.empty(),
        jvm.java.net.URI(f"file://{directory}"),
        conf,
        java.hadoopConfiguration(),
    )
    log.start()
    java.addSparkListener(log)
    try:
        yield
        java.listenerBus().waitUntilEmpty()
    finally:
        java.removeSparkListener(log)
        log.stop()


def test_a_program_that_receives_shows_no_secret(tmp_path: Path) -> None:
    secrets, endpoint = Secrets(tmp_path / "keys"), free_endpoint()
    data = tmp_path / "data"
    given = [word for name, value in secrets.server.items() for word in ("-o", f"{name}={value}")]
    command = [
        sys.executable,
        "-m",
        "zmq_datasource",
        "receive",
        "--socket-type",
        "ROUTER",
        "--bind",
        endpoint,
    ]
    command += ["--wal-location", str(data / "wal"), *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            with Producer(endpoint, "me", **secrets.client) as producer:
                producer.send(b"m")
                producer.flush()
            assert not in_processes(secrets)
        finally:
            process.terminate()
            said, _ = process.communicate(timeout=60)
    assert said
    assert not secrets.in_text(said)
    files = [path for path in data.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if secrets.in_file(path)] == []


@contextmanager
def publisher_with_passwords() -> Iterator[tuple[Socket, str]]:
    """A PUSH of another program that asks for a password, and its endpoint."""
    with zmq.Context() as context:
        authenticator = ThreadAuthenticator(context, log=logging.Logger("zap", logging.ERROR))
        authenticator.start()
        authenticator.configure_plain(passwords={"me": PASSWORD})
        push = context.socket(zmq.PUSH)
        push.plain_server = True
        push.linger = 0
        try:
            port = push.bind_to_random_port("tcp://127.0.0.1")
            yield push, f"tcp://127.0.0.1:{port}"
        finally:
            push.close()
            authenticator.stop()


def said_by(df: DataFrame, query: StreamingQuery) -> list[str]:
    """What Spark shows of a query."""
    said = [query._jsq.explainInternal(True), *(p.json for p in query.recentProgress)]
    return [*said, df._jdf.queryExecution().toString(), str(df.schema)]


@pytest.mark.parametrize("as_text", [False, True])
def test_no_secret_is_anywhere_but_in_its_file(
    spark: SparkSession, tmp_path: Path, package_log: Callable[[], str], as_text: bool
) -> None:
    """Of keys as text too, which Spark hides in plans because of their names."""
    secrets = Secrets(tmp_path / "keys")
    if as_text:
        secrets.server["zmq.curve_secretkey"], secrets.client["zmq.curve_secretkey"] = secrets.keys
        secrets.plain_client["zmq.plain_password"] = PASSWORD
    data = tmp_path / "data"
    data.mkdir()
    said = []
    with event_log(spark, tmp_path / "data" / "events"):
        endpoint = free_endpoint()
        df = feed(spark, bind=endpoint, walLocation=data / "curve.wal", **secrets.server)
        with running(df, data / "curve") as query:
            write(numbers(spark, 10), socketType="PUSH", connect=endpoint, **secrets.client)
            wait_for_rows(query, 10)
            said += said_by(df, query)
            assert not in_processes(secrets)
        with publisher_with_passwords() as (push, place):
            df = feed(spark, connect=place, walLocation=data / "plain.wal", **secrets.plain_client)
            with running(df, data / "plain") as query:
                for number in range(10):
                    push.send(b"%d" % number)
                wait_for_rows(query, 10)
                said += said_by(df, query)
                assert not in_processes(secrets)
        sides = {"pull": free_endpoint(), "durable": free_endpoint()}
        with Proxy(wal_location=data / "proxy.wal", **sides, **secrets.server) as proxy:
            write(numbers(spark, 1), socketType="PUSH", connect=sides["pull"], **secrets.client)
            with DurableSubscriber(sides["durable"], "me", **secrets.client) as subscriber:
                assert subscriber.receive(20) is not None
            said.append(json.dumps(wait_for(proxy.status, "a status"), default=str))
            assert not in_processes(secrets)
        with (
            pytest.raises(NoPeerError) as refused,
            Producer(endpoint, "me", connectTimeout="200ms", **secrets.client) as p,
        ):
            p.send(b"m")
            p.flush()
        said.append(str(refused.value))
        with pytest.raises(Exception, match="no answer") as failed:
            write(
                numbers(spark, 1),
                socketType="PUSH",
                connect=free_endpoint(),
                connectTimeout="200ms",
                **secrets.client,
            )
        said.append(str(failed.value))
    said.append(package_log())
    assert [text for text in said if secrets.in_text(text)] == []
    files = [path for path in data.rglob("*") if path.is_file()]
    assert {path.relative_to(data).parts[0] for path in files} >= {
        "events",
        "curve",
        "curve.wal",
        "proxy.wal",
    }
    assert any(
        b"SparkListenerSQLExecutionStart" in path.read_bytes() for path in files if "events" in path.parts
    )
    assert [path for path in files if secrets.in_file(path)] == []
