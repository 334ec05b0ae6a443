# Sourced by the scripts beside it. Leaves behind $ROOT (the repository), a ready virtual
# environment in $ROOT/.venv, its programs first on PATH, and _checkout. With $WLB_MEGATRON it is
# $ROOT/.venv-$WLB_MEGATRON, with that megatron-core instead of the pinned one.
#
# The first start installs what constraints.txt pins, and this project in editable form. Later
# starts compare a stamp and install nothing. An interrupted set-up is done again from the start.
#
#   PYTHON   the interpreter to make the environment with (default: the first fit one on PATH)
#   PIP_…    pip's own settings, such as PIP_INDEX_URL and PIP_EXTRA_INDEX_URL

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv${WLB_MEGATRON:+-$WLB_MEGATRON}
OLDEST=11 # Python 3.11, but 3.12 for megatron-core 0.17 and later.
[[ ${WLB_MEGATRON:-0.16} == 0.16* ]] || OLDEST=12
SETUP_LOG=$VENV/setup.log
SETUP_STAMP=$VENV/setup.stamp

unset PYTHONHOME PYTHONPATH # What runs is what is in .venv.
export PIP_USER=0

_fail() {
  printf 'error: %s\n' "$*" >&2
  return 1
}

# _checkout PATH: prints the folder of a checkout of Megatron-LM, which is PATH, or is in the archive
# PATH (.tar.gz, .tar.xz). An archive is unpacked once, into the environment.
_checkout() {
  local folders=("$1") unpacked part
  if [[ -f $1 ]]; then
    unpacked=$VENV/checkouts/$(sha256sum <"$1" | cut -c 1-16)
    if [[ ! -d $unpacked ]]; then
      part=$unpacked.$$ # Whole or not at all, also where two scripts unpack it at a time.
      { mkdir -p "$part" && tar -xf "$1" -C "$part"; } || return
      mv -T "$part" "$unpacked" 2>/dev/null || rm -rf "$part"
    fi
    folders=("$unpacked" "$unpacked"/*) # GitHub's archives hold one folder.
  fi
  local folder
  for folder in "${folders[@]}"; do
    if [[ -f $folder/pretrain_gpt.py ]]; then
      (CDPATH='' cd -- "$folder" && pwd -P)
      return
    fi
  done
  _fail "$1 has no pretrain_gpt.py; give a checkout of Megatron-LM, or an archive of one"
}

# Prints the first interpreter of 3.$OLDEST or newer that can make a virtual environment.
_find_python() {
  local probe candidate version found='' needed="Python 3.$OLDEST or newer with venv and ensurepip"
  probe="import sys
print('%d.%d.%d%s' % (sys.version_info[:3] + (' too old' * (sys.version_info < (3, $OLDEST)),)))
import venv, ensurepip"
  while read -r candidate; do
    [[ $candidate != "$VENV"/* ]] || continue # It is about to be deleted.
    if version=$("$candidate" -c "$probe" 2>/dev/null </dev/null); then
      if [[ $version != *'too old' ]]; then
        printf '%s\n' "$candidate"
        return
      fi
    elif [[ -n $version && $version != *'too old' ]]; then
      version+=" without venv (Debian and Ubuntu have it in python${version%.*}-venv)"
    fi
    found+="${found:+; }$candidate is ${version:-no Python that starts}"
  done < <(if [[ -n ${PYTHON:-} ]]; then type -P "$PYTHON" || printf '%s\n' "$PYTHON"
           else type -aP python3.11 python3.12 python3.13 python3 python | awk '!seen[$0]++'; fi)
  _fail "needs $needed; found: ${found:-no python on PATH}." \
    "Install one, or name one with PYTHON=/path/to/python3."
}

# The environment that is wanted: its place and Python (first line), what is pinned (second).
_stamp() {
  local python=${PYTHON:-$VENV/bin/python} version
  version=$("$python" -V 2>&1) || return
  printf '%s %s\n' "$ROOT" "$version"
  { _constraints && cat "$ROOT/pyproject.toml"; } | sha256sum
}

# What is pinned: constraints.txt, but for the megatron-core that is asked for. Of Megatron's main
# there is no release: then it is the newest.
_constraints() {
  case ${WLB_MEGATRON:-} in
    '') cat "$ROOT/constraints.txt" ;;
    main) grep -v '^megatron-core==' "$ROOT/constraints.txt" ;;
    *) sed "s/^megatron-core==.*/megatron-core==$WLB_MEGATRON/" "$ROOT/constraints.txt" ;;
  esac
}

# _step MESSAGE COMMAND…: runs it with its output in the log, and says how long it takes.
_step() {
  local message=$1 started=$SECONDS ticker='' status=0
  shift
  printf '  %s …' "$message" >&2
  if [[ -t 2 ]]; then
    while sleep 1 && kill -0 $$ 2>/dev/null; do
      printf '\r  %s … %d s' "$message" $((SECONDS - started)) >&2
    done &
    ticker=$!
  fi
  "$@" </dev/null >>"$SETUP_LOG" 2>&1 || status=$?
  [[ -z $ticker ]] || { kill "$ticker" && wait "$ticker"; } 2>/dev/null || true
  [[ -z $ticker ]] || printf '\r  %s …' "$message" >&2
  ((status)) && printf ' not done,' >&2
  printf ' %d s\n' $((SECONDS - started)) >&2
  return "$status"
}

_pip_install() {
  (cd "$ROOT" && "$VENV/bin/python" -m pip --no-input --disable-pip-version-check \
    install --constraint "$VENV/constraints.txt" "$@")
}

_install_torch() {
  local torch
  torch=$(grep '^torch==' "$ROOT/constraints.txt")
  if ! nvidia-smi -L >/dev/null 2>&1; then # No GPU: the CPU build is a tenth of the size.
    _step "$torch, CPU build" _pip_install "$torch+cpu" && return
    # Told in the second form because of the constraint, which any build satisfies.
    grep -Eq "No matching distribution found for torch|Cannot install $torch\+cpu" "$SETUP_LOG" ||
      return
    printf '  %s\n' "This machine's package index has no CPU build of torch: taking the default \
build, which may be large. PIP_EXTRA_INDEX_URL can name PyTorch's CPU index." >&2
  fi
  _step "$torch" _pip_install "$torch"
}

_install() {
  _constraints >"$VENV/constraints.txt" && _install_torch &&
    _step 'build tools' _pip_install setuptools &&
    { [[ -z ${WLB_MEGATRON:-} ]] || _step 'triton' _pip_install triton; } && # 0.18 imports it
    _step 'other packages' _pip_install --no-build-isolation --editable '.[test]'
}

_set_up() {
  local python output wanted
  wanted=$(_stamp) || wanted=''
  if [[ -f $SETUP_STAMP && -n $wanted && $(head -n 1 "$SETUP_STAMP") == "${wanted%%$'\n'*}" ]]; then
    printf 'Updating %s\n' "$VENV" >&2
    rm -f "$SETUP_STAMP"
  else
    python=$(_find_python) || return
    printf 'Setting up %s with %s (%s)\n' "$VENV" "$("$python" -V)" "$python" >&2
    rm -f "$SETUP_STAMP"
    output=$("$python" -m venv --clear "$VENV" 2>&1 </dev/null) || {
      _fail "$python cannot make a virtual environment in $VENV: ${output##*$'\n'}"
      return
    }
  fi
  : >"$SETUP_LOG"
  if ! _install; then
    tail -n 15 "$SETUP_LOG" >&2
    _fail "the set-up failed; the log is $SETUP_LOG"
    return
  fi
  _stamp >"$SETUP_STAMP"
}

_ready() {
  local wanted
  wanted=$(_stamp 2>/dev/null) && [[ -f $SETUP_STAMP && $(<"$SETUP_STAMP") == "$wanted" ]]
}

# One set-up at a time: a script started meanwhile waits, then finds all done.
_ready || {
  exec 9<"$ROOT"
  if command -v flock >/dev/null && ! flock --nonblock 9; then
    printf 'Waiting for another set-up of %s\n' "$VENV" >&2
    flock 9
  fi
  _ready || _set_up || exit 1
  exec 9<&-
}
export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH
