#!/bin/sh
# Run the tests of the core with a compiled one that is watched by ASan and UBSan: sanitize.sh <interpreter> <directory>
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1") # which may be a link into an environment
directory=$2
compiler=${CC:-gcc}

rm -rf "$directory"
mkdir -p "$directory"
cp -r zmq_datasource tests pyproject.toml "$directory"
cd "$directory"
"$compiler" -std=c11 -g -O1 -Wall -Wextra -Werror -shared -fPIC -fno-omit-frame-pointer \
    -fsanitize=address,undefined -fno-sanitize-recover=undefined \
    -I"$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
    -o zmq_datasource/transport/_core.abi3.so zmq_datasource/transport/_core.c

# The interpreter is not built with ASan, so the library comes before it; and it never frees all that it has, so
# leaks are not looked for.
library() {
    "$compiler" -print-file-name="$1"
}
export LD_PRELOAD="$(library libasan.so) $(library libubsan.so) $(library libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=32
export PYTHONMALLOC=malloc PYTHONPATH=.
exec "$python" -m pytest -p no:cacheprovider -m "not long" tests/transport/test_core.py tests/transport/test_core_giving.py tests/transport/test_tee.py
