#!/usr/bin/env bash
# Two simulated hosts on this machine (Linux, root): each has its own network, host name and /dev/shm; files are shared.
#   scripts/two_hosts.sh up            create them: A is 10.213.7.1, B is 10.213.7.2
#   scripts/two_hosts.sh ray [CPUS]    start a Ray cluster on both, with CPUS each; runs join it at 10.213.7.1:6379
#   scripts/two_hosts.sh A CMD...      run a command on A (or B)
#   scripts/two_hosts.sh down          kill all their processes and remove them
# TWO_HOSTS=name selects one of several pairs.
set -euo pipefail

name=${TWO_HOSTS:-mcore_rl}
state=/run/two_hosts_$name
PATH=$PATH:/usr/sbin:/sbin
token=$state/token

address_of() { [[ $1 == A ]] && echo 10.213.7.1 || echo 10.213.7.2; }

up() {
  [[ $EUID == 0 ]] || { echo "two_hosts.sh: needs root, for network namespaces" >&2; exit 2; }
  for tool in ip unshare nsenter; do
    command -v $tool >/dev/null || { echo "two_hosts.sh: $tool is not installed (iproute2, util-linux)" >&2; exit 2; }
  done
  [[ ! -e $state ]] || { echo "two_hosts.sh: $state exists; run two_hosts.sh down first" >&2; exit 2; }
  mkdir -m 700 "$state"
  (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$token")
  printf '127.0.0.1 localhost\n10.213.7.1 host-a\n10.213.7.2 host-b\n' >"$state/hosts"
  : >"$state/resolv.conf" # no name server: torch resolves the name of each peer, which takes 10 s if no server answers
  for host in A B; do
    ip netns add "${name}_$host"
    ip -n "${name}_$host" link set lo up
  done
  ip -n "${name}_A" link add veth0 type veth peer name veth0 netns "${name}_B"
  for host in A B; do
    ip -n "${name}_$host" addr add "$(address_of $host)/24" dev veth0
    ip -n "${name}_$host" link set veth0 up
    # One process keeps the namespaces of a host alive, so that all its commands share one /dev/shm.
    setsid ip netns exec "${name}_$host" unshare --mount --ipc --uts bash -c "
      mount -t tmpfs -o size=50% shm /dev/shm
      mount --bind '$state/hosts' /etc/hosts
      mount --bind '$state/resolv.conf' /etc/resolv.conf
      hostname host-${host,,}
      echo \$\$ >'$state/$host.new' && mv '$state/$host.new' '$state/$host'
      exec sleep infinity" </dev/null >/dev/null 2>&1 &
  done
  for _ in $(seq 100); do
    [[ -e $state/A && -e $state/B ]] && return
    sleep 0.1
  done
  echo "two_hosts.sh: this machine does not allow namespaces" >&2
  down
  exit 2
}

on() {
  local host=$1
  shift
  [[ -e $state/$host ]] || { echo "two_hosts.sh: there are no hosts; run two_hosts.sh up" >&2; exit 2; }
  # Ray requires a token if its nodes are on different machines; all processes use the same one.
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token
  exec nsenter --target "$(<"$state/$host")" --mount --ipc --uts --net --wd="$PWD" "$@"
}

start_ray() {
  local cpus=${1:-4} here
  here=$(dirname "$(readlink -f "$0")")
  for host in A B; do
    local role=(--address=10.213.7.1:6379)
    [[ $host == A ]] && role=(--head --port=6379 --include-dashboard=false)
    mktemp -d "/tmp/ray$host.XXXXX" >"$state/ray_$host" # a short path: Linux limits the paths of sockets to 107 characters
    (on $host env RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 "$here/../.venv/bin/python" -m ray.scripts.scripts start "${role[@]}" \
      --node-ip-address="$(address_of $host)" --node-name="host-${host,,}" --num-cpus="$cpus" \
      --object-store-memory=200000000 --temp-dir="$(<"$state/ray_$host")" --disable-usage-stats \
      --dashboard-agent-listen-port=0 --dashboard-agent-grpc-port=0 --include-log-monitor=false) \
      >"$state/ray_$host.log" 2>&1 || { cat "$state/ray_$host.log" >&2; exit 1; }
  done
}

down() {
  for host in A B; do
    for _ in $(seq 50); do
      pids=$(ip netns pids "${name}_$host" 2>/dev/null || true)
      [[ -n $pids ]] || break
      kill -9 $pids 2>/dev/null || true
      sleep 0.1
    done
    ip netns del "${name}_$host" 2>/dev/null || true
  done
  for host in A B; do
    [[ ! -e $state/ray_$host ]] || rm -rf "$(<"$state/ray_$host")"
  done
  rm -rf "$state"
}

case ${1:-} in
up) up ;;
down) down ;;
ray) start_ray "${@:2}" ;;
A | B) on "$@" ;;
*)
  sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
  exit 2
  ;;
esac
