#!/bin/sh
# Starts the program on this machine's 1 device(s), with train.py's arguments.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # Workers that torchrun starts again (PET_MAX_RESTARTS) meet in a new store.
exec torchrun --standalone --nproc-per-node 1 "$(dirname "$0")/train.py" "$@"
