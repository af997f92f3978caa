#!/usr/bin/env bash
# Makes two hosts on this machine and trains on both: bash scripts/two_hosts.sh [--transport NAME] [OPTION=VALUE ...]
# Each host has its own network, processes, host name, /tmp and /dev/shm, and a Ray node. A link connects the hosts.
# The learner runs on the first host. Engines run on both hosts. The environment variable RATE sets the rate of the link.
# The script trains the quickstart with the transports collective and file, or only with NAME. Results: outputs/two_hosts/.
# The script needs root. It exits with 3 if namespaces are not permitted. At its end, it stops all processes of the hosts.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 1

RATE=${RATE:-1gbit}                       # rate of the link in each direction, in the notation of tc
OUT=${OUT:-$PWD/outputs/two_hosts}        # folder of the results; both hosts can see it
ADDRESSES=(10.77.0.1 10.77.0.2)
PORT=6379
START_TIMEOUT_S=120
transports=(collective file)

say() { printf 'two_hosts: %s\n' "$*" >&2; }
fail() { local status=$1; shift; say "$*"; exit "$status"; }

while [ $# -gt 0 ]; do
    case $1 in
        --transport) transports=("${2:?--transport needs a name}"); shift 2 ;;
        -h | --help) sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) break ;;
    esac
done

# A host is a first process and its descendants. When this script dies, the kernel kills the first process.
# Then the kernel also kills the descendants, and removes their mounts and their end of the link.
# The first process opens the repository and OUT before it hides /tmp. So both hosts see these folders, even in /tmp.
FIRST_PROCESS='mount --bind "$2/hosts" /etc/hosts && mount --bind "$2/resolv.conf" /etc/resolv.conf &&
    exec 8<"$3" 9<"$4" && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && mkdir -p "$3" "$4" &&
    mount --no-canonicalize --bind /proc/self/fd/8 "$3" && mount --no-canonicalize --bind /proc/self/fd/9 "$4" &&
    exec 8<&- 9<&- && hostname "$1" && ip link set lo up && echo up && { sleep infinity & while :; do wait; done; }'
namespaces=(--mount --propagation private --net --uts --pid --fork --kill-child --mount-proc)

why_not() { # Prints why this machine cannot make hosts; prints nothing if it can.
    command -v ip nsenter setpriv unshare >/dev/null || { echo "ip, nsenter, setpriv and unshare are needed"; return; }
    unshare "${namespaces[@]}" bash -c 'mount -t tmpfs tmpfs /tmp && ip link add x type veth peer name y' 2>&1
}

scratch='' driver='' firsts=()
end() {
    trap - EXIT INT TERM HUP
    for pid in "${firsts[@]}"; do kill -KILL "$(child_of "$pid")" || kill -KILL "$pid"; done 2>/dev/null
    wait 2>/dev/null # for all processes of the hosts
    [ -z "$scratch" ] || rm -rf "$scratch"
}
stop() { # Stops the run with SIGTERM, as a user does. Then ends this script.
    say "stopping"
    [ "$driver" != starting ] || driver=$!
    [ -z "$driver" ] || { kill -TERM "$(child_of "$driver")" && wait "$driver"; } 2>/dev/null
    driver=''
    exit "$1"
}

child_of() { local children; children=$(<"/proc/$1/task/$1/children") && echo "${children%% *}"; }
on_host() { # on_host NUMBER COMMAND ...: runs the command on a host.
    local first
    first=$(child_of "${firsts[$1]}")
    shift
    nsenter --target "$first" --mount --net --uts --pid --wd="$PWD" -- "$@"
}
wait_for() { # wait_for WORDS FILE PID: waits until the process has written a line with the words to the file.
    timeout "$START_TIMEOUT_S" tail -n +1 --follow=name --retry --pid="$3" "$2" 2>/dev/null | grep -qm1 "$1" &
    wait $! ||  # the command runs in the background, so that this script handles signals at once
        fail 1 "no '$1' within $START_TIMEOUT_S s in $2, which ends: $(tail -n 5 "$2")"
}

make_host() {
    setpriv --pdeathsig KILL unshare "${namespaces[@]}" bash -c "$FIRST_PROCESS" first "host-$1" "$scratch" "$root" "$OUT" \
        >"$scratch/host-$1.log" 2>&1 &
    firsts+=($!)
    wait_for '^up$' "$scratch/host-$1.log" $!
}

join_hosts() {
    local number
    ip link add eth0 netns "$(child_of "${firsts[0]}")" type veth peer name eth0 netns "$(child_of "${firsts[1]}")" || exit 1
    for number in 0 1; do
        on_host $number ip address add "${ADDRESSES[$number]}/24" dev eth0
        on_host $number ip link set eth0 up
        on_host $number tc qdisc add dev eth0 root tbf rate "$RATE" burst 1mb latency 100ms 2>"$scratch/tc.log" ||
            say "the link of host-$number is not shaped: $(head -n 1 "$scratch/tc.log")"
    done
}

start_ray() { # start_ray NUMBER ARGUMENTS ...
    local number=$1
    shift
    on_host "$number" "$root/.venv/bin/ray" start --block --disable-usage-stats --node-ip-address "${ADDRESSES[$number]}" \
        --labels "host=$number" --object-store-memory 120000000 "$@" >"$scratch/ray-$number.log" 2>&1 &
    wait_for 'Ray runtime started' "$scratch/ray-$number.log" $!
}

train() { # train TRANSPORT OVERRIDES ...: returns the run's exit status.
    local transport=$1 options=()
    shift
    case $transport in
        collective) options=(weights.transport=collective weights.interface=eth0) ;;
        *) options=("weights.transport=$transport" "weights.directory=$scratch/weights") ;;
    esac
    say "the quickstart over $transport, on $((${#ADDRESSES[@]})) hosts with a link of $RATE"
    driver=starting
    # The run has its own session: Ctrl-C reaches it only once, through this script.
    setsid nsenter --target "$(child_of "${firsts[0]}")" --mount --net --uts --pid --wd="$PWD" -- \
        "$root/.venv/bin/asyncrl" train experiment=quickstart output_dir=/tmp/asyncrl \
        "ray.address=${ADDRESSES[0]}:$PORT" "ray.node_address=${ADDRESSES[0]}" "buffer.host=${ADDRESSES[0]}" \
        placement.num_nodes=2 placement.strategy=spread placement.engines_per_node=1 "placement.learner_labels={host: '0'}" \
        placement.interface=eth0 rollout_fleet.num_engines=2 "${options[@]}" "$@" &
    driver=$!
    wait "$driver"
    local status=$?
    driver=''
    rm -rf "${OUT:?}/$transport" && mkdir "$OUT/$transport" # removes the results of an earlier run
    on_host 0 bash -c 'cp -r /tmp/asyncrl/quickstart/20*/. "$1" && rm -r /tmp/asyncrl/quickstart/20*' copy "$OUT/$transport"
    return "$status"
}

(cd "$root" && source scripts/setup.sh) || exit 1
reason=$(why_not)
[ -z "$reason" ] || fail 3 "hosts cannot be made here, namespaces are not permitted: $reason"
mkdir -p "$OUT" && scratch=$(mktemp -d "$OUT/.scratch.XXXXXX") || exit 1
trap end EXIT
trap 'stop 130' INT
trap 'stop 143' TERM HUP

export RAY_AUTH_MODE=token RAY_AUTH_TOKEN PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
export RAY_worker_niceness=0 RAY_enable_worker_prestart=0 RAY_prestart_worker_first_driver=0
RAY_AUTH_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
{
    printf '127.0.0.1 localhost\n'
    for number in 0 1; do printf '%s host-%s\n' "${ADDRESSES[$number]}" "$number"; done
} >"$scratch/hosts"
echo 'nameserver 127.0.0.1' >"$scratch/resolv.conf" # there is no name server, so lookups of other names fail at once
make_host 0
make_host 1
join_hosts
start_ray 0 --head --port "$PORT" --num-cpus 2 --include-dashboard=false
start_ray 1 --address "${ADDRESSES[0]}:$PORT" --num-cpus 2
for transport in "${transports[@]}"; do
    train "$transport" "$@" || exit $?
    say "$transport: done, kept in $OUT/$transport"
done
