"""From a mapping to a chain: names, ranges, order, whose value holds, and the YAML files."""

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from sampler_oracles import Only

from mlxgen.errors import ConfigError
from mlxgen.sampler import Sampler, effective, known_stages

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(path.stem for path in (CONF / "sampler").glob("*.yaml"))


def names(config, **kwargs):
    return [stage.name for stage in Sampler.from_config(config, **kwargs).stages]


# ---- errors name the key, the rule and the value


@pytest.mark.parametrize(
    "config, message",
    [
        ({"top_p": 1.7}, "`sampler.top_p` must be in [0, 1], but is 1.7."),
        ({"top_p": "high"}, "`sampler.top_p` must be a number, but is 'high'."),
        ({"top_p": True}, "`sampler.top_p` must be a number, but is True."),
        ({"top_p": float("nan")}, "`sampler.top_p` must be in [0, 1], but is nan."),
        ({"top_p": {"p": 2}}, "`sampler.top_p.p` must be in [0, 1], but is 2.0."),
        ({"temperature": -1}, "`sampler.temperature` must be a finite number >= 0, but is -1.0."),
        ({"temperature": float("inf")}, "`sampler.temperature` must be a finite number >= 0, but is inf."),
        ({"top_k": 1.5}, "`sampler.top_k` must be an integer, but is 1.5."),
        ({"top_k": -1}, "`sampler.top_k` must be >= 0 (0: off), but is -1."),
        ({"min_p": -0.1}, "`sampler.min_p` must be in [0, 1], but is -0.1."),
        ({"typical_p": 2}, "`sampler.typical_p` must be in [0, 1], but is 2.0."),
        ({"top_n_sigma": -1}, "`sampler.top_n_sigma` must be >= 0 (0: off), but is -1.0."),
        ({"xtc": {"probability": 3}}, "`sampler.xtc.probability` must be in [0, 1], but is 3.0."),
        ({"xtc": {"threshold": 0.1}}, "`sampler.xtc.probability` must be given."),
        ({"xtc": {"probability": 1, "thresold": 0.1}}, "Did you mean `threshold`?"),
        ({"xtc": {"probability": 1, "keep": [-1]}}, "`sampler.xtc.keep` must be token ids"),
        ({"xtc": {"probability": 1, "keep": [9999]}}, "`sampler.xtc.keep` must be token ids below 298"),
        ({"dry": {"multiplier": 1, "base": 0}}, "`sampler.dry.base` must be in [1, 16], but is 0.0."),
        (
            {"dry": {"multiplier": 1, "allowed_length": 0}},
            "`sampler.dry.allowed_length` must be >= 1, but is 0.",
        ),
        (
            {"dry": {"multiplier": 1, "sequence_breakers": [1.5]}},
            "`sampler.dry.sequence_breakers[0]` must be an int",
        ),
        (
            {"dry": {"multiplier": 1, "sequence_breakers": [298]}},
            "must be token ids below 298, but is (298,).",
        ),
        ({"mirostat": -1}, "`sampler.mirostat` must be a finite number >= 0 (0: off), but is -1.0."),
        ({"mirostat": {"tau": 5, "eta": 2}}, "`sampler.mirostat.eta` must be in [0, 1], but is 2.0."),
        (
            {"dynamic_temperature": -1},
            "`sampler.dynamic_temperature` must be a finite number >= 0, but is -1.0.",
        ),
        (
            {"dynamic_temperature": {"range": 1, "temperature": 1}},
            "`sampler.dynamic_temperature.temperature` must be left out.",
        ),
        (
            {"repetition_penalty": 0},
            "`sampler.repetition_penalty` must be a finite number > 0 (1: off), but is 0.0.",
        ),
        (
            {"repetition_penalty": {"penalty": 1.1, "window": -1}},
            "`sampler.repetition_penalty.window` must be >= 0",
        ),
        (
            {"presence_penalty": float("inf")},
            "`sampler.presence_penalty` must be a finite number, but is inf.",
        ),
        ({"frequency_penalty": "x"}, "`sampler.frequency_penalty` must be a number, but is 'x'."),
        (
            {"logit_bias": {"99999": 100}},
            "`sampler.logit_bias.99999` must be a token id below the vocabulary size 298",
        ),
        ({"logit_bias": {"cat": 1}}, "`sampler.logit_bias.cat` must be a token id, but is 'cat'."),
        ({"logit_bias": {-1: 1}}, "`sampler.logit_bias.-1` must be a token id, but is -1."),
        ({"logit_bias": {1: "x"}}, "`sampler.logit_bias.1` must be a number below infinity, but is 'x'."),
        (
            {"logit_bias": {1: float("nan")}},
            "`sampler.logit_bias.1` must be a number below infinity, but is nan.",
        ),
        ({"logit_bias": {1: 1, "1": 2}}, "`sampler.logit_bias.1` must be given once, but is given twice."),
        ({"logit_bias": [1]}, "`sampler.logit_bias` must be a mapping of token id to bias, but is [1]."),
        ({"seed": 1.5}, "`sampler.seed` must be an integer or null, but is 1.5."),
        ({"temprature": 1}, "Did you mean `temperature`?"),
        (
            {"order": ["top_p", "tpo_k"]},
            "`sampler.order` must name stages, but has 'tpo_k'. Did you mean `top_k`?",
        ),
        ({"order": ["top_p", "top_p"]}, "`sampler.order` must be a list without repeats"),
        ({"order": "top_p"}, "`sampler.order` must be a list of stage names, but is 'top_p'."),
        (
            {"top_k": 5, "order": ["temperature", "top_p"]},
            "`sampler.order` must name every stage in use, but lacks `top_k`.",
        ),
        (
            {"mine": {"_target_": "a.B"}},
            "`sampler.mine` must be a stage of mlxgen's own, but has a `_target_`.",
        ),
    ],
)
def test_errors(config, message):
    with pytest.raises(ConfigError) as error:
        Sampler.from_config(config, vocab_size=298)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_key_path_is_the_callers():
    with pytest.raises(ConfigError, match=r"^`top_p` must be"):
        Sampler.from_config({"top_p": 2}, path="")
    with pytest.raises(ConfigError, match=r"^`body\.xtc\.threshold` must be"):
        Sampler.from_config({"xtc": {"probability": 1, "threshold": 2}}, path="body")


# ---- chains


def test_the_default_order_is_penalties_then_truncations_then_temperature():
    everything = {name: 0.5 for name in known_stages() if name != "dynamic_temperature"}
    everything |= {"logit_bias": {1: 1}, "top_k": 5}
    order = names(everything)
    assert order == [
        "logit_bias",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "dry",
        "top_n_sigma",
        "top_k",
        "typical_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
        "mirostat",
    ]


def test_the_order_can_be_set():
    config = {"temperature": 0.5, "top_p": 0.9, "top_k": 4}
    assert names(config) == ["top_k", "top_p", "temperature"]
    assert names({**config, "order": ["temperature", "top_p", "xtc", "top_k"]}) == [
        "temperature",
        "top_p",
        "top_k",
    ]


def test_a_number_sets_the_main_field_and_null_is_not_given():
    bare, full = (
        {"temperature": 1, "xtc": value} for value in (0.5, {"probability": 0.5, "threshold": None})
    )
    assert Sampler.from_config(bare).stages == Sampler.from_config(full).stages
    assert names({"temperature": 1, "xtc": None, "dry": {"multiplier": None, "base": None}}) == []


def test_without_a_temperature_it_is_greedy():
    assert Sampler.from_config({}).greedy
    assert Sampler.from_config({"temperature": None, "top_p": 0.9}).greedy
    assert Sampler.from_config(composed("auto")).greedy


def test_a_stage_from_outside_runs_before_the_temperature_unless_ordered():
    def build(node, path):
        assert path == "sampler.mine"
        return Only(token=node["token"])

    mine = {"_target_": "my_package.Only", "token": 7}
    config = {"temperature": 0.5, "top_p": 0.9, "mirostat": 3, "mine": mine}
    kinds = [type(stage).__name__ for stage in Sampler.from_config(config, build=build).stages]
    assert kinds == ["TopP", "Only", "Temperature", "Mirostat"]
    config["order"] = ["mine", "top_p", "temperature", "mirostat"]
    kinds = [type(stage).__name__ for stage in Sampler.from_config(config, build=build).stages]
    assert kinds == ["Only", "TopP", "Temperature", "Mirostat"]
    with pytest.raises(ConfigError, match=r"`sampler.mine` must be a mlxgen.sampler.Stage, but is 3\."):
        Sampler.from_config({"mine": mine}, build=lambda node, path: 3)
    with pytest.raises(ConfigError, match=r"`sampler\.top_p` must be under a name that mlxgen does not use"):
        Sampler.from_config({"top_p": mine}, build=build)


# ---- whose value holds

GENERATION_CONFIG = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "do_sample": True,
    "epsilon_cutoff": 1e-3,
    "eos_token_id": [1, 2],
}


def test_the_request_wins_over_the_user_over_the_model_over_the_built_in_values():
    nothing = effective()
    assert nothing.values == {"temperature": 0.0} and nothing.sources == {"temperature": "built-in"}
    model = effective(generation_config=GENERATION_CONFIG)
    assert model.values == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    user = effective({}, {"top_p": 0.5, "min_p": None}, GENERATION_CONFIG)
    assert user.values == {"temperature": 0.6, "top_p": 0.5, "top_k": 20}
    all_three = effective(
        {"temperature": 0, "top_k": None}, {"top_p": 0.5, "temperature": 1}, GENERATION_CONFIG
    )
    assert all_three.values == {"temperature": 0, "top_p": 0.5, "top_k": 20}
    assert all_three.sources == {"temperature": "request", "top_p": "user", "top_k": "model"}
    assert Sampler.from_config(all_three.values).greedy


def test_fields_of_one_stage_are_merged_one_by_one():
    user = {"repetition_penalty": {"penalty": 1.1, "window": 64}, "xtc": {"probability": None}}
    merged = effective({"repetition_penalty": 1.3}, user, {"repetition_penalty": 1.05})
    assert merged.values["repetition_penalty"] == {"penalty": 1.3, "window": 64}
    assert merged.sources["repetition_penalty.penalty"] == "request"
    assert merged.sources["repetition_penalty.window"] == "user"
    assert "xtc" not in merged.values


@pytest.mark.parametrize(
    "generation_config, expected",
    [
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.6}, {"temperature": 0.6}),
        (
            {"temperature": None, "top_k": 50, "typical_p": 0.9},
            {"temperature": 0.0, "top_k": 50, "typical_p": 0.9},
        ),
    ],
)
def test_generation_config(generation_config, expected):
    assert effective(generation_config=generation_config).values == expected


def test_the_models_file_counts_only_where_the_user_lets_it():
    assert effective({}, {"model_defaults": False, "top_p": 0.5}, GENERATION_CONFIG).values == {
        "temperature": 0.0,
        "top_p": 0.5,
    }
    assert effective({}, {"model_defaults": True}, GENERATION_CONFIG).values["top_k"] == 20


# ---- the YAML files


def composed(file, *overrides):
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        config = compose(config_name=None, overrides=[f"+sampler={file}", *overrides])
    return OmegaConf.to_container(config.sampler)


@pytest.mark.parametrize("file", FILES)
def test_every_file_builds_and_says_what_it_is_for(file):
    assert (CONF / "sampler" / f"{file}.yaml").read_text().startswith("# ")
    config = composed(file)
    stages = Sampler.from_config(config, vocab_size=298).stages
    if file not in ("auto", "base"):
        own = OmegaConf.load(CONF / "sampler" / f"{file}.yaml")
        assert {stage.name for stage in stages} | {"temperature"} == set(own) - {"defaults"}
        assert effective({}, config, GENERATION_CONFIG).sources["temperature"] == "user"


@pytest.mark.parametrize("file", FILES)
def test_every_file_takes_every_value_from_the_command_line(file):
    overrides = [
        "sampler.top_p=0.4",
        "sampler.temperature=0.9",
        "sampler.xtc=0.3",
        "sampler.logit_bias={5: 1}",
    ]
    sampler = Sampler.from_config(composed(file, *overrides))
    by_name = {stage.name: stage for stage in sampler.stages}
    assert by_name["top_p"].p == 0.4
    assert by_name["xtc"].probability == 0.3
    assert by_name["logit_bias"].ids == (5,)


def test_a_field_of_a_stage_can_be_set_alone():
    config = composed("xtc", "sampler.xtc.threshold=0.2", "sampler.repetition_penalty.window=64")
    assert config["xtc"] == {"probability": 0.5, "threshold": 0.2, "keep": ["\n"]}
    assert config["repetition_penalty"] == {"penalty": None, "window": 64}


def test_the_base_file_names_every_field_and_the_default_order():
    base = composed("base")
    assert base["order"] == list(known_stages())
    for name, stage in known_stages().items():
        fields = {field.name for field in dataclasses.fields(stage)} - {stage.absorbs}
        if len(fields) > 1 and stage.main:
            assert base[name] == dict.fromkeys(fields)
        else:
            assert base[name] is None
    assert set(base) == {*known_stages(), "order", "model_defaults"}
    texts = {file: (CONF / "sampler" / f"{file}.yaml").read_text() for file in FILES}
    assert [file for file in FILES if "model_defaults: true" in texts[file].split("\n")] == ["auto"]


def test_texts_name_the_tokens_that_end_with_them():
    ids = {"\n": 7, ":": 9}
    config = {"temperature": 1.0, "dry": {"multiplier": 1.0, "sequence_breakers": ["\n", 3, ":", "?"]}}
    sampler = Sampler.from_config(config, token_of=ids.get)
    assert sampler.stages[0].sequence_breakers == (7, 3, 9)
    assert Sampler.from_config(config).stages[0].sequence_breakers == (3,)
