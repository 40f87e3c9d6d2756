#!/bin/sh
# The network of this node's pods, in place of kindnetd. Pods get addresses of the range that the controller manager gave
# to their node; the range of every other node is reached through that node's address.
set -u
config=/etc/cni/net.d/10-kind.conflist

nodes() {
  kubectl get nodes -o 'jsonpath={range .items[*]}{.spec.podCIDR} {.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}'
}

configure() {
  cat > "$config.new" <<EOF
{"cniVersion": "0.3.1", "name": "kind", "plugins": [
  {"type": "ptp", "ipMasq": false, "mtu": 1500, "ipam": {
    "type": "host-local", "dataDir": "/run/cni-ipam-state",
    "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "$1"}]]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
EOF
  mv "$config.new" "$config"
  echo "pods of this node: $1"
}

while true; do
  nodes | while read -r range address; do
    # A node that kwok plays has no address, or none that is a neighbour.
    if [ -z "$range" ] || [ -z "$address" ]; then
      continue
    elif [ "$address" = "$HOST_IP" ]; then
      [ -e "$config" ] || configure "$range"
    elif ! ip route get "$address" 2>/dev/null | grep -qw via; then
      ip route replace "$range" via "$address"
    fi
  done
  sleep 5
done
