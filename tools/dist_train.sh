#!/usr/bin/env bash
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"

if [[ $# -lt 2 ]] || ! is_count "$2"; then
    echo "usage: [NNODES=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1 PORT=free]" \
        "$0 CONFIG GPUS [train.py options]" >&2
    exit 2
fi
run_torchrun "$2" train.py "$1" "${@:3}"
