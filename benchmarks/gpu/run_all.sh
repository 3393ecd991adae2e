#!/bin/bash
# Builds, tests and measures the CUDA side of jdp on a machine with one GPU, in under 8 minutes:
#
#     benchmarks/gpu/run_all.sh [FOLDER [STAGE...]]
#
# runs all stages, or those that are named.
#
# Needs nvcc, and a python3 (or $PYTHON) with JAX's CUDA plugin, optax, flax. Tables go to
# benchmarks/results/, logs to FOLDER (out/gpu). A failed stage is reported, and the others still
# run. Every timed result is compared with the exact one in each round; a wrong result gets no
# table.

set -uo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
OUT=${1:-out/gpu}
ONLY=("${@:2}")
BUDGET_S=470
INCLUDE=(-Ijdp/csrc -Itests/csrc/cuda)

say() { echo "run_all: $*"; }
give_up() { say "$*" >&2; exit 1; }

command -v nvidia-smi > /dev/null || give_up "no GPU here (nvidia-smi was not found): nothing was run."
nvidia-smi -L 2> /dev/null | grep -q GPU || give_up "no GPU here (nvidia-smi lists none): nothing was run."
command -v nvcc > /dev/null || give_up "nvcc was not found: nothing was run."

mkdir -p "$OUT"
OUT=$(realpath "$OUT")
BIN=$OUT/bin
mkdir -p "$BIN"
failed=()

# stage NAME SECONDS COMMAND...: runs the command with a deadline, its output in NAME.log.
stage() {
	local name=$1 limit_s=$2 begin=$SECONDS
	shift 2
	if ((${#ONLY[@]})) && [[ " ${ONLY[*]} " != *" $name "* ]]; then return; fi
	local left_s=$((BUDGET_S - SECONDS))
	((limit_s < left_s)) || limit_s=$left_s
	if ((limit_s < 5)); then
		say "$name: SKIPPED, no time is left"
		failed+=("$name")
		return 1
	fi
	if timeout -k 5 "$limit_s" "$@" > "$OUT/$name.log" 2>&1; then
		say "$name: ok ($((SECONDS - begin)) s)"
	else
		say "$name: FAILED with $? ($((SECONDS - begin)) s), the end of $OUT/$name.log:"
		tail -n 8 "$OUT/$name.log" | cut -c1-400
		failed+=("$name")
		return 1
	fi
}

arch=sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
compile() { nvcc -std=c++17 -O3 -cudart static -arch="$arch" "${INCLUDE[@]}" "$@"; }

# All at once: each is one compiler process.
build() {
	local headers pids=() pid
	headers=$("$PYTHON" -c 'import jaxlib, pathlib; print(pathlib.Path(jaxlib.__file__).parent / "include")')
	compile --shared -Xcompiler -fPIC,-fvisibility=hidden -isystem "$headers" -o "$BIN/libjdp_cuda.so" \
		jdp/csrc/cuda/*.cu jdp/csrc/cuda/*.cc & pids+=($!)
	compile -o "$BIN/virtual_ranks" tests/csrc/cuda/virtual_ranks.cu & pids+=($!)
	compile -o "$BIN/several_processes" tests/csrc/cuda/several_processes.cu \
		jdp/csrc/cuda/{kernels.cu,communicator.cc,peers.cc,start_finish.cc,plan.cc} & pids+=($!)
	compile -o "$BIN/bench_ring" benchmarks/gpu/bench_ring.cu & pids+=($!)
	for pid in "${pids[@]}"; do wait "$pid" || return 1; done
}

sanitize() {
	local tool=$1
	"$PYTHON" tests/csrc/cuda/ring_cases.py --few compute-sanitizer --tool "$tool" --error-exitcode 9 \
		--log-file "$OUT/$tool.txt" "$BIN/virtual_ranks"
}

bench() { "$BIN/bench_ring" > "$OUT/bench_ring.jsonl"; }

export -f build compile sanitize bench
export PYTHON OUT BIN arch PYTHONPATH=$PWD PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.3

stage build 180 bash -c "INCLUDE=(${INCLUDE[*]}); build"
# Times first: only this machine can measure them.
stage bench 110 bash -c bench
stage virtual_ranks 150 "$PYTHON" tests/csrc/cuda/ring_cases.py "$BIN/virtual_ranks"
stage two_processes 40 "$BIN/several_processes" 2
stage three_processes 50 "$BIN/several_processes" 3
stage measure 60 "$PYTHON" -m benchmarks.gpu.measure "$BIN/libjdp_cuda.so" "$OUT/bench_ring.jsonl"
stage calibrated 60 "$PYTHON" -m benchmarks.gpu.calibrated
stage step 120 "$PYTHON" -m benchmarks.gpu.step
# racecheck checks shared memory, which the kernels do not use; memcheck and synccheck matter.
for tool in memcheck synccheck racecheck; do
	if command -v compute-sanitizer > /dev/null; then
		stage "$tool" 60 bash -c "sanitize $tool"
	else
		say "$tool: SKIPPED, compute-sanitizer was not found"
	fi
done

tail -n 3 "$OUT"/{virtual_ranks,two_processes,three_processes}.log 2> /dev/null
cat "$OUT"/{measure,calibrated,step}.log 2> /dev/null
say "$SECONDS s in all; failed: ${failed[*]:-none}"
((${#failed[@]} == 0))
