"""Variables of another launcher's start scripts, and caches of compiled code that travel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forked
from holdfast.base.config import ALIASES, aliases
from holdfast.base.errors import UsageError
from holdfast.elastic.launch import compile_cache, run_flags
from holdfast.elastic.launch.compile_cache import MAX_ARCHIVES, CompileCache, make_cache, pack, unpack
from holdfast.elastic.launch.foreign_launcher_env import read
from holdfast.tiers.backends.local import LocalBackend
from launch_kit import Job, kill_tree, wait_for

WORKER = {
    "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "8", "MS_NODE_ID": "3", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118",
    "MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": "/ckpts/run1",
}  # fmt: skip


def test_a_worker_of_a_start_script_becomes_a_node_with_one_rank() -> None:
    found = read(aliases(environ={**WORKER, "OTHER": "x", "MS_COMPILER_CACHE_PATH": ""}))
    parser = run_flags.build_parser()
    parser.set_defaults(**found.defaults)
    args = parser.parse_args(["train.py"])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("8", "1", "c10d")
    assert (args.rdzv_endpoint, args.checkpoint_dir) == ("127.0.0.1:8118", "/ckpts/run1")
    assert (args.holdfast_node_label, args.local_addr) == ("worker-3", "127.0.0.4")
    assert "MS_WORKER_NUM=8 is taken as --nnodes=8" in found.notes
    assert not found.scheduler
    assert parser.parse_args(["--nnodes=2", "train.py"]).nnodes == "2", "flags win"


def test_roles_numbers_and_switches() -> None:
    assert read({"MS_ROLE": "MS_SCHED", "MS_SCHED_HOST": "h", "MS_WORKER_NUM": "2"}).scheduler
    assert read({"MS_ENABLE_RECOVERY": "0"}).defaults == {"max_restarts": 0}
    assert read({"MS_COMPILER_CACHE_ENABLE": "1", "MS_COMPILER_CACHE_PATH": "/c"}).defaults == {"compile_cache": "/c"}
    assert read({"MS_COMPILER_CACHE_ENABLE": "0"}).defaults == {"compile_cache": "off"}
    assert read({}).defaults == {}
    for wrong in ({"MS_ROLE": "MS_PSERVER"}, {"MS_WORKER_NUM": "many"}):
        with pytest.raises(UsageError):
            read(wrong)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_guides_scripts_start_a_cluster_and_bring_one_worker_back(tmp_path: Path, runtime_dir: Path) -> None:
    """run.sh starts a scheduler and two workers; one worker is killed, recover.sh starts it again; the job goes on."""
    job = Job(tmp_path)
    port = str(20000 + os.getpid() % 20000)
    environment = {name: value for name, value in os.environ.items() if name not in ALIASES}
    environment |= {
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": port,
        "MS_WORKER_NUM": "2",
        "MS_ENABLE_RECOVERY": "1",
    }
    command = f"{sys.executable} -m holdfast.elastic.launch.run_command"
    script = Path(__file__).with_name("elastic_worker.py")

    def start(role: str, node: int | None = None) -> subprocess.Popen[str]:
        more = {"MS_ROLE": role} | ({"MS_NODE_ID": str(node)} if node is not None else {})
        log = (tmp_path / f"launcher{len(job.launchers)}.log").open("w")
        with log:
            launcher = subprocess.Popen(
                ["bash", "-c", f"exec {command} {script} {tmp_path}"],
                env={**environment, **more}, stdout=log, stderr=log, text=True,
            )  # fmt: skip
        job.launchers.append(launcher)
        return launcher

    try:
        scheduler = start("MS_SCHED")
        workers = [start("MS_WORKER", node) for node in range(2)]
        first = job.running(2)
        kill_tree(workers[1])
        workers[1] = start("MS_WORKER", 1)

        def returned() -> list[tuple[int, int, int]] | None:
            rows = job.ranks(2)
            return rows if rows and rows[1][0] != first[1][0] and rows[1][2] >= 10 else None

        again = wait_for(returned, "the return of worker 1", job.logs)
        assert again[0][0] == first[0][0], "the other worker waited"  # type: ignore[index]
        job.stop()
        assert [worker.wait(60) for worker in workers] == [0, 0], job.logs()
        assert scheduler.wait(60) == 0
    finally:
        job.end()


def test_an_archive_travels_and_a_damaged_one_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "kept"
    environ: dict[str, str] = {}
    first = CompileCache(str(root), tmp_path / "a", environ)
    assert first.fetch() == 0
    assert caplog.text == "", "a first start is nothing to warn of"
    assert environ["TORCHINDUCTOR_CACHE_DIR"] == str(first.directory / "inductor")
    code = first.directory / "inductor" / "xy" / "kernel.so"
    code.parent.mkdir(parents=True)
    code.write_bytes(b"\x7fELF")
    code.chmod(0o700)
    (code.parent / "x.lock").touch()
    assert (first.keep(), first.keep()) == (1, 0)
    second = CompileCache(str(root), tmp_path / "b", {})
    assert second.fetch() == 1
    copy = second.directory / "inductor" / "xy" / "kernel.so"
    assert (copy.read_bytes(), os.access(copy, os.X_OK)) == (b"\x7fELF", True)
    assert second.keep() == 0, "what came from there need not go back"
    other = CompileCache(str(root), tmp_path / "c", {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"})
    assert (other.key != first.key, other.fetch()) == (True, 0), "other flags, other code"
    (archive,) = (root / first.key).iterdir()
    archive.write_bytes(archive.read_bytes()[:-1] + b"?")
    assert CompileCache(str(root), tmp_path / "d", {}).fetch() == 0


def test_with_a_secret_only_who_has_it_spreads_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, secret = str(tmp_path / "kept"), b"s" * 32
    for name, said in (("stranger", b""), ("ours", secret)):
        cache = CompileCache(root, tmp_path / name, {}, secret=said)
        cache.fetch()
        code = cache.directory / "inductor" / name
        code.parent.mkdir(parents=True)
        code.write_bytes(b"code")
        assert cache.keep() == 1
    second = CompileCache(root, tmp_path / "second", {}, secret=secret)
    assert second.fetch() == 1
    assert {path.name for path in second.directory.rglob("*") if path.is_file()} == {"ours"}
    assert "not of a process with this job's secret" in caplog.text


def test_what_a_run_without_the_secret_fetched_is_neither_used_nor_signed(tmp_path: Path) -> None:
    root, secret = tmp_path / "kept", b"s" * 32
    stranger = CompileCache(str(root), tmp_path / "elsewhere", {})
    stranger.fetch()
    compiled(stranger, "evil")
    assert stranger.keep() == 1
    assert CompileCache(str(root), tmp_path / "node", {}).fetch() == 1, "a run of ours without a secret"
    ours = CompileCache(str(root), tmp_path / "node", {}, secret=secret)
    assert (ours.fetch(), list(ours.directory.rglob("evil")), ours.keep()) == (0, [], 0)
    compiled(ours, "good")
    other = CompileCache(str(root), tmp_path / "node", {}, secret=b"t" * 32)
    assert (other.fetch(), list(other.directory.rglob("good"))) == (0, []), "nor of a run with another one"
    assert list(CompileCache(str(root), tmp_path / "node", {}, secret=secret).directory.rglob("good"))


def test_archives_are_proved_before_they_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sparse file costs who makes it nothing, and who reads it whole its memory."""
    cache = CompileCache(str(tmp_path / "kept"), tmp_path / "node", {}, secret=b"s" * 32)
    (tmp_path / "kept" / cache.key).mkdir(parents=True)
    for number, size in enumerate((64 << 20, 3, 2, 1)):
        file = tmp_path / "kept" / cache.key / f"{number:032x}.cache"
        file.touch()
        os.truncate(file, size)
    real, asked = LocalBackend.read_into, []

    def read_into(backend: LocalBackend, name: str, view: memoryview, *, offset: int = 0) -> int:
        asked.append((name[-7:], len(view)))
        return real(backend, name, view, offset=offset)

    monkeypatch.setattr(LocalBackend, "read_into", read_into)
    monkeypatch.setattr(LocalBackend, "read", None)
    assert cache.fetch() == 0
    assert "not of a process with this job's secret" in caplog.text
    assert max(size for _, size in asked) == compile_cache.PIECE_BYTES
    asked.clear()
    monkeypatch.setattr(compile_cache, "MAX_READ", 2)
    assert cache.fetch() == 0
    assert [size for _, size in asked] == [1, 2], "the smallest"
    assert "2 of 4 archives" in caplog.text
    monkeypatch.setattr(compile_cache, "MAX_READ", 9)
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 4)
    asked.clear()
    assert cache.fetch() == 0
    assert [size for _, size in asked] == [1, 2]


@pytest.mark.parametrize(
    "head",
    [b"[" * 200_000, b'[["\\ud800",0,false]]', b'[["../x",0,false]]', b'[["/x",0,false]]', b"9" * 5000],
    ids=repr,
)
def test_an_archive_that_is_none_stops_no_job(tmp_path: Path, head: bytes) -> None:
    assert compile_cache.unpack(len(head).to_bytes(8, "little") + head) == []
    kept = CompileCache(str(tmp_path / "kept"), tmp_path / "a", {})
    directory = tmp_path / "kept" / kept.key
    directory.mkdir(parents=True)
    archive = len(head).to_bytes(8, "little") + head
    (directory / kept._name(archive)).write_bytes(archive)
    assert kept.fetch() == 0


def test_an_archive_without_bound_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 1000)
    cache = CompileCache(str(tmp_path / "kept"), tmp_path / "a", {})
    (tmp_path / "kept" / cache.key).mkdir(parents=True)
    (tmp_path / "kept" / cache.key / f"{'0' * 32}.cache").write_bytes(bytes(1001))
    assert cache.fetch() == 0
    assert "more than 1000 bytes" in caplog.text


def test_code_that_another_machine_or_version_made_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    here = compile_cache.key({})
    assert compile_cache.key({"TORCHINDUCTOR_CACHE_DIR": "/elsewhere", "HOME": "/x"}) == here
    foreign = {compile_cache.key({name: "1"}) for name in ("TRITON_INTERPRET", "CXX")}
    for owner, name, value in (
        (compile_cache.accelerator, "_models", lambda: ["Model: another"]),
        (compile_cache.accelerator, "_cards", lambda: ["0x10de:0x2330"]),
        (compile_cache, "_processor", lambda: "flags: fewer"),
        (compile_cache.torch, "__version__", "99.0"),
        (compile_cache.torch.version, "cuda", "99.0"),
        (compile_cache.platform, "machine", lambda: "another"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            foreign.add(compile_cache.key({}))
    assert len(foreign | {here}) == 9


def test_where_the_caches_lie_is_the_users_word_and_off_is_off(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": "/mine"}
    cache = make_cache(str(tmp_path / "kept"), tmp_path / "a", environ)
    assert cache is not None
    cache.fetch()
    assert environ == {"TRITON_CACHE_DIR": "/mine", "TORCHINDUCTOR_CACHE_DIR": str(cache.directory / "inductor")}
    other: dict[str, str] = {}
    CompileCache(str(tmp_path / "kept"), tmp_path / "a", other).fetch()
    assert other["TRITON_CACHE_DIR"] == str(cache.directory / "triton")
    assert make_cache("off", tmp_path, {}) is make_cache(None, tmp_path, {}) is None


# A script that has something compiled and waits until that is where the next node would look.
WAITS_FOR_ITS_ARCHIVE = """
import os, pathlib, sys, time
code = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "xy", "kernel.so")
code.parent.mkdir(parents=True)
code.write_bytes(b"code")
os.utime(code, (1, 1))
while not list(pathlib.Path({kept!r}).glob("*/*.cache")):
    time.sleep(0.02)
"""
AT_ONCE = """
import sys
from holdfast.elastic.launch import compile_cache, run_command, run_flags
compile_cache.CompileCache.start.__kwdefaults__["first_s"] = 0.05
sys.exit(run_command.main({flags!r}))
"""


def test_a_run_brings_what_it_compiles_to_storage_before_it_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WAITS_FOR_ITS_ARCHIVE.format(kept=str(tmp_path / "kept")))
    flags = ["--standalone", f"--runtime-dir={tmp_path / 'rt'}", f"--compile-cache={tmp_path / 'kept'}", str(script)]
    environment = {n: v for n, v in os.environ.items() if n not in compile_cache.DIRECTORIES}
    environment["MS_COMPILER_CACHE_PATH"] = str(tmp_path / "other")
    command = [sys.executable, "-c", AT_ONCE.format(flags=flags)]
    done = forked.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (tmp_path / "other").exists(), "flags win over the variables of another launcher"
    assert "MS_COMPILER_CACHE_PATH" in done.stderr, "a variable that has a meaning here is told"


def compiled(cache: CompileCache, name: str, *, age_s: float = 100.0) -> None:
    file = cache.directory / "inductor" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(name.encode())
    os.utime(file, (time.time() - age_s, time.time() - age_s))


def test_what_is_compiled_is_in_storage_while_the_job_runs(tmp_path: Path) -> None:
    """Nobody says that the job is over: the node may be killed at any moment."""
    first = CompileCache(str(tmp_path / "kept"), tmp_path / "a", {})
    first.fetch()
    compiled(first, "kernel.so")
    compiled(first, "half.so", age_s=0.0)
    first.start(first_s=0.05)

    def there() -> int:
        return CompileCache(str(tmp_path / "kept"), tmp_path / str(time.monotonic_ns()), {}).fetch()

    wait_for(there, "an archive", lambda: "")
    assert there() == 1, "a file that was being written went along"
    first.close()
    assert there() == 2


def test_many_small_archives_become_one_and_nothing_is_lost(tmp_path: Path) -> None:
    first = CompileCache(str(tmp_path / "kept"), tmp_path / "a", {})
    first.fetch()
    for number in range(MAX_ARCHIVES + 3):
        compiled(first, f"kernel{number}.so")
        assert first.keep(settled_s=10.0) == 1
    assert len(list((tmp_path / "kept" / first.key).iterdir())) <= MAX_ARCHIVES
    second = CompileCache(str(tmp_path / "kept"), tmp_path / "b", {})
    assert second.fetch() == MAX_ARCHIVES + 3


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", ""])
def test_no_name_leads_out_of_the_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1")
    assert unpack(pack({"fine": tmp_path / "f"})) == [("fine", b"1", False)]
    assert unpack(pack({"fine": tmp_path / "f", name: tmp_path / "f"})) == []
    assert unpack(b"") == unpack(b"\xff" * 99) == []


COMPILES = """
import sys, time, json, torch
sys.path.insert(0, {root!r})
if len(sys.argv) > 1: sys.exit(0)
net = torch.nn.Sequential(*[m for _ in range(6) for m in (torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.LayerNorm(32))])
step = torch.compile(lambda x: (net(x) * {factor}).sin().sum())
began = time.perf_counter()
step(torch.randn(8, 32)).backward()
open({out!r}, "w").write(json.dumps(time.perf_counter() - began))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_node_compiles_in_less_than_half_the_time(tmp_path: Path) -> None:
    """Two nodes one after the other, with nothing in common but the place where compiled code is kept."""

    def seconds(node: str, factor: int) -> float:
        script, out = tmp_path / f"{node}.py", tmp_path / f"{node}.json"
        script.write_text(COMPILES.format(root=str(tmp_path), factor=factor, out=str(out)))
        flags = [f"--compile-cache={tmp_path / 'kept'}", f"--runtime-dir={tmp_path / node}", "--nproc-per-node=1"]
        command = [sys.executable, "-m", "holdfast.elastic.launch.run_command", "--standalone", *flags, str(script)]
        environment = {n: v for n, v in os.environ.items() if n not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert answer.returncode == 0, answer.stderr[-2000:]
        return float(json.loads(out.read_text()))

    cold, warm, changed = seconds("one", 2), seconds("two", 2), seconds("three", 3)
    print(f"cold {cold:.2f} s, with the cache {warm:.2f} s, changed script {changed:.2f} s")
    assert warm < 0.5 * cold
    assert changed > warm
