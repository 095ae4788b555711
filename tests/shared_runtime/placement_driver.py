"""A small driver for test_placement_lifetime: two workers, one of them with a child process, busy for a long time."""

import json
import subprocess
import sys
import time
from pathlib import Path

from shared_runtime.placement.cluster import ray_cluster
from shared_runtime.placement.layout import Pool, lay_out
from shared_runtime.placement.ray_group import RayWorkerGroup


class Busy:
    def start_child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def compute(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(10_000))


def main(report: Path, logs: Path) -> None:
    with ray_cluster(lay_out([Pool((1,), {"actor": 1, "rollout": 1})]), keep_logs_in=logs) as cluster:
        groups = [RayWorkerGroup(Busy, [{}], cluster=cluster, role=role) for role in ("actor", "rollout")]
        pids = [pid for group in groups for pid in group.pids()]
        child = groups[0].call("start_child")[0]
        assert cluster.session_dir is not None
        text = json.dumps({"pids": pids, "child": child, "temp_dir": str(cluster.session_dir.parent)})
        report.with_suffix(".tmp").write_text(text)
        report.with_suffix(".tmp").rename(report)
        groups[1].wait(groups[0].start("compute", 600.0) + groups[1].start("compute", 600.0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
