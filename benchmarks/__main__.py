"""``python -m benchmarks [NAME…] [--quick] [--json]``: measure against the budgets and print one table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

from benchmarks.row import Row
from example_app.services import RedisServer


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="./run bench", description="Measure what the guards cost, against the budgets.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="round-trips, dispatch, drain, memory, worker; default: all")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work: for a look, not for a judgement")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    chosen = parser.parse_args()
    with RedisServer("--databases", "16") as server:
        os.environ["BENCH_REDIS"] = server.url(0).rsplit("/", 1)[0]
        from benchmarks import suites

        known: dict[str, Callable[[RedisServer, bool], Iterator[Row]]] = suites.SUITES
        unknown = [name for name in chosen.names if name not in known]
        if unknown:
            parser.error(f"unknown benchmark {unknown[0]!r}; there are {', '.join(known)}")
        rows: list[Row] = []
        for name in chosen.names or known:
            print(f"{name} …", file=sys.stderr, flush=True)
            rows += known[name](server, chosen.quick)
    if chosen.json:
        print(json.dumps([{**asdict(row), "kept": row.kept} for row in rows], indent=2))
    else:
        _table(rows)
    return 1 if any(row.kept is False for row in rows) else 0


def _table(rows: list[Row]) -> None:
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  {'measured':>12}  {'budget':>9}")
    for row in rows:
        mark = {True: "kept", False: "MISSED", None: ""}[row.kept]
        print(f"{row.name:{width}}  {row.value:>9.3g} {row.unit:<6} {row.budget:>6}  {mark:6} {row.note}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
