"""Composition: who wins, the user's own files, what is refused, and the way back to a file."""

import copy
import functools
from pathlib import Path

import pytest
import yaml

from mlxgen.blueprint.blueprint import read_blueprint
from mlxgen.build import build
from mlxgen.cli import check_parts
from mlxgen.config import (
    GROUPS,
    Config,
    ModelConfig,
    Overrides,
    checked,
    compose,
    conf_dir,
    config_dirs,
    load_config,
    options,
    read_overrides,
    recipe,
)
from mlxgen.errors import ConfigError
from mlxgen.yaml_text import read_yaml, write_yaml


@pytest.fixture
def own(tmp_path):
    """A folder of the user's own: `own(group/name, text)` writes a file of it."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / "own" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path / "own"

    return write


SMALL_GROUPS = [group for group in GROUPS if group != "architecture"]


def refusal(*words, config_dir=None) -> str:
    with pytest.raises(ConfigError) as error:
        check_parts(load_config(words, config_dir=config_dir))
    message = str(error.value)
    assert "\n" not in message
    return message


# -- the shipped files


def test_every_folder_is_a_group_and_every_group_a_folder():
    assert {path.name for path in conf_dir().iterdir() if path.is_dir()} == set(GROUPS)


def test_every_key_of_the_root_is_a_field_and_every_field_a_key():
    root = yaml.safe_load((conf_dir() / "config.yaml").read_text())
    keys = set(root) - {"defaults"} | set(GROUPS) - {"experiment"}
    caller = {"trust", "config_dirs", "variant", "given"}
    assert keys == set(Config.__dataclass_fields__) - caller


@pytest.mark.parametrize("index", range(max(len(options(g, [conf_dir()])) for g in SMALL_GROUPS)))
def test_every_file_composes_and_builds_and_says_what_it_is_for(index):
    """The groups' files side by side, as composing takes a while."""
    words = ["model.source=x"]
    for group in SMALL_GROUPS:
        names = options(group, [conf_dir()])
        name = sorted(names)[index % len(names)]
        assert names[name], f"the first comment line of {group}/{name} says what it is for"
        words.append(f"{group}={name}")
    config = load_config(words)
    assert isinstance(config.model, ModelConfig)
    check_parts(config)


def test_every_architecture_reads_and_inherits():
    names = options("architecture", [conf_dir()])
    for name in set(names) - {"auto"}:
        assert {"decoder", "layer", "weights"} <= set(read_blueprint(name, [conf_dir() / "architecture"]).tree), name
        assert names[name], f"the first comment line of architecture/{name} says what it is for"


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
def test_hydra_and_our_own_reader_agree_on_inheritance(name):
    tree = read_blueprint(name, [conf_dir() / "architecture"]).tree
    assert compose(read_overrides([f"architecture={name}"]))["architecture"] == tree  # no expression evaluated


# -- who wins


def test_the_command_line_wins_over_the_experiment_over_the_group_over_the_root(own):
    """Root, group file, experiment and command line each set max_tokens; they are taken away one by one."""
    own("model/four", "# @package _global_\nmax_tokens: 4\nmodel: {source: x}\n")
    folder = own("experiment/five", "# @package _global_\nmax_tokens: 5\n")

    def value(*words):
        return load_config(words, config_dir=folder).max_tokens

    assert value("model=four", "experiment=five", "max_tokens=6") == 6
    assert value("model=four", "experiment=five") == 5
    assert value("model=four") == 4
    assert value() == 512


def test_an_experiment_chooses_groups_and_the_command_line_chooses_others(own):
    text = "# @package _global_\ndefaults:\n  - override /sampler: top_p\nsampler: {temperature: 0.3}\n"
    folder = own("experiment/mine", text)
    sampler = load_config(["experiment=mine"], config_dir=folder).sampler
    assert (sampler["top_p"], sampler["temperature"]) == (0.9, 0.3)
    sampler = load_config(["experiment=mine", "sampler=top_k"], config_dir=folder).sampler
    assert (sampler["top_p"], sampler["top_k"]) == (None, 40)


def test_text_in_yaml_is_taken_literally_too(own):
    folder = own("experiment/mine", "# @package _global_\nprompt: costs ${amount}\nstop: ['${x}']\n")
    config = load_config(["experiment=mine"], config_dir=folder)
    assert (config.prompt, config.stop) == ("costs ${amount}", ("${x}",))
    config = load_config(["experiment=mine", "prompt=other"], config_dir=folder)
    assert config.prompt == "other"


def test_a_small_float_in_yaml_is_a_number(own):
    folder = own("sampler/tiny", "defaults: [base, _self_]\ntemperature: 1e-5\n")
    assert load_config(["sampler=tiny"], config_dir=folder).sampler["temperature"] == 0.00001


# -- a folder of the user's own


def test_own_files_of_every_kind_are_found(own, monkeypatch):
    own("model/mine", "# Mine.\ndefaults: [source, _self_]\nsource: /somewhere\n")
    own("sampler/mine", "defaults: [top_p, _self_]\ntop_p: 0.5\n")
    own("cache/mine", "_target_: mlxgen.cache.Window\nsize: 7\nsinks: 1\n")
    own("architecture/mine", "# Mine.\ndefaults: [llama, _self_]\ndecoder: {embed_scale: 2.0}\n")
    folder = own("experiment/mine", "# @package _global_\n# Mine.\nmax_tokens: 3\n")
    words = [f"{group}=mine" for group in ("model", "sampler", "cache", "architecture", "experiment")]
    config = load_config(words, config_dir=folder)
    assert (config.model.source, config.sampler["top_p"], config.cache["size"]) == ("/somewhere", 0.5, 7)
    assert (config.architecture["decoder"]["embed_scale"], config.max_tokens) == (2.0, 3)
    assert config.config_dirs == (folder, conf_dir())
    assert options("experiment", config.config_dirs)["mine"] == "Mine."
    monkeypatch.setenv("MLXGEN_CONFIG_DIR", str(folder))
    assert load_config(words).max_tokens == 3


def test_a_relative_folder_is_found_from_where_the_caller_stands(own, monkeypatch):
    folder = own("experiment/mine", "# @package _global_\nmax_tokens: 3\n")
    monkeypatch.chdir(folder.parent)
    assert load_config(["experiment=mine"], config_dir=Path("own")).config_dirs[0] == folder


def test_a_folder_with_blanks_and_commas_in_its_name(tmp_path):
    folder = tmp_path / "my conf, (new)"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\nmax_tokens: 3\n")
    assert load_config(["experiment=mine"], config_dir=folder).max_tokens == 3


def test_a_file_with_a_shipped_name_is_refused(own):
    folder = own("sampler/top_p", "temperature: 0\n")
    assert refusal(config_dir=folder) == f"{folder}/sampler/top_p.yaml has the name of a shipped file; give it another."


def test_a_folder_that_is_none_is_refused(tmp_path, monkeypatch):
    assert "`--config-dir` must be a folder" in refusal(config_dir=tmp_path / "no")
    monkeypatch.setenv("MLXGEN_CONFIG_DIR", str(tmp_path / "no"))
    with pytest.raises(ConfigError, match="`MLXGEN_CONFIG_DIR` must be a folder"):
        config_dirs(None)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("model/bad", "source: [1", "own/model/bad.yaml, line 1 is not plain YAML: expected ',' or ']'"),
        ("model/bad", "source: a\nsource: b\n", "own/model/bad.yaml, line 2 is not plain YAML: found duplicate key"),
        ("model/bad", "defaults: [nowhere]\n", "In 'model/bad': Could not load 'model/nowhere'."),
        ("model/bad", "source: ${nowhere}\n", "Interpolation key 'nowhere' not found full_key: model.source"),
        ("model/bad", "source: x\ndtyp: float32\n", "`model.dtyp` is not a key. Did you mean `dtype`?"),
        ("model/bad", "- source\n", "`model` must be a mapping with source, revision,"),
        ("model/bad", "", "`model.source` must be given."),
        ("experiment/bad", "max_tokens: 3\n", "must begin with the line `# @package _global_`"),
        ("experiment/bad", "# A title first.\n# @package _global_\nmax_tokens: 3\n", "must begin with the line"),
        (
            "experiment/bad",
            "# @package _global_\nmax_tokns: 3\n",
            "`max_tokns` is not a key. Did you mean `max_tokens`?",
        ),
        ("experiment/bad", "# @package _global_\ntrust: [os]\n", "`trust` must not stand in YAML."),
        ("experiment/bad", "# @package _global_\nconfig_dirs: [/]\n", "`config_dirs` must not stand in YAML."),
        ("experiment/bad", "# @package _global_\nprompt: true\n", "`prompt` must be text, but is True."),
        (
            "experiment/bad",
            "# @package _global_\ndefaults: [{override /sampler: nowhere}]\n",
            "Could not find 'sampler/nowhere' Available options in 'sampler': auto base",
        ),
        (
            "experiment/bad",
            "# @package _global_\nx: !!python/object/apply:os.system ['true']\n",
            "line 2 is not plain YAML: could not determine a constructor",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line(own, name, text, message):
    folder = own(name, text)
    assert message in refusal(f"{name.split('/')[0]}=bad", config_dir=folder)


def test_a_file_that_is_not_utf8(own):
    folder = own("model/bad", "")
    (folder / "model" / "bad.yaml").write_bytes(b"source: \xff\n")
    assert refusal("model=bad", config_dir=folder).startswith("a YAML file is not UTF-8: ")


# -- keys and values


@functools.cache
def default_run():
    return compose(read_overrides([]))


def refusal_of(values: dict) -> str:
    """The message for the default run with other values at key paths: what Hydra gives for KEY=VALUE, but fast."""
    data = copy.deepcopy(default_run())
    for path, value in values.items():
        *parents, last = path.split(".")
        functools.reduce(lambda node, name: node.setdefault(name, {}), parents, data)[last] = value
    with pytest.raises(ConfigError) as error:
        check_parts(checked(Overrides(), data))
    return str(error.value)


@pytest.mark.parametrize(
    "word, message",
    [
        ("promt=hi", "`promt` is not a key. Did you mean `prompt`?"),
        ("smapler=top_p", "`smapler` is not a key. Did you mean `sampler`?"),
        ("temperature=0.5", "`temperature` is not a key. Did you mean `sampler.temperature`?"),
        ("dtype=float32", "`dtype` is not a key. Did you mean `model.dtype`?"),
        ("quite_unheard_of=1", "`quite_unheard_of` is not a key; known here: "),
        ("model.dtyp=float32", "`model.dtyp` is not a key. Did you mean `dtype`?"),
        ("model.sampling.top_pp=1", "`model.sampling.top_pp` is not a key"),
        ("sampler.dry.multipler=1", "`sampler.dry.multipler` is not a key. Did you mean `multiplier`?"),
        ("sampler.top_q=1", "`sampler.top_q` is not a key"),
        ("cache.siz=1", "`cache.siz` is not a key"),
        ("task.chta=true", "`task.chta` is not a key"),
        ("experiment.foo=1", "an experiment's file must begin"),
    ],
)
def test_unknown_keys_at_any_depth_name_the_nearest(word, message):
    assert message in refusal_of({word.partition("=")[0]: 1})


def test_unknown_keys_from_the_command_line_with_and_without_a_plus():
    message = "`cache.siz` is not a key. Did you mean `size`?"
    assert refusal("cache=window", "cache.siz=1") == refusal("cache=window", "+cache.siz=1") == message


@pytest.mark.parametrize(
    "word, message",
    [
        ("max_tokens=abc", "`max_tokens` must be an integer, but is 'abc'."),
        ("max_tokens=-1", "`max_tokens` must be at least 0, but is -1."),
        ("prefill_chunk=0", "`prefill_chunk` must be at least 1, but is 0."),
        ("top_logprobs=-1", "`top_logprobs` must be at least 0, but is -1."),
        ("seed=1.5", "`seed` must be an integer, but is 1.5."),
        ("raw=perhaps", "`raw` must be true or false, but is 'perhaps'."),
        ("stats=perhaps", "`stats` must be true or false or auto, but is 'perhaps'."),
        ("output=xml", "`output` must be one of text, json, jsonl, but is 'xml'."),
        ("model.dtype=float23", "but is 'float23'. Did you mean `float32`?"),
        ("model.revision=1234", "`model.revision` must be text, but is 1234. Write 1234 in quotes."),
        ("model.package=x", "`model.package` must be a mapping with requirements, members, sha256, file"),
        ("sampler.top_p=high", "`sampler.top_p` must be a number, but is 'high'."),
        ("sampler.top_p=1.7", "`sampler.top_p` must be in [0, 1], but is 1.7."),
        ("sampler.temperature=-1", "`sampler.temperature` must be"),
        ("model.sampling.top_p=1.7", "`model.sampling.top_p` must be in [0, 1], but is 1.7."),
        ("architecture.decoder.embed_scale=2", "`architecture` must be chosen before its values can be set"),
    ],
)
def test_wrong_types_and_ranges_are_found_at_composition(word, message):
    key, _, value = word.partition("=")
    assert message in refusal_of({key: read_yaml(value)})


@pytest.mark.parametrize(
    "words, message",
    [
        ("cache=window cache.size=1", "`cache.size` must be at least 2, but is 1."),
        ("cache=quantized cache.k_bits=7", "`cache.k_bits` must be one of"),
        ("cache=window cache.size=abc", "`cache.size` must be an integer, but is 'abc'."),
        ("sampler=top_p sampler.top_p=1.7", "`sampler.top_p` must be in [0, 1], but is 1.7."),
        ("max_tokens=${nowhere}", "Interpolation key 'nowhere' not found full_key: max_tokens"),
    ],
)
def test_wrong_values_from_the_command_line(words, message):
    assert message in refusal(*words.split())


def test_whole_floats_are_integers():
    assert load_config(["max_tokens=1e3"]).max_tokens == 1000


def test_missing_values_are_listed_all_at_once():
    words = ["model=source", "cache=window", "cache.size=???"]
    assert refusal(*words) == "`model.source`, `cache.size` must be given."


# -- and back


@pytest.mark.parametrize(
    "words",
    [
        ["model=./x", "prompt=what's ${up}?", "system=true", "stop=[</s>]", "sampler.temperature=1e-5", "seed=3"],
        ["architecture=qwen3_moe", "prompt=你好\nC:\\new", "prefill=1e-5", "sampler=xtc", "cache=window", "tokenize"],
    ],
)
def test_a_composed_run_composes_to_itself_again(words, tmp_path):
    overrides = read_overrides(words)
    data, experiment = recipe(overrides)
    text = write_yaml(experiment)
    assert yaml.safe_load(text) == experiment  # plain PyYAML reads the same types
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "again.yaml").write_text("# @package _global_\n" + text)
    again = read_overrides(["experiment=again"], tmp_path)
    assert compose(again) == data


def test_another_task_can_be_named_with_a_saved_run(tmp_path):
    _, experiment = recipe(read_overrides(["tokenize", "task.chat=true"]))
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "saved.yaml").write_text("# @package _global_\n" + write_yaml(experiment))
    config = load_config(["tokenize", "experiment=saved"], config_dir=tmp_path)
    assert build(config.task, "task").chat is True


def test_a_hydra_application_of_the_callers_is_left_alone():
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(conf_dir() / "sampler"), version_base="1.3"):
        load_config(["max_tokens=3"])
        assert hydra_compose("top_k").top_k == 40
