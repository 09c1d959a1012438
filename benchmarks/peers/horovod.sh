#!/usr/bin/env bash
# Installs Horovod beside TensorFlow in an environment of its own, and says whether
# it can be imported. Needs a C++ compiler and CMake; takes about ten minutes.
#
#   benchmarks/peers/horovod.sh [python3] [tensorflow version]
set -euo pipefail
python="${1:-python3}"
version="${2:-2.21.0}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
pip="$folder/venv/bin/pip"
"$pip" install --quiet "tensorflow==$version" setuptools wheel packaging

date +'date      %Y-%m-%d'
echo "machine   $(uname -m), $(nproc) cores"
echo "python    $("$folder/venv/bin/python" -V)"
echo "compiler  $(c++ --version | head -n 1), $(cmake --version | head -n 1)"
echo "packages  tensorflow $version"
# Without these a package is built that holds no support for TensorFlow.
export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
if "$pip" install --no-cache-dir --no-build-isolation --verbose horovod \
  >"$folder/log" 2>&1; then
  "$folder/venv/bin/python" -c 'import horovod.tensorflow.keras; print("imported")'
else
  echo "pip install horovod failed:"
  grep -oE 'horovod-[0-9.]+\.tar\.gz' "$folder/log" | head -n 1 || true
  grep -oE '(tensorflow/include|horovod/tensorflow)/[^ ]*: (fatal )?error: .*' \
    "$folder/log" | head -n 5 || true
  grep '^ERROR: ' "$folder/log" | tail -n 1
fi
