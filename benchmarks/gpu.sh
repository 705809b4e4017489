#!/usr/bin/env bash
# All measurements that need a GPU, in parts of at most 8 minutes; about 20 minutes in all on an H100.
#
#   bash benchmarks/gpu.sh                        all parts; tables on the terminal, JSON in gpu-results/
#   bash benchmarks/gpu.sh parity loss            these parts
#   ICONS=icons bash benchmarks/gpu.sh icons      with the folder of `make_shards icons` (docs/icons.md)
#   PEERS=peers.py bash benchmarks/gpu.sh loss    also losses of other code, see benchmarks/loss.py
#   TINY=1 bash benchmarks/gpu.sh                 the same commands on a CPU in a few minutes, to try the script
#
# PYTHON is the interpreter (default: python), OUT the folder of the results. Nothing is downloaded. A part that fails
# does not stop the others; the exit code is the number of failed parts.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python} OUT=${OUT:-gpu-results} LIMIT=${LIMIT:-480}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT"

if [[ -n ${TINY:-} ]]; then
    device=cpu precision=fp32 seconds=0.1
    sizes=(--batch-sizes 16 --dims 16 -m 64 --num-samples 1000)
    network=(--batch-sizes 16 -m 64 --dim 16 --also bfloat16)
    rows=(--rows 1000 10000 --batch-size 64)
    models=("ViT-shapes-tiny 4") parity=(--batch-size 16 --dim 16 -m 64 --num-samples 200 --steps 4)
    demo=(--samples 512 --epochs 1 --batch 8 --processes 1) epochs=1 samples=64 batch=16 warmup=1
else
    device=cuda precision=amp_bf16 seconds=4
    sizes=(--batch-sizes 512 1024 4096 16384 --dtypes float32 bfloat16
        --losses fastclip-v3 isogclr neuclip queue tuneclip amorlip)
    network=(--batch-sizes 512 1024 4096 --also compile graph bfloat16)
    rows=(--rows 100000 1000000 10000000 100000000)
    models=("ViT-B-32 512" "RN50 256") parity=()
    demo=(--processes 1 --batch 128) epochs=30 samples=${ICONS_SAMPLES:-20000} batch=64 warmup=500
fi
common=(--device "$device" --seconds "$seconds")

parity() {  # whether every loss is finite and equal to the CPU's
    "$PYTHON" benchmarks/parity.py --device "$device" "${parity[@]}" --json "$OUT/parity.json"
}
loss() {  # time and memory of each loss against ClipLoss
    "$PYTHON" benchmarks/loss.py "${common[@]}" "${sizes[@]}" ${PEERS:+--peers "$PEERS"} --json "$OUT/loss.json"
}
network() {  # the network's updates against bare matrix products: plain, compiled, as a CUDA graph, in bfloat16
    "$PYTHON" benchmarks/network.py "${common[@]}" "${network[@]}" --json "$OUT/network.json"
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
            --prototypes 4096 --losses neuclip queue fastclip-v3 tuneclip --json "$OUT/steps-$name.json"
    done
}
precision() {  # what TF32 and bfloat16 do to the estimates
    "$PYTHON" benchmarks/precision.py --device "$device" --json "$OUT/precision.json"
}
demo() {
    "$PYTHON" examples/demo.py "${demo[@]}" --folder "$OUT/demo" --device "$device" --precision "$precision"
}
tests() {  # the library's tests on this machine
    "$PYTHON" -m pytest -q -p no:cacheprovider tests/open_clip_ext ${TINY:+-k test_queue}
}
icons() {  # the main methods of the comparison on icons, one seed each
    if [[ -z ${ICONS:-} ]]; then
        echo "icons: give ICONS=FOLDER; left out"
        return 0
    fi
    local data=("$ICONS"/train-*.tar)
    local recipe=(--model ViT-icons-tiny --device "$device" --precision "$precision" --workers 4 --batch-size "$batch"
        --lr 1e-3 --wd 0.1 --warmup $warmup --epochs "$epochs" --dataset-type webdataset --train-num-samples "$samples"
        --train-data "$(IFS=:; echo "${data[*]}" | sed 's/:/::/g')" --val-data "$ICONS/test-000000.tar"
        --save-frequency 0 --logs "$OUT/icons")
    for method in "clip" "neuclip --rho 6.5" "queue --rho 6.5" "fastclip-v3 --rho 6.5"; do
        "$PYTHON" -m open_clip_ext.main --loss $method --name "${method%% *}" "${recipe[@]}" > "$OUT/icons-${method%% *}.txt" 2>&1 ||
            { tail -3 "$OUT/icons-${method%% *}.txt"; return 1; }
        echo "$method: $(grep 'Eval Epoch' "$OUT/icons-${method%% *}.txt" | tail -1)"
    done
}
export -f parity loss network rows steps precision demo tests icons

failed=0
for part in "${@:-}"; do
    parts=(${part:-parity steps loss network rows precision demo tests icons})
    for name in "${parts[@]}"; do
        echo "== $name"
        start=$SECONDS
        # timeout cannot run a function, so it runs a shell, which gets the arrays, since these cannot be exported.
        if ! timeout "$LIMIT" bash -c "$(declare -p PYTHON OUT device precision seconds sizes network rows models parity \
            demo epochs samples batch warmup common); $name"; then
            echo "$name: failed"
            failed=$((failed + 1))
        fi
        echo "$name: $((SECONDS - start)) s"
    done
done
exit $failed
