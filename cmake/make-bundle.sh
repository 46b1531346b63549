#!/usr/bin/env bash
# Packs the stripped executable, its links, the GPU tests and the OpenMP library
# into <build>/corey-bundle.tar.xz, to be run on any newer x86-64 Linux:
#
#   tar xf build/corey-bundle.tar.xz && ./corey-bundle/bin/corey-bench scan --target=cpu
#   ./corey-bundle/run-gpu-tests.sh <source tree>
set -euo pipefail

build=$1
source=$(cd "$(dirname "$0")/.." && pwd)
name=corey-bundle
archive=$build/$name.tar.xz
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$stage/$name/bin" "$stage/$name/lib"
DESTDIR= cmake --install "$build" --prefix "$stage/$name" --component bundle --strip >/dev/null
for tool in corey-opt corey-run corey-translate corey-bench corey-lsp-server corey-reduce; do
  ln -s corey "$stage/$name/bin/$tool"
done
strip -o "$stage/$name/bin/corey-gpu-tests" "$build/test/unittests/corey-gpu-tests"
cp "$source/test/run-gpu-tests.sh" "$stage/$name/"
cp -L "$(ldd "$build/bin/corey" | awk '/libomp/ { print $3 }')" "$stage/$name/lib/"
# Both executables hold LLVM: a dictionary that reaches from one to the other.
tar -C "$stage" -c "$name" | xz -T1 --x86 --lzma2=preset=6,dict=128MiB >"$archive"
size=$(stat -c %s "$archive")
echo "$archive: $((size / 1048576)) MB"
if [ "$size" -gt $((32 * 1048576)) ]; then
  echo "make-bundle.sh: error: expected at most 32 MB, got $((size / 1048576)) MB" >&2
  exit 1
fi
