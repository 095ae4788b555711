"""Console, picture, TensorBoard, W&B: what they show of known numbers."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from shared_runtime.tracking import LoggedImage, Tracker, build_tracker, open_run_directory
from shared_runtime.tracking.console import ConsoleSink, sparkline
from shared_runtime.tracking.jsonl import read_rows
from shared_runtime.tracking.plots import RewardPlot, read_curves, smooth
from shared_runtime.tracking.tensorboard import TensorBoardSink
from shared_runtime.tracking.wandb import WandbSink

STEP = {
    "rollout/raw_reward": 0.5,
    "train/loss": -0.0125,
    "train/grad_norm": 0.83,
    "perf/tokens_per_s": 4210.4,
    "perf/rollout_time": 0.614,
    "perf/reward_time": 0.02,
    "perf/actor_train_time": 0.93,
    "perf/update_weights_time": 0.04,
    "perf/step_time": 1.62,
}


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class TestConsole:
    def sink(self, terminal: bool, **options) -> tuple[ConsoleSink, io.StringIO, FakeClock]:
        out, clock = io.StringIO(), FakeClock()
        console = Console(file=out, force_terminal=terminal, width=100)
        return ConsoleSink(20, "tiny", console=console, clock=clock, **options), out, clock

    def test_plain_lines(self):
        sink, out, clock = self.sink(terminal=False)
        sink.log(-1, {"eval/sums": 0.25})
        for step in range(3):
            sink.log(step, STEP)
            clock.now += 2.0
        assert out.getvalue().splitlines()[0] == "before training | accuracy (sums) 0.250"
        assert out.getvalue().splitlines()[3] == (
            "step 3/20 | reward 0.500 | accuracy 0.250 | loss -0.0125 | grad norm 0.830 | tokens/s 4,210 | "
            "generate 0.61s score 0.02s train 0.93s publish 0.04s step 1.62s | left 0:34"  # 17 steps of 2 s
        )
        assert "\x1b" not in out.getvalue()

    def test_log_interval_keeps_every_nth_and_the_last(self):
        sink, out, _ = self.sink(terminal=False, log_interval=8)
        for step in range(20):
            sink.log(step, STEP)
        assert [line.split(" |")[0] for line in out.getvalue().splitlines()] == [
            "step 8/20",
            "step 16/20",
            "step 20/20",
        ]

    def test_null_metrics_and_several_sets(self):
        sink, out, _ = self.sink(terminal=False)
        sink.log(4, {"rollout/raw_reward": 0.5, "train/loss": None, "eval/a": 0.1, "eval/b": 123456.0})
        line = "step 5/20 | reward 0.500 | accuracy (a) 0.100 | accuracy (b) 1.23e+05 | loss nan\n"
        assert out.getvalue() == line

    def test_time_left_after_resume_counts_only_own_steps(self):
        sink, _, clock = self.sink(terminal=False)
        sink.truncate_after(9)
        assert sink.seconds_left() is None
        sink.log(10, STEP)
        clock.now += 3
        sink.log(11, STEP)
        assert sink.seconds_left() == pytest.approx(3 * 8)

    def test_live_display_ends_with_the_last_state(self):
        sink, out, _ = self.sink(terminal=True)
        sink.phase("rollout")
        sink.log(0, {"eval/sums": 0.25})
        sink.log(0, STEP)
        sink.log(1, {**STEP, "rollout/raw_reward": 0.75, "eval/sums": 0.5})
        sink.phase("actor_train")
        sink.close()
        text = "".join(part.partition("m")[2] for part in out.getvalue().split("\x1b["))
        last = text[text.rindex("step 2/20") :]
        for shown in ("0.750", "▁█", "0.500", "from 0.250", "grad norm 0.830", "publish 0.04s"):
            assert shown in last
        assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back

    def test_plain_and_live_can_be_chosen(self):
        plain, out, _ = self.sink(terminal=True, live=False)
        plain.log(0, STEP)
        assert out.getvalue().startswith("step 1/20 | reward 0.500")

    def test_sparkline(self):
        assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
        assert sparkline([0.3, 0.3]) == "▁▁"
        assert sparkline([]) == ""
        assert sparkline([float(i) for i in range(80)], width=8) == "▁▂▃▄▅▆▇█"


class TestRewardPlot:
    def test_smoothing_is_adams(self):
        values, weight = [1.0, 0.0, 2.0], 0.7
        # Closed form: sum of w^(t-s) x_s, divided by the sum of the weights.
        expected = [
            sum(weight ** (t - s) * values[s] for s in range(t + 1)) / sum(weight**s for s in range(t + 1))
            for t in range(3)
        ]
        assert smooth(values, weight) == pytest.approx(expected)
        assert smooth(values, 0.0) == values

    def test_curves_of_a_run(self):
        rows = [
            {"step": -1, "eval/sums": 0.3},
            {"step": 0, "rollout/raw_reward": 0.25},
            {"step": 1, "rollout/raw_reward": None},
            {"step": 2, "rollout/reward/raw_mean": 0.5, "eval/sums": 0.6},
        ]
        curves = read_curves(rows)
        assert curves.reward == [(1, 0.25), (3, 0.5)]
        assert curves.scores == {"sums": [(0, 0.3), (3, 0.6)]}

    def test_picture_shows_the_curve_where_it_is(self, tmp_path):
        """A reward that is 0 and then 1 puts blue into the lower left and the upper right, and nowhere else."""
        with Tracker([]) as _, (tmp_path / "m.jsonl").open("w") as file:
            for step in range(40):
                file.write(json.dumps({"step": step, "rollout/raw_reward": float(step >= 20)}) + "\n")
        RewardPlot(tmp_path / "m.jsonl", tmp_path / "reward.png", "tiny").close()
        pixels = np.asarray(Image.open(tmp_path / "reward.png").convert("RGB")).astype(int)
        blue = (pixels[..., 2] - pixels[..., 0]) > 80
        height, width = blue.shape
        assert (width, height) == (1200, 690)
        left, right = blue[:, 100 : int(width * 0.45)], blue[: height // 2, int(width * 0.7) :]
        assert left[height // 2 :].any()
        assert not left[: height // 2].any()
        assert right.any()

    @pytest.mark.parametrize(
        "row", [{"rollout/raw_reward": -3.0}, {"eval/sums": 0.0}, {"rollout/raw_reward": 1.0, "eval/sums": 1.0}]
    )
    def test_one_row_is_enough(self, tmp_path, row):
        (tmp_path / "m.jsonl").write_text(json.dumps({"step": 0, **row}) + "\n")
        RewardPlot(tmp_path / "m.jsonl", tmp_path / "reward.png").close()
        assert Image.open(tmp_path / "reward.png").size == (1200, 690)

    def test_nothing_logged_draws_nothing(self, tmp_path):
        (tmp_path / "m.jsonl").write_text('{"step": 0, "train/loss": 1.0}\n')
        RewardPlot(tmp_path / "m.jsonl", tmp_path / "reward.png").close()
        RewardPlot(tmp_path / "absent.jsonl", tmp_path / "reward.png").close()
        assert not (tmp_path / "reward.png").exists()


class TestTensorBoard:
    def read(self, directory):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(directory), purge_orphaned_data=True)
        events.Reload()
        return events

    def test_scalars_and_pictures(self, tmp_path):
        with Tracker([TensorBoardSink(tmp_path)]) as tracker:
            tracker.log(0, {"a": 0.5, "bad": float("nan")})
            tracker.log(1, {"a": 1.5})
            tracker.log_images(1, "media", [LoggedImage(np.full((4, 6, 3), 200, dtype=np.uint8))])
        events = self.read(tmp_path)
        assert [(event.step, event.value) for event in events.Scalars("a")] == [(0, 0.5), (1, 1.5)]
        assert "bad" not in events.Tags()["scalars"]
        image = events.Images("media/0")[0]
        assert (image.width, image.height) == (6, 4)

    def test_resume_has_no_double_points(self, tmp_path):
        with Tracker([TensorBoardSink(tmp_path)]) as tracker:
            tracker.truncate_after(-2)
            for step in range(-1, 5):
                tracker.log(step, {"a": step})
        with Tracker([TensorBoardSink(tmp_path)]) as tracker:
            tracker.truncate_after(2)
            for step in range(3, 5):
                tracker.log(step, {"a": 10 * step})
        points = [(event.step, event.value) for event in self.read(tmp_path).Scalars("a")]
        assert points == [(-1, -1), (0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]


def leveldb_records(data: bytes, header: int = 7, block: int = 32768):
    """Records of a LevelDB log (4 bytes checksum, 2 length, 1 type), which a `.wandb` file is behind its header."""
    position, record = header, b""
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or the last part
            yield record
            record = b""


def wandb_records(directory):
    """Run record and history rows of every offline run, once W&B's own process has written them to the end."""
    runs = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        deadline = time.monotonic() + 30
        while (records := read_records(path))[-1].WhichOneof("record_type") != "exit":
            assert time.monotonic() < deadline, f"{path} was not finished"
            time.sleep(0.05)
        history, run = [], None
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                history.append({".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
            elif record.WhichOneof("record_type") == "run":
                run = record.run
        runs.append((run, history))
    return runs


def read_records(path):
    """What there is of a `.wandb` file so far; an empty record stands for nothing."""
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(data) for data in leveldb_records(path.read_bytes())] or [Record()]


class TestWandb:
    def open(self, tmp_path, **options):
        return WandbSink(
            tmp_path / "wandb.json",
            "project",
            name="tiny",
            group="g",
            mode="offline",
            directory=tmp_path,
            config={"lr": 1e-6, "tracking": {"wandb_key": "s3cret"}},
            **options,
        )

    def test_online_without_a_login_is_refused(self, tmp_path):
        code = (
            "from pathlib import Path\n"
            "from shared_runtime.tracking.wandb import WandbSink\n"
            "WandbSink(Path('wandb.json'), 'project', mode='online')"
        )
        # A process of its own, since W&B keeps what a start has set up; home is where a login leaves its key.
        env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert run.returncode == 1
        assert re.search(r"ConfigError: --use-wandb: .*login.*\(or give --wandb-mode offline\)$", run.stderr.strip())

    def test_offline_run_and_its_continuation(self, tmp_path):
        with Tracker([self.open(tmp_path, run_id="mine", team="us", api_key="s3cret" + "0" * 34)]) as tracker:
            tracker.truncate_after(-2)
            for step in range(-1, 3):
                tracker.log(step, {"a": step, "bad": float("nan")})
            assert tracker.errors == {}
        with Tracker([self.open(tmp_path)]) as tracker:  # resumed behind a checkpoint at step 1
            tracker.truncate_after(1)
            for step in range(2, 5):
                tracker.log(step, {"a": 10 * step})
            tracker.log_images(4, "media", [LoggedImage(np.zeros((4, 4, 3), dtype=np.uint8), "a caption")])
            assert tracker.errors == {}
        (first, rows), (second, later) = wandb_records(tmp_path)
        assert first.run_id == second.run_id == "mine"
        assert first.entity == "us"
        assert (first.project, first.run_group, first.display_name) == ("project", "g", "tiny")
        points = [(row["rollout/step"], row["a"]) for row in rows + later if "a" in row]
        assert points == [(-1, -1), (0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]  # step 2 was sent before
        assert not any("bad" in row for row in rows)
        assert any("media" in key for row in later for key in row)
        secret = [p for p in tmp_path.rglob("*") if p.is_file() and b"s3cret" in p.read_bytes()]
        assert secret == []

    def test_missing_package_names_the_extra(self, tmp_path):
        """In a process where wandb and tensorboard can't be imported, the runtime works and the sinks say why."""
        script = (
            "import sys; sys.modules['wandb'] = None; sys.modules['tensorboard'] = None\n"
            "from pathlib import Path\n"
            "from shared_runtime.tracking import *\n"
            "from shared_runtime.tracking.wandb import WandbSink\n"
            "from shared_runtime.tracking.tensorboard import TensorBoardSink\n"
            "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
            "for sink in (lambda: WandbSink(Path('x'), 'p'), lambda: TensorBoardSink(Path('x'))):\n"
            "    try: sink()\n"
            "    except ImportError as error: print(error)\n"
        )
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert "--use-wandb needs the package wandb: install tandem-shared-runtime[wandb]" in run.stdout
        assert "install tandem-shared-runtime[tensorboard]" in run.stdout


def test_build_tracker_writes_all_of_a_run(tmp_path, capsys):
    wandb = {"wandb_mode": "offline", "wandb_run_id": "abcd", "wandb_dir": tmp_path / "elsewhere"}
    with (
        open_run_directory(tmp_path / "runs", "tiny", {"seed": 1}) as run,
        build_tracker(run, 2, tensorboard_dir=tmp_path / "tb", use_wandb=True, **wandb) as tracker,
    ):
        for step in range(2):
            tracker.log(step, STEP)
            tracker.log_samples(step, [{"prompt": "1+1=", "response": "2", "label": "2", "reward": 1.0}])
        assert tracker.errors == {}
    assert [row["step"] for row in read_rows(run.metrics_path)] == [0, 1]
    assert [row["response"] for row in read_rows(run.samples_path)] == ["2", "2"]
    assert run.reward_plot_path.exists()
    assert list((tmp_path / "tb" / "tiny").glob("events*"))
    assert list((tmp_path / "elsewhere" / "wandb").glob("offline-run-*-abcd"))
    with build_tracker(run, 2, use_tensorboard=True, progress="none") as tracker:
        tracker.log(2, STEP)
    assert list((run.path / "tensorboard").glob("events*"))
    assert "step 2/2 | reward 0.500" in capsys.readouterr().out
