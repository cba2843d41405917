#!/usr/bin/env bash
# install/run.sh <build dir> <results file>: installs fovea into a scratch prefix and builds a foreign project against it,
# with find_package (static and shared) and with pkg-config.
set -uo pipefail
build=$1
results=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tests=0
failures=0

check() {
  tests=$((tests + 1))
  if ! "${@:2}" >"$scratch/log" 2>&1; then
    failures=$((failures + 1))
    printf 'FAILED: %s\n' "$1"
    cat "$scratch/log"
  fi
}

check "cmake --install" cmake --install "$build" --prefix "$scratch/prefix"
check "configure the foreign project" cmake -S "$here" -B "$scratch/foreign" -DCMAKE_PREFIX_PATH="$scratch/prefix"
check "build it" cmake --build "$scratch/foreign"
check "run it, static" "$scratch/foreign/use_static"
check "run it, shared" "$scratch/foreign/use_shared"
export PKG_CONFIG_PATH
PKG_CONFIG_PATH=$(dirname "$(find "$scratch/prefix" -name fovea.pc)")
library_dir=$(dirname "$PKG_CONFIG_PATH")
# shellcheck disable=SC2046  # the flags are meant to be split
check "compile with pkg-config" g++ -std=c++20 "$here/main.cc" $(pkg-config --cflags --libs fovea) -o "$scratch/with_pc"
check "run it, pkg-config" env LD_LIBRARY_PATH="$library_dir" "$scratch/with_pc"
check "only fovea's own symbols are exported" bash -c "! nm -D --defined-only -C '$library_dir/libfovea.so' | grep -E ' [TW] ' | grep -vE ' (fovea::|typeinfo|vtable|std::|void std::|bool std::|_init|_fini|VTT|guard)' | grep ."
mkdir -p "$(dirname "$results")"
printf '{"tests": %d, "failures": %d, "skipped": 0}\n' "$tests" "$failures" >"$results"
[ "$failures" -eq 0 ]
