"""A blueprint tree and a config.json in, a DecoderSpec out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxgen.blueprint import spec as specs
from mlxgen.blueprint.config_keys import mentioned
from mlxgen.blueprint.expression import Evaluator
from mlxgen.blueprint.hf_config import HfConfig
from mlxgen.blueprint.mixers import MIXERS
from mlxgen.blueprint.rope import RopeSpec
from mlxgen.blueprint.schedule import layer_schedule
from mlxgen.errors import ConfigError, did_you_mean
from mlxgen.schema import parse

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
_KINDS: dict[str, type] = {**MIXERS, "mlp": specs.MlpSpec, "moe": specs.MoeSpec}


def _kind(name: str) -> type:
    """The spec of a block's kind; those that single families have are imported when one is built. Raises KeyError."""
    if name in _KINDS:
        return _KINDS[name]
    from mlxgen.blueprint.special import SPECIAL

    return SPECIAL[name]


def _is_kind(name: str) -> bool:
    try:
        return bool(_kind(name))
    except KeyError:
        return False


def build_spec(tree: Mapping[str, Any], hf: HfConfig, weight_names: frozenset[str]) -> specs.DecoderSpec:
    builder = _Builder(tree, hf, weight_names)
    builder.refuse()
    return builder.decoder()


def build_weight_rules(tree: Mapping[str, Any], hf: HfConfig) -> dict[str, Any]:
    """The blueprint's `weights` with this config.json's values: layouts may depend on the number of heads."""
    return _Builder(tree, hf, frozenset()).evaluator.tree(tree["weights"], "weights")


class _Builder:
    """Evaluates the tree layer by layer. `${layer}` is the number of the layer being built."""

    def __init__(self, tree: Mapping[str, Any], hf: HfConfig, weight_names: frozenset[str]):
        self.tree, self.hf, self.weight_names = tree, hf, weight_names
        self.layer = 0
        self.config: dict[str, Any] = {}
        self.variant = ""
        self.lenders: dict[str, int] = {}  # variant of the mixer -> the last layer that has keys of its own
        self.evaluator = Evaluator(self._name, self._functions(), on_text=lambda text: hf.read.update(mentioned(text)))

    def refuse(self) -> None:
        """Raise ConfigError for a config.json that asks for what this blueprint can't compute."""
        for key, rule in self.tree["refuse"].items():
            if self.evaluator.tree(rule["when"], f"refuse.{key}.when"):
                value = self.hf.get(key, None)
                raise ConfigError(f"config.json: `{key}` {value!r} is not supported: {rule['why']}.")

    def decoder(self) -> specs.DecoderSpec:
        node = self.evaluator.tree(self.tree["decoder"], "decoder")
        count = self._name("config.layers")
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"config.json: the number of layers must be at least 1, but is {count!r}.")
        schedules = {part: self._schedule(part, count) for part in ("mixer", "ffn")}
        layers = tuple(self._layer(i, schedules) for i in range(count))
        for key in ("embed_norm", "final_norm"):
            node[key] = self._norm(node[key])
        if inputs := node.get("layer_inputs"):
            node["layer_inputs"] = {**inputs, "norm": self._norm(inputs["norm"])}
        return parse(specs.DecoderSpec, {**node, "layers": layers}, "")

    def _schedule(self, part: str, count: int) -> list[str]:
        path = f"variants.{part}_schedule"
        names = layer_schedule(self.evaluator.tree(self.tree["variants"][f"{part}_schedule"], path), count, path)
        known = self.tree["variants"][part]
        for name in names:
            if name not in known:
                raise ConfigError(f"`{path}` must name one of {', '.join(known)}, but names {name!r}.")
        return names

    def _layer(self, index: int, schedules: Mapping[str, list[str]]) -> specs.LayerSpec:
        self.layer = index
        self.config.clear()  # values may differ from layer to layer
        path = f"layers[{index}]"
        node = self.evaluator.tree(self.tree["layer"], path)
        norms = {f"{k}_norm": self._norm(v) for k, v in node.pop("norms").items()}
        if altup := node.get("altup"):
            node["altup"] = {**altup, "norm": self._norm(altup["norm"])}
        if extra := node.get("layer_input"):
            activation = self._activation(extra["activation"])
            node["layer_input"] = {**extra, "norm": self._norm(extra["norm"]), "activation": activation}
        blocks = {}
        self.variant = schedules["mixer"][index]
        for part, build in (("mixer", self._mixer), ("ffn", self._ffn)):
            variant = dict(self.tree["variants"][part][schedules[part][index]])
            kind = self.evaluator.tree(variant.pop("kind", node[part]), f"{path}.{part}.kind")
            blocks[part] = None if kind in (None, "none") else build(kind, variant, f"{path}.{part}")
        return parse(specs.LayerSpec, {**node, **norms, **blocks}, path)

    def _template(self, kind: str, changes: Mapping[str, Any], path: str) -> dict[str, Any]:
        """The block that the blueprint describes under `kind`, with a variant's changes.

        A family's own kind of attention or mlp has what those have, and more.
        """
        try:
            node, spec = self.tree[kind], _kind(kind)
        except KeyError:
            known = [name for name, block in self.tree.items() if isinstance(block, Mapping) and _is_kind(name)]
            raise ConfigError(f"`{path}.kind` must be one of {', '.join(known)}, but is {kind!r}.") from None
        for plain in ("attention", "latent_attention", "mlp", "moe"):
            if kind != plain and issubclass(spec, _KINDS[plain]):
                node = merge(self.tree[plain], node)
        return self.evaluator.tree(merge(node, changes), path)

    def _mixer(self, kind: str, changes: Mapping[str, Any], path: str) -> specs.MixerSpec:
        if kind == "parallel":
            pair = merge(self.tree[kind], changes)
            attention = self._mixer("attention", pair["attention"], f"{path}.attention")
            recurrent = dict(pair["recurrent"])
            other = self._mixer(recurrent.pop("kind"), recurrent, f"{path}.recurrent")
            return parse(specs.ParallelSpec, {"attention": attention, "recurrent": other}, path)
        node = self._template(kind, changes, path)
        rope = node.pop("rope", None)
        if rope:
            own = {"theta": rope["theta"]} if rope.get("theta") else {}
            node["rope"] = RopeSpec.from_settings(
                {**rope["settings"], **own}, dims=rope["dims"], interleaved=rope["interleaved"]
            )
        elif self.tree[kind].get("rope") or self.tree["attention"].get("rope"):
            self.hf.read |= {"rope_parameters", "rope_scaling", "rope_theta"}  # understood, though no layer needs them
        if node.get("qk_norm"):
            node["qk_norm"] = {**node["qk_norm"], "norm": self._norm(node["qk_norm"].get("norm", True))}
        if "norm" in node:
            node["norm"] = self._norm(node["norm"])
        if "activation" in node:
            node["activation"] = self._activation(node["activation"])
        if node.pop("shares_keys", False):
            node["keys_of"] = self._lender(path)
        else:
            self.lenders[self.variant] = self.layer
        return parse(_kind(kind), node, path)

    def _lender(self, path: str) -> int:
        """The last layer of this one's variant that has keys of its own."""
        if self.variant not in self.lenders:
            raise ConfigError(f"`{path}` must come after a layer of its kind whose keys it can share.")
        return self.lenders[self.variant]

    def _ffn(self, kind: str, changes: Mapping[str, Any], path: str) -> specs.FfnSpec:
        if not (_is_kind(kind) and issubclass(_kind(kind), specs.MoeSpec)):
            return self._mlp(changes, path, kind)
        node = self._template(kind, changes, path)
        node["expert"] = self._mlp(node["expert"], f"{path}.expert")
        if node.get("shared"):  # a width of 0 is none
            node["shared"] = self._mlp(node["shared"], f"{path}.shared") if node["shared"]["width"] else None
        if "dense" in node:
            node["dense"] = self._mlp(node["dense"], f"{path}.dense")
        if "norm" in node:
            node["norm"] = self._norm(node["norm"])
        return parse(_kind(kind), node, path)

    def _mlp(self, changes: Mapping[str, Any], path: str, kind: str = "mlp") -> specs.MlpSpec:
        node = self._template(kind, changes, path)
        if "norm" in node:
            node["norm"] = self._norm(node["norm"])
        return parse(_kind(kind), {**node, "activation": self._activation(node["activation"])}, path)

    def _norm(self, node: Any) -> specs.NormSpec | None:
        """`true` is the family's norm, a mapping changes some of its fields, `false` is no norm."""
        if not node:
            return None
        base = self.evaluator.tree(self.tree["norm"], "norm")
        return parse(specs.NormSpec, {**base, **(node if isinstance(node, Mapping) else {})}, "norm")

    def _activation(self, name: Any) -> str:
        if name not in _ACTIVATIONS:
            hint = did_you_mean(str(name), _ACTIVATIONS)
            raise ConfigError(
                f"config.json: the activation must be one of {', '.join(_ACTIVATIONS)}, but is {name!r}.{hint}"
            )
        return _ACTIVATIONS[name]

    def _name(self, name: str) -> Any:
        if name == "layer":
            return self.layer
        section, _, key = name.partition(".")
        if section != "config" or key not in self.tree["config"]:
            raise ConfigError(f"`${{{name}}}` is not a value of the blueprint's `config`.")
        if key not in self.config:
            self.config[key] = self.evaluator.tree(self.tree["config"][key], f"config.{key}")
        return self.config[key]

    def _functions(self) -> dict[str, Any]:
        def text(thunk: Any) -> str:
            return str(thunk())

        def hf(keys: Any, *default: Any) -> Any:
            value = self.hf.get(text(keys), _NONE) if default else self.hf.get(text(keys))
            return default[0]() if value is _NONE else value

        def given(key: Any, default: Any) -> Any:
            """A key's value, also when that is null; the default only where the key is absent."""
            name = text(key)
            self.hf.read.add(name)
            return self.hf.raw[name] if name in self.hf.raw else default()

        def rope(layer_type: Any, local_key: Any = None, theta: Any = None, settings: Any = None) -> Any:
            local, default = (thunk() if thunk else None for thunk in (local_key, settings))
            return self.hf.rope(text(layer_type), local, float(theta()) if theta else 10000.0, default)

        def lacks_weight(module: Any) -> bool:
            return f"{text(module)}.weight" not in self.weight_names

        def lacks_tensor(ending: Any) -> bool:
            """Whether the checkpoint, where it is known, has no tensor of which the name ends so."""
            return bool(self.weight_names) and not any(n.endswith(text(ending)) for n in self.weight_names)

        def of_layer(key: Any, default: Any) -> Any:
            """A key's value for this layer alone, from transformers' `per_layer_config`."""
            self.hf.read.add("per_layer_config")
            layers = self.hf.raw.get("per_layer_config") or {}
            own = layers.get(str(self.layer)) or layers.get(self.layer) or {}
            return own[text(key)] if text(key) in own else default()

        def exact_div(a: Any, b: Any) -> int:
            x, y = a(), b()
            if x % y:
                raise ConfigError(f"config.json: hidden size must be a multiple of the heads ({y}), but is {x}.")
            return x // y

        return {
            "hf": hf,
            "given": given,
            "rope": rope,
            "of_layer": of_layer,
            "lacks_weight": lacks_weight,
            "lacks_tensor": lacks_tensor,
            "exact_div": exact_div,
        }


_NONE = object()


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on `base`: mappings key by key, everything else replaced."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result
