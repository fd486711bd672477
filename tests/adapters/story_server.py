"""Lives of a story as forks of a process that has loaded everything. Not a test itself."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable

import torch


def serve(main: Callable[[list[str]], None]) -> None:
    """Makes a life for each line of standard input: JSON of words, environment, file for output. Answers with its exit status."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        words, environment, output = json.loads(line)
        if pid := os.fork():
            _, status = os.waitpid(pid, 0)
            sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
            sys.stdout.flush()
            continue
        code = 1
        try:
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.environ.update(environment)
            main(words)
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:  # noqa: BLE001 - told, and the exit code says so
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
