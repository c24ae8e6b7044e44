#!/usr/bin/env bash
# install-deps.sh [--dev] [--list]: install what building shardd needs, on Debian 12 or Ubuntu 24.04.
#
# Only what is missing is installed; when nothing is, no package index is fetched and no root is
# needed. --dev adds what scripts/test.sh and scripts/bench.sh need. --list prints the names.
set -euo pipefail

# The matrix multiplication library of examples/gpt.
gemm_packages="libdnnl-dev"
build_packages="gcc libc6-dev cmake ninja-build pkg-config protobuf-c-compiler
    libuv1-dev libzmq3-dev libprotobuf-c-dev libjansson-dev libssl-dev libsystemd-dev
    libmicrohttpd-dev libcurl4-openssl-dev libncurses-dev libucx-dev
    $gemm_packages"
# The default training text: /usr/share/games/fortunes.
data_packages="fortunes"
# Versions by name, so that both distributions agree about format and findings.
# clang-14 with its run time for scripts/fuzz.sh; systemd for a test of the units (nothing boots it).
# Slurm and munge for a test of examples/slurm, which starts its own, as one of arbiters does with etcd; iperf3 and UCX's own test to measure beside; ip
# and fuser for hosts that are namespaces.
# git says what differs from the commit that clang-tidy was clean at (scripts/tidy.py).
# g++ compiles the GPU kernels for the host, for their tests; without it those are left out.
dev_packages="g++ clang-format-14 clang-tidy-14 clang-14 libclang-rt-14-dev lld shellcheck python3 python3-venv procps
    universal-ctags systemd dpkg-dev lintian mandoc tmux curl git
    slurmctld slurmd slurm-client munge etcd-server iperf3 ucx-utils iproute2 psmisc"

# For the test of the page. Ubuntu has it as a snap alone, which does not run everywhere.
browser=chromium
! grep -qsx 'ID=ubuntu' /etc/os-release || browser=

say() { printf 'install-deps.sh: %s\n' "$*" >&2; }

packages="$build_packages $data_packages"
list=no
for arg in "$@"; do
    case $arg in
    --dev) packages="$packages $dev_packages $browser" ;;
    --list) list=yes ;;
    *)
        say "unknown argument '$arg'; usage: install-deps.sh [--dev] [--list]"
        exit 2
        ;;
    esac
done
read -ra names <<<"${packages//$'\n'/ }"
if [ "$list" = yes ]; then
    printf '%s\n' "${names[@]}"
    exit 0
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "this system has no apt; the package names here are those of Debian 12 and Ubuntu 24.04."
    say "install the equivalents of these packages, then go on with the next step:"
    printf '  %s\n' "${names[@]}" >&2
    exit 1
fi

missing=()
for name in "${names[@]}"; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null || true)
    [ "$state" = installed ] || missing+=("$name")
done
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        say "missing packages: ${missing[*]}"
        say "to install them, run as root: apt-get install --no-install-recommends ${missing[*]}"
        exit 1
    fi
    as_root=(sudo)
fi
say "installing ${#missing[@]} packages: ${missing[*]}"
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y
    -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
"${apt[@]}" update >&2
if ! "${apt[@]}" install --no-install-recommends "${missing[@]}" >&2; then
    say "apt-get could not install: ${missing[*]}"
    # shellcheck source=/dev/null
    say "this is $(. /etc/os-release && echo "$PRETTY_NAME"); the names are those of Debian 12 and Ubuntu 24.04"
    exit 1
fi
