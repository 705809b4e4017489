#!/usr/bin/env bash
# CC3M as in NeuCLIP's Table 1 (ResNet-50, global batch 1024, 100M samples = 37 epochs of 2.7M), Table 3 (lr 1e-3, lr of
# tau 1.25e-4, neuclip's default, wd 0.1, warm-up 10,000, rho 6.5) and Table 4 (the network, our defaults). FastCLIP's released
# command for CC3M has an lr of tau of 2e-4.
set -euo pipefail
source "$(dirname "$0")/recipe.sh"
ours="--rho 6.5"
if [ "${1:-}" = fastclip-v3 ]; then ours="$ours --lr-tau 2e-4"; fi
run_recipe \
    "--model RN50 --batch-size 128 --epochs 37 --lr 1e-3 --wd 0.1 --warmup 10000 --precision amp_bf16 --workers 6" \
    "$ours" "$@"
