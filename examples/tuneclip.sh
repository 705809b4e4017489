#!/usr/bin/env bash
# TuneCLIP on DFN-12M as in its paper's Section 5 (512 pairs on each of 8 GPUs for ViT-B/32, 256 for ViT-B/16, 5 epochs of
# recovery and 5 of fine-tuning) and Table 6 (lr 1e-5, betas 0.9 and 0.98, wd 0.02, margin 0.1, AMP), which are the
# defaults of --loss tuneclip. The paper gives no batch size for ViT-H/14; 256 is ours.
set -euo pipefail
source "$(dirname "$0")/recipe.sh"

usage() {
    echo "usage: $0 {openai-b32|openai-b16|laion-b32|siglip-b16|dfn-h14} SHARDS [FLAG...]    or    LOCAL=1 $0 MODEL [FLAG...]" >&2
    exit 2
}

[ $# -ge 1 ] || usage
case "$1" in
    openai-b32) model="--model ViT-B-32-quickgelu --pretrained openai --batch-size 512" ;;
    openai-b16) model="--model ViT-B-16-quickgelu --pretrained openai --batch-size 256" ;;
    laion-b32) model="--model ViT-B-32 --pretrained laion2b_s34b_b79k --batch-size 512" ;;
    siglip-b16) model="--model ViT-B-16-SigLIP --pretrained webli --batch-size 256" ;;
    dfn-h14) model="--model ViT-H-14-quickgelu --pretrained dfn5b --batch-size 256 --grad-checkpointing" ;;
    *) usage ;;
esac
shift

if [ "${LOCAL:-0}" = 1 ]; then
    pretraining="local-pretraining-$(date +%s)"
    run_recipe "--lr 1e-3" "" clip --name "$pretraining"
    set -- --pretrained "logs/$pretraining/checkpoints/epoch_2.pt" --shapes-shifted --lr 1e-4 --osr-epochs 2 "$@"
fi
run_recipe "$model --precision amp --workers 6" "" tuneclip "$@"
