"""An S3 server whose objects are files in a directory, where the weather can damage them.

It does what ``log.bucket_store`` asks of one: objects are put, with or without the condition that there is none of the
key, read as a whole or in part, listed and deleted. What it holds survives its end. That the store works with a server
of others, ``tests/log/test_store.py`` shows.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.weather.faults import SLOW_SECONDS, Faults

__all__ = ["location_in", "serve"]

_BUCKET = "bucket"


def location_in(endpoint: str, prefix: str) -> str:
    """A prefix in the bucket of the server at an endpoint, as ``walStore``."""
    host = endpoint.removeprefix("tcp://").replace(":", "%3A")
    return f"s3://any:secret@{_BUCKET}/{prefix}?endpoint_override={host}&scheme=http&region=us-east-1"


def serve(root: Path, endpoint: str, faults: Faults, stopped: threading.Event) -> None:
    """Serve the files below a directory, each prefix a directory in it, until ``stopped``."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    handler = type("Handler", (_Handler,), {"root": root, "faults": faults, "replacing": threading.Lock()})
    root.mkdir(parents=True, exist_ok=True)
    with ThreadingHTTPServer((host, int(port)), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stopped.wait()
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    faults: Faults
    replacing: threading.Lock

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self._answer_late(lambda: self._list(asked) if "list-type" in asked else self._get())

    def do_HEAD(self) -> None:
        self._answer_late(self._get)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self._change(lambda: self._put(content))

    def do_DELETE(self) -> None:
        self._change(self._delete)

    def _answer_late(self, act: Callable[[], None]) -> None:
        if self.faults.disk == "slow-store":
            time.sleep(SLOW_SECONDS)
        act()

    def _change(self, act: Callable[[], None]) -> None:
        if self.faults.disk == "read-only":
            self._error(503, "SlowDown")
        else:
            self._answer_late(act)

    @property
    def _path(self) -> Path:
        key = unquote(urlsplit(self.path).path).removeprefix(f"/{_BUCKET}").lstrip("/")
        return self.root / key

    def _get(self) -> None:
        try:
            content, modified = self._path.read_bytes(), self._path.stat().st_mtime
        except (FileNotFoundError, IsADirectoryError):
            self._error(404, "NoSuchKey")
            return
        headers = {"Last-Modified": formatdate(modified, usegmt=True), "ETag": _tag(content)}
        if (asked := self.headers.get("Range")) is None:
            self._answer(200, content, headers)
            return
        begin, _, last = asked.removeprefix("bytes=").partition("-")
        part = content[int(begin) : int(last) + 1]
        end = int(begin) + len(part) - 1
        self._answer(206, part, headers | {"Content-Range": f"bytes {begin}-{end}/{len(content)}"})

    def _put(self, content: bytes) -> None:
        path = self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_name(f".{uuid.uuid4().hex}")
        whole.write_bytes(content)
        try:
            with self.replacing:
                if (tag := self.headers.get("If-Match")) is not None and tag != _tag(path.read_bytes()):
                    raise FileExistsError(f"{path} has changed")
                if self.headers.get("If-None-Match") == "*":
                    os.link(whole, path)
                else:
                    os.replace(whole, path)
        except (FileExistsError, FileNotFoundError):
            self._error(412, "PreconditionFailed")
        else:
            self._answer(200, b"", {"ETag": _tag(content)}, changes=True)
        finally:
            whole.unlink(missing_ok=True)

    def _delete(self) -> None:
        self._path.unlink(missing_ok=True)
        self._answer(204, b"", {}, changes=True)

    def _list(self, asked: dict[str, str]) -> None:
        prefix, after = asked.get("prefix", ""), asked.get("start-after", "")
        directory = self.root / prefix
        paths = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(".")]
        objects, prefixes = [], set()
        for path in paths:
            key = path.relative_to(self.root).as_posix()
            below, slash, _ = key.removeprefix(prefix).partition("/")
            if slash and asked.get("delimiter"):
                prefixes.add(f"{prefix}{below}/")
            elif key > after:
                objects.append((key, path))
        text = "".join(_described(key, path) for key, path in sorted(objects))
        text += "".join(
            f"<CommonPrefixes><Prefix>{escape(it)}</Prefix></CommonPrefixes>" for it in sorted(prefixes)
        )
        self._answer(
            200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{text}</ListBucketResult>".encode(), {}
        )

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode(), {})

    def _answer(self, status: int, content: bytes, headers: dict[str, str], *, changes: bool = False) -> None:
        if changes and self.faults.disk == "lost-answer":
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _described(key: str, path: Path) -> str:
    try:
        about = path.stat()
    except FileNotFoundError:  # deleted meanwhile
        return ""
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(about.st_mtime))
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified>"
        f'<ETag>"{about.st_mtime}"</ETag><Size>{about.st_size}</Size></Contents>'
    )
