#!/usr/bin/env bash
# Run a study on a remote machine that is available for half an hour. The machine starts empty, has no network, and
# transfers at most 64 MiB with each call in either direction. Each line below is one call, from the root of the copy of
# this checkout that the call transfers:
#
#     research/sitting.sh unpack           # unpack data/tiny_parts/*.tar.gz; one call for each part
#     research/sitting.sh start COMMAND    # check the package on every GPU, then start the command in the background
#     research/sitting.sh wait SECONDS     # wait for the command; results are copied to $OUT every half minute
#
# If a start fails, nothing runs, and each later wait fails at once, so that no machine time is wasted. Make the calls
# without a pause, because an idle machine is released. The files in vil/weights/ need not be transferred.
set -euo pipefail
place=$HOME/sitting  # the study runs in a copy, because each call transfers the checkout again

save() {  # tar fails if files change or disappear while it reads them, so errors are ignored
    (cd "$place" && find output -name '*.json' -o -name '*.csv*' -o -name '*.txt' -o -name '*.jsonl') |
        tar czf "$place/results" -C "$place" -T - || true
    cp "$place/results" "$OUT/writing" && mv "$OUT/writing" "$OUT/results.tar.gz" || true
}

case $1 in
unpack)
    mkdir -p "$place/data/tiny_imagenet"
    for part in data/tiny_parts/*.tar.gz; do
        tar xzf "$part" -C "$place/data/tiny_imagenet"
    done
    ;;
start)
    mkdir -p "$place/output"
    tar c --exclude ./data --exclude ./output . | tar x -C "$place"
    cd "$place"
    # with git: missing weights would mark the commit as dirty
    [ ! -e .git ] || git ls-files -z 'vil/weights/*.safetensors' | xargs -0 git update-index --skip-worktree
    python3 -m pip install --quiet --no-build-isolation --no-deps --editable .  # not in a venv, which would not have PyTorch
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
    shift
    setsid nohup "$@" > output/log.txt 2>&1 < /dev/null &
    echo $! > process
    ;;
wait)
    read -r process < "$place/process"
    for ((second = 0; second < $2; second++)); do
        kill -0 "$process" 2>/dev/null || break
        sleep 1
        ((second % 30)) || save
    done
    save
    tail -n 20 "$place/output/log.txt"
    find "$place/output" -name summary.csv -exec wc -l {} +
    kill -0 "$process" 2>/dev/null || { echo "it has ended"; exit 1; }
    ;;
esac
