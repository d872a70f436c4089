#!/bin/sh
# Regenerate the protobuf modules in place, or into the folder given as the first argument.
set -eu
cd "$(dirname "$0")"
out="${1:-src}"
python="${PYTHON:-python}"
"$python" -m grpc_tools.protoc --proto_path=src \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
    $(find src -name '*.proto' | sort)
