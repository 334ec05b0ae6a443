"""``scripts/slurm/pretrain_gpt.sbatch`` as it is: really run, on stand-ins for Slurm's commands.

Two "nodes" are two torchruns on this machine, which meet in a c10d rendezvous and train a pipeline.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron_lm_runs import BOTH, MEGATRON_LM, PP2
from rank_runs import LAUNCHER, ROOT, command_line, losses, num_lines

SCRIPT = ROOT / "scripts" / "slurm" / "pretrain_gpt.sbatch"
JOBS: list[subprocess.Popen[str]] = []
"""All that were submitted; a fixture ends those that a failed test leaves behind."""
STAND_INS = {
    # A task on each node; scancel's signal reaches what they run.
    "srun": """
printf '%s\\n' "$@" > "$STATE/srun-$SLURM_RESTART_COUNT"
while [[ $1 == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node "$@" & pids+=($!)
done
echo "${pids[@]}" > "$STATE/pids"
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
""",
    "scontrol": """
if [[ $1 == show ]]; then printf '127.0.0.1\\n127.0.0.1\\n'; else echo "$@" >> "$STATE/scontrol"; fi
""",
    "scancel": """
echo "$@" >> "$STATE/scancel"
kill -TERM $(cat "$STATE/pids")
""",
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a job of two nodes."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in STAND_INS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (commands / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHON": sys.executable,
        "STATE": str(tmp_path),
        "LOG_ROOT": str(tmp_path / "logs"),
        "GPUS_PER_NODE": "1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "tiny",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_RESTART_COUNT": "0",
    }
    while JOBS:
        job = JOBS.pop()
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def submit(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    job = subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    JOBS.append(job)
    return job


def output(job: subprocess.Popen[str], timeout_s: float = 300.0) -> str:
    """All that it printed, once it ended; a hang is a failure."""
    try:
        return job.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise AssertionError(f"hung:\n{job.communicate()[0]}") from None


@pytest.mark.launcher
@pytest.mark.long
def test_job_trains_on_two_nodes_is_requeued_and_resumes(
    tmp_path: Path, cluster: dict[str, str], corpus: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = {
        **MEGATRON_LM,
        **BOTH,
        **PP2,
        "data_path": corpus,
        "wlb_packing": "hold",
        "exit_signal_handler": True,
        "train_iters": 4000,  # more than it comes to
        "save": tmp_path / "run",
        "load": tmp_path / "run",
        "save_interval": 2,
        "wlb_metrics": metrics,
    }
    first = submit(cluster, "-m", LAUNCHER, *command_line(flags))
    deadline = time.monotonic() + 300
    while num_lines(metrics) < 5:
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline, "hung"
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGUSR1)  # to the batch shell only, as --signal=B: does
    printed = output(first)
    assert first.returncode == 0, printed
    assert "the end is near: stopping, to be requeued" in printed
    assert (tmp_path / "scancel").read_text() == "--signal=TERM 4711\n"
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"
    reached = max(losses(metrics))
    logs = tmp_path / "logs" / "tiny-4711"
    assert f"-m {LAUNCHER}" in (logs / "attempt-0" / "command.sh").read_text()
    assert len(list((logs / "attempt-0").rglob("stdout.log"))) == 2  # one a rank

    last = {**flags, "exit_interval": 2 * (reached // 2) + 4}
    second = submit({**cluster, "SLURM_RESTART_COUNT": "1"}, "-m", LAUNCHER, *command_line(last))
    printed = output(second)
    assert second.returncode == 0, printed
    assert "successfully loaded checkpoint" in printed
    assert "ended with status 0" in printed
    assert max(losses(metrics)) == last["exit_interval"]
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"  # not again
    assert (logs / "attempt-1").is_dir()
    rendezvous = [(tmp_path / f"srun-{n}").read_text().split("--rdzv-id\n")[1] for n in (0, 1)]
    assert [text.split()[0] for text in rendezvous] == ["4711-0", "4711-1"]


@pytest.mark.launcher
def test_failure_keeps_its_status_and_is_not_requeued(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    flags = command_line(MEGATRON_LM | BOTH | {"wlb_packing": "hold", "no_such_flag": True})
    job = submit({**cluster, "SLURM_NNODES": "1"}, "-m", LAUNCHER, *flags)
    printed = output(job)
    assert job.returncode not in (0, None)
    assert "unknown flag --no-such-flag" in printed
    assert f"ended with status {job.returncode}" in printed
    assert not (tmp_path / "scontrol").exists()


def test_recipe_is_run_on_every_node(tmp_path: Path, cluster: dict[str, str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("MODEL_ARGS: {--num-layers: 4, --save: $NOT_SET}\n")
    job = submit(cluster, str(recipe), "--train-iters", "7")
    printed = output(job)
    assert job.returncode == 2
    assert printed.count("variables that are not set: NOT_SET") == 2
    words = (tmp_path / "srun-0").read_text().splitlines()
    assert words[:2] == ["--kill-on-bad-exit=1", "--ntasks-per-node=1"]
    assert words[2:8] == [
        sys.executable,
        "-m",
        "megatron_wlb.cli.main",
        "recipe",
        "run",
        str(recipe),
    ]
    assert words[-3:] == ["--", "--train-iters", "7"]


def test_flags_for_srun_stand_before_the_command(tmp_path: Path, cluster: dict[str, str]) -> None:
    flags = ["--container-image=/shared/image.sqsh", "--container-mounts=/a:/a,/b:/b", "--mpi=none"]
    given = f"{flags[0]} {flags[1]}\n   {flags[2]} "
    cluster = {**cluster, "SRUN_ARGS": given, "SLURM_NNODES": "1"}
    output(submit(cluster, "-m", LAUNCHER, "--wlb-no-flag"))
    words = (tmp_path / "srun-0").read_text().splitlines()
    assert words[2:7] == [*flags, sys.executable, "-m"]


def test_gpus_are_asked_for_as_every_cluster_knows() -> None:
    """`--gres` alone: with it, other forms are refused or contradict what the user gives."""
    asked = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH --g")]
    assert asked == ["#SBATCH --gres=gpu:8"]


def test_submission_without_arguments_or_slurm_is_refused(cluster: dict[str, str]) -> None:
    job = submit(cluster)
    assert "error: say what to train" in output(job) and job.returncode == 2
    job = submit({k: v for k, v in cluster.items() if not k.startswith("SLURM")}, "recipe.yaml")
    assert "error: not in a Slurm job" in output(job) and job.returncode == 2


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
