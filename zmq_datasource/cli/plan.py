"""``zmq-datasource plan``."""

from __future__ import annotations

import click

from zmq_datasource.cli.types import AGE, DURATION, SIZE, number, set_by_user
from zmq_datasource.cli.types import size as size_type

__all__ = ["plan"]


@click.command(short_help="Find high-water marks that cover a pause of the consumer.")
@click.option(
    "--rate",
    type=number(0.001, 1e9),
    required=True,
    help="Messages a second, at the peak.",
)
@click.option("--size", type=size_type(1, 64 << 20), required=True, help="Bytes of a message.")
@click.option(
    "--stall",
    type=DURATION,
    help="The longest time for which the consumer takes nothing, without a drop.",
)
@click.option(
    "--cluster",
    is_flag=True,
    help="Calculate how many receivers the feed needs, and how many cores, how much network and disk.",
)
@click.option(
    "--retention",
    type=AGE,
    default="0",
    show_default=True,
    help="With --cluster: how long messages stay in the log.",
)
@click.option(
    "--hops",
    type=click.IntRange(min=1, max=100),
    default=1,
    show_default=True,
    help="Pairs of sockets one after another; 2 with a proxy in between.",
)
@click.option("--memory", type=SIZE, help="What all queues together may take.  [default: no bound]")
@click.option(
    "--buffers",
    type=size_type(0, 1 << 30),
    default="0",
    show_default=True,
    help="SNDBUF and RCVBUF of the sockets; 0 leaves them to the system.",
)
def plan(
    rate: float,
    size: int,
    stall: float | None,
    cluster: bool,
    retention: float,
    hops: int,
    memory: int | None,
    buffers: int,
) -> None:
    """Say which high-water marks cover a pause of the consumer, what they hold, and how old messages then get.

    With --cluster: how many receivers a feed needs, and what its log, its network and Spark then cost.

    What it depends on is measured first, on this machine, which takes some seconds.

    \b
    Examples:
      zmq-datasource plan --rate 20000 --size 200 --stall 2s
      zmq-datasource plan --rate 5000 --size 10k --stall 10s --hops 2 --memory 512m --buffers 64k
      zmq-datasource plan --cluster --rate 1000000 --size 200 --retention 1h
    """
    without = ("stall", "hops", "memory", "buffers") if cluster else ("retention",)
    if given := [f"--{name}" for name in without if set_by_user(name)]:
        raise click.UsageError(
            f"{', '.join(given)} says nothing {'with' if cluster else 'without'} --cluster"
        )
    if cluster:
        _plan_cluster(rate, size, retention)
        return
    if stall is None:
        raise click.UsageError("--stall is needed: how long may the consumer take nothing? Or --cluster")
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from zmq_datasource.workbench.experiment import HEADER_BYTES  # noqa: PLC0415
    from zmq_datasource.workbench.plan import make_plan, measure_kernel  # noqa: PLC0415

    console = Console()
    kernel = measure_kernel(max(size, HEADER_BYTES), buffers)
    made = make_plan(rate, size, stall, hops, kernel, memory)
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("to hold", f"{made.wanted:,} messages: {rate:,.0f} a second for {stall:g} s"),
        ("sndhwm, rcvhwm", f"{made.hwm:,} at each of {2 * hops} sockets"),
        ("the chain holds", f"{made.held:,} messages, {made.held * size:,} bytes"),
        ("of those", f"{made.kernel:,} in the system's buffers, which no high-water mark bounds"),
        ("memory of queues", f"{made.memory:,} bytes at most"),
        ("covers", f"a pause of {made.survives:.2f} s"),
        ("age of a message", f"{made.staleness:.2f} s through the full chain"),
    ):
        table.add_row(f"[dim]{name}[/]", value)
    console.print(table)
    for warning in made.warnings:
        console.print(f"[yellow]Warning:[/] {warning}", highlight=False)


def _plan_cluster(rate: float, size: int, retention: float) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from zmq_datasource.workbench.cluster import make_cluster_plan, measure_receiver  # noqa: PLC0415

    console = Console()
    cost = measure_receiver(size)
    made = make_cluster_plan(rate, size, cost, retention)
    table = Table.grid(padding=(0, 2))
    for name, value in (
        (
            "one receiver takes",
            f"{cost.rate:,.0f} messages a second here, at {cost.cpu_seconds * 1e6:.2f} µs of CPU each",
        ),
        ("receivers", f"{made.receivers:,}, each for {made.rate_each:,.0f} messages a second"),
        ("cores for receivers", f"{made.receiver_cores:,.1f}"),
        (
            "cores to read the log",
            f"{made.spark_cores:,.1f} in Spark's executors, without what is done with the rows",
        ),
        ("network", f"{made.network_bits / 1e9:,.2f} Gbit/s into all receivers"),
        ("log", f"{made.log_bytes / 1e6:,.0f} MB/s written, and as much read"),
        ("retention", f"{made.stored_bytes / 1e9:,.0f} GB"),
    ):
        table.add_row(f"[dim]{name}[/]", value)
    console.print(table)
