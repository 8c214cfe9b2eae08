from __future__ import annotations

import asyncio
import time

from local_gang import Rig, make_task, processes_of, wait_for

from broker.types import NodeState, RunStatus, Secret


def test_two_nodes_set_up_then_run_with_their_environment(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(2)
        run = 'echo "run $SKYPILOT_NODE_RANK/$SKYPILOT_NUM_NODES $(echo "$SKYPILOT_NODE_IPS" | wc -l) $OMP_NUM_THREADS $A $B"'
        task = make_task(
            run,
            setup="echo setup $SKYPILOT_NODE_RANK",
            num_nodes=2,
            envs={"A": "a"},
            secrets={"B": Secret(value="hush")},
        )
        before = time.monotonic()
        await rig.start(cluster, task)
        await rig.wait_log(cluster, "setup 0")
        print(f"gang start to first line {time.monotonic() - before:.3f} s")
        report = await rig.finish(cluster)
        assert (report.status, report.returncode) == (RunStatus.SUCCEEDED, 0), report
        log = await rig.read_log(cluster)
        assert "run 0/2 2 1 a hush\n" in log
        assert "(rank1) run 1/2 2 1 a hush\n" in log
        lines = log.splitlines()
        assert max(i for i, line in enumerate(lines) if "setup" in line) < min(
            i for i, line in enumerate(lines) if "run " in line
        )

    asyncio.run(act())


def test_one_failing_rank_ends_the_others_and_gives_its_code(rig: Rig) -> None:
    async def act() -> None:
        cluster = await rig.make_cluster(2)
        await rig.start(cluster, make_task('[ "$SKYPILOT_NODE_RANK" = 1 ] && exit 7; sleep 1000', num_nodes=2))
        report = await rig.finish(cluster)
        assert (report.status, report.returncode) == (RunStatus.FAILED, 7), report

    asyncio.run(act())
