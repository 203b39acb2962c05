#!/usr/bin/env bash
# A Ray cluster by hand: `ray_nodes.sh head` on one node, `ray_nodes.sh worker HEAD` on each of the others. Both run until
# they are told to end (Ctrl-C), and end nothing but their own node: `ray stop` would end every Ray of the machine.
set -euo pipefail

export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="${RAY_AUTH_TOKEN_PATH:-$HOME/.silva/ray_token}"
port="${RAY_PORT:-6379}"

case "${1:-}" in
head)
  umask 077 # nobody else may read the token, which lets its owner run code on every node
  mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
  [ -s "$RAY_AUTH_TOKEN_PATH" ] || head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH"
  exec ray start --head --port="$port" --include-dashboard=false --disable-usage-stats --block
  ;;
worker)
  head="${2:?the name or address of the head}"
  exec ray start --address="$head:$port" --disable-usage-stats --block
  ;;
*)
  echo "usage: $0 head | worker HEAD" >&2
  exit 2
  ;;
esac
