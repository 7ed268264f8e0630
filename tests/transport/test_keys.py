"""Keys and passwords that are kept in files and variables; real certificates, real handshakes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth
from click.testing import CliRunner

from tests.support import stream_options
from zmq_datasource.cli import main
from zmq_datasource.cli.types import named_options
from zmq_datasource.errors import OptionError
from zmq_datasource.transport.spec import SocketSpec, check_socket_options, value_of


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in ("server", "client"):
        made = CliRunner().invoke(main, ["keygen", name, "--directory", str(tmp_path / "keys")])
        assert made.exit_code == 0, made.output
    return tmp_path / "keys"


def test_new_keys_are_certificates_that_only_their_owner_can_read(keys: Path) -> None:
    public, secret = zmq.auth.load_certificate(keys / "server.key_secret")
    assert zmq.auth.load_certificate(keys / "server.key") == (public, None)
    assert secret is not None
    assert zmq.curve_public(secret) == public
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    again = CliRunner().invoke(main, ["keygen", "server", "--directory", str(keys)])
    assert again.exit_code != 0
    assert "exists; remove it, or choose another name" in again.output
    assert zmq.auth.load_certificate(keys / "server.key_secret") == (public, secret)


def test_only_its_owner_can_change_a_new_public_key_or_read_a_secret_one(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        CliRunner().invoke(main, ["keygen", "feed", "--directory", str(tmp_path), "--only", "billing"])
    finally:
        os.umask(before)
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {".key": 0o644, ".key_secret": 0o600}


def test_an_option_reads_the_right_key_of_a_certificate(keys: Path, tmp_path: Path) -> None:
    public, secret = zmq.auth.load_certificate(keys / "client.key_secret")
    assert secret is not None
    for name in ("client.key", "client.key_secret"):
        assert value_of("curve_publickey", f"@{keys / name}") == public.decode()
        assert value_of("curve_serverkey", f"@{keys / name}") == public.decode()
    assert value_of("curve_secretkey", f"@{keys / 'client.key_secret'}") == secret.decode()
    with pytest.raises(OptionError, match=r"client\.key has no secret key; name the file"):
        value_of("curve_secretkey", f"@{keys / 'client.key'}")
    text = tmp_path / "password"
    text.write_text("  curved words\n")
    assert value_of("plain_password", f"@{text}") == "curved words"
    assert value_of("plain_username", "me@home") == "me@home"
    assert value_of("plain_username", "@home") == "@home"


def test_a_file_is_named_by_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(main, ["keygen", "here"])
    assert f"-o zmq.curve_publickey=@{tmp_path / 'here.key'}" in made.output
    with pytest.raises(OptionError, match="named by an absolute path"):
        value_of("curve_publickey", "@here.key")
    # A command line is of one machine, and knows its directory.
    assert named_options(["zmq.curve_publickey=@here.key"]) == {
        "zmq.curve_publickey": f"@{tmp_path / 'here.key'}"
    }


@pytest.mark.parametrize("begin", ["@", "@/"])
def test_a_key_that_begins_like_a_place_is_a_key(begin: str) -> None:
    """One in 85 does."""
    key = begin + "Rzp<qKsu=dV:TnZ}=D1{B4Gd<(tmbwX9D$.rvs?x"[: 40 - len(begin)]
    assert value_of("curve_serverkey", key) == key
    assert named_options([f"zmq.curve_serverkey={key}"]) == {"zmq.curve_serverkey": key}


def test_a_missing_value_is_an_error_that_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match=r"zmq\.curve_secretkey: reading /nowhere.*each machine that opens"):
        value_of("curve_secretkey", "@/nowhere")
    monkeypatch.setenv("OURS", "s3cret")
    assert value_of("plain_password", "env:OURS") == "s3cret"
    with pytest.raises(OptionError, match="the variable NOT_OURS is not set"):
        value_of("plain_password", "env:NOT_OURS")
    broken = tmp_path / "broken"
    broken.write_text("curve\n    s3cret\n")
    with pytest.raises(OptionError, match="neither a key nor a certificate") as caught:
        value_of("curve_publickey", f"@{broken}")
    assert "s3cret" not in str(caught.value)
    with pytest.raises(OptionError) as refused:
        check_socket_options(
            SocketSpec.of_source(stream_options(connect="tcp://a:1", zmq_curve_secretkey="env:OURS"))
        )
    assert "s3cret" not in str(refused.value)
