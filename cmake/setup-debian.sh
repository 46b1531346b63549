#!/usr/bin/env bash
# Installs what the build and the tests need on Debian 12, as root. Does nothing
# where all of it is there.
set -euo pipefail

packages=(
  clang-22 lld-22 llvm-22-dev llvm-22-tools libmlir-22-dev mlir-22-tools libomp-22-dev
  libopenblas-openmp-dev nlohmann-json3-dev libclang-rt-22-dev libgtest-dev zlib1g-dev libzstd-dev
  cmake ninja-build python3 python3-dev python3-venv git make gcc g++ xz-utils
)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  echo "setup-debian.sh: error: expected root to install ${missing[*]}, got user $(id -un)" >&2
  exit 1
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
