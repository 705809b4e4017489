#!/usr/bin/env bash
# CC12M as in NeuCLIP's Table 1 (ViT-B/32, global batch 2048, 300M samples = 33 epochs of 9.2M), Table 3 (lr 4e-4, lr of
# tau 5e-5, wd 0.1, warm-up 10,000, rho 8.5) and Table 4 (the network, our defaults). The lr of tau is neuclip's default, and
# 1e-4 that of fastclip-v3, as in its released command.
set -euo pipefail
source "$(dirname "$0")/recipe.sh"
run_recipe \
    "--model ViT-B-32 --batch-size 256 --epochs 33 --lr 4e-4 --wd 0.1 --warmup 10000 --precision amp_bf16 --workers 6" \
    "--rho 8.5" "$@"
