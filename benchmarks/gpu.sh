#!/usr/bin/env bash
# Everything that needs a GPU, in one call of under ten minutes: bash benchmarks/gpu.sh
# Writes JSON to $OUT (default: reports/benchmarks/gpu). Every part has its own limit, so that one that hangs or fails
# leaves the others their time; what failed is named at the end.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-reports/benchmarks/gpu}
mkdir -p "$OUT"
PYTHON=${PYTHON:-python3}
"$PYTHON" -c "import dspark_exp" 2>/dev/null || "$PYTHON" -m pip install -q -e ".[dev]" || exit 1
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv > "$OUT/device.csv" 2>/dev/null || true

failed=()
part() { # name, seconds, command
  local name=$1 limit=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" > "$OUT/$name.log" 2>&1 || failed+=("$name")
  tail -n 15 "$OUT/$name.log"
}

part equal_backends 90 "$PYTHON" -m pytest -q tests/drafters/test_laws.py tests/targets/test_ragged_flex.py tests/objectives -x
part train_step 120 "$PYTHON" benchmarks/train_step.py --device cuda --slopes --json "$OUT/train_step.json"
part qwen3_4b 150 "$PYTHON" benchmarks/qwen3_4b.py --device cuda --json "$OUT/qwen3_4b.json"
part sequential_head 120 "$PYTHON" benchmarks/sequential_head.py --device cuda --scale qwen3_4b --json "$OUT/sequential_head.json"
part decode 45 "$PYTHON" benchmarks/decode.py --device cuda --attention sdpa --json "$OUT/decode.json"
part decode_flex 60 "$PYTHON" benchmarks/decode.py --device cuda --attention flex --json "$OUT/decode_flex.json"

if ((${#failed[@]})); then
  echo "failed or out of time: ${failed[*]} (see $OUT/*.log)"
  exit 1
fi
