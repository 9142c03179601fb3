# torchrun exits with 1 after any failure, so the run writes its own exit code to this file, on the disk of the run. No
# rank starts before the torchrun of every host has, so what is removed here is older.
export GPIPE_EXIT_CODE_FILE=$run.exit-code
mkdir -p "$(dirname "$run")"
rm -f "$GPIPE_EXIT_CODE_FILE"

# Pass signals on. With job control (-m), torchrun in the background does not ignore Ctrl-C.
set -m
"$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$ranks_per_node" \
    --rdzv-id "$name" --rdzv-backend gpipe --rdzv-endpoint "$endpoint" --rdzv-conf "hosts=$hosts" \
    -m gpipe_cli "${command[@]}" &
torchrun=$!
for signal in INT TERM HUP; do
    trap 'kill -s '"$signal"' "$torchrun"' "$signal"
done
wait "$torchrun"
status=$?
while kill -0 "$torchrun" 2>/dev/null; do
    wait "$torchrun"
    status=$?
done
code=
[ "$status" -eq 0 ] || code=$(cat "$GPIPE_EXIT_CODE_FILE" 2>/dev/null)
exit "${code:-$status}"
