"""Every shipped config composes, fits the schema, and names only options that its class takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark_exp.__main__ import CONF
from dspark_exp.config import flattened, job_key, resolved_dict, validated
from dspark_exp.errors import ConfigError
from dspark_exp.tasks.building import build_drafter, build_policy, construct
from tests.conftest import composed, random_target

GROUPS = [
    f"{folder.name}={path.stem}"
    for folder in sorted(Path(CONF).iterdir())
    if folder.is_dir() and folder.name != "experiment"
    for path in sorted(folder.glob("*.yaml"))
]
DATA_PATH = "data.path=rows.jsonl"


@pytest.mark.parametrize("choice", GROUPS)
def test_every_choice_of_every_group_fits_the_schema(choice: str) -> None:
    needs_path = choice == "data=jsonl" or (choice.startswith("target=") and choice != "target=tiny")
    validated(composed(choice, *([DATA_PATH] if needs_path else [])))


@pytest.mark.parametrize("drafter", ["eagle3", "dflash", "dspark_markov", "dspark_gated", "dspark_rnn", "mtp1"])
def test_every_drafter_file_builds(drafter: str) -> None:
    config, target = validated(composed(f"drafter={drafter}")), random_target(vocab_size=40)
    network = build_drafter(config, target)
    assert network.block_size == (1 if drafter == "mtp1" else 7)
    construct(config.drafter.objective, "drafter.objective")
    build_policy(config, target)


@pytest.mark.parametrize("experiment", [path.stem for path in sorted(Path(CONF).glob("experiment/*.yaml"))])
def test_every_experiment_composes_under_its_own_name(experiment: str) -> None:
    assert validated(composed(f"+experiment={experiment}")).experiment == experiment


@pytest.mark.parametrize("path", sorted((Path(CONF).parent / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sweep_composes_and_its_claims_name_real_options(path: Path) -> None:
    name = path.stem
    plain = resolved_dict(composed(f"+sweeps={name}"))
    config = validated(composed(f"+sweeps={name}"))
    assert config.experiment == name
    options = flattened(plain)
    arms = [arm for c in config.sweep.claims for arm in (c.first, c.second, c.first_over, c.second_over) if arm]
    assert bool(arms) == (config.sweep.x is not None) == (name != "tune")  # a search has no axis and no claims
    axes = [config.sweep.x] if config.sweep.x is not None else []
    for option in {*axes, *config.sweep.lines, *(key for arm in arms for key in arm)}:
        assert option in options, option


def test_a_target_chooses_its_data_and_benchmarks_and_the_command_line_wins() -> None:
    config = validated(composed("target=smollm2_135m", DATA_PATH))
    assert (config.data.source, config.benchmark.source) == ("jsonl", "prompts")
    config = validated(composed("target=smollm2_135m", "benchmark=language", "data=language"))
    assert (config.data.source, config.benchmark.source) == ("language", "language")


def test_a_job_is_known_by_what_changes_its_numbers() -> None:
    key = job_key(resolved_dict(composed()))
    assert job_key(resolved_dict(composed("paths.outputs=elsewhere", "tracking=none"))) == key
    assert job_key(resolved_dict(composed("seed=1"))) != key
    assert job_key(resolved_dict(composed("trainer.lr=0.1"))) != key


def test_a_name_of_ones_own_files_the_same_job_elsewhere() -> None:
    for overrides in ((), ("+experiment=reliability",), ("+sweeps=depth",)):
        named = composed(*overrides, "name=monday-2")
        assert validated(named).experiment == "monday-2"
        assert job_key(resolved_dict(named)) == job_key(resolved_dict(composed(*overrides)))
    with pytest.raises(ConfigError, match="name='a/b'"):
        validated(composed("name=a/b"))


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.stepz"):
        validated(composed("+trainer.stepz=3"))
