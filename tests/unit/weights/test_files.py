"""Updates through files: equal to what was sent to the bit, whole or not at all, named when damaged, and removed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from mcore_rl.errors import ConfigError, PeerLostError, StorageError, WeightSyncError
from mcore_rl.remote.shared_folder import SharedFolder
from mcore_rl.weights.connection import Connection, TrainerSetup
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.arrival import Rendezvous
from mcore_rl.weights.transports.files.channel import FileChannel
from mcore_rl.weights.transports.files.run_files import RunFiles
from mcore_rl.weights.verify import compare
from model_converters.mapping.layout import TrainLayout
from tests.unit.weights import transfer
from tests.unit.weights.delivery import Taken, Tensors, check_taken, trainer_tensors
from tests.unit.weights.delta.test_updates import EDITS, bits, everything, nothing
from tests.unit.weights.test_lost_peers import CountedTensors
from tests.unit.weights.test_slices import random_checkpoint
from tests.unit.weights.test_transfer import (
    CASES,
    DENSE,
    check_update,
    checkpoint_of,
    drain,
    held_by,
    ignore,
)
from tests.unit.weights.transfer import Processes, connected, fork_server, receive_digests, sync_plan, update

BUCKET = "memory://bucket/weights"


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return transfer.store()


def files_plan(case: str = "engine elsewhere", **settings: Any) -> SyncPlan:
    return sync_plan(*CASES[case], transport="files", **settings)


def begun(directory: Path | str) -> str:
    """Return the URL of the folder of a new connection."""
    return RunFiles(f"{directory}/run").begin_connection(1)


def files_in(folder: str) -> list[str]:
    """Return the names of all files below a folder, without that of the driver."""
    root = Path(folder)
    return sorted(str(each.relative_to(root)) for each in root.rglob("*") if each.is_file() and each.name != "shared")


def send(processes: Processes, held: list[Tensors]) -> None:
    """Send an update; no engine takes part."""
    transfer.at_once([partial(sender.send, own) for sender, own in zip(processes.senders, held, strict=True)])


def until_fetched(receiver: SliceReceiver) -> None:
    while not receiver.is_fetched():
        time.sleep(0.01)


def taken_from(receiver: SliceReceiver) -> Taken:
    taken: Taken = {}
    receiver.begin()
    for sync_round in range(receiver.num_rounds):
        receiver.receive(sync_round, lambda name, start, box: taken.setdefault(name, []).append((start, box.clone())))
    receiver.finish()
    return taken


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_three_updates_arrive_exactly(store: dist.TCPStore, case: str, num_slots: int, tmp_path: Path) -> None:
    plan = files_plan(case, num_slots=num_slots)
    assert plan.num_rounds > 3
    with connected(plan, store, folder=begun(tmp_path)) as processes:
        for seed in range(3):
            check_update(processes, seed)


def test_two_updates_arrive_exactly_through_an_object_store(store: dist.TCPStore, bucket: MemoryFileSystem) -> None:
    with connected(files_plan(), store, folder=begun(BUCKET)) as processes:
        for seed in range(2):
            check_update(processes, seed)
    assert bucket.find("/bucket/weights/run/1")


def test_update_is_fetched_before_it_begins(store: dist.TCPStore, tmp_path: Path) -> None:
    """A receiver that has fetched an update needs neither the files nor the trainer ranks, and has not begun it."""
    plan, folder = files_plan("two engines read one buffer"), begun(tmp_path)
    checkpoint = checkpoint_of(plan, 1)
    with connected(plan, store, folder=folder) as processes:
        for receiver in processes.receivers:
            receiver.fetch()
            assert not receiver.is_fetched()
        send(processes, held_by(plan, checkpoint))
        for receiver in processes.receivers:
            until_fetched(receiver)
        shutil.rmtree(folder)
        taken = [taken_from(receiver) for receiver in processes.receivers]
    check_taken(taken, checkpoint, DENSE, plan.engine_layout)


def test_one_file_serves_all_engines(store: dist.TCPStore, tmp_path: Path) -> None:
    one, three = (
        sync_plan(DENSE, TrainLayout(2, pp=2), EngineLayout(tp=2), "AA", engines, transport="files")
        for engines in ("BB", "BCDDEE")
    )
    assert [buffer.readers for buffer in three.topology.buffers] == [(0, 2, 4), (1, 3, 5)]
    sizes = []
    for name, plan in (("one", one), ("three", three)):
        folder = begun(tmp_path / name)
        with connected(plan, store, folder=folder) as processes:
            check_update(processes, 3)
        sizes.append({name: (Path(folder) / name).stat().st_size for name in files_in(folder)})
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("case", ["two engines read one buffer", "all kinds"])
def test_delta_through_files_equals_whole_messages(store: dist.TCPStore, case: str, tmp_path: Path) -> None:
    plans = [files_plan(case, delta=delta) for delta in (False, True)]
    checkpoint, folders = checkpoint_of(plans[0], 1), [begun(tmp_path / name) for name in ("whole", "delta")]
    with ExitStack() as stack:
        whole, delta = (
            stack.enter_context(connected(plan, store, folder=folder))
            for plan, folder in zip(plans, folders, strict=True)
        )
        for transfer_number, edit in enumerate((nothing, *EDITS)):
            edit(checkpoint)
            held = held_by(plans[0], checkpoint)
            expected, received = (update(processes, held) for processes in (whole, delta))
            assert bits(received[0]) == bits(expected[0])
            assert received[1] == expected[1]
            sizes = [
                sum(path.stat().st_size for path in Path(folder).rglob(f"{transfer_number}.*.weights.*"))
                for folder in folders
            ]
            assert sizes[1] == sum(sender.delta_bytes.sent for sender in delta.senders)
            assert (sizes[1] < sizes[0] / 5) == (transfer_number > 0 and edit is not everything)


def test_delta_after_a_lost_update_is_refused(store: dist.TCPStore, tmp_path: Path) -> None:
    """A receiver that missed an update cannot take the next one."""
    plan, folder = files_plan(delta=True), begun(tmp_path)
    with connected(plan, store, folder=folder) as processes:
        held = held_by(plan, checkpoint_of(plan, 1))
        send(processes, held)
        send(processes, held)
        for name in files_in(folder):  # the first update is lost
            path = Path(folder) / name
            if path.name.startswith("1."):
                manifest = path.read_bytes()
                target = path.with_name(f"0{path.name[1:]}")
                target.write_bytes(manifest.replace(b"0/1.", b"0/0.") if path.suffix == ".json" else manifest)
        with pytest.raises(WeightSyncError, match=r"is based on version 1, but version 0 is held"):
            drain(processes.receivers[0])


@pytest.mark.parametrize("delta", [False, True])
def test_slow_engine_reads_an_update_while_the_next_one_is_written(
    store: dist.TCPStore, delta: bool, tmp_path: Path
) -> None:
    """Removals begin with the write of the update after the next one, which waits for all engines."""
    plan, folder = files_plan("two engines read one buffer", delta=delta), begun(tmp_path)
    checkpoints = [checkpoint_of(plan, seed) for seed in range(4)]
    with connected(plan, store, folder=folder) as processes:
        fast, slow = processes.receivers
        send(processes, held_by(plan, checkpoints[0]))
        check_taken([taken_from(fast)], checkpoints[0], DENSE, plan.engine_layout)
        for number in (1, 2, 3):
            calls: list[Callable[[], Any]] = [partial(taken_from, slow)]
            calls += [
                partial(sender.send, own)
                for sender, own in zip(processes.senders, held_by(plan, checkpoints[number]), strict=True)
            ]
            late = transfer.at_once(calls)[0]
            check_taken([late], checkpoints[number - 1], DENSE, plan.engine_layout)
            check_taken([taken_from(fast)], checkpoints[number], DENSE, plan.engine_layout)


def test_file_that_another_job_has_removed_ends_no_update(store: dist.TCPStore, tmp_path: Path) -> None:
    plan, folder = files_plan(), begun(tmp_path)
    with connected(plan, store, folder=folder) as processes:
        check_update(processes, 0)
        next(Path(folder).rglob("0.*.weights.0")).unlink()
        for seed in (1, 2, 3):
            check_update(processes, seed)
        assert not list(Path(folder).rglob("0.*"))


def test_files_of_two_transfers_are_kept(store: dist.TCPStore, tmp_path: Path) -> None:
    plan, folder = files_plan(), begun(tmp_path)
    kept = []
    with connected(plan, store, folder=folder) as processes:
        for seed in range(4):
            check_update(processes, seed)
            kept.append({int(Path(name).name.partition(".")[0]) for name in files_in(folder)})
    assert kept == [{0}, {0, 1}, {1, 2}, {2, 3}]


def test_digests_cover_all_tensors_and_detect_changes(store: dist.TCPStore, tmp_path: Path) -> None:
    plan = files_plan("two engines read one buffer")
    with connected(plan, store, folder=begun(tmp_path)) as processes:
        for seed in range(2):  # digests between two updates
            check_update(processes, seed)
            checkpoint = checkpoint_of(plan, seed)
            whole = {name: value for name, value in checkpoint.items() if "rotary" not in name}
            boxes = {name: (((0,) * value.dim(), tuple(value.shape)),) for name, value in whole.items()}
            name = "model.layers.1.self_attn.k_proj.weight"
            changed = whole | {name: whole[name] + torch.nn.functional.pad(torch.ones(1, 1), (3, 28, 5, 26))}
            for of_rank in receive_digests(processes, held_by(plan, checkpoint)):
                found = compare(of_rank, whole.items(), boxes)
                assert (found.differing, found.missing, found.unknown) == (set(), set(), set())
                assert compare(of_rank, changed.items(), boxes).differing == {name}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], None], str, type[Exception], str]] = {
    "truncated": (truncate, "0/0.*.weights.1", WeightSyncError, r"weights\.1 has \d+ bytes instead of \d+"),
    "changed": (flip, "0/0.*.weights.1", WeightSyncError, r"weights\.1 has another content than was written"),
    "vanished": (Path.unlink, "0/0.*.weights.1", StorageError, r"weights\.1: FileNotFoundError: "),
    "cut manifest": (truncate, "0/complete/0.*.json", WeightSyncError, r"0/complete/0\.\d\.json is damaged: "),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_named_and_breaks_the_receiver(store: dist.TCPStore, damage: str, tmp_path: Path) -> None:
    change, pattern, error, message = DAMAGES[damage]
    plan, folder = files_plan(), begun(tmp_path)
    with connected(plan, store, folder=folder) as processes:
        send(processes, held_by(plan, checkpoint_of(plan, 1)))
        change(next(Path(folder).glob(pattern)))
        receiver = processes.receivers[0]
        receiver.fetch()
        with pytest.raises(error, match=message):
            until_fetched(receiver)
        with pytest.raises(WeightSyncError, match="broken"):
            receiver.begin()


MANIFEST = 2.0
"""Share of an update after which all files are written, and the manifest is not."""


def die_before_manifest(folder: SharedFolder) -> None:
    put = folder.put

    def put_or_die(name: str, data: memoryview) -> None:
        if "/complete/" in name:
            os.kill(os.getpid(), signal.SIGKILL)
        put(name, data)

    folder.put = put_or_die  # type: ignore[method-assign]


def send_and_die(plan: SyncPlan, folder: str, share: float) -> None:
    """Send an update as trainer rank 1, and die after `share` of it."""
    sender = TrainerSetup(plan, 1).connect(Connection(plan, Rendezvous("", 0, 0), {}, 1.0, folder))
    if share == MANIFEST:
        die_before_manifest(cast("FileChannel", sender._channels.host)._folder)
    num_slices = sum(len(message.slices) for of_round in plan.outgoing(1).values() for message in of_round)

    def on_access(done: int) -> None:
        if done >= int(share * (num_slices - 1)):
            os.kill(os.getpid(), signal.SIGKILL)

    held = trainer_tensors(plan.rows, plan.train_layout, 1, random_checkpoint(plan.rows, 1))
    sender.send(CountedTensors(held, on_access))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, MANIFEST])
def test_killed_sender_leaves_nothing_to_take_and_is_named(store: dist.TCPStore, share: float, tmp_path: Path) -> None:
    plan, files = files_plan(), RunFiles(f"{tmp_path}/run")
    folder = files.begin_connection(1)
    child = fork_server().Process(target=send_and_die, args=(plan, folder, share))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    written = {name for name in files_in(folder) if "/0.1.weights." in name}
    assert bool(written) == (share > 0)
    if share == MANIFEST:
        assert len(written) == sum(map(len, plan.outgoing(1).values()))
    with connected(plan, store, timeout_seconds=1.0, folder=folder) as processes:
        processes.senders[0].send(held_by(plan, checkpoint_of(plan, 1))[0])
        assert [name for name in files_in(folder) if "complete" in name] == ["0/complete/0.0.json"]
        with pytest.raises(PeerLostError, match=r"^trainer rank 1 on A did not write .*/0/complete/0\.1\.json within"):
            drain(processes.receivers[0])
        with pytest.raises(WeightSyncError, match="broken"):
            processes.receivers[0].receive(0, ignore)
    with connected(plan, store, folder=files.begin_connection(2)) as processes:  # all processes connect again
        check_update(processes, 2)
    assert not Path(folder).exists()


def test_full_disk_is_named_by_the_sender(
    store: dist.TCPStore, small_disk: Callable[[str], Path], tmp_path: Path
) -> None:
    plan, folder = files_plan(), begun(small_disk("300k"))
    with connected(plan, store, folder=folder) as processes:
        message = r"^weights\.directory: .*/1/0/0\.(\d)\.weights\.\d+: OSError: .*No space"
        with pytest.raises(StorageError, match=message) as caught:
            send(processes, held_by(plan, checkpoint_of(plan, 1)))
        found = re.match(message, str(caught.value))
        assert found
        # Another sender may be complete.
        assert f"0/complete/0.{found[1]}.json" not in files_in(folder)
        assert not [name for name in files_in(folder) if name.endswith(".part")]


def test_process_that_does_not_see_the_folder_is_named(store: dist.TCPStore, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"^weights\.directory: .* does not see the files of the driver in .*; set "),
        connected(files_plan(), store, folder=f"{tmp_path}/elsewhere"),
    ):
        pass


def test_weights_import_no_configuration() -> None:
    """SGLang's ranks import this module in an environment without OmegaConf."""
    code = "import sys, mcore_rl.weights.connection; sys.exit('omegaconf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
