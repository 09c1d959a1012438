#!/usr/bin/env bash
# A job over two hosts by TF_CONFIG: one worker on each, with examples/digits.py.
#
#   sudo examples/two_hosts.sh           two hosts on this machine, made of network
#                                        namespaces (needs root and iproute2)
#   examples/two_hosts.sh alpha beta     two real hosts, by ssh: names by which they
#                                        reach each other; the repository and Python
#                                        are at the same place on both
#
# PYTHON (default: python3) and PORT (default: 12345) can be set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
port="${PORT:-12345}"
command=("$python" examples/digits.py --epochs 5)

# On a network that others reach, the workers prove to each other that they hold the
# same secret. It is passed in the environment and on standard input, because all users
# of a host can read command lines.
KERASDIST_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
export KERASDIST_SECRET

spaces=("kerasdist-$$-0" "kerasdist-$$-1")
workers=()
taggers=()
# shellcheck disable=SC2317 # it is called by the trap
clean_up() {
  ((${#workers[@]} == 0)) || kill "${workers[@]}" 2>/dev/null || true
  wait
  for space in "${spaces[@]}"; do
    if [ -e "/run/netns/$space" ]; then ip netns delete "$space"; fi
  done
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

case $# in
  0)
    if [ "$(id -u)" != 0 ]; then
      echo "Network namespaces need root. Received: user $(id -un), no host names." \
        "Run it with sudo, or name two hosts: $0 alpha beta" >&2
      exit 2
    fi
    hosts=(10.77.1.1 10.77.1.2)
    for i in 0 1; do
      ip netns add "${spaces[i]}"
      ip -n "${spaces[i]}" link set lo up
    done
    # A cable between the two.
    ip -n "${spaces[0]}" link add eth0 type veth peer name eth0 netns "${spaces[1]}"
    for i in 0 1; do
      ip -n "${spaces[i]}" address add "${hosts[i]}/24" dev eth0
      ip -n "${spaces[i]}" link set eth0 up
    done
    ;;
  2) hosts=("$1" "$2") ;;
  *)
    echo "Expected no arguments or two host names. Received: $*" >&2
    exit 2
    ;;
esac

tf_config() { # of the worker with this index
  printf '{"cluster": {"worker": ["%s:%s", "%s:%s"]}, ' \
    "${hosts[0]}" "$port" "${hosts[1]}" "$port"
  printf '"task": {"type": "worker", "index": %s}}' "$1"
}

start() { # the worker with this index, in place of this process
  if (($# == 1)); then
    exec env TF_CONFIG="$(tf_config "$1")" \
      ip netns exec "${spaces[$1]}" "${command[@]}"
  fi
  exec ssh "${hosts[$1]}" "read -r KERASDIST_SECRET; export KERASDIST_SECRET;
    export TF_CONFIG=$(printf %q "$(tf_config "$1")");
    cd $(printf %q "$PWD") && exec $(printf '%q ' "${command[@]}")" \
    <<<"$KERASDIST_SECRET"
}

# Both write here: whole lines, each with its worker's index before it.
for i in 0 1; do
  exec {output}> >(exec sed -u "s/^/[$i] /")
  taggers+=($!)
  start "$i" "$@" >&"$output" 2>&1 &
  workers+=($!)
  exec {output}>&-
done
# When a worker fails, the other one ends by itself within seconds, and reports which
# worker was lost.
code=0
for worker in "${workers[@]}"; do
  wait "$worker" || code=$?
done
workers=()
wait "${taggers[@]}"
exit "$code"
