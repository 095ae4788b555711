"""The run directory: names, resuming, locks of live and dead processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
import yaml

from shared_runtime.tracking import RunDirectoryError, RunInUseError, open_run_directory
from shared_runtime.tracking.config_diff import differences, to_plain
from shared_runtime.tracking.run_dir import check_run_directory, read_state

CONFIG = {"batch": {"rollout_batch_size": 32}, "optimizer": {"lr": 1e-6}, "seed": 1}


def open_run(tmp_path, config=CONFIG, name=None, **options):
    return open_run_directory(tmp_path / "runs", "tiny", config, name, **options)


HOLDER = """
import os, sys, time
from pathlib import Path
from shared_runtime.tracking import open_run_directory
run = open_run_directory(Path(sys.argv[1]) / "runs", "tiny", {"seed": 1}, "held")
if sys.argv[2] == "fork":
    readable, writable = os.pipe()
    if os.fork() == 0:
        os.write(writable, b"here")
        time.sleep(30)
        os._exit(0)
    os.read(readable, 4)
print(os.getpid(), flush=True)
time.sleep(30)
"""


def hold(tmp_path, how="plain"):
    """A live process that writes into runs/held."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), how], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    return process


def test_new_run_has_a_rerunnable_config_and_a_state(tmp_path):
    with open_run(tmp_path) as run:
        assert run.path == tmp_path / "runs" / "tiny"
        assert (run.resumed, run.next_rollout) == (False, 0)
        assert yaml.safe_load(run.config_path.read_text()) == CONFIG
        assert list(yaml.safe_load(run.config_path.read_text())) == list(CONFIG)  # in the order of the config
        run.update(3)
        state = json.loads((run.path / "state.json").read_text())
        assert (state["status"], state["next_rollout"], state["pid"]) == ("running", 3, os.getpid())


def test_unfinished_run_of_the_same_config_is_resumed(tmp_path):
    with open_run(tmp_path) as run:
        run.update(7)
    with open_run(tmp_path) as run:
        assert (run.name, run.resumed, run.next_rollout) == ("tiny", True, 7)


def test_names_are_numbered(tmp_path):
    with open_run(tmp_path) as run:
        run.finish()
    with open_run(tmp_path) as run:
        assert (run.name, run.resumed) == ("tiny-2", False)
    with open_run(tmp_path, {**CONFIG, "seed": 2}) as run:
        assert (run.name, run.resumed) == ("tiny-3", False)
    with open_run(tmp_path) as run:  # tiny-2 is unfinished, tiny-3 is another configuration
        assert (run.name, run.resumed) == ("tiny-2", True)
        with open_run(tmp_path) as other:  # a live run is left alone
            assert (other.name, other.resumed) == ("tiny-4", False)


def test_names_of_other_recipes_do_not_count(tmp_path):
    for other in ("tiny-big", "tiny-02", "tinier-2", "tiny-1"):
        (tmp_path / "runs" / other).mkdir(parents=True)
    with open_run(tmp_path) as run:
        assert run.name == "tiny"
        run.finish()
    with open_run(tmp_path) as run:
        assert run.name == "tiny-2"


def test_a_failed_run_says_why_and_is_resumed(tmp_path):
    def train():
        with open_run(tmp_path) as run:
            run.update(2)
            raise ValueError("reward is NaN")

    with pytest.raises(ValueError, match="reward is NaN"):
        train()
    state = read_state(tmp_path / "runs" / "tiny")
    assert (state["status"], state["error"]) == ("failed", "ValueError: reward is NaN")
    with open_run(tmp_path) as run:
        assert (run.resumed, run.next_rollout) == (True, 2)


def test_an_error_after_the_end_leaves_it_finished(tmp_path):
    def train():
        with open_run(tmp_path) as run:
            run.finish()
            raise ValueError("plot")

    with pytest.raises(ValueError, match="plot"):
        train()
    assert read_state(tmp_path / "runs" / "tiny")["status"] == "finished"


def test_named_run_of_another_config_lists_the_keys(tmp_path):
    open_run(tmp_path, name="mine").close()
    changed = {"batch": {"rollout_batch_size": 64}, "optimizer": {"lr": 1e-6, "warmup": 3}, "seed": 1}
    with pytest.raises(RunDirectoryError) as caught:
        open_run(tmp_path, changed, "mine")
    assert str(caught.value).splitlines()[1:] == [
        "  batch.rollout_batch_size: 32 there, 64 now",
        "  optimizer.warmup: nothing there, 3 now",
    ]
    assert yaml.safe_load((tmp_path / "runs/mine/config.yaml").read_text()) == CONFIG
    open_run(tmp_path, name="mine").close()  # the refusal left no lock behind


def test_ignored_keys_may_differ_and_are_written(tmp_path):
    open_run(tmp_path, {**CONFIG, "tracking": {"log_interval": 1}}, "mine").close()
    later = {**CONFIG, "tracking": {"log_interval": 5, "use_wandb": True}}
    with open_run(tmp_path, later, "mine", ignore=["tracking"]) as run:
        assert run.resumed
        assert yaml.safe_load(run.config_path.read_text()) == later


def test_named_finished_run_says_so(tmp_path):
    with open_run(tmp_path, name="mine") as run:
        run.update(60)
        run.finish()
    with pytest.raises(RunDirectoryError, match=r"mine has finished \(60 rollouts\); .*another --run-name"):
        open_run(tmp_path, name="mine")
    with open_run(tmp_path, name="mine", num_rollout=80) as run:  # a longer run goes on
        assert (run.resumed, run.next_rollout) == (True, 60)


def test_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "runs" / "photos").mkdir(parents=True)
    (tmp_path / "runs" / "photos" / "cat.png").touch()
    with pytest.raises(RunDirectoryError, match=r"no config\.yaml: not a run"):
        open_run(tmp_path, name="photos")
    (tmp_path / "runs" / "notes").touch()
    with pytest.raises(RunDirectoryError, match="is a file"):
        open_run(tmp_path, name="notes")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp/x", "-x", "a b"])
def test_names_that_are_no_names(tmp_path, name):
    with pytest.raises(RunDirectoryError, match="--run-name"):
        open_run(tmp_path, name=name)


def test_creation_cut_short_is_started_again(tmp_path):
    run = open_run(tmp_path, name="mine")
    run.close()
    run.config_path.rename(run.path / "config.yaml.tmp")
    with open_run(tmp_path, name="mine") as run:
        assert not run.resumed


def test_live_process_is_named_and_death_frees_the_directory(tmp_path):
    process = hold(tmp_path)
    try:
        with pytest.raises(RunInUseError, match=rf"is being written by process {process.pid} on .*--run-name"):
            open_run(tmp_path, {"seed": 1}, "held")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with open_run(tmp_path, {"seed": 1}, "held") as run:
        assert run.resumed


def test_forked_child_does_not_outlive_the_lock(tmp_path):
    process = hold(tmp_path, "fork")
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        open_run(tmp_path, {"seed": 1}, "held").close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the child, which is still alive


def test_second_open_in_the_same_process_is_refused(tmp_path):
    with open_run(tmp_path, name="mine"), pytest.raises(RunInUseError):
        open_run(tmp_path, name="mine")


def test_processes_that_start_together_get_directories_of_their_own(tmp_path):
    script = (
        "import sys; from pathlib import Path; from shared_runtime.tracking import open_run_directory\n"
        "sys.stdin.readline()\n"
        "run = open_run_directory(Path(sys.argv[1]), 'tiny', {'seed': 1}); print(run.name, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    names = [process.stdout.readline().strip() for process in processes]
    for process in processes:
        process.communicate("end\n")
    assert sorted(names) == ["tiny", "tiny-2", "tiny-3", "tiny-4"]


def test_secrets_reach_no_file(tmp_path):
    config = {**CONFIG, "tracking": {"wandb_key": "s3cret", "wandb_project": "p"}}
    with open_run(tmp_path, config) as run:
        for file in run.path.iterdir():
            assert "s3cret" not in file.read_text()
        assert yaml.safe_load(run.config_path.read_text())["tracking"] == {"wandb_project": "p"}
    with open_run(tmp_path, config) as run:
        assert run.resumed


def test_config_values_survive_the_file(tmp_path):
    class Kind(Enum):
        GRPO = "grpo"

    @dataclass
    class Part:
        paths: tuple[Path, ...]
        kind: Kind

    config = {"part": Part((Path("a"),), Kind.GRPO), "lr": 1e-6, "none": None, "on": True, "text": "1e-6", "no": "no"}
    with open_run(tmp_path, config) as run:
        assert yaml.safe_load(run.config_path.read_text()) == {
            "part": {"paths": ["a"], "kind": "grpo"}, "lr": 1e-6, "none": None, "on": True, "text": "1e-6", "no": "no",
        }  # fmt: skip
    with open_run(tmp_path, config) as run:
        assert run.resumed
    with pytest.raises(TypeError, match="can't hold a object"):
        to_plain({"x": object()})


def test_true_is_not_one():
    assert differences({"a": True, "b": 1}, {"a": 1, "b": 1.0}) == ["a: True there, 1 now"]


class TestCheckRunDirectory:
    """What `--dry-run` says of a run's directory is what the run would say, and nothing is made."""

    def check(self, tmp_path, name="mine", config=CONFIG, **options):
        check_run_directory(tmp_path / "runs", config, name, **options)

    def test_nothing_is_made(self, tmp_path):
        self.check(tmp_path)
        self.check(tmp_path, name=None)
        assert list(tmp_path.iterdir()) == []

    def test_an_unfinished_run_may_go_on(self, tmp_path):
        with open_run(tmp_path, name="mine"):
            pass
        self.check(tmp_path)

    @pytest.mark.parametrize(
        ("config", "finish", "message"),
        [({"seed": 2}, False, "another configuration"), (CONFIG, True, "has finished")],
    )
    def test_another_or_a_finished_run_is_refused(self, tmp_path, config, finish, message):
        with open_run(tmp_path, name="mine") as run:
            if finish:
                run.finish()
        with pytest.raises(RunDirectoryError, match=message):
            self.check(tmp_path, config=config)

    def test_a_run_in_use_is_refused(self, tmp_path):
        with open_run(tmp_path, name="mine"), pytest.raises(RunInUseError, match="is being written by"):
            self.check(tmp_path)

    def test_a_directory_of_other_files_is_refused_and_left_alone(self, tmp_path):
        (tmp_path / "runs" / "mine").mkdir(parents=True)
        (tmp_path / "runs" / "mine" / "thesis.tex").touch()
        with pytest.raises(RunDirectoryError, match="not a run"):
            self.check(tmp_path)
        assert [p.name for p in (tmp_path / "runs" / "mine").iterdir()] == ["thesis.tex"]

    def test_files_in_the_way_are_named(self, tmp_path):
        (tmp_path / "runs").touch()
        with pytest.raises(RunDirectoryError, match="is a file"):
            self.check(tmp_path)
