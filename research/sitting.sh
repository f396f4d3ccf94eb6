#!/usr/bin/env bash
# Run studies on a remote machine that is available for half an hour. The machine starts empty, has no network, and
# transfers at most 64 MiB with each call in either direction, in files of at most 16 MiB. Each command line below
# is one call, which transfers a copy of this checkout, and runs the command line in the root of the copy:
#
#     research/sitting.sh unpack FOLDER       # unpack data/parts/*.tar* into FOLDER; one call for each part
#     research/sitting.sh start COMMAND       # start the command in the background; can be called several times
#     research/sitting.sh wait SECONDS        # wait for all commands; results are copied to $OUT every half minute
#     research/sitting.sh stop                # ask the commands to stop, and wait until they have written checkpoints
#     research/sitting.sh checkpoints FIRST   # copy four pieces of the checkpoints to $OUT, beginning with piece FIRST
#     research/sitting.sh restore             # unpack data/parts/piece-* on a new machine; one call per three pieces
#
# The first start checks the package on every GPU. If this check fails, nothing runs, and each later wait fails at once,
# so that no machine time is wasted. Make the calls without a pause, because an idle machine is released. Calling
# `checkpoints 0` splits the checkpoints into pieces, and each call of `checkpoints` prints the number of pieces. Call
# `restore` with all pieces, in order, before the first start. Three pieces and the checkout fit into one call. Files
# *.safetensors of the checkout need not be transferred, unless the study reads them.
set -euo pipefail
place=$HOME/sitting  # the study runs in a copy, because each call transfers the checkout again

save() {  # tar fails if files change or disappear while it reads them, so errors are ignored
    (cd "$place" && find output -name '*.json' -o -name '*.csv*' -o -name '*.txt' -o -name '*.jsonl') |
        tar czf "$place/results" -C "$place" -T - || true
    cp "$place/results" "$OUT/writing" && mv "$OUT/writing" "$OUT/results.tar.gz" || true
}

check() {  # on the first call, copy the checkout, install the package, and run every kind of block on every GPU
    [ ! -e "$place/checked" ] || return 0
    mkdir -p "$place/output"
    tar c --exclude ./data --exclude ./output . | tar x -C "$place"
    cd "$place"
    # Mark the weights as unchanged in git, because missing weights would mark the commit as dirty.
    [ ! -e .git ] || git ls-files -z '*.safetensors' | xargs -0 git update-index --skip-worktree
    # NVIDIA's MPS lets runs that share a GPU work at the same time.
    nvidia-cuda-mps-control -d || echo "runs that share a GPU take turns"
    python3 -m pip install --quiet --no-build-isolation --no-deps --editable .  # a venv would lack PyTorch
    python3 - <<'PROGRAM'
import torch
import timm
import vil

for device in [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]:
    for name in ("vil_tiny", "vim_tiny", "vil_tiny_pooled"):
        model = timm.create_model(name, img_size=64, patch_size=4).to(device)
        with torch.autocast(device.split(":")[0], torch.bfloat16):
            model(torch.randn(2, 3, 64, 64, device=device)).float().square().mean().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters()), name
    print(device, torch.cuda.get_device_name(device) if device != "cpu" else "", flush=True)
PROGRAM
    touch checked
}

wait_for() {  # wait up to $1 seconds for all commands, and copy the results every half minute and at the end
    for ((second = 0; second < $1; second++)); do
        kill -0 "${processes[@]}" 2>/dev/null || break  # kill fails only if all commands have ended
        sleep 1
        ((second % 30)) || save
    done
    save
    tail -n 20 "$place/output/log.txt"
    find "$place/output" -name summary.csv -exec wc -l {} +
}

case $1 in
unpack)
    mkdir -p "$place/$2"
    for part in data/parts/*.tar*; do
        tar xf "$part" -C "$place/$2"
    done
    echo "$(find "$place/$2" -type f | wc -l) files"
    ;;
start)
    check
    cd "$place"
    shift
    setsid nohup "$@" >> output/log.txt 2>&1 < /dev/null &
    echo $! >> processes
    ;;
wait)
    mapfile -t processes < "$place/processes"
    wait_for "$2"
    kill -0 "${processes[@]}" 2>/dev/null || { echo "all commands have ended"; exit 1; }
    ;;
stop)  # SIGTERM; a program that does not handle the signal ends, and its runs are lost
    mapfile -t processes < "$place/processes"
    kill -- "${processes[@]/#/-}" 2>/dev/null || true  # the process groups
    wait_for 60
    ;;
checkpoints)
    cd "$place"
    if (($2 == 0)); then
        rm -rf pieces && mkdir pieces
        find output -name last.pt -o -path '*/summary.csv' -o -path '*/config.yaml' -o -name study.json -o -name '*.jsonl' \
            -o -name '*.safetensors' |
            { tar c -T - || [ $? = 1 ]; } | split --bytes 15M --numeric-suffixes - pieces/piece-  # 1 if a file grew
    fi
    for ((i = $2; i < $2 + 4; i++)); do
        piece=$(printf 'pieces/piece-%02d' "$i")
        [ ! -e "$piece" ] || cp "$piece" "$OUT"
    done
    echo "$(find pieces -type f | wc -l) pieces, $(du --bytes --total pieces/* | tail -n 1 | cut -f 1) bytes"
    ;;
restore)
    mkdir -p "$place"
    cat data/parts/piece-* >> "$place/checkpoints.tar"
    tar xf "$place/checkpoints.tar" -C "$place" 2>/dev/null || echo "the archive is not complete yet"
    ;;
esac
