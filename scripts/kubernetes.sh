#!/usr/bin/env bash
# A Kubernetes control plane for the tests: the real API server, controller manager and etcd, without nodes. Sourced by ./x, or by itself:
#   scripts/kubernetes.sh build                 builds what is not built yet
#   scripts/kubernetes.sh up|down FOLDER        starts one that keeps all it has in FOLDER; ends it
#   scripts/kubernetes.sh stop|start PART FOLDER   kills a part (apiserver, controller-manager, etcd) and starts it again: same port, same data
# FOLDER/kubeconfig is for an administrator, FOLDER/agl-controller.kubeconfig for the user `agl-controller`, who has no rights of its own.
# There is no kubelet: Pods stay Pending until a test says what became of them. NetworkPolicies are kept, and enforced by nobody.

# Debian's source package is the one release whose programs can be made from a package archive alone.
KUBERNETES_VERSION=1.20
KUBERNETES_GO=1.19
KUBERNETES_CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/agl/kubernetes/$KUBERNETES_VERSION"

kubernetes_is_built() {
  local program
  for program in etcd kube-apiserver kube-controller-manager; do [ -x "$KUBERNETES_CACHE/bin/$program" ] || return 1; done
}

# Why it cannot be built here, or nothing.
kubernetes_obstacle() {
  have apt-get && have dpkg || { printf 'it is built from Debian packages, and this is no Debian'; return; }
  have dpkg-source && have rsync && have jq && have make && have openssl || install_packages dpkg-dev jq make openssl rsync \
    || { printf 'dpkg-dev, jq, make, openssl or rsync is missing, and installing it needs root'; return; }
  [ "$(($(df --output=avail -k "$(dirname "$KUBERNETES_CACHE")" | tail -n 1)))" -gt 4000000 ] || printf 'the build needs 4 GB in %s' "$(dirname "$KUBERNETES_CACHE")"
}

# apt-get with lists and downloads of its own: the machine's package sources stay as they are, and nobody has to be root.
kubernetes_apt() {
  apt-get -q -o Dir::State::Lists="$PWD/lists" -o Dir::Cache="$PWD/cache" -o Dir::Etc::SourceList="$PWD/sources/own.list" \
    -o Dir::Etc::SourceParts="$PWD/sources" -o APT::Sandbox::User="$(id -un)" "$@"
}

# In an empty folder: leaves the programs in bin/. Nothing is installed: Go and etcd are unpacked where they are needed.
compile_kubernetes() {
  local file package go reflect=github.com/modern-go/reflect2
  mkdir -p sources lists/partial cache/archives/partial root
  # The machine's own sources, with source packages beside the binary ones.
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    case "$file" in
      *.list) [ ! -f "$file" ] || sed -nE '/debian/{p; s/^deb /deb-src /p}' "$file" >>sources/own.list ;;
      */debian.sources) sed -E 's/^Types:.*/Types: deb deb-src/' "$file" >sources/debian.sources ;;
    esac
  done
  kubernetes_apt update
  kubernetes_apt download "golang-$KUBERNETES_GO-go" "golang-$KUBERNETES_GO-src" etcd-server golang-github-modern-go-reflect2-dev
  for package in *.deb; do dpkg -x "$package" root; done
  kubernetes_apt source --download-only kubernetes
  dpkg-source -x kubernetes_"$KUBERNETES_VERSION"*.dsc tree
  go="$PWD/root/usr/lib/go-$KUBERNETES_GO"
  # The copy of reflect2 in that release crashes with a Go that is newer than it; Debian's is newer, too.
  rm -f "tree/vendor/$reflect"/*.go "tree/vendor/$reflect"/*.s
  cp "root/usr/share/gocode/src/$reflect"/*.go "root/usr/share/gocode/src/$reflect"/*.s "tree/vendor/$reflect/"
  rm -f "tree/vendor/$reflect"/*_test.go
  mkdir bin
  cp root/usr/bin/etcd bin/
  (
    cd tree
    unset GOFLAGS GOPATH
    export PATH="$go/bin:$PATH" GOROOT="$go" GOCACHE="$PWD/../go-cache"
    nice make WHAT="cmd/kube-apiserver cmd/kube-controller-manager" KUBE_BUILD_PLATFORMS="linux/$(go env GOARCH)"
    cp _output/local/bin/linux/*/kube-apiserver _output/local/bin/linux/*/kube-controller-manager ../bin/
  )
}

# Fails with the reason on standard output.
build_kubernetes() {
  local reason log
  kubernetes_is_built && return
  mkdir -p "$KUBERNETES_CACHE"
  reason=$(kubernetes_obstacle)
  [ -z "$reason" ] || { printf '%s' "$reason"; return 1; }
  log="$KUBERNETES_CACHE/build.log"
  # Whoever comes second waits, and finds it built.
  (
    flock 9
    kubernetes_is_built && exit
    say "x: building a Kubernetes control plane for the tests, once: minutes; its log is $log"
    rm -rf "$KUBERNETES_CACHE/build" && mkdir "$KUBERNETES_CACHE/build" && cd "$KUBERNETES_CACHE/build" || exit 1
    # A shell of its own ends at the first failure; a function whose success is asked for does not.
    "$KUBERNETES_SCRIPT" compile >"$log" 2>&1 9>&- || exit 1
    rm -rf ../bin && mv bin ../bin && cd .. && rm -rf build
  ) 9>"$KUBERNETES_CACHE/lock" || { printf 'its build failed: %s: %s' "$log" "$(tail -n 1 "$log")"; return 1; }
}

# The process of a part of the control plane in FOLDER, if it runs. A number that another program has by now is none.
kubernetes_process() {
  local process
  process=$(cat "$2/$1.pid" 2>/dev/null) || return 1
  { tr '\0' '\n' <"/proc/$process/cmdline"; } 2>/dev/null | grep -qxF -e "$KUBERNETES_CACHE/bin/$(kubernetes_program "$1")" || return 1
  printf '%s' "$process"
}

kubernetes_program() {
  case "$1" in
    etcd) printf etcd ;;
    apiserver | controller-manager) printf 'kube-%s' "$1" ;;
    *) die "a control plane has an etcd, an apiserver and a controller-manager, no $1" ;;
  esac
}

# Starts a part in FOLDER and waits until it answers.
start_kubernetes_part() {
  local part="$1" folder etcd peer api program
  folder=$(cd "$2" && pwd)
  program=$(kubernetes_program "$part")
  read -r etcd peer api <"$folder/ports"
  kubernetes_process "$part" "$folder" >/dev/null && return
  local -a flags
  case "$part" in
    # Thrown away with its folder: it need not wait for the disk.
    etcd) flags=(--data-dir "$folder/etcd" --listen-client-urls "http://127.0.0.1:$etcd" --advertise-client-urls "http://127.0.0.1:$etcd"
      --listen-peer-urls "http://127.0.0.1:$peer" --initial-advertise-peer-urls "http://127.0.0.1:$peer" --initial-cluster "default=http://127.0.0.1:$peer") ;;
    apiserver) flags=(--etcd-servers "http://127.0.0.1:$etcd" --bind-address 127.0.0.1 --secure-port "$api" --cert-dir "$folder/certificates"
      --token-auth-file "$folder/tokens.csv" --authorization-mode RBAC --service-cluster-ip-range 10.0.0.0/24
      --service-account-key-file "$folder/accounts.key" --service-account-signing-key-file "$folder/accounts.key" --service-account-issuer https://agl.invalid
      --disable-admission-plugins ServiceAccount --feature-gates TTLAfterFinished=true) ;;
    controller-manager) flags=(--kubeconfig "$folder/kubeconfig" --port 0 --secure-port 0 --leader-elect=false --feature-gates TTLAfterFinished=true
      --service-account-private-key-file "$folder/accounts.key" --controllers "job,ttl-after-finished,garbagecollector,namespace,podgc,resourcequota") ;;
  esac
  # A session of its own: Ctrl-C is for the tests, and who starts it may end.
  setsid "$KUBERNETES_CACHE/bin/$program" "${flags[@]}" </dev/null >>"$folder/$part.log" 2>&1 9>&- &
  printf '%s\n' "$!" >"$folder/$part.pid"
  # The shell need not tell of its end.
  disown
  case "$part" in
    etcd) kubernetes_answers "http://127.0.0.1:$etcd/health" ;;
    apiserver) kubernetes_answers "https://127.0.0.1:$api/readyz" ;;
    controller-manager) ;;
  esac || { tail -n 20 "$folder/$part.log" >&2; return 1; }
}

# Waits up to a minute for a 200.
kubernetes_answers() {
  python3 - "$1" <<'PYTHON'
import ssl, sys, time, urllib.request
insecure = ssl._create_unverified_context()
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer agl-test-admin"})
for _ in range(600):
    try:
        with urllib.request.urlopen(request, context=insecure, timeout=5):
            sys.exit(0)
    except OSError:
        time.sleep(0.1)
sys.exit(f"{sys.argv[1]} does not answer")
PYTHON
}

# As a crash does: at once.
stop_kubernetes_part() {
  local process
  kubernetes_program "$1" >/dev/null
  process=$(kubernetes_process "$1" "$2") || return 0
  kill -KILL "$process" 2>/dev/null || true
  while kubernetes_process "$1" "$2" >/dev/null; do sleep 0.02; done
}

# Writes FILE: how USER with TOKEN gets to the API server at PORT.
kubernetes_kubeconfig() {
  cat >"$1" <<YAML
apiVersion: v1
kind: Config
current-context: test
contexts: [{name: test, context: {cluster: test, user: $2}}]
clusters: [{name: test, cluster: {server: "https://127.0.0.1:$4", insecure-skip-tls-verify: true}}]
users: [{name: $2, user: {token: $3}}]
YAML
}

# A control plane in FOLDER, which is emptied before.
start_kubernetes() {
  local folder="$1" part
  stop_kubernetes "$folder"
  mkdir -p "$folder/etcd"
  chmod 700 "$folder/etcd"
  python3 >"$folder/ports" <<'PYTHON'
import socket
taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(each.getsockname()[1] for each in taken))
PYTHON
  openssl genrsa -out "$folder/accounts.key" 2048 2>/dev/null
  printf '%s\n' 'agl-test-admin,admin,1,"system:masters"' 'agl-test-controller,agl-controller,2' >"$folder/tokens.csv"
  local api
  read -r _ _ api <"$folder/ports"
  kubernetes_kubeconfig "$folder/kubeconfig" admin agl-test-admin "$api"
  kubernetes_kubeconfig "$folder/agl-controller.kubeconfig" agl-controller agl-test-controller "$api"
  for part in etcd apiserver controller-manager; do start_kubernetes_part "$part" "$folder" || return 1; done
}

stop_kubernetes() {
  local part
  for part in controller-manager apiserver etcd; do stop_kubernetes_part "$part" "$1"; done
  rm -rf "$1"
}

# A control plane of our own, whose kubeconfig AGL_TEST_KUBECONFIG names; one that is named there already is used as it is. Where it cannot be had,
# that is said, and the tests that want it skip.
need_kubernetes() {
  local reason
  [ -z "${AGL_TEST_KUBECONFIG:-}" ] || return 0
  if ! reason=$(build_kubernetes); then
    say "x: the tests against a Kubernetes API server are SKIPPED: there is none, and $reason"
    return 0
  fi
  at_exit stop_kubernetes "$PWD/target/kubernetes"
  start_kubernetes "$PWD/target/kubernetes" || die "the Kubernetes control plane for the tests does not start; its files are in target/kubernetes"
  export AGL_TEST_KUBECONFIG="$PWD/target/kubernetes/kubeconfig"
}

KUBERNETES_SCRIPT=$(realpath "${BASH_SOURCE[0]}")
declare -F say >/dev/null || {
  # The few functions of ./x that are used here.
  say() { printf '%s\n' "$*" >&2; }
  die() { say "kubernetes.sh: $*"; exit 1; }
  have() { command -v "$1" >/dev/null 2>&1; }
  install_packages() { return 1; }
}

if [ "$KUBERNETES_SCRIPT" = "$(realpath "$0")" ]; then
  set -euo pipefail
  case "${1:-} $#" in
    "build 1") reason=$(build_kubernetes) || die "$reason" ;;
    "compile 1") compile_kubernetes ;;
    "up 2") reason=$(build_kubernetes) || die "$reason"; start_kubernetes "$2" || die "it does not start; its files are in $2" ;;
    "down 2") stop_kubernetes "$2" ;;
    "stop 3") stop_kubernetes_part "$2" "$3" ;;
    "start 3") start_kubernetes_part "$2" "$3" || die "$2 does not start; its log is in $3" ;;
    *) sed -n '2,/^$/s/^# \{0,1\}//p' "$KUBERNETES_SCRIPT" >&2; exit 2 ;;
  esac
fi
