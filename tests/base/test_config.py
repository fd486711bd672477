"""Settings: who is stronger than whom, and that a wrong word is an error that says where it stands."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.base.config import (
    CONFIG_FILE_VARIABLE,
    DISABLE_VARIABLE,
    ENVIRONMENT,
    PATHS,
    Config,
    hand_on,
    is_relative,
    load,
    overridden,
    unknown_variables,
)
from holdfast.base.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text('every = "7"\ndurable_every = "5m"\nkeep_last = 4\nverify_capture = true\n')
    return path


def test_arguments_are_stronger_than_the_environment_that_than_the_file_and_that_than_the_defaults(file: Path) -> None:
    environ = {CONFIG_FILE_VARIABLE: str(file), "HOLDFAST_EVERY": "30s", "HOLDFAST_RUN_ID": "r2"}
    found = load({"run_id": "r3", "keep_last": None}, environ=environ)
    assert (found.run_id, found.every, found.durable_every, found.keep_last) == ("r3", "30s", "5m", 4)
    assert found.verify_capture is True
    assert found.num_slots == Config().num_slots
    assert load(environ={}) == Config()


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_every_variable_sets_its_field(variable: str) -> None:
    texts = {
        "HOLDFAST_EVERY": "10,30s", "HOLDFAST_DURABLE_EVERY": "20", "HOLDFAST_MEMORY_BUDGET": "2GiB",
        "HOLDFAST_LOG_LEVEL": "debug",
    }  # fmt: skip
    text = texts.get(variable, "x")
    assert load(environ={variable: text}) == Config(**{ENVIRONMENT[variable]: text})


def test_a_checkpointer_without_settings_reads_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_EVERY", "often")
    with pytest.raises(ConfigError, match="often"):
        holdfast.Checkpointer(tmp_path / "job")
    monkeypatch.setenv("HOLDFAST_EVERY", "3")
    config = holdfast.Checkpointer(tmp_path / "job", durable_every=9)._config
    assert (config.every, config.durable_every) == ("3", "9")
    assert overridden(None, {"every": 4}).every == "4", "an argument is stronger"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("evry = 3", "unknown setting 'evry'.*Remedy: write every$"),
        ("strict = 'maybe'", "strict = 'maybe' is not true or false"),
        ("memory_budget = 'much'", "'much' is not a size"),
        ("keep_last = 1", "keep_last = 1 is out of range"),
    ],
)
def test_a_wrong_line_of_the_file_is_named_with_its_place(file: Path, line: str, named: str) -> None:
    file.write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=named) as caught:
        load(environ={CONFIG_FILE_VARIABLE: str(file)})
    assert caught.value.where == f"{file}: {line.split(maxsplit=1)[0]}"


@pytest.mark.parametrize(("variable", "text"), [("HOLDFAST_MEMORY_BUDGET", "much"), ("HOLDFAST_LOG_LEVEL", "loud")])
def test_a_wrong_value_is_told_with_the_variable_that_has_it(file: Path, variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load(environ={CONFIG_FILE_VARIABLE: str(file), variable: text})
    assert caught.value.where == variable


def test_variables_of_our_name_that_mean_nothing_are_told_with_what_was_meant() -> None:
    meant = {
        "HOLDFAST_DISABLED": "; write HOLDFAST_DISABLE",
        "HOLDFAST_DURABLE_EVRY": "; write HOLDFAST_DURABLE_EVERY",
        "HOLDFAST_CLOSE_TIMEOUT": "the setting close_timeout_s has no variable",
        "HOLDFAST_KEEP_EVERY": "the setting keep_every has no variable",
        "HOLDFAST_OF_THE_SITE": "; known: HOLDFAST_CONFIG, ",
    }
    known = dict.fromkeys([*ENVIRONMENT, CONFIG_FILE_VARIABLE, DISABLE_VARIABLE, "PATH"], "secret")
    told = unknown_variables(environ={**dict.fromkeys(meant, "secret"), **known})
    assert len(told) == len(meant)
    for line, (name, said) in zip(told, sorted(meant.items()), strict=True):
        assert f"the variable {name} means nothing" in line
        assert said in line
        assert "secret" not in line


# Setting -> the last values that are allowed, and the first on either side that are not.
BOUNDS: dict[str, tuple[list[object], list[object]]] = {
    "num_slots": ([2, 3], [1, 4]),
    "keep_last": ([2], [1, 0, -1]),
    "ranks_per_reader": ([1], [0]),
    "metrics_port": ([0, 65535], [-1, 65536]),
    **{
        name: ([0.001], [0.0, -1.0, float("nan")])
        for name in ("fence_timeout_s", "begin_timeout_s", "linger_s", "close_timeout_s")
    },
    "run_id": (["a" * 128, "A-1_b.c"], ["", "a" * 129, "../x", "a b"]),
    **{name: (["", "a" * 128], ["a" * 129, "../x", "a b"]) for name in ("node_label", "rack_label", "backup_node")},
    "memory_budget": (["", "4GiB"], ["much", "-1", "4 bytes", "9" * 400]),
    "replicate_bandwidth": (["", "500MB"], ["fast", "-1"]),
    "redundancy": (
        ["replica", "none", "parity:3", "parity:10", "parity:1024"],
        ["", "parity", "parity:2", "parity:03", "both"],
    ),
    "overhead": (["", "0.5%", "99%"], ["0%", "100%", "-1%", "nan%", "little"]),
    "log_level": (["debug", "CRITICAL"], ["", "loud", "7"]),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_values_out_of_range_are_refused_with_what_is_allowed(name: str, tmp_path: Path) -> None:
    """As an argument, in the file, in the environment where it has a variable, and where a Config is made by hand."""
    variable = next((v for v, field in ENVIRONMENT.items() if field == name), None)
    path = tmp_path / "settings.toml"
    allowed, refused = BOUNDS[name]
    for value in [*allowed, *refused]:
        path.write_text(f"{name} = {json.dumps(value).replace('NaN', 'nan')}\n")
        ways: list[Callable[[], Config]] = [
            partial(load, {name: value}, environ={}),
            partial(load, environ={CONFIG_FILE_VARIABLE: str(path)}),
            partial(Config, **{name: value}),  # type: ignore[arg-type]
            *([partial(load, environ={variable: str(value)})] if variable else []),
        ]
        for way in ways:
            if value in allowed:
                assert getattr(way(), name) == value
            else:
                with pytest.raises(ConfigError) as caught:
                    way()
                assert caught.value.remedy, value


def test_settings_made_by_hand_are_of_their_types_or_are_refused_by_name(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "memory_budget": 1000,
        "every": 5,
        "close_timeout_s": "5",
        "runtime_dir": tmp_path,
        "run_id": None,
    }
    made = Config(**given)
    assert (made.memory_budget, made.every, made.close_timeout_s) == ("1000", "5", 5.0)
    assert (made.runtime_dir, made.run_id) == (str(tmp_path), Config().run_id)
    for name, value in {"num_slots": 2.5, "close_timeout_s": "5s", "memory_budget": b"3", "require_memory": 2}.items():
        with pytest.raises(ConfigError, match=name):
            Config(**{name: value})  # type: ignore[arg-type]


def test_a_backup_node_is_refused_where_no_replicas_are_kept() -> None:
    assert Config(redundancy="replica", backup_node="b").backup_node == "b"
    for redundancy in ("parity:3", "none"):
        with pytest.raises(ConfigError, match="backup_node = 'b'"):
            Config(redundancy=redundancy, backup_node="b")


def test_every_number_has_its_bounds() -> None:
    numbers = {field.name for field in dataclasses.fields(Config) if type(field.default) in (int, float)}
    assert numbers <= BOUNDS.keys()


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    for text in (None, "every = = 3"):
        if text:
            (tmp_path / "s.toml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(environ={CONFIG_FILE_VARIABLE: str(tmp_path / "s.toml")})
        assert caught.value.where == str(tmp_path / "s.toml")


@pytest.mark.root
def test_settings_of_another_user_under_a_number_that_came_again_are_not_read() -> None:
    """A launcher hands settings on by the number of its process, and what it left running outlives both."""
    name, place = hand_on({"every": "7"})
    fd = int(place.rpartition("/")[2])
    try:
        assert load(environ={name: place}).every == "7"
        os.fchown(fd, 65534, 65534)
        with pytest.raises(ConfigError, match="another user's") as caught:
            load(environ={name: place})
        assert caught.value.where == place
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", PATHS)
def test_a_path_means_the_file_it_named_when_the_settings_were_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "settings.toml"
    for text, meant in (("~/x", tmp_path / "home" / "x"), ("x", tmp_path / "x"), ("/y/x", Path("/y/x"))):
        file.write_text(f"{name} = {json.dumps(text)}\n")
        found = [
            Config(**{name: text}),
            load({name: text}, environ={}),
            load(environ={CONFIG_FILE_VARIABLE: "settings.toml"}),
        ]  # type: ignore[arg-type]
        assert {getattr(config, name) for config in found} == {str(meant)}
    for text in ("", "!print-key") if name == "encryption_key" else ("", "fd:3"):
        assert getattr(Config(**{name: text}), name) == text  # type: ignore[arg-type]


def test_workers_that_change_directory_read_the_paths_of_their_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("settings.toml").write_text('stop_file = "stop.json"\n')
    for given, relative in (("settings.toml", True), (str(tmp_path / "settings.toml"), True), ("", False)):
        assert is_relative(environ={CONFIG_FILE_VARIABLE: given}) is relative
    variable, file = hand_on({"trace_dir": "traces"}, environ={CONFIG_FILE_VARIABLE: "settings.toml"})
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = load(environ={variable: file})
    assert (found.stop_file, found.trace_dir) == (str(tmp_path / "stop.json"), str(tmp_path / "traces"))
    assert not is_relative(environ={variable: file})
    os.close(int(Path(file).name))
