#!/bin/sh
# venv.sh FOLDER [PYTHON]: makes a virtual environment with the first Python on the PATH that is new enough.
# The newest comes last among those with a number, since libraries with compiled parts follow a new Python late.
set -eu

folder=$1
wanted=${2:-}
existed=$([ -e "$folder" ] && echo yes || true)

new_enough() {
    "$1" -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else 1)' >/dev/null 2>&1
}

python=
if [ -n "$wanted" ]; then
    if ! new_enough "$wanted"; then
        echo "Error: PYTHON=$wanted is not a Python 3.11 or later" >&2
        exit 1
    fi
    python=$wanted
else
    for name in python3.13 python3.12 python3.11 python3.14 python3 python; do
        if command -v "$name" >/dev/null 2>&1 && new_enough "$name"; then
            python=$name
            break
        fi
    done
fi
if [ -z "$python" ]; then
    found=$(python3 --version 2>&1 || python --version 2>&1 || echo "no Python on the PATH")
    echo "Error: localrun needs Python 3.11 or later; found: $found. Install one, or name it: make PYTHON=/path/to/python3" >&2
    exit 1
fi

echo "Using $("$python" --version) ($(command -v "$python")) in $folder"
if "$python" -m venv "$folder" >"$folder.log" 2>&1; then
    rm -f "$folder.log"
    exit 0
fi
# Some distributions ship Python without the part that puts pip into an environment. The system's pip can do it instead.
[ -n "$existed" ] || rm -rf "$folder"
if "$python" -m venv --without-pip "$folder" >>"$folder.log" 2>&1; then
    for inside in "$folder/bin/python" "$folder/Scripts/python.exe"; do
        if [ -x "$inside" ] && "$python" -m pip --python "$inside" install --quiet pip >>"$folder.log" 2>&1; then
            rm -f "$folder.log"
            exit 0
        fi
    done
fi
cat "$folder.log" >&2
rm -f "$folder.log"; [ -n "$existed" ] || rm -rf "$folder"
echo "Error: $python could not make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2
exit 1
