"""A bucket for tests: moto's S3 server, in a thread."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import boto3
from moto.server import ThreadedMotoServer

from tests.support.ports import free_port

__all__ = ["BucketServer"]

_BUCKET = "bucket"
_ACCESS = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}


class BucketServer:
    """Use it in a ``with`` block; it may be stopped meanwhile, and keeps what it holds."""

    def __init__(self) -> None:
        self._port = free_port()
        self._server: ThreadedMotoServer | None = None

    def __enter__(self) -> Self:
        self.start()
        # moto keeps what all of its servers in a process hold in one place.
        urllib.request.urlopen(f"http://127.0.0.1:{self._port}/moto-api/reset", data=b"").close()
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self._port}", **_ACCESS).create_bucket(
            Bucket=_BUCKET
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it logs each request
        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        """Answer nothing from now on: connections are refused."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    @contextmanager
    def away(self) -> Iterator[None]:
        """Stopped in this block."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"tcp://127.0.0.1:{self._port}"

    def location(self, path: str, endpoint: str | None = None) -> str:
        """A place in the bucket, as a user names it.

        Args:
            endpoint: Where to reach it, if that is not its own: see ``Middlebox``.
        """
        host = (endpoint or self.endpoint).removeprefix("tcp://").replace(":", "%3A")
        return f"s3://any:any@{_BUCKET}/{path}?endpoint_override={host}&scheme=http&region=us-east-1"
