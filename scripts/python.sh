#!/bin/sh
# Make a virtual environment: python.sh <interpreter> <directory>. Says what to do where it cannot.
set -eu
python=$1
venv=$2
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    for candidate in python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null 2>&1; then
            python=$candidate
            break
        fi
    done
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Python 3.11 or newer is needed, and $python is not. Install it, then: make PYTHON=/path/to/python3.11 ..." >&2
    exit 1
fi
if ! "$python" -m venv --clear "$venv"; then
    echo "This Python cannot make virtual environments. On Debian and Ubuntu: sudo apt-get install python3-venv" >&2
    exit 1
fi
