"""README and docs: links lead somewhere, commands parse, recipes validate, Python compiles, imports and runs."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import itertools
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.exceptions
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from smelt.compress import Recipe, run
from smelt.compress.cli import app
from smelt.compress.sweep.trials import Sweep

from . import house_map
from .house import ALL_FILES
from .tiny import REPOSITORY

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "CHANGELOG.md",
    REPOSITORY / "benchmarks/README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
# Pages whose Python needs more than the builtin model.
NOT_RUN = {
    "evaluation.md": "downloads a task",
    "export.md": "needs checkpoints of other models",
    "gpu.md": "needs a GPU",
}
FOLDERS = (*(package.name for package in house_map.packages() if package.parent == REPOSITORY), *house_map.PLAIN)
_MARKDOWN = MarkdownIt("commonmark").enable("table")
_SHELLS = ("sh", "bash", "console")
# Words that DESIGN's table replaces.
_WORDS = (
    r"\b[Tt]old\b|not there yet|cold reading|stored.opinions|StoredOpinions|[Ss]loped|\b[Uu]nturned|\bFlight\b|\bLanded\b"
    r"|from_first\b|everyones|keep_less|\boutlook\b|oddest|own_head|head_apart|fewer_experts|prove[sd]? what it cost"
)
_NAMES = re.compile(r"[A-Z]{3,}|[*…<>{}]")  # FILE, OUT, wildcards: what a reader puts in


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def _tokens(page: Path) -> list[Token]:
    return _MARKDOWN.parse(page.read_text(encoding="utf-8"))


def _inline(page: Path) -> Iterator[Token]:
    for token in _tokens(page):
        yield from token.children or ()


def _blocks(*languages: str) -> list[Block]:
    return [
        Block(page, token.info, token.content, (token.map or [0])[0] + 1)
        for page in PAGES
        for token in _tokens(page)
        if token.type == "fence" and token.info in languages
    ]


def _anchors(page: Path) -> set[str]:
    """A page's headings, as GitHub names them."""
    tokens = _tokens(page)
    found: dict[str, int] = {}
    anchors = set()
    for opening, content in itertools.pairwise(tokens):
        if opening.type != "heading_open":
            continue
        text = "".join(part.content for part in content.children or () if part.type in ("text", "code_inline"))
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        anchors.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for token in _inline(page):
        target = str(token.attrGet("href") or token.attrGet("src") or "")
        if not target or target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """`runtime/kernels/` and the like, in running text and in tables."""
    named = {token.content for token in _inline(page) if token.type == "code_inline"}
    paths = {
        name for name in named if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]*", name) and not _NAMES.search(name)
    }
    assert sorted(name for name in paths if not (REPOSITORY / name).exists()) == []


def _commands(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        for part in line.split(";"):
            with contextlib.suppress(ValueError):  # a quotation mark of prose
                words = shlex.split(part, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words:
                    yield words


def _problem(words: list[str], *, whole: bool) -> str | None:
    """What is wrong with a command line; of one that is not whole, arguments may be missing."""
    program = Path(words[0]).name
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        return None if all(word in targets or "=" in word for word in words[1:]) else "no such target"
    if "-m" in words[:-1]:
        module, rest = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
        if module.startswith(("benchmarks", "tests.")):
            place = REPOSITORY / module.replace(".", "/")
            return None if place.with_suffix(".py").exists() or (place / "__main__.py").exists() else "no such module"
        if module == "smelt.compress":
            return _smelt_problem(rest, whole=whole)
    return _smelt_problem(words[1:], whole=whole) if program == "smelt" else None


def _smelt_problem(words: list[str], *, whole: bool) -> str | None:
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not words:
            return "no command" if whole else None
        if words[0] not in command.commands:
            return f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    try:
        command.make_context(command.name, list(words))
    except typer.Exit:  # --help
        return None
    except typer.exceptions.TyperException as error:
        if type(error).__name__ == "MissingParameter" and not whole:
            return None
        return error.format_message()
    recipes = [word for word in words if word.startswith("recipes/") and not (REPOSITORY / word).exists()]
    return f"no file {recipes[0]}" if recipes else None


@pytest.mark.parametrize("block", _blocks(*_SHELLS), ids=str)
def test_commands_in_blocks_parse(block: Block) -> None:
    problems = {" ".join(words): _problem(words, whole=True) for words in _commands(block.text)}
    assert {command: problem for command, problem in problems.items() if problem} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_text_exist(page: Path) -> None:
    said = [token.content for token in _inline(page) if token.type == "code_inline"]
    commands = [words for text in said if re.match(r"(smelt|make|python3? -m) ", text) for words in _commands(text)]
    shown = [words for words in commands if "[" not in "".join(words)]
    problems = {" ".join(words): _problem(words, whole=False) for words in shown}
    assert {command: problem for command, problem in problems.items() if problem} == {}


def test_the_checks_find_mistakes() -> None:
    assert _problem(["smelt", "run", "recipes/quickstart.yaml", "--dry-run"], whole=True) is None
    assert "No such option" in str(_problem(["smelt", "run", "recipe.yaml", "--dryrun"], whole=True))
    assert "no command" in str(_problem(["smelt", "sing"], whole=True))
    assert "no file" in str(_problem(["smelt", "run", "recipes/nothing.yaml"], whole=True))
    assert "issing" in str(_problem(["smelt", "export", "runs/w4"], whole=True))
    assert _problem(["smelt", "export", "runs/w4"], whole=False) is None
    assert _problem(["torchrun", "-m", "smelt.compress", "run", "recipe.yaml", "--fast"], whole=True) is not None
    assert _problem(["make", "tea"], whole=True) is not None
    assert _problem(["python", "-m", "benchmarks.nothing"], whole=True) is not None


@pytest.mark.parametrize("block", _blocks("yaml"), ids=str)
def test_recipes_validate(block: Block, tmp_path: Path) -> None:
    for recipe in (REPOSITORY / "recipes").glob("*.yaml"):
        shutil.copy(recipe, tmp_path)
    if block.text.startswith("# fragment\n"):
        data = yaml.safe_load(block.text)
        steps = data["steps"] if isinstance(data, dict) else data
        text = yaml.safe_dump({"model": "builtin:smelt-6m", "output": "out", "steps": steps})
    else:
        text = block.text
    path = tmp_path / "shown.yaml"
    path.write_text(text)
    assert Sweep.load(path) if "\nsweep:" in text else Recipe.load(path)


@pytest.mark.parametrize("block", _blocks("python"), ids=str)
def test_python_compiles_and_its_imports_resolve(block: Block) -> None:
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert missing == [], node.module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the documents' Python reads: ``runs/quickstart`` of a shortened quickstart, and what stands in for other files."""
    folder = tmp_path_factory.mktemp("examples")
    data = yaml.safe_load((REPOSITORY / "recipes/quickstart.yaml").read_text())
    data |= {"calibrate": {"samples": 4, "length": 64}, "evaluate": {"windows": 2, "length": 64, "speed": False}}
    (folder / "recipes").mkdir()
    (folder / "recipes/quickstart.yaml").write_text(yaml.safe_dump(data))
    with contextlib.chdir(folder):
        run(Recipe.load("recipes/quickstart.yaml"), progress=False)
    (folder / "runs/w4").symlink_to("quickstart")
    rows = [f"2023-11-16 18:15:{second:02}.0000000,{100 * second + 1},8" for second in range(1, 9)]
    trace = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text(trace)
    return folder


@pytest.mark.few(3)
@pytest.mark.parametrize("block", [block for block in _blocks("python") if block.page.name not in NOT_RUN], ids=str)
def test_python_runs(block: Block, examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.chdir(examples):
        result = eval(code, {})
        if inspect.iscoroutine(result):
            asyncio.run(result)
    lines = capsys.readouterr().out.splitlines()
    expected = [line for comment in re.findall(r"print\(.*\)  # (.+)", block.text) for line in comment.split("; ")]
    assert [line for line in expected if line not in lines] == []


def test_every_page_is_in_the_site_and_in_the_index() -> None:
    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, (dict, list)):
            for each in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(each)

    shown = set(pages(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"]))
    assert shown == {page.name for page in (REPOSITORY / "docs").glob("*.md")}
    index = (REPOSITORY / "docs/index.md").read_text()
    assert sorted(name for name in shown - {"index.md"} if f"]({name})" not in index) == []


def test_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) < 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words(page: Path) -> None:
    """The words that DESIGN's table replaces, where documents used them most."""
    assert re.findall(rf"residual stream|{_WORDS}", page.read_text(encoding="utf-8")) == []


def test_words_in_code() -> None:
    """Those of them that have no other meaning."""
    files = [*ALL_FILES, *(REPOSITORY / name for name in ("pyproject.toml", "mkdocs.yml", "Makefile"))]
    found = {
        str(path): re.findall(_WORDS, path.read_text(encoding="utf-8")) for path in files if path != Path(__file__)
    }
    assert {path: words for path, words in found.items() if words} == {}


def test_the_map_of_the_folders_is_true() -> None:
    text = house_map.DOCUMENT.read_text(encoding="utf-8")
    assert house_map.filled(text) == text, "run python -m tests.house_map"
    assert all(f"- `{folder}/`: " in text for folder in FOLDERS)


def test_the_map_follows_packages_of_any_depth(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.setuptools]\npackages = ["smelt.top", "smelt.low", "smelt.top.a"]\n'
    )
    for name, docstring in {
        "low": "Last, in spite of its name.",
        "top": "First.\n\nMore of it.",
        "top/b": "Second\nline.",
        "top/a": "Before b, of ``paths``.",
        "top/a/deep": "Within a.",
        "extra": "Not installed.",
    }.items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "__init__.py").write_text(f'"""{docstring}"""\n')
    lines = house_map.written(tmp_path).splitlines()
    assert lines[:6] == [
        "- `top/`: First.",
        "  - `a/`: Before b, of `paths`.",
        "    - `deep/`: Within a.",
        "  - `b/`: Second line.",
        "- `low/`: Last, in spite of its name.",
        "- `extra/`: Not installed.",
    ]
    (tmp_path / "extra/__init__.py").write_text("")
    with pytest.raises(ValueError, match=r"extra/__init__\.py has no docstring"):
        house_map.written(tmp_path)
