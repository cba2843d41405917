#!/usr/bin/env bash
# Runs a bundle made by `./dev gpu-bundle` on a machine with a GPU:
#
#   run.sh [--out FOLDER] [--only NAME[,NAME]] [--skip NAME[,NAME]] [--filter GTEST_FILTER]
#
# Sections, in this order, each with a limit in seconds that LIMIT_<NAME> replaces:
#   info        devices and the kernel code that they run
#   tests       every suite on the GPU
#   verify      fovea verify --device cuda:0, golden files included
#   python      the Python package: what a call costs, then every suite, by $PYTHON (python3), as far as torch is there;
#               engines' own files are executed where FOVEA_PEER_SOURCES names their folder
#   ptx         the suites again with the PTX for compute capability 8.0, compiled by the driver
#   memcheck, initcheck, synccheck   the suites under compute-sanitizer
#   racecheck   one case of every suite
#   bench       the ceilings of the device, then the perf suite (docs/bench.md)
#
# FOLDER (results) receives one text file a section, perf.json and summary.txt. Exit code 0: every section that ran is
# right; 1: one failed or ran out of time; 2: wrong options; 3: there is no GPU, nothing ran.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

all_sections=(info tests verify python ptx memcheck initcheck synccheck racecheck bench)
declare -A limit=([info]=60 [tests]=400 [verify]=120 [python]=550 [ptx]=400 [memcheck]=550 [initcheck]=550 [synccheck]=550
  [racecheck]=550 [bench]=500)
for name in "${all_sections[@]}"; do
  variable=LIMIT_${name^^}
  limit[$name]=${!variable:-${limit[$name]}}
done
out=results
only=''
skip=''
section=''
default_filter='*cuda*:*Cuda*-*Full*'
filter=$default_filter

usage() {
  sed -n '2,18s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || usage
  case "$1" in
    --out) out=$2 ;;
    --only) only=$2 ;;
    --skip) skip=$2 ;;
    --filter) filter=$2 ;;
    --section) section=$2 ;; # of this script itself: one section, in this process
    *) usage ;;
  esac
  shift 2
done
for name in ${only//,/ } ${skip//,/ }; do
  [ -n "${limit[$name]-}" ] || { printf 'run.sh: there is no section %s\n' "$name" >&2 && usage; }
done
case $filter in
  *-*) ;;
  *) filter+='-*Full*' ;;
esac

# room <test binary>
room() { basename "$1" | sed 's/^fovea_test_//'; }

# What asks for all memory of the device, and what holds it with a kernel that does not end: cases that disturb others.
memory_cases='*MoreThanIsFree*:*TooManyPages*:*Memory.*DoesNotFit*'
endless_cases='*NothingWaitsForTheDevice*'
cases_a_process=40

# job <deadline> <text file> <label> <test binary> <command...>: one test binary under a command (env, a sanitizer), with
# the shard that the environment names. Appends a line "passed failed skipped", then what to print.
job() {
  local deadline=$1 to=$2 label=$3 test=$4 left log status p f s
  shift 4
  left=$((deadline - SECONDS))
  if [ "$left" -le 1 ]; then
    printf '0 1 0\n%-16s not run: the section is out of time\n' "$label" >"$to"
    return
  fi
  log=$(timeout --kill-after=5 "$left" "$@" "$test" --gtest_brief=1 "--gtest_filter=$filter" 2>&1)
  status=$?
  count() { grep -oE "^\[  $1 *\] [0-9]+ test" <<<"$log" | grep -oE '[0-9]+' | tail -n 1; }
  p=$(count PASSED) f=$(count FAILED) s=$(count SKIPPED)
  # A crash, a sanitizer's finding and a time limit leave no failed case.
  if [ "$status" -ne 0 ] && [ "${f:-0}" -eq 0 ]; then f=1; fi
  {
    printf '%d %d %d\n' "${p:-0}" "${f:-0}" "${s:-0}"
    printf '%-16s %5d passed %5d failed %5d skipped%s\n' "$label" "${p:-0}" "${f:-0}" "${s:-0}" \
      "$([ "$status" -ne 124 ] || printf ', out of time')"
    [ "${f:-0}" -eq 0 ] || tail -n 60 <<<"$log"
  } >"$to"
}

# suites <deadline> <jobs> <command...>: every test binary with the filter, so many at a time (long ones in parts);
# prints totals. The deadline is that of the section; what it cuts short counts as a failure.
suites() {
  local deadline=$1 jobs=$2 test list number=0 shards shard texts passed=0 failed=0 skipped=0 p f s text
  shift 2
  texts=$(mktemp -d)
  for test in bin/fovea_test_*; do
    # What leaves no text of its own, or cannot even list its cases, has failed.
    printf '0 1 0\n%-16s does not start\n' "$(room "$test")" >"$texts/$(room "$test").0"
    list=$("$test" --gtest_list_tests "--gtest_filter=$filter" 2>&1) || continue
    number=$(grep -c '^  ' <<<"$list")
    [ "$number" -gt 0 ] || rm "$texts/$(room "$test").0"
    [ "$number" -gt 0 ] || continue
    shards=1
    [ "$jobs" -eq 1 ] || shards=$(((number + cases_a_process - 1) / cases_a_process))
    for ((shard = 0; shard < shards; ++shard)); do
      printf '0 1 0\n%-16s ended without a word\n' "$(room "$test") $((shard + 1))/$shards" \
        >"$texts/$(room "$test").$shard"
      while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
      GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard job "$deadline" "$texts/$(room "$test").$shard" \
        "$(room "$test") $((shard + 1))/$shards" "$test" "$@" &
    done
  done
  wait
  for text in "$texts"/*; do
    [ -f "$text" ] || continue
    read -r p f s <"$text"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    tail -n +2 "$text"
  done
  rm -r "$texts"
  printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
  [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
}

# suites_at_once <deadline> <cases left out> <command...>: many at a time, then alone what asks for all memory.
suites_at_once() {
  local deadline=$1 without=$2 all=$filter status=0
  shift 2
  # Every process pins 4 GiB of the host.
  local jobs=$(($(awk '/^MemAvailable/ {print $2}' /proc/meminfo) >> 23)) cores
  cores=$(nproc)
  [ "$jobs" -le "$cores" ] || jobs=$cores
  filter=$all:$memory_cases:$without
  suites "$deadline" "$((jobs > 1 ? jobs : 1))" "$@" || status=1
  if [ "$all" = "$default_filter" ]; then
    filter=${memory_cases//:/cuda*:}cuda*
    suites "$deadline" 1 "$@" || status=1
  fi
  filter=$all
  return $status
}

sanitizer() {
  command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null ||
    ls /usr/local/cuda/compute-sanitizer/compute-sanitizer 2>/dev/null
}

# under_sanitizer <deadline> <tool>. A tool may hold back what follows a kernel that does not end: the case of such a
# kernel is left out. Calls that the runtime refuses are no findings: cases ask for too much memory on purpose.
under_sanitizer() {
  local tool options=(--tool "$2" --error-exitcode 9 --print-limit 20)
  tool=$(sanitizer) || {
    printf 'not run: there is no compute-sanitizer on this machine\n'
    return 4
  }
  [ "$2" != memcheck ] || options+=(--report-api-errors no)
  suites_at_once "$1" "$endless_cases" "$tool" "${options[@]}"
}

# One case of every suite: the first that its list has for a GPU and that is no long run of its own.
cases_of_suites() {
  local test
  for test in bin/fovea_test_*; do
    "$test" --gtest_list_tests "--gtest_filter=$filter" |
      awk '/^[^ ]/ {suite = $1; taken = 0}
           /^  / && !taken && !/Allocate|NothingWaits|NoRow|AHundred|32Bits/ {print suite $1; taken = 1}'
  done
}

section_info() {
  bin/fovea info --devices && bin/fovea info && nvidia-smi 2>/dev/null
  grep -q '^device cuda:0' <<<"$(bin/fovea info --devices)"
}
section_tests() { suites "$1" 1 env; }
section_verify() { bin/fovea verify --device cuda:0; }
section_python() {
  local interpreter=${PYTHON:-python3}
  [ -d python ] || {
    printf 'not run: the bundle was made without --python\n'
    return 4
  }
  export PYTHONPATH=$PWD/python
  "$interpreter" -c 'import fovea; print(fovea.available("sparse_mla", "cuda:0"))' || return 1
  if "$interpreter" -c 'import torch' 2>/dev/null; then
    "$interpreter" bench/python_call.py --device cuda:0 --calls 3000 || return 1
  fi
  "$interpreter" tests/support/run_unittests.py tests/python "$out/python.json"
}
section_ptx() {
  local line
  line=$(CUDA_FORCE_PTX_JIT=1 bin/fovea info --devices | grep '^device cuda:0')
  printf '%s\n' "$line"
  grep -q 'kernels: ptx 80,' <<<"$line" || {
    printf 'the kernels do not come from the PTX for 8.0: CUDA_FORCE_PTX_JIT=1 had no effect\n'
    return 1
  }
  suites_at_once "$1" "$endless_cases" env CUDA_FORCE_PTX_JIT=1
}
section_memcheck() { under_sanitizer "$1" memcheck; }
section_initcheck() { under_sanitizer "$1" initcheck; }
section_synccheck() { under_sanitizer "$1" synccheck; }
section_racecheck() {
  filter=$(cases_of_suites | paste -sd:)-
  cases_a_process=2
  under_sanitizer "$1" racecheck
}
section_bench() {
  bin/fovea bench --device cuda:0 --ceilings &&
    bin/fovea bench --device cuda:0 --suite perf --json "$out/perf.json"
}

if [ -n "$section" ]; then
  "section_$section" $((SECONDS + ${limit[$section]}))
  exit
fi
if ! devices=$(bin/fovea info --devices); then
  printf 'run.sh: bin/fovea does not start on this machine\n' >&2
  exit 1
fi
if ! grep -q '^device cuda:0' <<<"$devices"; then
  printf '%s\nnothing was run\n' "$devices"
  exit 3
fi
mkdir -p "$out"
: >"$out/summary.txt"
worst=0
for name in "${all_sections[@]}"; do
  [[ ,$skip, != *,$name,* ]] || continue
  [[ -z $only || ,$only, == *,$name,* ]] || continue
  begin=$SECONDS
  # The section ends by itself; the rest is for a command that hangs.
  timeout --kill-after=10 $((limit[$name] + 20)) bash ./"$(basename "$0")" --out "$out" --filter "$filter" \
    --section "$name" >"$out/$name.txt" 2>&1
  case $? in
    0) text=ok ;;
    4) text='not run' ;;
    124 | 137) text='out of time' worst=1 ;;
    *) text=FAILED worst=1 ;;
  esac
  printf '%-10s %-12s %4d s  %s\n' "$name" "$text" $((SECONDS - begin)) "$(tail -n 1 "$out/$name.txt")" |
    tee -a "$out/summary.txt"
done
exit $worst
