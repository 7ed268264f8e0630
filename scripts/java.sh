#!/bin/sh
# Find a Java runtime for Spark (17 or newer), else install a headless one where that is allowed,
# else say what to type. Prints shell text to eval: it sets JAVA_HOME where that is needed.
set -eu

version_of() { # the major version of a java command, or 0
    "$1" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1 | grep . || echo 0
}

use_existing() {
    if [ -n "${JAVA_HOME:-}" ] && [ -x "$JAVA_HOME/bin/java" ] && [ "$(version_of "$JAVA_HOME/bin/java")" -ge 17 ]; then
        return 0
    fi
    if command -v java >/dev/null 2>&1 && [ "$(version_of java)" -ge 17 ]; then
        echo "unset JAVA_HOME;" # it names an older one, or none
        return 0
    fi
    for home in /usr/lib/jvm/* /opt/homebrew/opt/openjdk* /usr/local/opt/openjdk*; do
        if [ -x "$home/bin/java" ] && [ "$(version_of "$home/bin/java")" -ge 17 ]; then
            echo "export JAVA_HOME='$home';"
            return 0
        fi
    done
    return 1
}

if use_existing; then
    exit 0
fi

if command -v apt-get >/dev/null 2>&1; then
    refresh="apt-get update"
    install="apt-get install -y --no-install-recommends"
    # Debian and Ubuntu releases differ in which of these they have.
    packages="openjdk-21-jre-headless openjdk-17-jre-headless default-jre-headless"
elif command -v dnf >/dev/null 2>&1; then
    install="dnf install -y java-17-openjdk-headless"
    refresh=true
elif command -v apk >/dev/null 2>&1; then
    install="apk add openjdk17-jre-headless"
    refresh=true
elif command -v brew >/dev/null 2>&1; then
    install="brew install openjdk@17"
    refresh=true
else
    echo "Spark needs Java 17 or newer. Install a JRE (https://adoptium.net) and run this again." >&2
    exit 1
fi

case "$install" in
    brew*) as_root="" ;;
    *)
        if [ "$(id -u)" -eq 0 ]; then
            as_root=""
        elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
            as_root="sudo"
        else
            echo "Spark needs Java 17 or newer. Type this, then run the same command again:" >&2
            echo "    sudo $install${packages:+ openjdk-17-jre-headless}" >&2
            exit 1
        fi
        ;;
esac
echo "Spark needs Java 17 or newer; installing it: $install" >&2
$as_root $refresh >&2
if [ -n "${packages:-}" ]; then
    for package in $packages; do
        if apt-cache show "$package" >/dev/null 2>&1; then
            install="$install $package"
            break
        fi
    done
fi
$as_root $install >&2
if ! use_existing; then
    echo "The system's Java is older than 17. Install a newer JRE (https://adoptium.net) and run this again." >&2
    exit 1
fi
