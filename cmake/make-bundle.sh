#!/usr/bin/env bash
# Packs the stripped executable, its links and the OpenMP library into
# corey-bundle.tar.xz, to be run on any newer x86-64 Linux:
#
#   tar xf corey-bundle.tar.xz && ./corey-bundle/bin/corey-bench scan --target=cpu
set -euo pipefail

build=$1
name=corey-bundle
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$stage/$name/bin" "$stage/$name/lib"
DESTDIR= cmake --install "$build" --prefix "$stage/$name" --component bundle --strip >/dev/null
for tool in corey-opt corey-run corey-translate corey-bench corey-lsp-server corey-reduce; do
  ln -s corey "$stage/$name/bin/$tool"
done
cp -L "$(ldd "$build/bin/corey" | awk '/libomp/ { print $3 }')" "$stage/$name/lib/"
tar -C "$stage" -c "$name" | xz -T0 -6 >"$name.tar.xz"
size=$(stat -c %s "$name.tar.xz")
echo "$name.tar.xz: $((size / 1048576)) MB"
if [ "$size" -gt $((32 * 1048576)) ]; then
  echo "make-bundle.sh: error: expected at most 32 MB, got $((size / 1048576)) MB" >&2
  exit 1
fi
