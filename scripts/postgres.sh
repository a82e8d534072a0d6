# Sourced by ./x: a Postgres server for the tests, made anew and thrown away.

# Where its programs are: Debian does not put them on the path.
postgres_programs() {
  local folder
  for folder in $(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -rV) "$(dirname "$(readlink -f "$(command -v postgres)" 2>/dev/null)" 2>/dev/null)"; do
    if [ -x "$folder/initdb" ] && [ -x "$folder/postgres" ]; then printf '%s' "$folder"; return; fi
  done
  return 1
}

# Postgres does not run as root.
as_postgres() {
  if [ "$(id -u)" -ne 0 ]; then "$@"; else runuser -u "$(id -un postgres 2>/dev/null || printf nobody)" -- "$@"; fi
}

# A server of our own on a free port of this machine, named in AGL_TEST_POSTGRES; one that is named there already is used as it is.
need_postgres() {
  [ -z "${AGL_TEST_POSTGRES:-}" ] || return 0
  local programs port
  programs=$(postgres_programs) || { install_packages postgresql && programs=$(postgres_programs); } \
    || die "Postgres is missing: install postgresql, or set AGL_TEST_POSTGRES to the URL of a server whose user may create databases"
  POSTGRES_FOLDER="$PWD/target/postgres"
  mkdir -p target
  # Its user must be able to get there.
  as_postgres test -x "$PWD/target" 2>/dev/null || POSTGRES_FOLDER=$(mktemp -d)/postgres
  rm -rf "$POSTGRES_FOLDER"; mkdir -p "$POSTGRES_FOLDER"
  if [ "$(id -u)" -eq 0 ]; then
    chmod 755 "$(dirname "$POSTGRES_FOLDER")"
    chown "$(id -un postgres 2>/dev/null || printf nobody)" "$POSTGRES_FOLDER"
  fi
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  POSTGRES_CONTROL="$programs/pg_ctl"
  at_exit stop_postgres
  (
    cd "$POSTGRES_FOLDER"
    as_postgres "$programs/initdb" --pgdata data --username agl --auth trust --encoding UTF8 --no-locale --no-sync >initdb.log 2>&1 \
      || { tail -n 20 initdb.log >&2; exit 1; }
    # Everything that makes it durable stays on: the store refuses a server without it.
    as_postgres "$POSTGRES_CONTROL" --pgdata data --silent --wait --log data/server.log \
      --options "-c listen_addresses=127.0.0.1 -c port=$port -c unix_socket_directories=''" start \
      || { tail -n 20 data/server.log >&2; exit 1; }
  ) || die "the Postgres server for the tests does not start; its files are in $POSTGRES_FOLDER"
  export AGL_TEST_POSTGRES="postgres://agl@127.0.0.1:$port/postgres"
}

stop_postgres() {
  (cd "$POSTGRES_FOLDER" && as_postgres "$POSTGRES_CONTROL" --pgdata data --silent --mode immediate stop) || true
  rm -rf "$POSTGRES_FOLDER"
  [ "$POSTGRES_FOLDER" = "$PWD/target/postgres" ] || rmdir "$(dirname "$POSTGRES_FOLDER")"
}
