"""Reads the values of libzmq's options from files, certificates and environment variables.

An option names the place, and each process that opens a socket reads the value there. So no key appears in a query's
plan, its checkpoint, an event log or a list of processes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import zmq.auth

from zmq_datasource.errors import OptionError
from zmq_datasource.options.socket import CURVE_KEY_CHARACTERS

__all__ = ["value_of", "warn_of_readers"]

_log = logging.getLogger(__name__)

_FILE, _VARIABLE = "@/", "env:"
_SECRET = frozenset({"curve_secretkey", "plain_password"})
_warned: set[Path] = set()


def value_of(name: str, text: str) -> str:
    """The value of an option: the text itself, or the content of the place that it names.

    Args:
        name: libzmq's name of the option, in lower case.
        text: ``@PATH``, absolute, stands for the content of a file, without surrounding white space; if the file is a
            certificate (of ``zmq-datasource keygen`` or ``zmq.auth``), for the key that this option takes.
            ``env:NAME`` stands for a variable of this process's environment.

    Raises:
        OptionError: The place has no value. The error names the option and the place, and never shows a value.
    """
    if text.startswith(_VARIABLE):
        variable = text.removeprefix(_VARIABLE)
        if variable not in os.environ:
            raise OptionError(
                f"option zmq.{name}: {text}: the variable {variable} is not set in this process; each machine that "
                "opens the socket needs it"
            )
        return os.environ[variable]
    path = Path(text[1:])
    is_key = name.startswith("curve_") and len(text) == CURVE_KEY_CHARACTERS and not path.exists()
    if not text.startswith(_FILE) or is_key:
        if name.startswith("curve_") and text.startswith("@") and not is_key:
            raise OptionError(
                f"option zmq.{name}: a file is named by an absolute path, as in @/etc/zmq/feed.key, because each "
                "machine that opens the socket reads it; a key as text has 40 characters"
            )
        return text
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise OptionError(
            f"option zmq.{name}: reading {path}: {e}; each machine that opens the socket needs this file"
        ) from e
    if name in _SECRET:
        warn_of_readers(path)
    return _key_of(name, path) if _is_certificate(content) else content.strip()


def _is_certificate(content: str) -> bool:
    lines = (line.strip() for line in content.splitlines())
    return "curve" in [line for line in lines if line and not line.startswith("#")]


def _key_of(name: str, path: Path) -> str:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except ValueError:
        raise OptionError(f"option zmq.{name}: {path} is no certificate: it has no public key") from None
    key = secret if name == "curve_secretkey" else public
    if key is None:
        raise OptionError(
            f"option zmq.{name}: the certificate {path} has no secret key; name the file that ends in .key_secret"
        )
    return key.decode()


def warn_of_readers(path: Path) -> None:
    """Warn once of a file with a secret that other users may read."""
    if path.stat().st_mode & 0o077 and path not in _warned:
        _warned.add(path)
        _log.warning("%s holds a secret, and other users may read it; chmod 600 it", path)
