"""An S3 server of its own (Adobe's S3Mock), which can be killed and started again with what it holds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pyarrow import fs

from tests.support import wait_for
from tests.support.maven import S3MOCK, fetched
from tests.support.ports import free_port

__all__ = ["S3Server"]

_BUCKET = "bucket"
# Plain HTTP on the port whose threads can be set.
_PLAIN = ("--server.ssl.enabled=false", "--com.adobe.testing.s3mock.httpPort=0")
_ONE_THREAD = ("--server.tomcat.threads.max=1", "--server.tomcat.threads.min-spare=1")


class S3Server:
    """Use it in a ``with`` block; ``location`` is a URI in it.

    Skips the test where the server cannot be had.

    Args:
        directory: Where it keeps what it holds.
        host: Its address.
        before: Words in front of its command, to run it elsewhere.
        atomic: Whether of two conditional puts of one key one fails, as on S3. This server looks whether there is such
            a key and then puts, so it gets one thread, with which it is too slow for pyarrow's many requests.
    """

    def __init__(
        self, directory: Path, host: str = "127.0.0.1", before: Sequence[str] = (), atomic: bool = False
    ) -> None:
        self._host, self._before = host, before
        self._options = (*_PLAIN, *(_ONE_THREAD if atomic else ()))
        self._jar = fetched(S3MOCK)
        self._directory = directory
        self._port = free_port()
        self._log = directory.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._directory.mkdir()
        self.start()
        self.file_system().create_dir(_BUCKET)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else "java"
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._before,
                    *(java, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-jar", self._jar, *self._options),
                    f"--server.port={self._port}",
                ],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "COM_ADOBE_TESTING_S3MOCK_STORE_ROOT": str(self._directory),
                    "COM_ADOBE_TESTING_S3MOCK_STORE_RETAIN_FILES_ON_EXIT": "true",
                },
            )
        wait_for(self._answers, "the S3 server answers", 60)

    def kill(self) -> None:
        """Kill it; what it holds stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text(errors="replace")[-2000:]
        try:
            self.file_system().get_file_info(fs.FileSelector("", recursive=False))
        except OSError:
            return False
        return True

    def file_system(self) -> fs.S3FileSystem:
        return fs.S3FileSystem(
            access_key="any", secret_key="any", endpoint_override=f"{self._host}:{self._port}", scheme="http",
            region="us-east-1", allow_bucket_creation=True, retry_strategy=fs.AwsStandardS3RetryStrategy(1),
        )  # fmt: skip

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"tcp://{self._host}:{self._port}"

    def location(self, path: str, endpoint: str | None = None) -> str:
        """A place in it, as a user names it; the keys come from the environment.

        Args:
            endpoint: Where to reach it, if that is not its own: see ``Middlebox``.
        """
        host = (endpoint or self.endpoint).removeprefix("tcp://").replace(":", "%3A")
        return f"s3://{_BUCKET}/{path}?endpoint_override={host}&scheme=http&region=us-east-1"
