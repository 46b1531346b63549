#!/usr/bin/env bash
# Tests of a CUDA device: golden cases, GPU tests, random programs and models.
#
#   run-gpu-tests.sh [--sanitize] [--jobs=<n>] [--filter=<gtest filter>] [<source tree>]
#
# Test inputs are read from the source tree: the current directory, the one this
# script lies in or that one's neighbour, unless given. Every test runs in a
# process of its own, so that one that breaks the device breaks no other.
# --sanitize adds a few tests under compute-sanitizer, if there is one. The last
# line is `N passed, M failed`; the exit status is not 0 when M is not.
#
#   COREY_TEST_DEVICE  the device, cuda unless set
#   COREY_CUDA_CHIP    a lesser chip, such as sm_80, to test its code on the device
#   COREY_TEST_SEED, COREY_TEST_DRAWS  as test/unittests/PropertyTest.cpp says
set -uo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# Seconds that a test may take.
limit=600
sanitize=0 jobs=6 filter='*' tree=
for argument in "$@"; do
  case $argument in
  --sanitize) sanitize=1 ;;
  --jobs=*) jobs=${argument#*=} ;;
  --filter=*) filter=${argument#*=} ;;
  -*)
    echo "run-gpu-tests.sh: error: expected --sanitize, --jobs=, --filter= or a source tree, got '$argument'" >&2
    exit 2
    ;;
  *) tree=$argument ;;
  esac
done
if [ -z "$tree" ]; then
  for candidate in "$PWD" "$here" "$here/.." "$here"/../*/; do
    if [ -f "$candidate/test/Inputs/golden/ops/cases.json" ]; then
      tree=$candidate
      break
    fi
  done
fi
if [ ! -f "$tree/test/Inputs/golden/ops/cases.json" ]; then
  echo "run-gpu-tests.sh: error: expected a source tree with test/Inputs/golden, got '${tree:-none}'" >&2
  exit 2
fi
# In a bundle, or in a source tree that was built.
run=$here/bin/corey-run tests=$here/bin/corey-gpu-tests
if [ ! -x "$run" ]; then
  run=$here/../build/bin/corey-run tests=$here/../build/test/unittests/corey-gpu-tests
fi
export COREY_TEST_DEVICE=${COREY_TEST_DEVICE:-cuda} COREY_TEST_INPUTS=$tree/test/Inputs
export TSAN_OPTIONS= OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

passed=0 failed=0 skipped=0
finish() {
  [ "$skipped" -eq 0 ] || echo "$skipped skipped"
  echo "$passed passed, $failed failed"
  [ "$failed" -eq 0 ]
  exit
}

# The context comes before the program that is missing here.
answer=$("$run" --target="$COREY_TEST_DEVICE" 2>&1)
case $answer in
*"expected a program"*) ;;
*)
  echo "no CUDA device: $answer"
  failed=1
  finish
  ;;
esac
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export COREY_CACHE_DIR=${COREY_CACHE_DIR:-$logs/cache}

# Golden cases. What no kernel can be made of yet is skipped.
for folder in ops blocks; do
  start=$SECONDS
  "$run" --golden "$tree/test/Inputs/golden/$folder" --target="$COREY_TEST_DEVICE" >"$logs/golden" 2>&1
  status=$?
  p=$(grep -c '^PASS ' "$logs/golden")
  s=$(grep '^FAIL ' "$logs/golden" | grep -c 'GPU lowering')
  f=$(grep '^FAIL ' "$logs/golden" | grep -vc 'GPU lowering')
  grep '^FAIL ' "$logs/golden" | grep -v 'GPU lowering'
  # It ended before its last case.
  if ! tail -n 1 "$logs/golden" | grep -q '^[0-9]* passed, [0-9]* failed$'; then
    tail -n 5 "$logs/golden"
    echo "corey-run --golden ended with status $status"
    f=$((f + 1))
  fi
  echo "golden/$folder: $p passed, $f failed, $s skipped ($((SECONDS - start)) s)"
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done

# runTest <name> [<command>...]: one test; leaves its log and a line of result.
runTest() {
  # Names of tests with parameters have slashes.
  local name=$1 log=$logs/${1//\//:} start=$SECONDS status
  shift
  timeout "$limit" "$@" "$tests" --gtest_filter="$name" >"$log.log" 2>&1
  status=$?
  if [ "$status" -ne 0 ]; then
    echo "FAIL $name ($((SECONDS - start)) s, status $status)" >"$log.result"
  elif grep -q '^\[  SKIPPED \]' "$log.log"; then
    echo "SKIP $name: $(grep -m 1 -A 2 '\[ RUN ' "$log.log" | tail -n 1)" >"$log.result"
  else
    echo "PASS $name ($((SECONDS - start)) s)" >"$log.result"
  fi
  # At once, for those who wait; why it failed comes with the others.
  cat "$log.result"
}

# runTests <what> <names> [<command>...]
runTests() {
  local what=$1 names=$2 name log start=$SECONDS p=0 f=0 s=0 result
  shift 2
  rm -f "$logs"/*.result
  for name in $names; do
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    runTest "$name" "$@" &
  done
  wait
  for name in $names; do
    log=$logs/${name//\//:}
    result=$(cat "$log.result" 2>/dev/null || echo "FAIL $name (no result)")
    case $result in
    PASS*) p=$((p + 1)) ;;
    SKIP*) s=$((s + 1)) ;;
    *)
      f=$((f + 1))
      echo "$result"
      grep -v -e '^\[ RUN' -e '^\[---' -e '^\[===' -e '^$' "$log.log" | head -n 60 | cut -c 1-1000
      ;;
    esac
    grep -h '^largest relative error' "$log.log" 2>/dev/null | sed 's/^/  /'
  done
  echo "$what: $p passed, $f failed, $s skipped ($((SECONDS - start)) s)"
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

# The longest first.
names=$("$tests" --gtest_list_tests --gtest_filter="$filter" |
  awk '/^[^ ].*\.$/ { suite = $1 } /^  / { print suite $1 }' |
  sed -e '/^Property\.\(SelectiveScan\|SSD\|Projection\|CausalConv\)$/s/^/0 /' -e '/^GPU\./s/^/1 /' -e '/^[^01]/s/^/2 /' |
  sort -s -k 1,1 | cut -d ' ' -f 2)
runTests "tests" "$names"

if [ "$sanitize" -eq 1 ]; then
  if ! command -v compute-sanitizer >/dev/null; then
    echo "no compute-sanitizer on PATH: nothing was run under it"
  else
    export COREY_TEST_DRAWS=2
    small="Property.SelectiveScan Property.CausalConv Property.RMSNorm Property.Hadamard Property.Projection
      Property.EmbeddingAndArgmax Property.Sample Property.ElementwiseChain Property.QuantizeAndDequantize GPU.ShortLengths GPU.StridedCopiesAgreeWithLoops
      Property.SSDInTiles"
    for tool in memcheck racecheck initcheck; do
      runTests "$tool" "$small" compute-sanitizer --tool "$tool" --error-exitcode 99 --target-processes all
    done
  fi
fi
finish
