#!/usr/bin/env bash
# The trainer on two nodes: `torchrun_nodes.sh NODE` with 0 on node1 and 1 on node2. Needs SILVA_API_KEY, the same on all
# nodes. Then `silva inference @ torchrun.toml --host 0.0.0.0 --port 8701` on node3 and `silva orchestrator @ torchrun.toml`.
set -euo pipefail

node="${1:?0 on the first node, 1 on the second}"
: "${SILVA_API_KEY:?other machines could use the trainer without a key}"
cd "$(dirname "$0")"
exec torchrun --nnodes=2 --node-rank="$node" --nproc-per-node="${RANKS:-1}" \
  --master-addr="${MASTER:-node1}" --master-port="${MASTER_PORT:-29500}" \
  -m silva trainer @ torchrun.toml --host "${LISTEN_HOST:-0.0.0.0}" --port "${LISTEN_PORT:-8702}"
