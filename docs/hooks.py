"""What the built site adds to the pages: the repository's own pages, and tables made from the code.

1. README, ARCHITECTURE, CONTRIBUTING, CHANGELOG and the reports' README become pages, and links to them lead there.
2. `<!-- options of all commands -->` becomes the help text of each command.
3. `<!-- fields of report.json -->` becomes a table for each object, from the schema that `report.json` is read by.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "harness" / "report" / "report.schema.json"
REPOSITORY_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "reports/README.md": "reference/run-folder.md",
}
"""Pages outside docs/ by their path in the repository, and where they stand in the site."""

PRINT_HELP = """
import json, sys
from bitproof.harness.cli import main
for path in json.loads(sys.argv[1]):
    print("\\0", flush=True)
    main([*path, "--help"])
"""
"""A program that prints each command's help, all in one process."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's own pages; docs/index.md stands for README.md."""
    for path, uri in REPOSITORY_PAGES.items():
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links for the site, and fill in the tables that are made from the code."""
    uri = page.file.src_uri
    in_repository = {site: path for path, site in REPOSITORY_PAGES.items() if site != "index.md"}
    here = posixpath.dirname(in_repository.get(uri, f"docs/{uri}"))

    def for_site(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        if "://" in link:
            return match[0]
        path = posixpath.normpath(posixpath.join(here, link))
        target = REPOSITORY_PAGES.get(path) or path.removeprefix("docs/")
        return f"]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}{anchor})"

    markdown = re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", for_site, markdown)
    for mark, table in (("options of all commands", option_texts), ("fields of report.json", report_tables)):
        if f"<!-- {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- {mark} -->", table())
    return markdown


def option_texts() -> str:
    """A heading and the help text for each command, in the order of `bitproof --help`."""
    from bitproof.harness.cli import app
    from bitproof.harness.cli.command_table import load_commands

    load_commands([])
    commands = list(_paths([], typer.main.get_command(app)))
    run = [sys.executable, "-c", PRINT_HELP, json.dumps(commands)]
    shown = subprocess.run(
        run, cwd=ROOT, env=os.environ | {"COLUMNS": "100"}, capture_output=True, text=True, check=True
    )
    texts = shown.stdout.split("\0")[1:]
    return "\n".join(
        f"## bitproof {' '.join(path)}\n\n```text\n{text.strip()}\n```\n"
        for path, text in zip(commands, texts, strict=True)
    )


def _paths(path: list[str], command: Any) -> Iterator[list[str]]:
    if path:
        yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from _paths([*path, name], child)


def report_tables() -> str:
    """A heading and a table for each object of a report, the report itself first."""
    schema = json.loads(SCHEMA.read_text())
    objects = {"report.json": schema, **schema["$defs"]}
    lines = []
    for name, described in objects.items():
        if "properties" in described:
            lines += [f"## {name}", "", described.get("description", ""), "", "| field | type |", "|---|---|"]
            lines += [f"| `{field}` | {_type(of, schema['$defs'])} |" for field, of in described["properties"].items()]
            lines.append("")
    return "\n".join(lines)


def _type(of: dict[str, Any], objects: dict[str, Any]) -> str:
    if "$ref" in of:
        name = of["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if "properties" in objects[name] else _type(objects[name], objects)
    if "const" in of or "enum" in of:
        return ", ".join(f"`{json.dumps(value)}`" for value in of.get("enum", [of.get("const")]))
    if "anyOf" in of:
        return " or ".join(_type(one, objects) for one in of["anyOf"])
    if of.get("type") == "array":
        return f"list of {_type(of['items'], objects)}" if of.get("items") else "list"
    if of.get("type") == "object" and isinstance(of.get("additionalProperties"), dict):
        return f"object of {_type(of['additionalProperties'], objects)}"
    return str(of.get("type", "any"))
