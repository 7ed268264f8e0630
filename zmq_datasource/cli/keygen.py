"""``zmq-datasource keygen``."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["keygen"]


@click.command()
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Where the two files are made; made itself if need be, for its owner alone. [default: here]",
)
def keygen(name: str, directory: Path) -> None:
    """Make a pair of CURVE keys: NAME.key for everybody, NAME.key_secret for its owner alone.

    The files are certificates of ZeroMQ, which other programs read, too (zmq.auth, czmq, zcert).
    """
    import zmq.auth  # noqa: PLC0415 - only who asks for keys

    directory = directory.absolute()  # as an option names it
    public, secret = directory / f"{name}.key", directory / f"{name}.key_secret"
    for path in (public, secret):
        if path.exists():
            raise click.UsageError(f"{path} exists; remove it, or choose another name")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Nobody else may read it even while it is written.
        secret.touch(mode=0o600)
        zmq.auth.create_certificates(directory, name)
        secret.chmod(0o600)
    except OSError as e:
        raise click.UsageError(f"making keys in {directory}: {e}") from e
    click.echo(f"{public}: give it to whoever is to know {name}")
    click.echo(f"{secret}: keep it where {name} runs")
    click.echo(f"-o zmq.curve_publickey=@{public} -o zmq.curve_secretkey=@{secret}")
