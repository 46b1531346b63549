#!/usr/bin/env bash
# Builds the wheel of the Python package against a build tree, installs it in an
# environment of its own there, and runs its tests:
#
#   python/check.sh build
set -euo pipefail

source=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
venv=$build/python-venv
wheels=$build/python-wheels

[ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
"$venv/bin/python" -c 'import matplotlib, nanobind, numpy, pytest, scikit_build_core' 2>/dev/null ||
  "$venv/bin/pip" install -q --disable-pip-version-check matplotlib nanobind numpy pytest scikit-build-core

rm -rf "$wheels"
COREY_BUILD_DIR=$build PATH=$venv/bin:$PATH "$venv/bin/pip" wheel -q --disable-pip-version-check \
  --no-build-isolation --no-deps --config-settings=build-dir="$build/python" -w "$wheels" "$source"
wheel=$(ls "$wheels"/corey-*.whl)
size=$(stat -c %s "$wheel")
echo "$wheel: $((size / 1048576)) MB"
if [ "$size" -gt $((40 * 1048576)) ]; then
  echo "check.sh: error: expected at most 40 MB, got $((size / 1048576)) MB" >&2
  exit 1
fi
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps --force-reinstall "$wheel"
# From elsewhere: the folder of the sources is a package of the same name.
cd "$build"
"$venv/bin/pytest" -q -p no:cacheprovider "$source/tests"
