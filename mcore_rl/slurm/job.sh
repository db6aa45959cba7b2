# The rest is the same for every job; see docs/slurm.md. Exits with the code of the run, or with 1 or 2.
set -euo pipefail

job=$SLURM_JOB_ID
restart=${SLURM_RESTART_COUNT:-0}
attempt=$run_dir/slurm/$job.$restart
idle_restarts=$run_dir/slurm/$job.idle_restarts # number of consecutive restarts without a new checkpoint
max_idle_restarts=5
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
cluster_pid='' preempted_at=''

say() { printf '%s mcore-rl job %s: %s\n' "$(date '+%F %T')" "$job" "$*"; }
# `controller ARGUMENTS...` calls scontrol, and again after a failure: a busy controller or authentication service refuses for
# a moment, and a run must not end because of that.
controller() {
  local tries
  for ((tries = 0; tries < 10; tries++)); do
    ((tries == 0)) || pause 3
    scontrol "$@" && return
  done
  return 1
}
# bash handles signals between commands and during `wait`, so long commands run in the background.
await() {
  local status
  while :; do
    status=0
    wait "$1" || status=$?
    kill -0 "$1" 2>/dev/null || return "$status"
  done
}
pause() {
  sleep "$1" &
  await $!
}

# `on NUM_NODES LOG COMMAND...` runs a command on the first nodes, one task each, in the environment of the run. Output goes
# to one log per node, LOG followed by the name of the node; if LOG is empty, to the log of the job.
on() {
  local num_nodes=$1 log=$2
  shift 2
  # USR1 must not kill srun or the task before the task has installed its handler.
  trap '' USR1
  exec srun --overlap --nodes="$num_nodes" --ntasks="$num_nodes" --ntasks-per-node=1 --nodelist="$(first "$num_nodes")" \
    --cpu-bind=none --mem=0 --kill-on-bad-exit=0 --unbuffered "${container[@]}" \
    bash -c 'trap "" USR1; [[ -z $0 ]] || exec >>"$0$SLURMD_NODENAME.log" 2>&1; enter=$1; shift; source "$enter"' \
    "$log" "$attempt/enter" "$@"
}
first() { (IFS=, && printf '%s' "${hosts[*]:0:$1}"); }
# Prints the nodes without a file in a directory.
missing() {
  local host
  for host in "${hosts[@]}"; do [[ -e $1/$host ]] || printf '%s ' "$host"; done
}
# Waits until every node has a file in the directory, the step has ended, or the timeout is over.
all_in() {
  local deadline=$((SECONDS + start_timeout_seconds))
  while [[ -n $(missing "$1") && -z $preempted_at && SECONDS -lt deadline ]] && kill -0 "$2" 2>/dev/null; do pause 1; done
  [[ -z $(missing "$1") ]]
}

stop_cluster() {
  [[ -n $cluster_pid ]] || return 0
  touch "$attempt/stop"
  local waited
  for ((waited = 0; waited < 30; waited++)); do
    kill -0 "$cluster_pid" 2>/dev/null || break
    pause 1
  done
  kill -TERM "$cluster_pid" 2>/dev/null || true
  cluster_pid=''
}
trap 'rm -f "$attempt/token" "$attempt/enter"; stop_cluster' EXIT
trap ': "${preempted_at:=$SECONDS}"; say "USR1: the run saves after its step, then the job is queued again"' USR1

newest_checkpoint() {
  { find "$run_dir/checkpoints" -maxdepth 1 -name 'step_*' -printf '%f\n' 2>/dev/null || true; } | sort -V | tail -n 1
}

# `requeue [NODE...]` queues the job again, without the given nodes.
requeue() {
  local restarts
  [[ $(newest_checkpoint) == "$newest_at_start" ]] || rm -f -- "$idle_restarts"
  restarts=$(cat -- "$idle_restarts" 2>/dev/null || echo 0)
  if ((restarts >= max_idle_restarts)); then
    say "not queued again: $restarts restarts in a row have saved nothing"
    exit 1
  fi
  echo $((restarts + 1)) >"$idle_restarts"
  stop_cluster
  # A node can only be excluded while the job is pending, so this shell ignores the TERM that ends the job.
  trap '' TERM
  if (($# == 0)); then
    controller requeue "$job" || { say "SLURM refuses to queue the job again; submit it again to continue"; exit 75; }
  else
    exclude "$@"
  fi
  say "queued again"
  exit 0
}
exclude() {
  local shown excluded nodes tries
  nodes=$(IFS=, && printf '%s' "$*")
  if shown=$(controller show job "$job"); then
    excluded=$(sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p' <<<"$shown")
    [[ -z $excluded || $excluded == '(null)' ]] || nodes=$excluded,$nodes
    if controller requeuehold "$job"; then
      for ((tries = 0; tries < 20; tries++)); do
        # Delayed: SLURM counts a start as failed if the script of the previous start ends during it.
        if scontrol update JobId="$job" ExcNodeList="$nodes" StartTime=now+60 2>/dev/null; then
          controller release "$job" || break
          say "excluded from now on: $nodes"
          return
        fi
        sleep 1
      done
      say "the job is held: scontrol update JobId=$job ExcNodeList=$nodes, then scontrol release $job"
      exit 1
    fi
  fi
  say "SLURM refuses to change the job; submit it again with --exclude=$nodes"
  exit 1
}

# `examine WHAT DIRECTORY ADVICE COMMAND...` runs a command on every node. A usable node creates its file in the directory.
# Others are reported with the last line of their log, and the job is queued again without them.
examine() {
  local what=$1 directory=$attempt/$2 advice=$3 log=$attempt/${1%% *}- step bad host
  shift 3
  on "$num_nodes" "$log" "$@" --attempt "$attempt" &
  step=$!
  if ! all_in "$directory" "$step" && [[ -z $preempted_at ]]; then
    kill -TERM "$step" 2>/dev/null || true
    bad=$(missing "$directory")
    for host in $bad; do
      say "node $host failed its $what: $(tail -n 1 -- "$log$host.log" 2>/dev/null || echo 'no answer')"
    done
    # Other nodes would fail in the same way, and a job that excludes all nodes waits forever.
    if ((num_nodes > 1)) && [[ $(wc -w <<<"$bad") -eq $num_nodes ]]; then
      say "every node failed its $what, so none is excluded: $advice"
      exit 1
    fi
    # shellcheck disable=SC2086 # one word per node
    requeue $bad
  fi
  await "$step" || true
  [[ -z $preempted_at ]] || requeue
}

for name in "${passed[@]}"; do
  if [[ ! -v $name ]]; then
    say "slurm.pass_environment: $name is not set; export it in the shell that calls sbatch, and submit again"
    exit 2
  fi
  # Apptainer passes variables with this prefix regardless of its settings; the value is in no command line.
  [[ ${container[0]-} != apptainer ]] || export "APPTAINERENV_$name=${!name}"
done
newest_at_start=$(newest_checkpoint)
# Readable by this user only, as the run itself would create it.
[[ -d $run_dir ]] || { mkdir -p -- "$(dirname -- "$run_dir")" && mkdir -m 700 -- "$run_dir"; }
(
  umask 077
  mkdir -p -- "$attempt/checked" "$attempt/sound" "$attempt/joined"
  # Tasks read their environment from a file: all users of a node can list command lines.
  printf '%s\n' "$enter" >"$attempt/enter"
  # Authentication token of Ray's processes, unique per job.
  od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$attempt/token"
)
say "start $restart on ${hosts[*]}; logs of the nodes: $attempt"
unset RAY_AUTH_TOKEN # it would override the token file
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$attempt/token

examine check checked "set up the environment of a task with slurm.setup" "${check[@]}"
if ((${#fabric[@]})); then
  examine 'fabric test' sound "the report is in $attempt/fabric-${hosts[0]}.log" "${fabric[@]}"
  # Problems without a node to blame, such as a slow link.
  { grep -E '^(slow|failing): ' "$attempt/fabric-${hosts[0]}.log" || true; } | while read -r line; do
    say "fabric test: $line"
  done
fi

on "$num_nodes" "$attempt/node-" "${node[@]}" --attempt "$attempt" &
cluster_pid=$!
if ! all_in "$attempt/joined" "$cluster_pid" && [[ -z $preempted_at ]]; then
  bad=$(missing "$attempt/joined")
  say "nodes that did not join the Ray cluster within $start_timeout_seconds s: $bad"
  # shellcheck disable=SC2086
  requeue $bad
fi
[[ -z $preempted_at ]] || requeue

on 1 '' "${run[@]}" cluster.address="$(cat -- "$attempt/address")" &
run_pid=$!
while kill -0 "$run_pid" 2>/dev/null; do
  pause 1
  [[ -n $preempted_at ]] || continue
  kill -USR1 "$run_pid" 2>/dev/null || true # repeated: a starting task may not have its handler yet
  if ((SECONDS - preempted_at > grace_seconds - (grace_seconds < 120 ? grace_seconds / 2 : 60))); then
    say "the step does not end within slurm.grace_seconds=$grace_seconds; going back to $(newest_checkpoint)"
    requeue
  fi
done
status=0
wait "$run_pid" || status=$?

((status != 75)) || requeue
say "the run ended with exit code $status"
exit "$status"
