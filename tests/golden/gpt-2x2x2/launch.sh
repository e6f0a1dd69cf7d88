#!/bin/sh
# Run on every node, with MASTER_ADDR set to the first: 1 node(s) of 8 device(s).
exec torchrun --nnodes 1 --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}" \
    "$(dirname "$0")/train.py" "$@"
