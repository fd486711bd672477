"""Settings: who is stronger than whom, and that a wrong word is an error that says where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.base.config import CONFIG_FILE_VARIABLE, ENVIRONMENT, Config, load, overridden
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
    text = {"HOLDFAST_EVERY": "10,30s", "HOLDFAST_DURABLE_EVERY": "20", "HOLDFAST_MEMORY_BUDGET": "2GiB"}.get(
        variable, "x"
    )
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
    [("evry = 3", "unknown setting 'evry'"), ("strict = 'maybe'", "strict = 'maybe' is not true or false")],
)
def test_a_wrong_line_of_the_file_is_named_with_its_place(file: Path, line: str, named: str) -> None:
    file.write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=named) as caught:
        load(environ={CONFIG_FILE_VARIABLE: str(file)})
    assert caught.value.where == f"{file}: {line.split(maxsplit=1)[0]}"


@pytest.mark.parametrize("wrong", [{"num_slots": 1}, {"keep_last": 1}, {"run_id": "../x"}, {"memory_budget": "much"}])
def test_values_out_of_range_are_refused_with_what_is_allowed(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(wrong, environ={})
    assert caught.value.remedy


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    for text in (None, "every = = 3"):
        if text:
            (tmp_path / "s.toml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(environ={CONFIG_FILE_VARIABLE: str(tmp_path / "s.toml")})
        assert caught.value.where == str(tmp_path / "s.toml")
