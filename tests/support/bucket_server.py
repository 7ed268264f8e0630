"""A bucket for tests: moto's S3 server, in a thread."""

from __future__ import annotations

import io
import logging
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

from tests.support.ports import free_port

__all__ = ["BucketServer"]

_BUCKET = "bucket"
_ACCESS = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}


class BucketServer:
    """Use it in a ``with`` block; it may be stopped meanwhile, and keeps what it holds."""

    def __init__(self) -> None:
        self._host, self._port = "127.0.0.1", free_port()
        self._server: BaseWSGIServer | None = None

    def __enter__(self) -> Self:
        self.start()
        # moto keeps what all of its servers in a process hold in one place.
        urllib.request.urlopen(f"http://{self._host}:{self._port}/moto-api/reset", data=b"").close()
        self._client().create_bucket(Bucket=_BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it logs each request
        app = _OneAtATime(DomainDispatcherApplication(create_backend_app))
        self._server = make_server(self._host, self._port, app, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _client(self) -> Any:
        return boto3.client("s3", endpoint_url=f"http://{self._host}:{self._port}", **_ACCESS)

    def stop(self) -> None:
        """Answer nothing from now on: connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
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
        return f"tcp://{self._host}:{self._port}"

    def location(self, path: str, endpoint: str | None = None) -> str:
        """A place in the bucket, as a user names it.

        Args:
            endpoint: Where to reach it, if that is not its own: see ``Middlebox``.
        """
        host = (endpoint or self.endpoint).removeprefix("tcp://").replace(":", "%3A")
        return f"s3://any:any@{_BUCKET}/{path}?endpoint_override={host}&scheme=http&region=us-east-1"


class _OneAtATime:
    """Answers one request at a time, because moto looks whether there is a key, and then puts it."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        content = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(content)
        with self._lock:
            return self._app(environ, start_response)
