"""Writes the page "how it is tested": what kinds of tests there are, and every scenario of the protocol as it is played."""

from __future__ import annotations

from pathlib import Path

from website.pages import page, table

# First word of a file's name -> what its scenarios are about. A topic without a title fails the build.
TOPICS = {
    "commit": "From captured to durable",
    "guard": "Which slot may be overwritten",
    "recovery": "What a job comes back with",
    "takeover": "Who writes in the place of a node that cannot",
    "retention": "What is removed from storage",
    "cadence": "How often to save",
    "faults": "What the watchdog says of ranks",
    "ladder": "What is done about a failure, and when to stop",
    "bubbles": "Copies inside the waits of a pipeline",
}
RULE, STAGE = "----", "# stage:"
KINDS = [
    ("decisions of the core", "by scenarios, below; by thousands of drawn cases (Hypothesis); by a model check of the protocol",
     "[protocol](../spec/protocol.md)"),
    ("processes, sockets, files", "by real ones: `kill -9`, cut connections, full disks, damaged bytes", "[promises](../promises.md)"),
    ("whole jobs", "by drills: crashes, faults, power cuts, simulated clusters; each finds the bugs that are planted for it",
     "[drills](../drill.md)"),
    ("frameworks", "by a contract that each door keeps with the real package", "[frameworks](../frameworks.md)"),
    ("scripts of users", "by a kill at every step, compared with an undisturbed run", "[prove](../prove.md)"),
    ("bytes of strangers", "by fuzzers of every parser", "[security](../security.md)"),
    ("speed", "as ratios of interleaved pairs, never in a test", "[benchmarks](../project/benchmarks.md)"),
]  # fmt: skip


def tested(folder: Path) -> str:
    """Returns the page.

    Args:
        folder: with a text file for each scenario.

    Raises:
        ValueError: a scenario belongs to no topic, or tells nothing before it begins.
    """
    intro = (
        "Every requirement names the test that proves it: [promises](../promises.md). "
        "[Coverage](coverage.md) says which lines the default tests run."
    )
    reading = (
        "A scenario is a story that can be read aloud. Prose says what happens and why. In each block the commands stand "
        f"above the line `{RULE}`, and below it what the real code of `core` answered. A test plays every story and compares "
        "the answers word for word. `R.S` is step S of incarnation R. The texts lie in `tests/core/scenarios`."
    )
    topics: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for path in sorted(folder.glob("*.txt")):
        topic, _, rest = path.stem.partition("_")
        if topic not in TOPICS:
            raise ValueError(f"{path.name}: give its topic {topic!r} a title in website/scenarios.py")
        title = (rest or topic).replace("_", " ").capitalize()
        topics[topic].append(f"### {title} {{#{path.stem}}}\n\n{story(path.read_text(encoding='utf-8'), path.name)}")
    parts = [f"## {TOPICS[topic]}\n\n" + "\n\n".join(stories) for topic, stories in topics.items() if stories]
    kinds = table(("what", "how", "more"), KINDS)
    return page("How it is tested", intro, kinds, reading, *parts)


def story(text: str, name: str) -> str:
    """Returns a scenario in Markdown: its comments as prose, its blocks as they are.

    Raises:
        ValueError: it does not begin with prose.
    """
    paragraphs: list[str] = []
    prose: list[str] = []
    block: list[str] = []

    def end() -> None:
        if prose:
            paragraphs.append(_escaped(" ".join(prose)))
        if block:
            paragraphs.append("\n".join(["```text", *block, "```"]))
        prose.clear()
        block.clear()

    for line in text.splitlines():
        if line.startswith(STAGE):
            continue
        if line.startswith("#") and not block and line.strip("# "):
            prose.append(line.lstrip("# "))
        elif not line or line == "#":
            end()
        else:
            if prose:
                end()
            block.append(line)
    end()
    if not paragraphs or paragraphs[0].startswith("```"):
        raise ValueError(f"{name}: begin with a comment that says what the story is about")
    return "\n\n".join(paragraphs)


def _escaped(prose: str) -> str:
    """Prose in which only code in backquotes is Markdown."""
    parts = prose.split("`")
    return "`".join(
        part if number % 2 else "".join("\\" + sign if sign in "*_[]<>#" else sign for sign in part)
        for number, part in enumerate(parts)
    )
