#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU. On 16 processors a run of one or two parts takes at most ten minutes.
#
#     bash ci/gpu.sh OUT_DIR [--only PART]...   # PART: one of KNOWN below
#
# RLK_GPU_WORKERS is the number of pytest's workers, 8 if unset, and half of how many parts run side
# by side. RLK_GPU_OPERATORS names the operators that are judged, surveyed and measured, all if
# unset; RLK_GPU_DTYPES the dtypes of the benchmark, bfloat16 if unset; RLK_GPU_ROWS its further row
# counts, and those of the profile. RLK_GPU_TESTS_SECONDS is how long pytest may take in `tests`, 560
# if unset: then it is cut off, and is red whatever passed; its log says what had failed.
#
# Needs no installation of rlk. `tests` needs Liger: a test may be skipped for want of a second GPU
# alone. These run only when asked for: `integration` needs transformers, diffusers and FLA,
# `install` a folder of wheels with kernels for this GPU (RLK_WHEELS, dist if unset), `profile` ncu of
# Nsight Compute, for what limits each kernel.
# Each part leaves OUT_DIR/<part>.log and JSON beside it, and replaces only those of its own name: what
# runs of other parts, operators or dtypes left in OUT_DIR stays. Exit status 0 all passed, 1
# something is red, 2 this machine cannot run it.
set -uo pipefail

KNOWN="tests|gates|sanitizer|survey|conventions|bench|exact_grad|profile|ptx|integration|install"
usage() {
    echo "usage: gpu.sh OUT_DIR [--only $KNOWN]..." >&2
    exit 2
}

[ $# -ge 1 ] || usage
mkdir -p "$1" || exit 2
OUT=$(cd "$1" && pwd)
shift
PARTS=()
while [ $# -gt 0 ]; do
    [ "$1" = --only ] && [[ "${2:-}" =~ ^($KNOWN)$ ]] || usage
    PARTS+=("$2")
    shift 2
done
[ ${#PARTS[@]} -gt 0 ] || PARTS=(tests gates sanitizer ptx survey conventions bench exact_grad)

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WORKERS=${RLK_GPU_WORKERS:-8}
METADATA=$(mktemp -d)
trap 'rm -rf "$METADATA"' EXIT

# Operators are found by the metadata of installed distributions: the same for a source tree.
write_metadata() {
    "$PYTHON" - "$1" <<'END'
import pathlib, re, sys, tomllib

version = re.search(r'__version__ = "(.*)"', pathlib.Path("core/src/rlk/__init__.py").read_text())[1]
for file in [*pathlib.Path().glob("core/pyproject.toml"), *pathlib.Path("packages").glob("*/pyproject.toml")]:
    project = tomllib.loads(file.read_text())["project"]
    name = project["name"]
    folder = pathlib.Path(sys.argv[1]) / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project.get("entry-points", {}).items()
    text = "".join(f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for g, e in groups)
    (folder / "entry_points.txt").write_text(text)
END
}
write_metadata "$METADATA" || exit 2
SOURCES=$(printf '%s:' core/src packages/*/src | sed "s#\([^:]*\):#$PWD/\1:#g")
# Installed wheels need what the caller's libraries bring, and none of these sources.
export RLK_CALLERS_PYTHONPATH="${PYTHONPATH:-}"
export PYTHONPATH="$METADATA:$SOURCES${PYTHONPATH:-}"
# One thread a process, compilers' helpers included: the parts and the workers of pytest supply the
# parallelism.
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONUNBUFFERED=1

"$PYTHON" ci/gpu_report.py require "${PARTS[@]}" || exit 2

# Run a command as a part of this run: its output to a log, its status and seconds beside it.
part() {
    local name=$1 start=$SECONDS status
    shift
    # What an earlier run left must not pass for what this one found.
    rm -f "$OUT/$name".{status,json,xml,limits}
    "$@" >"$OUT/$name.log" 2>&1
    status=$?
    echo "$status $((SECONDS - start))" >"$OUT/$name.status"
    return $status
}
# The same beside others, as soon as one may begin: each process holds memory of the GPU and the host.
beside() {
    while [ "$(jobs -rp | wc -l)" -ge $((2 * WORKERS)) ]; do wait -n; done
    part "$@" &
    NAMES+=("$1")
}
wanted() { [[ " ${PARTS[*]} " == *" $1 "* ]]; }

build() { "$PYTHON" -m rlk.cli build --all; }
gpu_files() { grep -rlE 'pytest\.mark\.gpu|\(OperatorSuite\)' --include='test_*.py' "$@"; }
# 30: seconds for pytest to say what it found. A shell makes what it runs in the background ignore INT,
# and pytest would not see it.
tests() {
    mapfile -t files < <(gpu_files core/src packages/*/src)
    timeout --foreground -s INT -k 30 "${RLK_GPU_TESTS_SECONDS:-560}" env --default-signal=INT \
        "$PYTHON" -m pytest -m gpu -n "$WORKERS" --dist loadgroup -p no:cacheprovider --durations 15 \
        --junitxml "$OUT/tests.xml" "${files[@]}"
}
integration() {
    "$PYTHON" -m pytest -m gpu -n 4 -p no:cacheprovider --durations 5 --junitxml "$OUT/$1.xml" "${@:2}"
}
installed() { "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }
# Models run without FLA: on Hopper its DeltaNet refuses to run backward on Triton before 3.7.1, and
# transformers has its own in PyTorch. Tests of FLA's norm need it: they are a part of their own.
without_fla() {
    mkdir -p "$METADATA/hidden"
    echo 'raise ImportError("hidden")' >"$METADATA/hidden/fla.py"
    PYTHONPATH="$METADATA/hidden:$PYTHONPATH" "$@"
}
install() { "$PYTHON" ci/install_gpu.py "${RLK_WHEELS:-dist}" "$OUT/install.json"; }
gates() { "$PYTHON" -m rlk.cli gate "$2" --tier full --backend "$1" --json "$OUT/gates-$1-$2.json"; }
operators() {
    [ -z "${RLK_GPU_OPERATORS:-}" ] || { printf '%s\n' $RLK_GPU_OPERATORS; return; }
    "$PYTHON" -c "from rlk.registry import operators; print(*operators(), sep='\n')"
}
ptx() { "$PYTHON" tools/check_ptx.py --cuda && "$PYTHON" tools/check_ptx.py --triton; }
survey() { "$PYTHON" -m rlk.cli survey "$1" --json "$OUT/survey-$1.json"; }
STARVED=adaln_mod_projection
# cuBLAS reads the size of its workspace once, when CUDA starts: a process of its own.
starved() {
    CUBLAS_WORKSPACE_CONFIG=:0:0 "$PYTHON" -m rlk.cli survey "$1" \
        --variant "F.linear, cuBLAS without a workspace" --json "$OUT/starved-$1.json"
}
conventions() { "$PYTHON" -m rlk.bench.conventions $(operators) --json "$1"; }
# An option for each word of a list, which may be empty.
each() { [ $# -lt 2 ] || printf -- "$1 %s " "${@:2}"; }
bench() {
    "$PYTHON" -m rlk.cli bench $(operators) $(each --rows ${RLK_GPU_ROWS:-}) \
        $(each --dtype ${RLK_GPU_DTYPES:-}) --jobs "$WORKERS" --json "$1"
}
# A file of several operators is named after those that were chosen.
joined() { local IFS=-; echo "$*"; }
CONVENTIONS=$(joined conventions ${RLK_GPU_OPERATORS:-})
BENCH=$(joined bench ${RLK_GPU_OPERATORS:-} ${RLK_GPU_DTYPES:-})
PROFILE=$(joined profile ${RLK_GPU_OPERATORS:-})
profile() {
    "$PYTHON" -m rlk.bench.profile $(operators) $(each --rows ${RLK_GPU_ROWS:-}) \
        --jobs "$WORKERS" --json "$1"
}
exact_grad() { "$PYTHON" -m rlk.exact_grad.overhead --json "$OUT/exact_grad.json"; }

NAMES=()
# Installed wheels bring or compile what they run.
[ "${PARTS[*]}" = install ] || NAMES+=(build)
if [ ${#NAMES[@]} -eq 0 ] || part build build; then
    mapfile -t found < <(operators)
    # Bits do not depend on the company a process keeps, times do: what measures runs last and alone.
    for name in "${PARTS[@]}"; do
        case $name in
            tests | ptx | install) beside "$name" "$name" ;;
            integration)
                mapfile -t files < <(gpu_files packages/*/integration)
                if installed fla; then
                    mapfile -t theirs < <(grep -l 'from fla' "${files[@]}")
                    mapfile -t files < <(grep -L 'from fla' "${files[@]}")
                    beside integration without_fla integration integration "${files[@]}"
                    beside integration-fla integration integration-fla "${theirs[@]}"
                else
                    beside integration integration integration "${files[@]}"
                fi ;;
            conventions) beside "$CONVENTIONS" conventions "$OUT/$CONVENTIONS.json" ;;
            gates)
                # Without operators nothing would be judged: "gates" then stays a part that did not
                # finish.
                [ ${#found[@]} -gt 0 ] || NAMES+=(gates)
                for backend in cuda triton; do
                    for operator in "${found[@]}"; do
                        beside "gates-$backend-$operator" gates "$backend" "$operator"
                    done
                done ;;
            survey)
                [ ${#found[@]} -gt 0 ] || NAMES+=(survey)
                for operator in "${found[@]}"; do
                    beside "survey-$operator" survey "$operator"
                    [ "$operator" != "$STARVED" ] || beside "starved-$operator" starved "$operator"
                done ;;
            sanitizer)
                for tool in memcheck racecheck initcheck synccheck; do
                    for share in 1/3 2/3 3/3; do
                        beside "$tool-${share%/*}" "$PYTHON" ci/sanitize.py "$tool" --share "$share"
                    done
                done ;;
        esac
    done
    wait
    if wanted bench; then
        part "$BENCH" bench "$OUT/$BENCH.json"
        NAMES+=("$BENCH")
    fi
    if wanted exact_grad; then
        part exact_grad exact_grad
        NAMES+=(exact_grad)
    fi
    if wanted profile; then
        part "$PROFILE" profile "$OUT/$PROFILE.json"
        NAMES+=("$PROFILE")
    fi
fi
"$PYTHON" ci/gpu_report.py table "$OUT" "${NAMES[@]}"
