"""The command line, ``zmq-datasource``: a module a command. What a command needs is imported when it is called."""

from __future__ import annotations

import click

from zmq_datasource.cli.completion import completion
from zmq_datasource.cli.demo import demo
from zmq_datasource.cli.doctor import doctor
from zmq_datasource.cli.hwm import hwm
from zmq_datasource.cli.plan import plan
from zmq_datasource.cli.proxy import proxy
from zmq_datasource.cli.receive import receive
from zmq_datasource.cli.top import top

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="zmq_datasource")
def main() -> None:
    """ZeroMQ as a source and sink of Spark Structured Streaming."""


for _command in (demo, receive, proxy, top, doctor, hwm, plan, completion):
    main.add_command(_command)
