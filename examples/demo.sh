#!/usr/bin/env bash
# The main job, end to end: plan a GPT for four local processes, show the plan, emit the program, train it on real text.
set -euo pipefail
cd "$(dirname "$0")/.."
[ ! -x .venv/bin/shardwright ] || PATH="$PWD/.venv/bin:$PATH"
if ! command -v shardwright > /dev/null; then
    echo "error: shardwright is not installed; run make setup" >&2
    exit 2
fi
export OMP_NUM_THREADS=1   # the profile local-cpu describes processes of one thread each
run=demo-run
rm -rf "$run" && mkdir -p "$run"

echo "== data: the text of Python's own library, bytes as tokens"
library=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
find "$library/asyncio" "$library/json" "$library/email" -name '*.py' | LC_ALL=C sort > "$run/files.txt"
xargs python examples/prepare_text.py --output "$run/text.tokens" < "$run/files.txt"

echo "== plan"
shardwright plan examples/gpt.py:gpt --cluster local-cpu:1x4 --batch 16 --seq 128 --set vocab=256 -o "$run/plan.yaml" > /dev/null

echo "== show"
shardwright show "$run/plan.yaml"

echo "== emit"
shardwright emit "$run/plan.yaml" -o "$run/program"

echo "== train"
torchrun --standalone --nproc-per-node 4 "$run/program/train.py" --steps 120 --learning-rate 3e-3 --warmup 10 \
    --data "$run/text.tokens" --metrics "$run/metrics.jsonl"

python - "$run/metrics.jsonl" <<'PY'
import json
import sys

with open(sys.argv[1]) as lines:
    losses = [json.loads(line)["loss"] for line in lines]
first, last = losses[0], sum(losses[-10:]) / 10
print(f"first loss {first:.3f}, mean of the last ten {last:.3f}, ratio {last / first:.2f}")
if last > 0.7 * first:
    sys.exit("the model did not learn: the ratio should be at most 0.7")
PY
