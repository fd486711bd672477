"""What the documents say of the code is so: errors have their sections, links lead somewhere, flags exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import holdfast
from holdfast.base import errors

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path for folder in (".", "docs", "docs/spec", "examples") for path in (ROOT / folder).glob("*.md") if path.is_file()
)


def test_every_error_has_a_section_under_its_code() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HoldfastError)
    ]
    sections = re.findall(r"^## (HF\d{3}) (\w+)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert sections == sorted((kind.code, kind.__name__) for kind in kinds if kind is not errors.HoldfastError)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_into_pages_find_their_heading(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", page.read_text())
    assert not [
        (target, anchor)
        for target, anchor in targets
        if anchor not in anchors(page.parent / target if target else page)
    ]


def test_every_page_is_linked_from_the_index() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "docs" / "index.md").read_text()))
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md") if path.name != "index.md"]
    assert {str(page) for page in pages} <= linked


def test_every_word_of_the_glossary_is_used_elsewhere_and_stands_once() -> None:
    glossary = ROOT / "docs" / "glossary.md"
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| \[[^|]+\]\([^|]+\) \|$", glossary.read_text(), re.MULTILINE)
    words = [word for row in rows for word in row.split(", ")]
    assert len(words) == len(set(words)) > 60
    assert len(rows) == sum(line.startswith("| ") for line in glossary.read_text().splitlines()) - 6, (
        "a row without a file"
    )
    others = " ".join(page.read_text() for page in PAGES if page != glossary).lower()
    assert not [word for word in words if not re.search(rf"\b{word[:-1] if word.endswith('e') else word}", others)]


def test_the_readme_says_what_is_not_validated_before_how_to_install() -> None:
    text = (ROOT / "README.md").read_text()
    assert 0 < text.index("Not validated") < text.index("## Install")
    lines = text.splitlines()
    assert not [line for line in lines if len(line) > (160 if line.startswith("|") else 120)]


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page's prose and lists; tables, code blocks and headings are left out."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *(\||#|\[\d\]:).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    paragraphs = re.split(r"\n\s*\n|\n *(?:[-*]|\d+\.) ", text)
    return [
        sentence
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.!?])[)*]*\s+(?=\W*(?:[A-Z]|code))", paragraph.strip())
        if sentence
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_nine_in_ten_sentences_have_at_most_25_words(page: Path) -> None:
    lengths = sorted(len(sentence.split()) for sentence in sentences(page)) or [0]
    assert lengths[int(len(lengths) * 0.9)] <= 25, "its sentences are too long"


def test_files_that_documents_name_are_there() -> None:
    """Paths may be given from any folder downwards: `core/model.py`, `model.py`. Files of other projects are listed."""
    elsewhere = {"pretrain_gpt.py", "test_file_system_checkpoint_cpu.py", "tensor_parallel_example.py", "example.py"}
    elsewhere |= {"_hf_utils.py"}
    ours = {
        str(path) for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
    }
    named = {
        (str(page.relative_to(ROOT)), name)
        for page in PAGES
        for name in re.findall(r"`([\w/.]*\w+\.py)(?:::\w+)?`", page.read_text())
    }
    assert len(named) > 200
    ends = {path[i:] for path in ours for i, letter in enumerate(path) if i and path[i - 1] == "/"}
    assert not [(page, name) for page, name in named if name not in ends and name.split("/")[-1] not in elsewhere]


def test_nothing_tells_to_install_the_package_of_that_name_from_an_index() -> None:
    """`holdfast` on PyPI is another project's; from a checkout it is `pip install .` or `./holdfast`."""
    files = [path for folder in ("src", "examples", "docs") for path in (ROOT / folder).rglob("*")]
    texts = {path: path.read_text() for path in files if path.suffix in {".py", ".md", ".yaml", ".sbatch", ".service"}}
    told = re.compile(r"(?<!never `)pip install (?:-\S+ )*['\"]?holdfast\b")
    assert not [str(path) for path, text in texts.items() if told.search(text)]


def test_every_invariant_of_the_protocol_has_one_letter() -> None:
    rows = re.findall(r"^\| ([SV]\d+(?:, [SV]\d+)*) \|", (ROOT / "docs/spec/protocol.md").read_text(), re.MULTILINE)
    letters = [letter for row in rows for letter in row.split(", ")]
    assert sorted(letters, key=lambda name: (name[0], int(name[1:]))) == [
        *(f"S{number}" for number in range(1, 25)),
        *(f"V{number}" for number in range(1, 6)),
    ]


def test_flags_that_documents_show_are_there() -> None:
    """Of the commands whose options are frozen: `holdfast COMMAND`, in blocks of commands; flags of scripts stand behind `.py` or `--`."""
    frozen = set((ROOT / "tests" / "cli" / "frozen_options.txt").read_text().splitlines())
    shown = [
        f"command {command[0]} {flag}"
        for page in PAGES
        for line in re.findall(
            r"^ *(?:\$ )?holdfast (?!run\b|drill\b|demo\b|prove\b)(.+)$",
            page.read_text().replace("\\\n", " "),
            re.MULTILINE,
        )
        if (command := re.match(r"[a-z]+", line))
        for flag in re.findall(r"(?<=\s)--[a-z][a-z-]*", re.split(r" -- | #", line)[0])
    ]
    assert shown, "no document shows a flag"
    assert not set(shown) - frozen


def test_the_page_of_commands_has_every_command_and_every_flag_of_ours() -> None:
    frozen = (ROOT / "tests" / "cli" / "frozen_options.txt").read_text()
    page = (ROOT / "docs" / "commands.md").read_text()
    flags = set(re.findall(r"^command run (--\S+)$", frozen, re.MULTILINE))
    assert flags
    assert flags <= set(re.findall(r"`(--[a-z-]+)`", page))
    commands = {line.split()[1] for line in frozen.splitlines() if line.startswith("command ")}
    assert commands <= set(re.findall(r"`(?:holdfast )?([a-z]+)", page))


def test_every_benchmark_takes_the_same_flags_and_keeps_its_figures() -> None:
    """`--quick` and `--json` come with `measure.options`; each figure says what it is, in which unit, and its goal."""
    benchmarks = ROOT / "benchmarks"
    parts = {
        "__init__",
        "load_together",
        "measure",
        "pace",
        "recover_train",
        "rivals_worker",
    }  # what the programs are made of
    for program in {path.stem for path in benchmarks.glob("*.py")} - parts - {"gpu"}:  # which is for a card
        assert re.search(rf'\b(parse_)?options\("{program}"', (benchmarks / f"{program}.py").read_text()), program
        machine, *figures = map(json.loads, (benchmarks / "results" / f"{program}.jsonl").read_text().splitlines())
        assert machine["machine"]["cores"]
        assert figures, program
        assert all({"metric", "value", "unit", "goal"} <= figure.keys() for figure in figures), program


def test_the_version_is_the_last_release_or_the_next_one_being_made() -> None:
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project
    assert project[1] == holdfast.__version__
    released = re.findall(
        r"^## (\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    order = [tuple(map(int, number.split("."))) for number in released]
    assert order == sorted(order, reverse=True)
    now = tuple(map(int, holdfast.__version__.removesuffix(".dev0").split(".")))
    assert now > order[0] if holdfast.__version__.endswith(".dev0") else now == order[0]


def test_every_change_note_names_its_kind() -> None:
    notes = [path.name for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    assert not [
        name for name in notes if not re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed|security)\.md", name)
    ]


def test_make_help_lists_every_intention() -> None:
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    listed = re.findall(r"^make ([a-z]+)", shown, re.MULTILINE)
    assert sorted(listed) == sorted(target for target in targets if not target.startswith(("$", "door-")))
    assert all(line.startswith(("make ", " " * 13)) for line in shown.splitlines())
