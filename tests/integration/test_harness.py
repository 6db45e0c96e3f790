"""The test harness keeps its own promises: nothing outlives a test, nothing is somebody else's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from example_app import reaper
from tests.services import Proc, RedisServer, ServiceUnavailable, redis_binary, wait_until

BASIC = "tests.services.basic"

ORPHANS = """
import sys, time
from pathlib import Path
from example_app.processes import Proc
from example_app.services import RedisServer
server = RedisServer()
script = "import os, time; print(os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '300'), flush=True); time.sleep(300)"
other = Proc([sys.executable, "-c", script], server.directory / "other")
other.start()
while not other.log().strip():
    time.sleep(0.01)
print(server.pid, other.pid, other.log().strip(), server.directory, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_killed_owner(number, tmp_path):
    """However the process that started services dies, they, their children and their directories are gone."""
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout
        *numbers, directory = owner.stdout.readline().split()
        pids = [int(number) for number in numbers]
        assert len(pids) == 3
        assert all(reaper.start_time(pid) for pid in pids)
        owner.send_signal(number)
        owner.wait(30)
    wait_until(lambda: not any(reaper.start_time(pid) for pid in pids), 30, "processes gone")
    wait_until(lambda: not Path(directory).exists(), 30, "directory gone")


def test_members_of_a_group_die_after_their_leader(tmp_path):
    """A leader that was killed before does not save its children from the reaper."""
    pid_file = tmp_path / "pid"
    child = f"import subprocess, pathlib; pathlib.Path({str(pid_file)!r}).write_text(str(subprocess.Popen(['sleep', '300']).pid) + '.')"
    leader = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("."), 30)
    began = reaper.start_time(leader.pid) or "0"
    leader.wait(30)
    orphan = int(pid_file.read_text().rstrip("."))
    assert reaper.start_time(orphan)
    estate = reaper.Estate()
    estate.obey(f"+P {leader.pid} {began}\n")
    estate.settle()
    wait_until(lambda: reaper.start_time(orphan) is None, 30, "orphan gone")


def test_reaper_spares_a_stranger_with_a_known_pid():
    """A pid that now belongs to another process is not killed."""
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as stranger:
        estate = reaper.Estate()
        estate.obey(f"+P {stranger.pid} 1\n")
        estate.settle()
        assert stranger.poll() is None
        stranger.kill()


def test_reaper_ignores_broken_orders():
    """A line that is cut off by the death of its writer does no harm."""
    estate = reaper.Estate()
    for line in ("+P", "+P x y", "-P 1", "?? 3", ""):
        estate.obey(line)
    assert not estate.groups
    assert not estate.directories


def test_redis_server_answers_on_both_addresses(private_redis):
    """A server is up when its constructor returns, on TCP and on the unix socket, with the pid it tells."""
    server = private_redis()
    with redis.Redis.from_url(server.url(3)) as client:
        client.set("a", 1)
        assert client.info("server")["process_id"] == server.pid
    with redis.Redis(unix_socket_path=server.unix_socket, db=3) as client:
        assert client.get("a") == b"1"


def test_redis_server_gives_up_on_a_taken_port():
    """A port that another server holds is an error, never a connection to that other server."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ServiceUnavailable, match="did not start on port"):
            RedisServer(port=other.getsockname()[1])


def test_redis_server_restarts_empty_or_full(private_redis):
    """A restart keeps the port, and the data only if asked to."""
    server = private_redis()
    port, pid = server.port, server.pid
    with redis.Redis.from_url(server.url()) as client:
        client.set("a", 1)
        server.restart(empty=False)
        assert client.get("a") == b"1"
        server.restart()
        assert client.get("a") is None
    assert server.port == port
    assert server.pid != pid


def test_redis_server_can_be_paused_and_killed(private_redis):
    """A paused server does not answer, a resumed one does, a killed one refuses."""
    server = private_redis()
    server.pause()
    with redis.Redis.from_url(server.url(), socket_timeout=0.2, retry=None) as client, pytest.raises(redis.TimeoutError):
        client.ping()
    server.resume()
    assert wait_until(server.answers)
    server.kill()
    with redis.Redis.from_url(server.url(), retry=None) as client, pytest.raises(redis.ConnectionError):
        client.ping()
    server.start_again()
    assert server.answers()


def test_redis_server_takes_arguments(private_redis):
    """Password, memory limit and replication are up to the test."""
    primary = private_redis("--requirepass", "x", "--maxmemory", "20mb", "--repl-diskless-sync-delay", "0")
    replica = private_redis("--replicaof", "127.0.0.1", str(primary.port), "--masterauth", "x")
    with redis.Redis(port=primary.port, password="x") as client:
        assert int(client.config_get("maxmemory")["maxmemory"]) == 20 * 1024 * 1024
        client.set("a", 1)
    with redis.Redis(port=replica.port) as client:
        assert wait_until(lambda: client.get("a"), 30) == b"1"


def test_unknown_redis_program_is_named(monkeypatch):
    """A wrong CELERY_GUARD_REDIS_SERVER is told, not silently replaced."""
    monkeypatch.setenv("CELERY_GUARD_REDIS_SERVER", "/nowhere/redis")
    with pytest.raises(ServiceUnavailable, match="/nowhere/redis"):
        redis_binary()


def test_databases_do_not_leak_between_tests(redis_url):
    """Every test starts with an empty database; parts of one test's data are not seen by another."""
    if os.environ.get("CELERY_GUARD_REDIS_URL"):
        pytest.skip("a foreign server is used as it is")
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0


def test_proc_reports_its_log_when_it_does_not_end(tmp_path):
    """A process that ignores the signal is named with its output, and killed."""
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)"
    process = Proc([sys.executable, "-c", script], tmp_path / "log").start()
    wait_until(lambda: "deaf" in process.log())
    with pytest.raises(TimeoutError, match="deaf"):
        process.stop(timeout=0.1)
    assert process.returncode == -signal.SIGKILL


def test_wait_until_tells_what_it_waited_for():
    """A failed wait names the condition; a met one returns its value."""
    with pytest.raises(TimeoutError, match="the moon"):
        wait_until(lambda: False, 0.01, "the moon")
    assert wait_until(lambda: [1]) == [1]


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
def test_worker_runs_tasks_of_the_app_of_the_test(pool, app_factory, worker_factory):
    """A worker and the test build the same app from one module, whatever the pool."""
    app = app_factory(BASIC)
    worker = worker_factory(BASIC, pool=pool)
    child, parent = app.tasks[f"{BASIC}.pids"].delay().get(timeout=30)
    assert (parent if pool == "prefork" else child) == worker.pid
    assert worker.hostname in app.control.ping(destination=[worker.hostname])[0]


def test_worker_children_can_be_killed_and_are_replaced(app_factory, worker_factory):
    """``child_pids`` lists the pool's processes; the worker makes up for a killed one."""
    app = app_factory(BASIC)
    worker = worker_factory(BASIC, concurrency=1)
    pids = app.tasks[f"{BASIC}.pids"]
    child, _ = pids.delay().get(timeout=30)
    assert worker.child_pids() == [child]
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: worker.child_pids() not in ([], [child]), 60, worker.tail)
    assert pids.delay().get(timeout=60)[0] != child


def test_a_killed_worker_starts_again_and_gets_its_task_back(app_factory, worker_factory, tmp_path):
    """SIGKILL of the group ends main and children; a late-acked task comes back after the visibility timeout."""
    app = app_factory(BASIC)
    worker = worker_factory(BASIC, concurrency=1)
    log, go = tmp_path / "log", tmp_path / "go"
    result = app.tasks[f"{BASIC}.hold"].delay(str(log), str(go))
    wait_until(lambda: log.exists() and "start" in log.read_text(), 30, worker.tail)
    children = worker.child_pids()
    worker.kill(group=True)
    assert worker.wait() == -signal.SIGKILL
    wait_until(lambda: not any(reaper.start_time(pid) for pid in children), 30, "children gone")
    go.touch()
    worker.start().wait_ready()
    assert result.get(timeout=60) == "done"
    assert log.read_text().count("start") == 2
    assert log.read_text().count("end") == 1


def test_worker_stops_warm(worker_factory):
    """A worker without work ends by SIGTERM with exit code 0."""
    worker = worker_factory(BASIC, pool="solo")
    assert worker.stop() == 0


def test_a_worker_that_cannot_start_says_why(worker_factory):
    """The end of the log is in the error."""
    with pytest.raises(RuntimeError, match="no_such_module"):
        worker_factory("tests.no_such_module")
