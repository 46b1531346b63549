#!/usr/bin/env bash
# Runs the tests of lifetime of the Python package with its extension built for
# AddressSanitizer, against the libcorey of a build tree as it is:
#
#   python/check-asan.sh build
#
# PYTHON names an interpreter with nanobind, numpy and pytest; without it that of
# check.sh is taken.
set -euo pipefail

source=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
python=${PYTHON:-$build/python-venv/bin/python}
tree=$build/python-asan
clang=${CXX:-clang++-22}

cmake -S "$source" -B "$tree" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER="$clang" \
  -DCMAKE_CXX_FLAGS="-fsanitize=address -fno-omit-frame-pointer -shared-libasan" \
  -DCOREY_BUILD_DIR="$build" -DPython_EXECUTABLE="$python" > "$tree.log"
ninja -C "$tree" _core >> "$tree.log"
# The package as installed: its files beside the extension.
rm -rf "$tree/packages"
mkdir -p "$tree/packages"
cp -r "$source/corey" "$tree/packages/corey"
cp "$tree"/_core.*.so "$tree/packages/corey/"

runtime=$("$clang" -print-file-name=libclang_rt.asan-x86_64.so)
[ -e "$runtime" ] || runtime=$("$clang" -print-file-name=libclang_rt.asan.so)
# Beside it the library whose exceptions it watches, which the interpreter has not.
standard=$("$clang" -print-file-name=libstdc++.so.6)
cd "$build"
# The interpreter keeps memory to its end; its own allocator would hide what is used
# after it was freed. libcorey has an operator new of its own, on malloc, that is no
# part of what is watched.
LD_PRELOAD="$runtime $standard" PYTHONMALLOC=malloc PYTHONPATH=$tree/packages \
  ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:abort_on_error=1:handle_segv=0 \
  "$python" -m pytest -q -s -p no:cacheprovider "$source/tests/test_lifetime.py"
