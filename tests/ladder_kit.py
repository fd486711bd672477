"""The stage for stories about the escalation policy: failures and progress in, what is done about them out."""

from __future__ import annotations

from holdfast.core.elastic.escalation import EscalationPolicy, Failure, Fault, Limits

FAULTS = {"groups": Fault.GROUPS, "process": Fault.PROCESS, "node": Fault.NODE}


class Climbing:
    """One ladder."""

    def __init__(self) -> None:
        self._ladder = EscalationPolicy(Limits())

    def run(self, name: str, given: dict[str, str]) -> list[str]:
        """One command."""
        return list(getattr(self, f"do_{name}")(**given))

    def do_limits(self, **given: str) -> list[str]:
        values = {key: int(value) for key, value in given.items()}
        self._ladder = EscalationPolicy(Limits(**{**values, "renewed": bool(values.get("renewed", 1))}))
        return [f"at most {self._ladder.limits.failures} failures"]

    def do_failed(self, fault: str, rank: str = "-1", step: str = "-1", error: str = "", node: str = "") -> list[str]:
        answer = self._ladder.failed(Failure(FAULTS[fault], int(rank), int(step), error, node))
        return [f"{answer.action.value}{' with the older version' if answer.older else ''}: {answer.reason}"]

    def do_progressed(self) -> list[str]:
        self._ladder.progressed()
        return ["the next failure begins at the bottom"]

    def do_renewed(self) -> list[str]:
        self._ladder.renew()
        return [f"{self._ladder.num_failures} failures counted"]

    def do_summary(self) -> list[str]:
        return [self._ladder.summary()]
