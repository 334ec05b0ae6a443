# Sourced by the scripts beside it. Leaves behind $ROOT (the repository), a ready virtual
# environment in $ROOT/.venv, its programs first on PATH, and _checkout. With $WLB_MEGATRON it is
# $ROOT/.venv-$WLB_MEGATRON, with that megatron-core instead of the pinned one.
#
# The first start installs what constraints.txt pins, and this project in editable form. Later
# starts compare a stamp and install nothing. An interrupted set-up is done again from the start.
#
#   PYTHON   the interpreter to make the environment with (default: a Python 3.12 on PATH, of pyenv,
#            of uv or in the system's folders, else a newer one)
#   PIP_…    pip's own settings, such as PIP_INDEX_URL and PIP_EXTRA_INDEX_URL

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv${WLB_MEGATRON:+-$WLB_MEGATRON}
OLDEST=12 # Python 3.12, as megatron-core asks.
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

# _version PYTHON: prints its version, and why it can make no environment, if it cannot.
_version() {
  local version status=0
  version=$("$1" -c "import sys
print('%d.%d.%d' % sys.version_info[:3])
if sys.version_info < (3, $OLDEST): sys.exit(3)
import venv, ensurepip" 2>/dev/null </dev/null) || status=$?
  case $status in
    0) ;;
    3) version+=', too old' ;;
    *) version+=${version:+, without venv (Debian and Ubuntu have it in python${version%.*}-venv)} ;;
  esac
  printf '%s\n' "${version:-no Python that starts}"
  return "$status"
}

# Prints the interpreters that may do, of PATH first.
_interpreters() {
  local uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python} candidate
  if [[ -n ${PYTHON:-} ]]; then
    type -P "$PYTHON" || printf '%s\n' "$PYTHON"
    return
  fi
  type -aP python3.{12..15} python3 python || true
  for candidate in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/python3 "$uv"/*/bin/python3 \
    /usr/bin/python3.1[2-9] /usr/local/bin/python3.1[2-9] /opt/*/bin/python3; do
    [[ ! -x $candidate ]] || printf '%s\n' "$candidate"
  done
}

# Prints an interpreter that can make a virtual environment: of Python 3.$OLDEST, with which the pinned
# versions are tested, else the first newer one.
_find_python() {
  local candidate version newer='' found=''
  local -A seen=()
  while read -r candidate; do
    # What is in .venv is about to be deleted.
    [[ $candidate != "$VENV"/* && -z ${seen[$candidate]:-} ]] || continue
    seen[$candidate]=1
    if ! version=$(_version "$candidate"); then
      found+="${found:+; }$candidate ($version)"
    elif [[ $version == 3.$OLDEST.* ]]; then
      printf '%s\n' "$candidate"
      return
    else
      newer=${newer:-$candidate}
    fi
  done < <(_interpreters)
  if [[ -n $newer ]]; then
    printf '%s\n' "$newer"
    return
  fi
  _fail "needs Python 3.$OLDEST or newer with venv and ensurepip; found: ${found:-none}." \
    "Get one with 'uv python install 3.$OLDEST', 'pyenv install 3.$OLDEST' or" \
    "'apt-get install python3.$OLDEST-venv', or name one with PYTHON=/path/to/python3."
}

# The environment that is wanted: its place and Python (first line), what is pinned (second).
_stamp() {
  local python=${PYTHON:-$VENV/bin/python} version
  version=$(_version "$python") || return
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
  # An update finds it there.
  compgen -G "$VENV/lib/python3*/site-packages/torch-${torch#*==}[.+]*" >/dev/null && return
  if ! nvidia-smi -L >/dev/null 2>&1; then # No GPU: the CPU build is a tenth of the size.
    _step "$torch, CPU build" _pip_install "$torch+cpu" && return
    # Told in the second form because of the constraint, which any build satisfies.
    grep -Eq "No matching distribution found for torch|Cannot install $torch\+cpu" "$SETUP_LOG" ||
      return
    printf '  %s\n' "pip finds no CPU build of torch here. It takes the default one, for CUDA: 2.7 GB to \
download, 5 GB on disk. docs/installing.md says where CPU builds are." >&2
  fi
  _step "$torch" _pip_install "$torch"
}

_install() {
  _constraints >"$VENV/constraints.txt" && _install_torch &&
    _step 'build tools' _pip_install setuptools &&
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
    printf 'Setting up %s with Python %s (%s)\n' "$VENV" "$(_version "$python")" "$python" >&2
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
