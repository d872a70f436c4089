#!/usr/bin/env bash
# Images for tests where no registry can be reached. Those that can be pulled are; for the others
# stand-ins with the same tags are made of Debian packages and of the test tools:
#
#   tests/support/containers/stand_ins.sh VENV
#   tests/support/containers/stand_ins.sh --base        the first of them, which needs no VENV
#   tests/support/containers/stand_ins.sh --remove      and what was built on them
#
#   python:3.11-slim         Debian's Python 3.11
#   chrislusf/seaweedfs      the same SeaweedFS, out of VENV
#   influxdb                 VictoriaMetrics, which takes InfluxDB 2's writes; it checks no token
#
# Needs a Docker engine, and for stand-ins mmdebstrap, victoria-metrics and root. What builds install
# from a package index goes through the host's certificates and pip's settings of the host.
set -euo pipefail

# Images have the labels of those that they are built on.
label=xain.stand-in
if [ "$1" = --remove ]; then
    # The youngest first, since nothing is removed that another one is built on.
    docker image ls --quiet --filter "label=$label" | awk '!seen[$0]++' |
        xargs --no-run-if-empty docker image rm --force >/dev/null
    exit
fi

venv=$1 pip="$1/bin/python -m pip"
[ "$1" = --base ] && pip="python3 -m pip"
here=$(dirname "$0")
compose_file=$here/../../../docker-compose.yml
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

tag_of() { grep -oE "image: $1:[^ ]+" "$compose_file" | cut -d: -f3; }

have() {
    docker image inspect "$1" >/dev/null 2>&1 ||
        timeout 300 docker pull --quiet "$1" >/dev/null 2>"$scratch/pull.log" ||
        { echo "$1: a stand-in, since: $(tail -n 1 "$scratch/pull.log")"; return 1; }
}

# Like the image of this name: without documentation and compiled modules, with pip, and as small.
make_python() {
    mmdebstrap --quiet --variant=minbase \
        --include=ca-certificates,curl,python3,python3-pip,python3-venv,wget \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        bookworm "$scratch/python"
    local root=$scratch/python
    rm "$root/usr/lib/python3.11/EXTERNALLY-MANAGED"
    ln -s python3 "$root/usr/bin/python"
    # What the installation alone needed.
    rm -r "$root"/usr/share/perl "$root"/usr/lib/*/perl "$root"/usr/lib/*/libperl.so* \
        "$root"/usr/lib/*/gconv
    find "$root/usr" -name __pycache__ -prune -exec rm -r {} +
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    {
        echo '[global]'
        $pip config list |
            sed -nE "s/^(global|:env:)\.(index-url|proxy|timeout|trusted-host)='(.*)'$/\2 = \3/p"
    } >"$root/etc/pip.conf"
    tar -C "$root" -c . |
        docker import --change 'CMD ["python3"]' --change "LABEL $label=true" - "$1" >/dev/null
}

# image, its entry point, and the files that belong into it as FROM:TO
make_server() {
    local image=$1 entrypoint=$2
    shift 2
    mkdir -p "$scratch/server"
    {
        echo "FROM $python"
        echo "LABEL $label=true"
        for file in "$@"; do
            cp -L "${file%%:*}" "$scratch/server/"
            echo "COPY $(basename "${file%%:*}") ${file#*:}"
        done
        echo "ENTRYPOINT $entrypoint"
    } >"$scratch/server/Dockerfile"
    DOCKER_BUILDKIT=0 docker build --quiet --tag "$image" "$scratch/server" >/dev/null
    rm -r "$scratch/server"
}

python=python:3.11-slim
seaweedfs=chrislusf/seaweedfs:$(tag_of chrislusf/seaweedfs)
influxdb=influxdb:$(tag_of influxdb)

have "$python" || make_python "$python"
[ "$1" = --base ] && exit
have "$seaweedfs" || make_server "$seaweedfs" '["/usr/bin/weed"]' \
    "$venv/bin/weed:/usr/bin/weed"
have "$influxdb" || make_server "$influxdb" '["/entrypoint.sh"]' \
    "$(command -v victoria-metrics):/usr/bin/victoria-metrics" "$here/influxdb.sh:/entrypoint.sh"
docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}'
