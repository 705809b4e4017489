# Sourced by the recipes: run_recipe trains on the paper's machine, or for a minute on this one.

usage() {
    echo "usage: $0 {clip|fastclip-v3|neuclip} SHARDS [FLAG...]    or    LOCAL=1 $0 LOSS [FLAG...]" >&2
    exit 2
}

# run_recipe "flags of every loss" "flags of ours" LOSS [SHARDS] [FLAG...]; no SHARDS with LOCAL=1
run_recipe() {
    local common=$1 ours=$2 loss shards=""
    shift 2
    [ $# -ge 1 ] || usage
    loss=$1
    shift
    if [ "${LOCAL:-0}" != 1 ]; then
        [ $# -ge 1 ] || usage
        shards=$1
        shift
    fi
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
