"""The shape of the code: who may import whom, a fast BLAS before MLX, and files that can be read in one sitting."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mlxgen"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module imports its own rank and below; packages of rank 2 never each other. `__init__` stands for the public names,
# which are loaded when they are used.
RANKS = {
    0: ("errors", "protocols", "device", "schema", "yaml_text"),
    1: ("config", "build", "blueprint"),
    2: ("decoder", "cache", "sampler", "tokenizer", "checkpoint", "guide"),
    3: ("passes", "engine"),
    4: (
        "training",
        "loading",
        "pipeline",
        "completion",
        "conversation",
        "prompting",
        "guiding",
        "adapting",
        "answering",
        "batching",
        "reusing",
        "fit",
        "speculating",
        "testing",
        "__init__",
    ),
    5: ("serving", "tasks", "bench"),
    6: ("cli", "help", "tab_completion", "__main__"),
}
RANK = {name: rank for rank, names in RANKS.items() for name in names}
HYDRA_IS_KNOWN_TO = "config"
MAX_LINES, MAX_FUNCTION_LINES = 330, 50  # "about 300" lines
# Longer files and functions, each with its reason.
LONGER: dict[str, str] = {}


def name_of(path: Path) -> str:
    """`mlxgen/cache/policy.py` -> `mlxgen.cache.policy`, a package's __init__ -> the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def part_of(module: str) -> str:
    """`mlxgen.cache.policy` -> `cache`; what `import mlxgen` gives counts as `__init__`."""
    return [*module.split("."), "__init__"][1]


def imports(tree: ast.AST) -> list[tuple[int, str, bool]]:
    """(line, module, whether at the top level) of all imports but those for type checkers."""
    found = []

    def walk(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((child.lineno, alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, "imports are absolute"
                modules = [f"{child.module}.{alias.name}" for alias in child.names]
                # `from mlxgen import x` names a module, `from mlxgen.x import y` lives in one.
                found.extend((child.lineno, m if child.module == "mlxgen" else child.module, top) for m in modules)
            walk(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    walk(tree, True)
    return found


def uses_mlx(module: str) -> bool:
    return module.split(".")[0] in ("mlx", "mlx_lm")


@pytest.fixture(scope="module")
def trees():
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def test_every_part_has_a_rank():
    assert {part_of(name_of(path)) for path in FILES} <= set(RANK)


def test_imports_point_downward(trees):
    wrong = []
    for path, tree in trees.items():
        own = part_of(name_of(path))
        for line, module, _ in imports(tree):
            if module.split(".")[0] != "mlxgen" or own == "__init__":
                continue
            other = part_of(module)
            siblings = own != other and RANK[own] == RANK[other] == 2
            if RANK[other] > RANK[own] or siblings:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert wrong == []


def test_testing_imports_no_more_than_the_engine(trees):
    wrong = [
        module
        for path, tree in trees.items()
        for _, module, _ in imports(tree)
        if part_of(name_of(path)) == "testing" and module.startswith("mlxgen.") and part_of(module) != "testing"
        if RANK[part_of(module)] > 3
    ]
    assert wrong == []


def test_configuration_never_imports_mlx(trees):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in trees.items()
        for line, module, _ in imports(tree)
        if uses_mlx(module) and RANK[part_of(name_of(path))] <= 1 and path.name != "device.py"
    ]
    assert wrong == []


def test_a_fast_blas_is_loaded_before_mlx(trees):
    """`import mlxgen.device` comes first, in the module itself or in its package's __init__."""

    def first(tree: ast.AST, wanted) -> float:
        return min((line for line, module, top in imports(tree) if top and wanted(module)), default=float("inf"))

    def device_before_mlx(tree: ast.AST) -> bool:
        return first(tree, lambda m: m == "mlxgen.device") < first(tree, uses_mlx)

    wrong = []
    for path, tree in trees.items():
        above = [folder / "__init__.py" for folder in path.parents if PACKAGE in folder.parents]
        covered = any(device_before_mlx(trees[package]) for package in above if package != path)
        if first(tree, uses_mlx) < float("inf") and not covered and not device_before_mlx(tree):
            wrong.append(str(path.relative_to(ROOT)))
        if path.name == "__init__.py" and device_before_mlx(tree):
            others = first(tree, lambda m: m.startswith("mlxgen.") and m != "mlxgen.device")
            if others < first(tree, lambda m: m == "mlxgen.device"):
                wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def test_one_package_knows_hydra(trees):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path, tree in trees.items()
        for line, module, _ in imports(tree)
        if module.split(".")[0] in ("hydra", "omegaconf") and part_of(name_of(path)) != HYDRA_IS_KNOWN_TO
    ]
    assert wrong == []


def test_no_torch_and_no_transformers(trees):
    modules = {module.split(".")[0] for tree in trees.values() for _, module, _ in imports(tree)}
    assert modules.isdisjoint({"torch", "transformers"})


@pytest.mark.parametrize("folder", ["mlxgen", "apps"])
def test_files_and_functions_can_be_read_in_one_sitting(folder):
    long = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        place = str(path.relative_to(ROOT))
        if (lines := text.count("\n")) > MAX_LINES:
            long[place] = lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{place}:{node.name}"] = lines
    assert {place: lines for place, lines in long.items() if place not in LONGER} == {}


def test_the_apps_see_public_names_only():
    """What stands in `mlxgen.__all__`, and what mlxgen.testing offers."""
    import mlxgen

    wrong = []
    for path in sorted((ROOT / "apps").rglob("*.py")):
        for line, module, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
            head, _, rest = module.partition(".")
            if head == "mlxgen" and rest.split(".")[0] not in ("", "testing", *mlxgen.__all__):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert wrong == []


def test_every_public_name_resolves():
    import mlxgen

    assert sorted(mlxgen.__all__) == mlxgen.__all__ == sorted(set(mlxgen.__all__))
    for name in mlxgen.__all__:
        assert getattr(mlxgen, name) is not None
    assert set(mlxgen.__all__) < set(dir(mlxgen))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = mlxgen.nothing
    typed = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlxgen.")
        for alias in node.names
    }
    assert typed == set(mlxgen.__all__)  # type checkers see the same names
