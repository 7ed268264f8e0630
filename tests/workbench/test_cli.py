"""Commands take the options that they pass on from where these are declared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import psutil
import pytest
import zmq
from click.testing import CliRunner

import zmq_datasource
from tests.support import wait_for
from zmq_datasource.cli import main
from zmq_datasource.cli.types import given_options, option_of, other_options
from zmq_datasource.options import ProxyOptions, ReadOptions, ReceiveOptions
from zmq_datasource.options.parser import describe
from zmq_datasource.transport import core


@click.command()
@option_of(ProxyOptions, "wal_max_bytes", "rcvhwm", "topics", "slow_subscriber", "wal_location")
@option_of(ReadOptions, "socket_type", choices=("SUB", "PULL"), default="SUB")
@other_options("-o a=b")
def command(others: tuple[str, ...], socket_type: str, **named: Any) -> None:
    click.echo(f"{given_options(ProxyOptions, named)} {socket_type} {others}")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments)
    return " ".join(result.output.split())


def test_the_version_names_the_core_and_libzmq() -> None:
    told = CliRunner().invoke(main, ["--version"], prog_name="zmq-datasource").output
    libraries = f"{core.NAME} core, libzmq {zmq.zmq_version()}"
    assert told == f"zmq-datasource, version {zmq_datasource.__version__} ({libraries})\n"


def test_help_describes_each_command_in_a_whole_sentence() -> None:
    told = CliRunner().invoke(main, ["--help"]).output
    _, commands = told.split("Commands:\n")
    assert len(commands.splitlines()) == len(main.commands)
    assert all(line.endswith(".") and not line.endswith("...") for line in commands.splitlines()), commands


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["doctor", "--wal-location", "/tmp", "-o", "connect=tcp://a:1"], "of its own"),
        (["receive", "--bind", "tcp://*:1", "--wal-location", "/tmp", "-o", "WALLOCATION=/b"], "of its own"),
        (["receive", "--deduplicate"], "No such option '--deduplicate'"),
        (["receive", "--deduplicate"], "is written -o NAME=VALUE"),
        (["proxy", "--nonsense"], "No such option"),
        (["proxy", "--wal-location", "/tmp", "-o", "walLocation=/b"], "of its own"),
        (["doctor", "--connect", "tcp://a:1", "-o", "socketType=PULL"], "of its own"),
    ],
)
def test_an_option_without_an_effect_is_refused_with_a_way_out(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert why in result.output


HUGE = "1" + "0" * 30


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        *((["hwm", "--rate", value], "'--rate': ") for value in ("nan", "inf", "-1", "1e400", HUGE, "")),
        *((["hwm", "--messages", value], "'--messages': ") for value in ("0", HUGE, "nan", "2147483648")),
        *((["hwm", name, "2147483648"], f"'{name}': ") for name in ("--size", "--buffers", "--rcvhwm")),
        *((["hwm", "--sndhwm", value], "'--sndhwm': ") for value in ("0", "1,,2", "9" * 5000)),
        *((["hwm", "--stall", value], "'--stall': ") for value in ("1e300 s", "30d", "nan s", "-1s")),
        (["hwm", "--rate", "0.0000000001"], "raise --rate"),
        (["hwm", "--consume", "10s"], "lower --messages, --consume"),
        (["hwm", "--stall", "1h"], "or --stall"),
        *((["keygen", name], "NAME ") for name in ("", "../x", "a\nb", "a" * 5000, "\udcff")),
        (["keygen", "x", "--directory", "/proc/nope"], "--directory"),
        (["keygen", "x", "--directory", "a" * 5000], "--directory"),
        (["proxy", "--figures-every", "30d"], "'--figures-every': "),
        (["receive", "--figures", "xml"], "'xml' is not one of"),
        (["doctor", "--connect", "tcp://a:1", "--duration", "1e300s"], "'--duration': "),
        (["doctor", "--connect", "tcp://a:1", "-o", f"rcvhwm={HUGE}"], "rcvhwm"),
        (["demo", "--seconds", "nan"], "'--seconds': "),
        (["receive", "--bind", "x", "--wal-location", "/tmp"], "write tcp://x or ipc://x"),
        (["proxy", "--wal-location", ""], "walLocation=''"),
        (["proxy", "--pull", "ipc://a", "--wal-location", "/tmp", "-o", f"rcvhwm={HUGE}"], "rcvhwm"),
    ],
)
def test_absurd_values_are_refused_at_once_with_a_way_out(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert told in line
    assert result.stdout == ""
    assert len(line) < 600 or arguments[2] in line  # what click itself has read is shown whole
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_is_not_given_has_the_declared_default() -> None:
    assert run() == "{} SUB ()"


def test_a_given_option_is_passed_on_as_text_under_its_name() -> None:
    told = run("--wal-max-bytes", "5g", "--rcvhwm", "7", "--slow-subscriber", "WAIT", "-o", "x=1")
    assert told == ("{'walMaxBytes': '5g', 'rcvhwm': '7', 'slowSubscriber': 'wait'} SUB ('x=1',)")


def test_help_shows_declared_defaults_choices_and_meanings() -> None:
    told = run("--help")
    assert "[default: 4 GiB]" in told
    assert "[default: 1000]" in told
    assert "[default: all]" in told
    assert "[drop|wait]" in told
    assert "[sub|pull]" in told.lower()
    assert "`" not in told


def test_a_command_offers_only_the_choices_that_make_sense() -> None:
    assert "'ROUTER' is not one of" in run("--socket-type", "ROUTER")


@pytest.mark.parametrize(("name", "options"), [("proxy", ProxyOptions), ("receive", ReceiveOptions)])
def test_a_command_that_passes_options_on_has_none_of_another_name(name: str, options: Any) -> None:
    fields = {option.field for option in describe(options)}
    own = {"others", "help", "prometheus", "ready_file", "figures", "figures_every"}
    assert {parameter.name for parameter in main.commands[name].params} <= fields | own


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_ends_its_processes(number: signal.Signals) -> None:
    arguments = ["hwm", "--messages", "1000000", "--rate", "30000", "--sndhwm", "10"]
    # In the background of a shell a process ignores it, and so do the processes that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "zmq_datasource", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, before)
    try:
        parent = psutil.Process(process.pid)

        def started() -> list[psutil.Process]:
            """The sender and the receiver, once both use libzmq, which starts threads."""
            found = [child for child in parent.children() if child.num_threads() > 1]
            return found if len(found) >= 2 else []

        children = wait_for(started, "a sender and a receiver")
        if number == signal.SIGINT:  # as a terminal sends it
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "Traceback" not in said
        assert said.endswith("Stopped.\n")
        assert not psutil.wait_procs(children, 30)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    "option",
    ["reader=me", "maxMessagesPerTrigger=5", "includeFrames=true", "startingOffsets=latest", "maxMessages=5"],
)
def test_receive_refuses_what_only_a_query_can_do(option: str, tmp_path: Path) -> None:
    arguments = ["receive", "--bind", "ipc://a", "--wal-location", str(tmp_path / "log"), "-o", option]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert (
        f"{option.partition('=')[0]} has no effect here: set it at the query that reads the log"
        in result.output
    )
    assert not (tmp_path / "log").exists()


def test_receive_has_the_flags_that_most_users_need_and_o_for_the_rest() -> None:
    names = {name for parameter in main.commands["receive"].params for name in parameter.opts}
    assert {"--socket-type", "--bind", "--connect", "--topics", "--framing", "--wal-location", "-o"} <= names
    assert len(main.commands["receive"].params) <= 15
