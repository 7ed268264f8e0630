"""``zmq-datasource keygen``: keys for CURVE."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click

# A file's name has 255 bytes.
_MOST_NAME_BYTES = 200
_MOST_SHOWN = 200


@click.command(short_help="Make a pair of CURVE keys.")
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Where to make the two files. A missing directory is made, for its owner alone.  [default: here]",
)
@click.option(
    "--only",
    metavar="NAME",
    multiple=True,
    help="A name of a producer or durable subscriber, or a pattern such as orders-*. If the key is in allowedClients, "
    "its owner may use only these names, and no other client may use them.",
)
def keygen(name: str, directory: Path, only: tuple[str, ...]) -> None:
    """Make a pair of CURVE keys: NAME.key is public, NAME.key_secret is for its owner alone.

    The files are certificates of ZeroMQ, which other programs read, too (zmq.auth, czmq, zcert).
    """
    import zmq.auth  # noqa: PLC0415 - only for this

    wrong = next((text for text in only if not text or any(c.isspace() or c in "\"'" for c in text)), None)
    if wrong is not None:
        raise click.UsageError(
            f"--only {wrong!r}: a name here has no spaces and no quotes; ? stands for any character"
        )
    if (
        not 0 < len(name.encode(errors="replace")) <= _MOST_NAME_BYTES
        or not name.isprintable()
        or "/" in name
    ):
        raise click.UsageError(
            f"NAME {name[:_MOST_NAME_BYTES]!r}: a name is 1 to {_MOST_NAME_BYTES} bytes of printable text without a "
            "slash; write the place with --directory"
        )
    directory = directory.absolute()  # options need an absolute path
    public, secret = directory / f"{name}.key", directory / f"{name}.key_secret"
    try:
        for path in (public, secret):
            if os.path.lexists(path):  # also a link whose target is missing
                raise click.UsageError(f"{path} exists; remove it, or choose another name")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory() as private
        ):  # pyzmq follows links, and leaves the mode to the umask
            made = [Path(path) for path in zmq.auth.create_certificates(private, name)]
            texts = [path.read_text() for path in made]
        if only:  # a server reads the public certificate; pyzmq would write metadata only into the secret one
            texts[0] = texts[0].replace("metadata\n", f'metadata\n    names = "{" ".join(only)}"\n', 1)
        for path, text, mode in zip((public, secret), texts, (0o644, 0o600), strict=True):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                file.write(text)
    except OSError as e:
        raise click.UsageError(
            f"making keys in {str(directory)[:_MOST_SHOWN]!r}: {e.strerror}; name a directory that can be written with "
            "--directory"
        ) from e
    click.echo(f"{public}: give it to the programs that are to know {name}")
    click.echo(f"{secret}: keep it where {name} runs")
    click.echo(f"-o zmq.curve_publickey=@{public} -o zmq.curve_secretkey=@{secret}")
