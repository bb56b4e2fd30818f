#!/usr/bin/env bash
# Runs a Ceph of one monitor, one manager, one OSD in memory and one gateway for S3 on loopback, until it is ended.
# Needs: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-mgr ceph-common
#
# CEPH_DIR              an empty directory; the file "ready" appears in it when the gateway answers
# CEPH_PORT             the gateway
# CEPH_MON_PORT         the monitor
# CEPH_KEY CEPH_SECRET  of the user that it makes
set -euo pipefail
cd "$CEPH_DIR"
trap 'trap - TERM EXIT; kill $(jobs -p) 2>/dev/null; wait' TERM EXIT

mkdir -p mon mgr/x osd/0 run log
touch keyring
fsid=$(cat /proc/sys/kernel/random/uuid)
cat > ceph.conf <<CONF
[global]
fsid = $fsid
mon host = [v1:127.0.0.1:$CEPH_MON_PORT]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
keyring = $CEPH_DIR/keyring
run dir = $CEPH_DIR/run
admin socket = $CEPH_DIR/run/\$name.asok
log file = $CEPH_DIR/log/\$name.log
crash dir = $CEPH_DIR/run
[mon.a]
mon data = $CEPH_DIR/mon/a
host = localhost
[mgr.x]
mgr data = $CEPH_DIR/mgr/x
mgr initial modules =
[osd.0]
osd data = $CEPH_DIR/osd/0
osd objectstore = memstore
memstore device bytes = 2147483648
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$CEPH_PORT
rgw thread pool size = 32
rgw dns name = localhost
CONF
export CEPH_CONF="$CEPH_DIR/ceph.conf"

monmaptool --create --fsid "$fsid" --addv a "[v1:127.0.0.1:$CEPH_MON_PORT]" monmap
ceph-mon --mkfs -i a --monmap monmap
ceph-mon -f -i a &
ceph-mgr -f -i x &
osd=$(cat /proc/sys/kernel/random/uuid)
timeout 60 ceph osd new "$osd"
ceph-osd -i 0 --mkfs --osd-uuid "$osd"
ceph-osd -f -i 0 &
radosgw -f -n client.rgw &
timeout 80 radosgw-admin user create --uid=tests --display-name=tests --access-key="$CEPH_KEY" --secret-key="$CEPH_SECRET" > user.json
until (exec 3<> "/dev/tcp/127.0.0.1/$CEPH_PORT") 2> /dev/null; do sleep 0.2; done
touch ready
wait
