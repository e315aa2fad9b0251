#!/usr/bin/env bash
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=launch.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"

if [[ $# -lt 3 ]]; then
    echo "usage: [GPUS=4 GPUS_PER_NODE=4 CPUS_PER_TASK=5 SRUN_ARGS=]" \
        "$0 PARTITION JOB_NAME CONFIG [train.py options]" >&2
    exit 2
fi
run_srun "$1" "$2" train.py "${@:3}"
