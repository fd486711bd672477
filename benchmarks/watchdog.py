"""What the beats cost a step: one sign of progress (a collective entered or left), and one look of the launcher at a page.

`watchdog_overhead_percent`: ten signs in a step of 100 ms. Part of benchmarks.recover too.
"""

from __future__ import annotations

import os
import statistics
import time

from benchmarks.measure import Report, options

from holdfast.checkpoint.liveness import heartbeat_page

SIGNS_PER_STEP, STEP_S = 10, 0.1


def measure(quick: bool) -> dict[str, float]:
    """The figures."""
    rounds = 20 if quick else 200
    fd = heartbeat_page.make_page()
    writer = heartbeat_page.Writer(fd)
    costs = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(500):
            writer.leave(writer.enter(b"all_reduce"))
        costs.append((time.perf_counter() - began) / 1000)
    reads = []
    for _ in range(rounds):
        began = time.perf_counter()
        heartbeat_page.read(fd)
        reads.append(time.perf_counter() - began)
    writer.close()
    os.close(fd)
    sign = statistics.median(costs)
    return {
        "sign_us": round(1e6 * sign, 3),
        "read_us": round(1e6 * statistics.median(reads), 1),
        "watchdog_overhead_percent": round(100 * SIGNS_PER_STEP * sign / STEP_S, 4),
    }


def main() -> None:
    given = options("watchdog", "What the beats cost a step.").parse_args()
    report = Report("watchdog", given.quick, given.json)
    figures = measure(given.quick)
    report.figure("watchdog_overhead_percent", figures["watchdog_overhead_percent"], "%", "<= 0.1")
    report.figure("sign_us", figures["sign_us"], "us")
    report.figure("read_us", figures["read_us"], "us")
    report.save()


if __name__ == "__main__":
    main()
