# shellcheck shell=bash
# Sourced by the dist_*.sh and slurm_*.sh scripts.

TOOLS_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

is_count() {
    [[ "$1" =~ ^[1-9][0-9]*$ ]]
}

# run_torchrun GPUS SCRIPT [ARGS...]: start GPUS processes on this node.
# Environment: NNODES NODE_RANK MASTER_ADDR PORT.
run_torchrun() {
    local gpus="$1" script="$2" nnodes="${NNODES:-1}"
    local rendezvous
    if [[ "$nnodes" == 1 && -z "${PORT:-}" ]]; then
        # A free port, so that two jobs share a machine; loopback addresses,
        # so that the host's name need not resolve.
        rendezvous=(--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0
                    --local-addr=127.0.0.1)
    else
        rendezvous=(--node-rank="${NODE_RANK:-0}"
                    --master-addr="${MASTER_ADDR:-127.0.0.1}"
                    --master-port="${PORT:-29500}")
    fi
    exec python -m torch.distributed.run --nnodes="$nnodes" \
        --nproc-per-node="$gpus" "${rendezvous[@]}" \
        "$TOOLS_DIR/$script" --launcher pytorch "${@:3}"
}

# run_srun PARTITION JOB_NAME SCRIPT [ARGS...]: start GPUS tasks with Slurm.
# Environment: GPUS GPUS_PER_NODE CPUS_PER_TASK SRUN_ARGS (blank-separated).
run_srun() {
    local gpus_per_node="${GPUS_PER_NODE:-4}"
    local srun_args
    # Never empty: under `set -u`, bash before 4.4 calls that unbound.
    read -r -a srun_args <<< "--kill-on-bad-exit=1 ${SRUN_ARGS:-}"
    exec srun -p "$1" \
        --job-name="$2" \
        --gres="gpu:$gpus_per_node" \
        --ntasks="${GPUS:-4}" \
        --ntasks-per-node="$gpus_per_node" \
        --cpus-per-task="${CPUS_PER_TASK:-5}" \
        "${srun_args[@]}" \
        python -u "$TOOLS_DIR/$3" --launcher slurm "${@:4}"
}
