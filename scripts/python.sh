#!/bin/sh
# Make a virtual environment: python.sh <interpreter> <directory>. Says what to do where it cannot.
set -eu
asked=$1
venv=$2

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

python=
for candidate in "$asked" python3.13 python3.12 python3.11; do
    if new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "Python 3.11 or newer is needed, and $asked is not. Install it, then: make PYTHON=/path/to/python3.11 ..." >&2
    exit 1
fi
if ! "$python" -m venv --clear "$venv"; then
    echo "This Python cannot make virtual environments. On Debian and Ubuntu: sudo apt-get install python3-venv" >&2
    exit 1
fi
