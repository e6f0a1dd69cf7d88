#!/usr/bin/env bash
# The main job, end to end: plan a GPT for four local processes, show the plan, emit the program, train it on real text.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
run=demo-run
rm -rf "$run" && mkdir -p "$run"

echo "== data: the text of Python's own library, bytes as tokens"
python examples/prepare_text.py --output "$run/text.tokens" "$(python -c 'import json, pathlib; print(pathlib.Path(json.__file__).parents[1] / "asyncio")')"

echo "== plan"
shardwright plan examples/gpt.py:gpt --cluster local-cpu:1x4 --batch 16 --seq 128 --set vocab=256 -o "$run/plan.yaml"

echo "== show"
shardwright show "$run/plan.yaml"

echo "== emit"
shardwright emit "$run/plan.yaml" -o "$run/program"

echo "== train"
torchrun --nproc-per-node 4 "$run/program/train.py" --steps 120 --data "$run/text.tokens" --metrics "$run/metrics.jsonl"

python - "$run/metrics.jsonl" <<'PY'
import json, sys
losses = [json.loads(line)["loss"] for line in open(sys.argv[1])]
first, last = losses[0], sum(losses[-10:]) / 10
print(f"first loss {first:.3f}, mean of the last ten {last:.3f}, ratio {last / first:.2f}")
if last > 0.7 * first:
    sys.exit("the model did not learn: the ratio should be at most 0.7")
PY
