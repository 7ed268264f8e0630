"""Commands take the options that they pass on from where these are declared."""

from __future__ import annotations

from typing import Any

import click
import pytest
import zmq
from click.testing import CliRunner

import zmq_datasource
from zmq_datasource.cli import main
from zmq_datasource.cli.types import given_options, option_of, other_options
from zmq_datasource.options import ProxyOptions, ReadOptions
from zmq_datasource.options.parser import describe
from zmq_datasource.transport import core


@click.command()
@option_of(ProxyOptions, "wal_max_bytes", "rcvhwm", "topics", "slow_subscriber", "plain", "wal_location")
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


def test_what_is_not_set_is_left_to_the_declaration() -> None:
    assert run() == "{} SUB ()"


def test_what_is_set_is_passed_on_as_text_under_its_own_name() -> None:
    told = run("--wal-max-bytes", "5g", "--rcvhwm", "7", "--slow-subscriber", "WAIT", "--plain", "-o", "x=1")
    assert told == (
        "{'walMaxBytes': '5g', 'rcvhwm': '7', 'slowSubscriber': 'wait', 'plain': 'true'} SUB ('x=1',)"
    )


def test_help_shows_declared_defaults_choices_and_meanings() -> None:
    told = run("--help")
    assert "[default: 4 GiB]" in told
    assert "[default: 1000]" in told
    assert "[default: all]" in told
    assert "[drop|wait|disconnect]" in told
    assert "[sub|pull]" in told.lower()
    assert "`" not in told


def test_only_some_choices_make_sense_here() -> None:
    assert "'ROUTER' is not one of" in run("--socket-type", "ROUTER")


@pytest.mark.parametrize(("name", "options"), [("proxy", ProxyOptions), ("receive", ReadOptions)])
def test_a_command_that_passes_options_on_has_none_of_another_name(name: str, options: Any) -> None:
    fields = {option.field for option in describe(options)}
    own = {"others", "monitor", "help", "partition"}
    assert {parameter.name for parameter in main.commands[name].params} <= fields | own
