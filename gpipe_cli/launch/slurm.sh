# torchrun exits with 1 after any failure, so the run writes its own exit code to this file, on the disk of the run.
export GPIPE_EXIT_CODE_FILE=$run.exit-code-$SLURM_JOB_ID
mkdir -p "$(dirname "$run")"
rm -f "$GPIPE_EXIT_CODE_FILE"
# time_limit counts from the start of the job.
export GPIPE_JOB_START=${SLURM_JOB_START_TIME:-$(date +%s)}
# How long torchrun waits for ranks that save after a signal.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$shutdown_seconds
port=${port:-$((20000 + SLURM_JOB_ID % 10000))}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# Run torchrun once on each node; the first node holds the rendezvous. When a node has ended, all others end within
# seconds; after a minute srun no longer waits for one that is lost.
srun --kill-on-bad-exit=0 --wait=60 "$cpus" \
    "$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$ranks_per_node" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend gpipe --rdzv-endpoint "${hosts[0]}:$port" \
    --rdzv-conf "hosts=$(IFS=/; echo "${hosts[*]}")" -m gpipe_cli "${command[@]}"
status=$?

code=
[ "$status" -eq 0 ] || code=$(cat "$GPIPE_EXIT_CODE_FILE" 2>/dev/null)
rm -f "$GPIPE_EXIT_CODE_FILE"
# A run that stopped (75), lost a node (7) or was killed can resume from its snapshot. An error would repeat.
if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$requeues" ] && [ ! -e "$run/summary.json" ]; then
    case "${code:-killed}" in
    75 | 7)
        scontrol requeue "$SLURM_JOB_ID"
        ;;
    killed)
        [ -e "$run/config.yaml" ] && scontrol requeue "$SLURM_JOB_ID"
        ;;
    esac
fi
exit "${code:-$status}"
