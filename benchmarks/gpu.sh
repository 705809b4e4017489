#!/usr/bin/env bash
# All measurements that need a GPU, in the order of what they decide, in parts of at most 8 minutes; each prints its
# figures as it gets them, and is useful alone.
#
#   bash benchmarks/gpu.sh                        all parts; tables on the terminal, JSON in gpu-results/
#   bash benchmarks/gpu.sh parity loss            these parts
#   bash benchmarks/gpu.sh decide                 what no GPU has shown yet, in BUDGET seconds (540): OUT then has two
#                                                 files, decide.txt and decide.tgz
#   ICONS=icons bash benchmarks/gpu.sh icons      with the folder of `make_shards icons` (docs/icons.md); BATCHES="64 32"
#                                                 trains at these batches alone
#   PEERS=peers.py bash benchmarks/gpu.sh loss    also losses of other code, see benchmarks/loss.py
#   TINY=1 bash benchmarks/gpu.sh                 the same commands on a CPU in a few minutes, to try the script; also
#                                                 with decide
#
# PYTHON is the interpreter (default: python), OUT the folder of the results. Nothing is downloaded. A part that fails
# does not stop the others; the exit code is the number of failed parts.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-python} OUT=${OUT:-gpu-results} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
LIMIT=${LIMIT:-480}
mkdir -p "$OUT"

if [[ -n ${TINY:-} ]]; then
    device=cpu precision=fp32 seconds=0.1
    sizes=(--batch-sizes 16 --dims 16 -m 64 --num-samples 1000)
    network=(--batch-sizes 16 -m 64 --dim 16 --also graph eager bfloat16)
    rows=(--rows 1000 10000 --batch-size 64)
    models=("ViT-shapes-tiny 4") consecutive=2 prototypes=16 cases=("ViT-shapes-tiny 4 neuclip")
    parity=(--batch-size 16 --dim 16 -m 64 --num-samples 200 --steps 4)
    epochs=1 samples=64 batches="16" warmup=1
    graphs=(--batch-sizes 16 --dims 16 -m 64 --num-samples 1000) graphed=fastclip-v3 small=4
    pairs=(--train-num-samples 64 --batch-size 4) few=("${pairs[@]}") compared_runs=(fastclip-v3)
    kernels=(--batch-sizes 70 --size 64 --dim 32 --processes 0) fused=(--batch-sizes 16 --dims 16 --num-samples 100)
else
    device=cuda precision=amp_bf16 seconds=4
    sizes=(--batch-sizes 512 1024 4096 16384 65536 --dtypes float32 bfloat16
        --losses clip-chunked siglip-chunked fastclip-v3 isogclr neuclip queue tuneclip amorlip)
    network=(--batch-sizes 512 1024 4096 --also graph eager bfloat16)
    rows=(--rows 100000 1000000 10000000 100000000)
    models=("ViT-B-32 512" "ViT-L-14 64") parity=() consecutive=10 prototypes=4096
    cases=("ViT-B-32 512 clip" "ViT-B-32 2016 neuclip" "ViT-L-14 256 fastclip-v3" "RN50 512 clip"
        "ViT-B-32 12992 clip-chunked --grad-checkpointing")
    epochs=10 samples=${ICONS_SAMPLES:-20000} batches="1024 512 256 128 64 32" warmup=500
    pairs=(--train-num-samples 20000 --batch-size 128) few=(--train-num-samples 4096 --batch-size 128)
    compared_runs=(fastclip-v3 clip-chunked "neuclip --npn-prototypes 512")
    graphs=(--batch-sizes 64 512 4096 8192) small="32 64 128"
    graphed="clip-chunked siglip-chunked fastclip-v3 neuclip"
    kernels=() fused=(--batch-sizes 2048 4096 8192 16384 65536)
fi
common=(--device "$device" --seconds "$seconds")
compared=(neuclip queue fastclip-v3 tuneclip amorlip clip-chunked)
trained=(clip fastclip-v3 neuclip "neuclip --npn-split" fastclip-v2)
[[ $device == cpu ]] && export TRITON_INTERPRET=1
declare -A limits
if [[ -n ${DECIDE:-} || ${1:-} == decide ]]; then
    export DECIDE=1
    if [[ $device == cuda ]]; then
        BUDGET=${BUDGET:-540} limits=([trainings]=200) small="32 128" graphed="clip-chunked fastclip-v3 neuclip"
    fi
fi

parity() {  # whether every loss is finite and equal to the CPU's
    "$PYTHON" benchmarks/parity.py --device "$device" "${parity[@]}" --json "$OUT/parity.json"
}
loss() {  # time and memory of each loss against ClipLoss
    "$PYTHON" benchmarks/loss.py "${common[@]}" "${sizes[@]}" ${PEERS:+--peers "$PEERS"} --json "$OUT/loss.json"
}
kernels() {  # --kernels: errors, times by the size of a tile, and losses with and without the fused kernels
    "$PYTHON" benchmarks/kernels.py --device "$device" "${kernels[@]}" --json "$OUT/kernels.json"
    local status=$?
    by_kernels --json "$OUT/loss-kernels.json" && return $status
}
ahead() {  # the losses with and without the fused kernels where the launches are hidden, as in a training
    by_kernels --ahead --json "$OUT/ahead.json"
}
by_kernels() {
    "$PYTHON" benchmarks/loss.py --device "$device" --seconds 0.5 "${fused[@]}" --kernels fused eager \
        --losses clip-chunked siglip-chunked fastclip-v3 "$@"
}
network() {  # the network's updates against bare products, as a CUDA graph, equal in each bit, without kernels
    "$PYTHON" benchmarks/network.py "${common[@]}" "${network[@]}" --json "$OUT/network.json"
}
loss_graph() {  # --loss-graph: whether each bit is as without it, then times of losses and of whole steps
    local losses=() name
    for name in $graphed; do losses+=("$name" "$name, loss graph"); done
    # In processes: after a capture that fails, torch lets no other one of its process begin.
    [[ $device == cpu ]] || "$PYTHON" -m pytest -q -p no:cacheprovider -n 4 -k cuda tests/open_clip_ext/test_step_graph.py || return 1
    "$PYTHON" benchmarks/loss.py --device "$device" --seconds 0.5 "${graphs[@]}" --losses "${losses[@]}" \
        --json "$OUT/loss-graph.json" || return 1
    for size in $small; do
        "$PYTHON" benchmarks/step_time.py --device "$device" --seconds 1.5 --model "${models[0]% *}" --batch-size "$size" --precision "$precision" \
            --prototypes "$prototypes" --consecutive "$consecutive" --losses "${losses[@]}" --json "$OUT/loss-graph-$size.json" || return 1
    done
}
trainings() {  # from which step on a second training has other losses, and which tensors differ; one with --loss-graph, too
    local loss run graph
    for loss in "${compared_runs[@]}"; do
        for run in first second graph; do
            graph=() && [[ $run == graph ]] && graph=(--loss-graph)
            train " loss .*/s" "${loss%% *}-$run" -m open_clip_ext.main --loss $loss "${graph[@]}" --device "$device" \
                --model ViT-shapes-tiny --dataset-type shapes --workers 1 --epochs 2 --warmup 10 --log-every-n-steps 1 \
                --zeroshot-frequency 0 --name "${loss%% *}-$run" "${few[@]}" > /dev/null || return 1
        done
        "$PYTHON" - "$OUT/logs/${loss%% *}" <<'END' || return 1
import json, sys, torch
runs = [f"{sys.argv[1]}-{run}" for run in ("first", "second", "graph")]
first, *others = ([json.loads(line)["loss"] for line in open(f"{run}/metrics.jsonl")] for run in runs)
models, *more = (torch.load(f"{run}/checkpoints/epoch_2.pt", map_location="cpu")["state_dict"] for run in runs)
unequal = ([at for at, pair in enumerate(zip(first, other, strict=True), 1) if pair[0] != pair[1]] for other in others)
print(sys.argv[1].rpartition("/")[2], len(first), "losses; unequal from", *(f"{one[0] if one else 'none'} on" for one in unequal))
for run, other in zip(runs[1:], more, strict=True):
    different = [name for name, tensor in models.items() if not torch.equal(tensor, other[name])]
    print(run.rpartition("/")[2], len(different), "of", len(models), "tensors differ", *different[:3])
END
    done
}
rows() {  # tables on the device and in host memory
    for where in device host; do
        "$PYTHON" benchmarks/rows.py "${common[@]}" "${rows[@]}" --rows-on $where --json "$OUT/rows-$where.json"
    done
}
steps() {  # whole training steps; the goal for neuclip is 1.01 times clip's time and memory
    for model in "${models[@]}"; do
        read -r name size <<< "$model"
        "$PYTHON" benchmarks/step_time.py "${common[@]}" --model "$name" --batch-size "$size" --precision "$precision" \
            --prototypes "$prototypes" --consecutive "$consecutive" --losses "${compared[@]}" \
            --json "$OUT/steps-$name.json" || return 1
    done
}
memory() {  # what --dry-run predicts, and what is allocated
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$PYTHON" benchmarks/step_memory.py "${cases[@]}" \
        --device "$device" --precision "$precision" --json "$OUT/memory.json"
}
tests() {  # the command's tests on this GPU
    local which=(-n 8 tests/training_ext)
    [[ $device == cpu ]] && which=(tests/training_ext/test_optimizer.py)
    [[ $device == cpu ]] || export OPEN_CLIP_DEVICE="--device cuda:0 --no-set-device-rank" NVIDIA_TF32_OVERRIDE=0
    "$PYTHON" -m pytest -p no:cacheprovider "${which[@]}"
}
# A training of the command; the lines of its log with pattern $1, of the last step or the evaluation.
train() {
    local pattern=$1 log=$OUT/$2.txt
    shift 2
    "$PYTHON" "$@" --precision "$precision" --lr 1e-3 --wd 0.1 --logs "$OUT/logs" > "$log" 2>&1 || { tail -3 "$log"; return 1; }
    grep "WARNING.*kernels: " "$log"
    grep "$pattern" "$log" | tail -1 | grep .  # fails without a line
}
processes() {  # two processes on one GPU, which NCCL takes for two hosts, since it refuses that on one
    local backend=nccl where=(--device cuda:0 --no-set-device-rank) loss
    [[ $device == cpu ]] && backend=gloo where=(--device cpu)
    export NCCL_SOCKET_IFNAME=lo
    for loss in "${trained[@]}"; do
        echo "$backend, $loss:"
        train " loss .*/s" "processes-${loss// /}" -m torch.distributed.run --standalone --nproc_per_node 2 \
            --no-python -- bash -c 'NCCL_HOSTID=$RANK exec "$0" -m open_clip_ext.main "$@"' "$PYTHON" \
            --loss $loss --dist-backend $backend "${where[@]}" --model ViT-shapes-tiny \
            --dataset-type shapes --workers 1 --epochs 1 --warmup 10 --log-every-n-steps 1 --zeroshot-frequency 0 \
            --name "processes-${loss// /}" "${pairs[@]}" || return 1
    done
}
icons() {  # the main methods of the comparison on icons at each batch, one seed; large batches, the fastest, first
    # A trial without icons takes shapes.
    local data=(--model ViT-shapes-tiny --dataset-type shapes --train-num-samples "$samples" --val-num-samples 32)
    if [[ -n ${ICONS:-} ]]; then
        local shards=("$ICONS"/train-*.tar)
        data=(--model ViT-icons-tiny --dataset-type webdataset --train-num-samples "$samples"
            --train-data "$(IFS=:; echo "${shards[*]}" | sed 's/:/::/g')" --val-data "$ICONS/test-000000.tar")
    elif [[ -z ${TINY:-} ]]; then
        echo "icons: give ICONS=FOLDER; left out"
        return 0
    fi
    for batch in ${BATCHES:-$batches}; do
        for method in "clip" "neuclip --rho 6.5" "queue --rho 6.5" "fastclip-v3 --rho 6.5"; do
            echo "batch $batch, $method:"
            train "Eval Epoch" "icons-$batch-${method%% *}" -m open_clip_ext.main --loss $method --device "$device" \
                --workers 4 --batch-size "$batch" --warmup "$warmup" --epochs "$epochs" --save-frequency 0 \
                --name "icons-$batch-${method%% *}" "${data[@]}" || return 1
        done
    done
}

if [[ ${1:-} == one ]]; then  # timeout cannot run a function
    "$2"
    exit
fi
run() {  # the parts of these names, each in its time; the number of those that failed
    local failed=0 name start limit
    for name in "$@"; do
        echo "== $name"
        start=$SECONDS limit=${limits[$name]:-$LIMIT}
        if [[ -n ${BUDGET:-} ]] && ((limit > BUDGET - SECONDS)); then limit=$((BUDGET - SECONDS)); fi
        if ((limit < 1)) || ! timeout "$limit" bash benchmarks/gpu.sh one "$name"; then
            echo "$name: failed"
            failed=$((failed + 1))
        fi
        echo "$name: $((SECONDS - start)) s"
        [[ -z ${kept:-} ]] || tar -czf "$kept/decide.tgz" --exclude ./logs -C "$OUT" .
    done
    return $failed
}
if [[ ${1:-} == decide ]]; then
    kept=$OUT OUT=$(mktemp -d)
    run trainings loss_graph 2>&1 | tee "$kept/decide.txt"
    exit "${PIPESTATUS[0]}"
elif (($#)); then
    run "$@"
else
    run parity steps trainings loss_graph memory loss kernels ahead network processes icons rows tests
fi
