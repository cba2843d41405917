#!/usr/bin/env bash
# Runs the device tests of a bundle made by `./dev gpu-bundle`: run.sh [GTEST_FILTER]. The last line is
# "N passed, N failed, N skipped" over every room.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export LD_LIBRARY_PATH=$PWD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
filter=${1:-*cuda*:*Cuda*}
passed=0
failed=0
skipped=0
for test in bin/fovea_test_*; do
  log=$("$test" --gtest_brief=1 "--gtest_filter=$filter" 2>&1)
  status=$?
  count() { grep -oE "^\[  $1 *\] [0-9]+ test" <<<"$log" | grep -oE '[0-9]+' | head -n 1; }
  p=$(count PASSED)
  f=$(count FAILED)
  s=$(count SKIPPED)
  # A crash leaves no totals.
  if [ "$status" -ne 0 ] && [ "${f:-0}" -eq 0 ]; then f=1; fi
  printf '%-24s %5d passed %5d failed %5d skipped\n' "$(basename "$test")" "${p:-0}" "${f:-0}" "${s:-0}"
  [ "${f:-0}" -eq 0 ] || tail -n 60 <<<"$log"
  passed=$((passed + ${p:-0}))
  failed=$((failed + ${f:-0}))
  skipped=$((skipped + ${s:-0}))
done
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ]
