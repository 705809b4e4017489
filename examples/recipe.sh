# Sourced by the recipes: run_recipe LOSS SHARDS FLAGS... sets up the paper's machine, or a minute on this one.

usage() {
    echo "usage: $0 {clip|fastclip-v3|neuclip} SHARDS [FLAG...]    or    LOCAL=1 $0 LOSS [FLAG...]" >&2
    exit 2
}

# run_recipe LOSS SHARDS "flags of every loss" "flags of ours" [FLAG...]
run_recipe() {
    local loss=$1 shards=$2 common=$3 ours=$4
    shift 4
    local flags="--loss $loss $common"
    [ "$loss" = clip ] || flags="$flags $ours"
    if [ "${LOCAL:-0}" = 1 ]; then
        # The last of a flag given twice counts.
        # shellcheck disable=SC2086
        python -m open_clip_ext.main $flags --model ViT-shapes-tiny --dataset-type shapes --train-num-samples 2048 \
            --val-num-samples 256 --batch-size 64 --epochs 2 --warmup 10 --workers 0 --device cpu --precision fp32 \
            --log-every-n-steps 8 --name "local-$loss-$(date +%s)" "$@"
    else
        # The -- keeps torchrun from taking --logs for an abbreviation of its own flags.
        # shellcheck disable=SC2086
        torchrun --nproc_per_node "${GPUS:-8}" -m -- open_clip_ext.main $flags \
            --train-data "$shards" --dataset-type webdataset "$@"
    fi
}
