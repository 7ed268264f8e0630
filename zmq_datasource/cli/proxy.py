"""``zmq-datasource proxy``."""

from __future__ import annotations

from typing import Any

import click

from zmq_datasource.cli.types import DIRECTORY, named_options

__all__ = ["proxy"]


@click.command()
@click.option("--bind", metavar="ENDPOINTS", help="Where publishers (PUB) connect to: an XSUB.")
@click.option("--connect", metavar="ENDPOINTS", help="Publishers that are bound somewhere.")
@click.option("--pull", metavar="ENDPOINTS", help="Where PUSH sockets connect to.")
@click.option(
    "--router", metavar="ENDPOINTS", help="Where DEALER sinks and Producers connect to (acknowledged)."
)
@click.option("--publish", metavar="ENDPOINTS", help="Where plain subscribers connect to: an XPUB.")
@click.option("--durable", metavar="ENDPOINTS", help="Where durable subscribers connect to.")
@click.option(
    "--replay", metavar="ENDPOINTS", help="Where any message is asked for again (vLLM's replay protocol)."
)
@click.option("--wal-location", type=DIRECTORY, metavar="DIR", required=True, help="Directory of the log.")
@click.option(
    "--wal-retention", metavar="DURATION", help="How long messages stay, as in 12h.  [default: 1 day]"
)
@click.option("--wal-max-bytes", metavar="SIZE", help="The most that the log takes.  [default: 4 GiB]")
@click.option("--topics", metavar="PREFIXES", help="What is kept whoever is subscribed.  [default: all]")
@click.option("--rcvhwm", metavar="N", help="High-water mark of the publishers' side.  [default: 1000]")
@click.option("--sndhwm", metavar="N", help="That of the subscribers' side.  [default: the same]")
@click.option(
    "--slow-subscriber",
    type=click.Choice(["drop", "wait", "disconnect"]),
    help="What a full queue of a plain subscriber means.  [default: drop]",
)
@click.option("--plain", is_flag=True, help="Publish the frames as they came, without ids.")
@click.option(
    "-o",
    "--option",
    "others",
    metavar="NAME=VALUE|@FILE",
    multiple=True,
    help="Any other option, as in docs/options.md; @FILE reads a value, such as a secret key.",
)
@click.option("--monitor", is_flag=True, help="Show publishers, subscriptions, rates and backlogs, live.")
def proxy(others: tuple[str, ...], plain: bool, monitor: bool, **named: str | None) -> None:
    """Stand between publishers and subscribers, write down what passes, and give it again.

    Messages are published as topic, id (8 bytes, big-endian), value, once they are in the log. Any Spark job
    can read the log. Ctrl-C or SIGTERM takes what is on its way, and ends.

    \b
    Examples:
      zmq-datasource proxy --bind "tcp://*:5557" --publish "tcp://*:5556" --wal-location /data/wal
      zmq-datasource proxy --bind "tcp://*:5557" --publish "tcp://*:5556" --durable "tcp://*:5558" \\
          --replay "tcp://*:5559" --wal-location /data/wal --wal-retention 7d --monitor
      zmq-datasource proxy --connect tcp://feed:5556 --topics orders. --durable "tcp://*:5558" \\
          --wal-location /data/wal -o subscriberExpiry=30d
    """
    from zmq_datasource.errors import ZmqDataSourceError  # noqa: PLC0415

    given = {_option_name(name): value for name, value in named.items() if value is not None}
    given |= {"plain": "true"} if plain else {}
    given |= named_options(others)
    try:
        if monitor:
            _watch(given)
        else:
            _run(given)
    except ZmqDataSourceError as e:
        raise click.ClickException(str(e)) from e


def _option_name(parameter: str) -> str:
    first, *rest = parameter.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _run(given: dict[str, str]) -> None:
    from zmq_datasource.proxy.process import run_until_stopped  # noqa: PLC0415 - imports Arrow

    run_until_stopped(given)


def _watch(given: dict[str, Any]) -> None:
    import time  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from zmq_datasource.proxy.handle import Proxy  # noqa: PLC0415
    from zmq_datasource.proxy.table import Rates, show  # noqa: PLC0415

    rates = Rates()
    console = Console()
    try:
        with Proxy(**given) as running, Live(console=console, refresh_per_second=2, screen=False) as live:
            while True:
                status = running.status()
                if status:
                    rates.take(time.monotonic(), status)
                live.update(show(status, rates))
                time.sleep(1)
    except KeyboardInterrupt:
        pass
