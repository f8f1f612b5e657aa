"""Flags, YAML and presets to Config: precedence, every refusal in one line, and YAML that loads back."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from smp.config import Config, ConfigError, ModelConfig, as_flat_dict, load_config, resolve, to_yaml
from smp.config.command_line.cli import ELSEWHERE, build_tree
from smp.config.command_line.entry_points import FINETUNE, PRETRAIN
from smp.config.command_line.fields import Setting, as_text, docstrings, group_classes, settings
from smp.models.presets import PRESETS as NAMED_SIZES

PRESETS = {"debug": {}, "small-llama": {"hidden_size": 64, "num_layers": 2, "rotary_base": 5e5}}


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_hints_for_other_programs_names_are_flags_that_are_there():
    ours = {setting.flag for entry in (PRETRAIN, FINETUNE) for setting in settings(entry).values()}
    assert {name.partition(" ")[0] for name in ELSEWHERE.values()} <= ours | {"--model"} and not set(ELSEWHERE) & ours


def test_each_layer_overrides_the_one_below(recipe):
    path = recipe("num_layers: 3\nrotary_base: 7.0\nlr: 3e-4\n")
    config = load_config(["--model", "small-llama", "--config", path, "--rotary-base", "9"], PRESETS)
    assert config.model.num_attention_heads == ModelConfig.num_attention_heads  # dataclass default
    assert config.model.hidden_size == 64  # preset
    assert config.model.num_layers == 3  # YAML over preset
    assert config.model.rotary_base == 9.0  # flag over YAML
    assert config.optim.lr == 3e-4  # YAML 1.1 alone reads a string here


def test_a_flag_wins_wherever_it_stands(recipe):
    path = recipe("num_layers: 3\n")
    assert load_config(["--num-layers", "5", "--config", path], PRESETS).model.num_layers == 5


def test_the_preset_may_be_named_in_yaml_and_replaced_by_a_flag(recipe):
    path = recipe("model: small-llama\n")
    assert load_config(["--config", path], PRESETS).model.hidden_size == 64
    assert load_config(["--config", path, "--model", "debug"], PRESETS).model == ModelConfig(model="debug")


def test_no_arguments_are_the_schema_and_no_preset():
    assert load_config([], PRESETS) == Config()


def test_without_a_preset_widths_follow_from_what_is_given():
    flags = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50257 --dry-run"
    model = resolve(load_config(flags.split(), NAMED_SIZES), 1).model
    assert (model.ffn_hidden_size, model.num_query_groups) == (2048, 12)  # 8/3 x 768, one per head


def test_switches_unset_values_and_underscored_numbers(recipe):
    path = recipe("window_size: 128\nbf16: true\nseed: 1_000\ntrain_iters: 010\nsave: ~\nload:\n")
    config = load_config(["--no-bf16", "--window-size", "none", "--global-batch-size", "1_000"], PRESETS)
    assert (config.parallel.bf16, config.model.window_size, config.data.global_batch_size) == (False, None, 1000)
    config = load_config(["--config", path, "--no-swiglu"], PRESETS)
    assert (config.parallel.bf16, config.model.window_size, config.model.swiglu) == (True, 128, False)
    assert (config.training.seed, config.training.train_iters, config.checkpoint.save) == (1000, 10, None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--hiden-size 64", "unknown flag --hiden-size: did you mean --hidden-size?"),
        ("--hiden-size=64", "unknown flag --hiden-size: did you mean --hidden-size?"),
        ("--hidden_size 64", "unknown flag --hidden_size: did you mean --hidden-size?"),
        ("--hidden 64", "unknown flag --hidden: did you mean --hidden-size?"),
        ("--no-swigl", "unknown flag --no-swigl: did you mean --no-swiglu?"),
        ("--conf x.yaml", "unknown flag --conf: did you mean --config?"),
        ("--qqqqqqqqq 1", "unknown flag --qqqqqqqqq (--help lists them all)"),
        ("--learning_rate 1", "unknown flag --learning_rate: did you mean --lr?"),
        ("--spare-nodes 1", "unknown flag --spare-nodes: did you mean --max-nodes (nodes beyond it are spare"),
        ("--tp 2", "unknown flag --tp: did you mean --tensor-model-parallel-size?"),
        ("--dataset_name x", "unknown flag --dataset_name: did you mean --data-path?"),
        ("--training.local_batch_size 1", "unknown flag --training.local_batch_size: did you mean --micro-batch-size?"),
        ("-lr 1", "unknown flag -lr: did you mean --lr?"),
        ("train", "unexpected 'train': a value follows its flag"),
        ("--bf16 true", "unexpected 'true': a value follows its flag, and a switch (--x or --no-x) takes none"),
        ("--bf16=true", "--bf16/--no-bf16: ignored explicit argument 'true'"),
        ("--lr", "--lr: expected one argument"),
        ("--lr --seed 1", "--lr: expected one argument"),
        ("--lr fast", "--lr: expected a finite number, got 'fast'"),
        ("--lr nan", "--lr: expected a finite number, got 'nan'"),
        ("--hidden-size 3.0", "--hidden-size: expected an integer, got '3.0'"),
        ("--hidden-size none", "--hidden-size: expected an integer, got 'none'"),
        ("--save=", "--save: expected text, got ''"),
        ("--normalization rmsnorm", "'rmsnorm' is not one of RMSNorm, LayerNorm: did you mean RMSNorm?"),
        ("--optimizer qqq", "--optimizer: 'qqq' is not one of adam, apex-adam, sgd"),
        ("--model smal-llama", "unknown --model smal-llama: did you mean small-llama?"),
        ("--model qqq", "unknown --model qqq (debug, small-llama)"),
        ("--config no.yaml", "--config no.yaml: No such file or directory"),
        ("--config a.yaml --config b.yaml", "--config is given 2 times: a.yaml, b.yaml"),
    ],
)
def test_a_bad_command_line_is_one_line(argv, message):
    with pytest.raises(ConfigError) as caught:
        load_config(argv.split(), PRESETS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nhiden_size: 64", ":2: unknown key hiden_size: did you mean hidden_size?"),
        ("hidden-size: 64", ":1: unknown key hidden-size: did you mean hidden_size?"),
        ("config: x.yaml", ":1: unknown key config"),
        ("[a]: 1", ":1: expected a name, not a list or group, before the colon"),
        ("seed: 1\nlr: 1\nseed: 1", ":3: seed is given twice"),
        ("hidden_size: wide", ":1: hidden_size: expected an integer, got 'wide'"),
        ("hidden_size: 3.0", ":1: hidden_size: expected an integer, got '3.0'"),
        ("bf16: 1", ":1: bf16: expected true or false, got '1'"),
        ("normalization: RMSnorm", ":1: normalization: 'RMSnorm' is not one of RMSNorm, LayerNorm: did you mean RMSN"),
        ("log_dir:", ":1: log_dir needs a value"),
        ("split: [1, 2, 3]", ":1: split: expected one value; keys are flat"),
        ("model:\n  hidden_size: 3", ":1: model: expected one value; keys are flat"),
        ("- seed", "expected lines of 'name: value'"),
        ("seed: [1", "recipe.yaml\", line 1, column 7 expected ',' or ']'"),
        ("seed: 1\n---\nseed: 2", "expected a single document"),
        ("model: small-lama", "unknown --model small-lama: did you mean small-llama?"),
    ],
)
def test_a_bad_recipe_is_one_line_with_its_place(recipe, text, message):
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", recipe(text)], PRESETS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="can't decode"):
        load_config(["--config", str(path)], PRESETS)


def test_an_empty_recipe_changes_nothing(recipe):
    assert load_config(["--config", recipe("# nothing\n")], PRESETS) == Config()


def test_help_shows_every_flag_its_group_and_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"], PRESETS)
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    words = set(shown.replace(",", " ").split())
    assert {setting.flag for setting in settings().values()} <= words
    assert "--no-swiglu" in words and "--no-lr" not in words
    assert "Saving and resuming." in shown and "Peak learning rate. (default: 0.0003)" in shown
    assert "Default: hidden size / number of heads.\n" in shown  # a default in words is not followed by "none"
    assert "{RMSNorm,LayerNorm}" in shown and "Named sizes: debug, small-llama." in shown


def test_every_setting_is_documented():
    classes = {*group_classes(PRETRAIN).values(), *group_classes(FINETUNE).values()}
    documented = {name for cls in classes for name in docstrings(cls)}
    no_flags = {"scalar_head", "transformers_config"}  # --objective reward and config.json set them
    assert documented - no_flags == {*settings(PRETRAIN), *settings(FINETUNE)}
    assert all(setting.text for entry in (PRETRAIN, FINETUNE) for setting in settings(entry).values())


def test_importing_the_config_imports_neither_torch_nor_yaml():
    code = "import smp.config, sys; print(*[m for m in ('torch', 'numpy', 'yaml') if m in sys.modules])"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.split() == []


def values_of(setting: Setting) -> st.SearchStrategy:
    """Any value of a setting that text can say; 'none' and 'null' unset an optional one and are no values."""
    by_type = {
        bool: st.booleans(),
        int: st.integers(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda t: t.lower() not in ("none", "null")),
    }
    values = st.sampled_from(setting.choices) if setting.choices else by_type[setting.type]
    return st.none() | values if setting.optional else values


@st.composite
def some_settings(draw) -> dict:
    names = draw(
        st.lists(
            st.sampled_from([name for name in settings() if name not in ("model", "model_config")]),
            unique=True,
            max_size=6,
        )
    )
    return {name: draw(values_of(settings()[name])) for name in names}


def as_flags(values: dict) -> list[str]:
    switches = {True: "", False: "no-"}
    return [
        f"--{switches[value]}{settings()[name].flag[2:]}"
        if isinstance(value, bool)
        else f"{settings()[name].flag}={as_text(value)}"
        for name, value in values.items()
    ]


@hypothesis_settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=some_settings())
def test_flags_and_yaml_mean_the_same_and_yaml_loads_back(recipe, values):
    config = build_tree(PRETRAIN, values)
    assert load_config(as_flags(values), PRESETS) == config
    assert load_config(["--config", recipe(to_yaml(config))], PRESETS) == config
    assert values.items() <= as_flat_dict(config).items()
